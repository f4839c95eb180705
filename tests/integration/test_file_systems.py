"""Saves, drains, restores, prefetches and loads on file systems with missing features, failures or long names.

Real file systems: FUSE (tests/fuse_mount.py), tmpfs, overlayfs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import tierckpt
from tests.fuse_mount import EVERYTHING, FuseMount, mounted
from tierckpt import Checkpointer, TierStorageReader, TierStorageWriter
from tierckpt.client import close_all
from tierckpt.errors import (
    CapacityError,
    ConfigError,
    PartialTransferError,
    PermissionDeniedError,
    StoreError,
    StoreUnavailableError,
    TierckptError,
)
from tierckpt.loading.cached_view import open_cached
from tierckpt.loading.export import export_safetensors

SECONDS = 60.0
CLI = [sys.executable, "-m", "tierckpt"]
LACKS: dict[str, dict[str, Any]] = {
    "everything": {"no": EVERYTHING},
    "changing inodes": {"inodes": "changing"},
    "zeros": {"zeros": True, "space": "unknown"},
    "direct I/O refused late": {"no": ["direct_io"]},
    "coarse times, folded names": {"step_ns": 2_000_000_000, "fold": True},
}
ONE_BY_ONE: dict[str, dict[str, Any]] = {call: {"no": [call]} for call in EVERYTHING}
ERRNOS = {
    "symlink": (errno.EPERM, errno.ENOSYS, errno.EINVAL, errno.EACCES),
    "link": (errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV, errno.ENOSYS),
    "flock": (errno.ENOSYS, errno.EOPNOTSUPP),
    "fsyncdir": (errno.EBADF, errno.EPERM),
}
OTHER_ERRNOS = {
    f"{call}: {errno.errorcode[number]}": {"no": [call], "numbers": {call: number}}
    for call, numbers in ERRNOS.items()
    for number in numbers
}


@contextlib.contextmanager
def on_fuse(base: Path, **control: Any) -> Iterator[FuseMount]:
    with mounted(base, **control) as mount:
        try:
            yield mount
        finally:
            close_all()  # background drains hold files open


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((300_000,), value), "step": 1}


def write_model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    save_file({"w": torch.arange(300_000, dtype=torch.float32)}, directory / "model.safetensors")
    return directory


def prefetch_to(place: Path, plain: Path) -> None:
    source = write_model(plain / "source")
    for is_here in (False, True):
        tierckpt.prefetch(source, place / "to")
        assert float(tierckpt.load_safetensors(place / "to")["w"][7]) == 7.0, is_here
    assert sorted(path.name for path in (place / "to").iterdir()) == [".tierckpt", "config.json", "model.safetensors"]
    assert [path.name for path in place.iterdir()] == ["to"], "temporary files must be removed"


def prefetch_from(place: Path, plain: Path) -> None:
    source = write_model(place / "source")
    assert float(tierckpt.load_safetensors(source)["w"][7]) == 7.0
    entries = {tierckpt.prefetch(source) for _ in range(2)}
    assert len(entries) == 1, "the second prefetch must use the first one's entry"
    assert float(tierckpt.load_safetensors(entries.pop())["w"][7]) == 7.0


def save_and_restore(uri: str) -> None:
    with Checkpointer(uri) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(float(step))).result(SECONDS)
    tierckpt.wait(f"{uri}/step-2", tier="shared", timeout_seconds=SECONDS)
    with Checkpointer(uri) as checkpointer:
        checkpointer.save(2, state(3.0)).result(SECONDS)
    tierckpt.wait(f"{uri}/step-2", tier="shared", timeout_seconds=SECONDS)
    again = state(0.0)
    assert Checkpointer(uri).restore(again) == 2 and float(again["w"][7]) == 3.0


def shared(place: Path, plain: Path) -> None:
    save_and_restore(f"file://{place}/run")


def local(place: Path, plain: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIERCKPT_LOCAL_ROOT", str(place / "root"))
        save_and_restore(f"file://{plain}/run")


VERBS: dict[str, Callable[[Path, Path], None]] = {
    "prefetch to": prefetch_to, "prefetch from": prefetch_from, "shared tier": shared, "local tier": local
}  # fmt: skip


def run(verb: str, place: Path, plain: Path, control: dict[str, Any]) -> None:
    """Run ``verb``, which must succeed. A local root without flock is refused with a clear error."""
    plain.mkdir()
    if verb != "local tier" or "flock" not in control.get("no", ()):
        VERBS[verb](place, plain)
        return
    with pytest.raises(StoreError, match="has no file locks") as caught:
        VERBS[verb](place, plain)
    assert "TIERCKPT_LOCAL_ROOT" in caught.value.hint and str(place) in caught.value.message


def test_local_tier_with_locks_only(tmp_path: Path) -> None:
    control = {"no": [call for call in EVERYTHING if call != "flock"]}
    with on_fuse(tmp_path, **control) as mount:
        run("local tier", mount.path, tmp_path / "plain", control)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("lack", [*LACKS, *ONE_BY_ONE, *OTHER_ERRNOS])
def test_each_verb_with_one_missing_feature(lack: str, verb: str, tmp_path: Path) -> None:
    control = {**LACKS, **ONE_BY_ONE, **OTHER_ERRNOS}[lack]
    with on_fuse(tmp_path, **control) as mount:
        run(verb, mount.path, tmp_path / "plain", control)


@pytest.mark.slow
@pytest.mark.parametrize("lack", ["everything", "changing inodes"])
def test_command_line_with_missing_features(lack: str, tmp_path: Path) -> None:
    """After several saves to one id, so that there is something to prune."""
    with on_fuse(tmp_path, **LACKS[lack]) as mount:
        shared(mount.path, tmp_path)
        uri = f"file://{mount.path}/run"
        command_line("ls", uri)
        command_line("verify", f"{uri}/step-2", "--read-data")
        command_line("restore", f"{uri}/step-2", "--to", f"{mount.path}/restored")
        command_line("export", f"{uri}/step-2", "--to", f"{mount.path}/exported")
        command_line("prune", uri, "--keep-last", "1", "--yes")
        assert not (mount.path / "run/step-1").exists()
        assert float(tierckpt.load_safetensors(mount.path / "exported")["w"][7]) == 3.0
        assert [path.name for path in mount.path.rglob("*.tmp")] == []


@contextlib.contextmanager
def of_the_kernel(kind: str, base: Path) -> Iterator[Path]:
    if os.geteuid():
        pytest.skip("needs root")
    mount = base / "mount"
    for name in ("mount", "disk"):
        (base / name).mkdir()
    disk = f"{base}/disk"
    commands = {
        "tmpfs": [["mount", "-t", "tmpfs", "-o", "size=256m", "none", str(mount)]],
        "overlay": [
            ["mount", "-t", "tmpfs", "none", disk],
            ["mkdir", f"{disk}/lower", f"{disk}/upper", f"{disk}/work"],
            [
                *("mount", "-t", "overlay", "none", "-o"),
                *(f"lowerdir={disk}/lower,upperdir={disk}/upper,workdir={disk}/work", str(mount)),
            ],
        ],
        "vfat": [
            ["truncate", "--size=128M", f"{disk}/image"],
            ["mkfs.vfat", f"{disk}/image"],
            ["mount", "-t", "vfat", "-o", "loop", f"{disk}/image", str(mount)],
        ],
    }[kind]
    try:
        for command in commands:
            try:
                subprocess.run(command, check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no {kind} here: {error}")
        yield mount
    finally:
        close_all()  # background drains hold files open
        for path in (mount, base / "disk"):
            subprocess.run(["umount", "-l", str(path)], check=False, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", ["tmpfs", "overlay", "vfat"])
def test_each_verb_on_kernel_file_systems(kind: str, verb: str, tmp_path: Path) -> None:
    with of_the_kernel(kind, tmp_path) as mount:
        run(verb, mount, tmp_path / "plain", {})


# --- failures midway --------------------------------------------------------------------------------------------------

FULL = {errno.ENOSPC: "no room", errno.EDQUOT: "quota", errno.EFBIG: "larger than a file can be"}
FAILURES: list[Any] = [
    *(({"room": 400_000, "full": number}, CapacityError, said) for number, said in FULL.items()),
    ({"read_only": True}, PermissionDeniedError, "read-only mount"),
]


@pytest.mark.parametrize(("control", "kind", "said"), FAILURES)
def test_failing_local_tier_fails_one_save(
    control: dict[str, Any], kind: type[TierckptError], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_fuse(tmp_path, no=["fallocate"]) as mount:
        monkeypatch.setenv("TIERCKPT_LOCAL_ROOT", str(mount.path / "root"))
        uri = f"file://{tmp_path}/shared/run"
        with Checkpointer(uri) as checkpointer:
            checkpointer.save(1, state(1.0)).result(SECONDS)
            tierckpt.wait(f"{uri}/step-1", tier="shared", timeout_seconds=SECONDS)
            mount.set(**control)
            with pytest.raises(kind) as caught:
                checkpointer.save(2, state(2.0))
                checkpointer.wait("local", SECONDS)
            check_message(caught.value, said, mount.path / "root")
            mount.set(room=None, read_only=False)
            checkpointer.save(3, state(3.0)).result(SECONDS)
        check_kept(uri, 3)


@pytest.mark.parametrize(("control", "kind", "said"), [one for one in FAILURES if "larger" not in one[2]])
def test_failing_shared_tier_keeps_the_checkpoint_for_a_later_drain(
    control: dict[str, Any], kind: type[TierckptError], said: str, tmp_path: Path
) -> None:
    with on_fuse(tmp_path, no=["link"]) as mount:
        uri = f"file://{mount.path}/run"
        with Checkpointer(uri) as checkpointer:
            checkpointer.save(1, state(1.0)).result(SECONDS)
            tierckpt.wait(f"{uri}/step-1", tier="shared", timeout_seconds=SECONDS)
            mount.set(**control)
            checkpointer.save(2, state(2.0)).result(SECONDS)  # acknowledged by the local tier
            with pytest.raises(kind) as caught:
                tierckpt.wait(f"{uri}/step-2", tier="shared", timeout_seconds=SECONDS)
            check_message(caught.value, said, mount.path)
            mount.set(room=None, read_only=False)
            checkpointer.save(3, state(3.0)).result(SECONDS)
            tierckpt.wait(f"{uri}/step-3", tier="shared", timeout_seconds=SECONDS)
        command_line("drain", "--wait")
        tierckpt.wait(f"{uri}/step-2", tier="shared", timeout_seconds=SECONDS)
        check_kept(uri, 3)


def command_line(*arguments: str) -> None:
    done = subprocess.run([*CLI, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (arguments, done.stderr)


def check_message(error: TierckptError, said: str, path: Path) -> None:
    assert said in error.message and str(path) in str(error) and error.hint and "tier" in error.context


def check_kept(uri: str, newest: int) -> None:
    for step in (1, newest):
        again = state(0.0)
        assert Checkpointer(uri).restore(again, step=step) == step and float(again["w"][7]) == step


def test_prefetch_resumes_after_a_full_disk(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source")
    with on_fuse(tmp_path, no=["fallocate"], room=500_000) as mount:
        with pytest.raises(CapacityError, match="no room") as caught:
            tierckpt.prefetch(source, mount.path / "to")
        assert str(mount.path) in caught.value.message and caught.value.hint
        mount.set(room=None)
        tierckpt.prefetch(source, mount.path / "to")
        assert float(tierckpt.load_safetensors(mount.path / "to")["w"][7]) == 7.0


def test_dead_mount_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCKPT_STORE_WAIT_SECONDS", "0")
    with on_fuse(tmp_path) as mount:
        mount.kill()
        calls: list[Callable[[], object]] = [
            lambda: tierckpt.prefetch(mount.path / "model"),
            lambda: tierckpt.load_safetensors(mount.path / "model"),
            lambda: tierckpt.latest(f"file://{mount.path}/run"),
        ]
        for call in calls:
            with pytest.raises(StoreUnavailableError, match="not connected") as caught:
                call()
            assert str(mount.path) in caught.value.message and caught.value.hint


@pytest.mark.slow
def test_rewrite_within_one_coarse_mtime_tick_is_fetched(tmp_path: Path) -> None:
    with on_fuse(tmp_path, step_ns=2_000_000_000) as mount:
        path = mount.path / "model" / "weights.bin"
        path.parent.mkdir()
        for data in (b"first", b"other"):
            path.write_bytes(data)
            assert (tierckpt.prefetch(path.parent) / "weights.bin").read_bytes() == data
            with open_cached(f"file://{path}", kind="object") as view:
                assert view.read("weights.bin") == data


def test_names_that_collide_on_the_file_system(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name, data in (("README", b"upper"), ("readme", b"lower")):
        (source / name).write_bytes(data)
    with on_fuse(tmp_path, fold=True) as mount:
        with pytest.raises(PartialTransferError) as caught:
            tierckpt.prefetch(source, mount.path / "to")
        assert f"{mount.path}/to takes README and readme for one name" in str(caught.value.failures)
        tierckpt.prefetch(source, mount.path / "to", exclude=["readme"])
        assert (mount.path / "to/README").read_bytes() == b"upper"


# --- long names -------------------------------------------------------------------------------------------------------

LONGEST = pytest.mark.parametrize("name", ["n" * 255, "é" * 127], ids=["ascii", "multi-byte"])


def save_and_load(uri: Path) -> None:
    dcp.save({"x": torch.ones(4)}, storage_writer=TierStorageWriter(str(uri)))
    state = {"x": torch.zeros(4)}
    dcp.load(state, storage_reader=TierStorageReader(str(uri)))
    assert state["x"].sum() == 4


@LONGEST
def test_run_checkpoint_and_targets_of_the_longest_name(tmp_path: Path, name: str) -> None:
    with Checkpointer(str(tmp_path / "runs" / name)) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(4)})
    assert tierckpt.latest(str(tmp_path / "runs" / name))
    uri = tmp_path / "checkpoints" / name
    save_and_load(uri)
    tierckpt.prefetch(str(uri), to=tmp_path / "prefetched" / name)
    (tmp_path / "exported").mkdir()
    export_safetensors(str(uri), tmp_path / "exported" / name)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).write_bytes(b"weights")
    tierckpt.prefetch(str(tmp_path / "model"), to=tmp_path / "model-here")
    assert (tmp_path / "model-here" / name).read_bytes() == b"weights"
    tierckpt.adopt(tmp_path / "model", str(tmp_path / "adopted" / "step-1")).wait(timeout_seconds=60)


@pytest.mark.parametrize("below", ["n" * 256, "é" * 128, "/".join(["d" * 200] * 22)], ids=["name", "bytes", "path"])
def test_too_long_name_is_refused_with_its_length(tmp_path: Path, below: str) -> None:
    for work in (
        lambda: Checkpointer(str(tmp_path / below)),
        lambda: TierStorageWriter(str(tmp_path / below)),
        lambda: tierckpt.prefetch(str(tmp_path), to=tmp_path / "x" / below),
        lambda: export_safetensors(str(tmp_path), tmp_path / below),
    ):
        with pytest.raises(ConfigError, match="too long for its file system"):
            work()


def test_key_too_long_for_a_file_gets_another_name_or_is_excluded(s3_uri: str, tmp_path: Path) -> None:
    for key, data in {"good.bin": b"good", "k" * 300: b"long", "k" * 299: b"shorter"}.items():
        with fsspec.open(f"{s3_uri}/model/{key}", "wb") as file:
            file.write(data)
    tierckpt.prefetch(f"{s3_uri}/model", to=tmp_path / "all")
    named = {path.name: path.read_bytes() for path in (tmp_path / "all").glob("k*")}
    assert sorted(named.values()) == [b"long", b"shorter"] and all(name.startswith("k" * 200) for name in named)
    tierckpt.prefetch(f"{s3_uri}/model", to=tmp_path / "to", exclude=["k*"])
    assert not list((tmp_path / "to").glob("k*"))
    assert (tmp_path / "to" / "good.bin").read_bytes() == b"good"

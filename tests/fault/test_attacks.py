"""No checkpoint runs code in the process that opens it, kills it, or makes it act on false metadata.

The corpus is in attacks.py; docs/adr/0008-no-code-from-a-checkpoint.md describes the defence.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldTensorProperties
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from tests.fault import attacks
from tests.fault.attacks import CORPUS, Attack
from tests.fault.runner import start
from tests.states import raises_ours, save, small_state
from tierckpt import TierStorageReader
from tierckpt.dcp.sealed_unpickler import load_metadata, objects
from tierckpt.dcp.sealed_unpickler import metadata as sealed
from tierckpt.errors import UnsafeCheckpointError
from tierckpt.format import pickle_machine as machine

SEED = 20261121
INPUTS_MIN = 320
"""Least number of inputs, also on a slow machine."""
OPCODES = bytes(range(0x80, 0x98)) + b"(.0123FIJKLMNPQRSTUVXabcdeghijlopqrstu}])GCB"


def fuzz(directory: Path, seconds: float) -> dict[str, Any]:
    """Count tried and accepted inputs; raise on any other error, or if an accepted one is not safe."""
    uri = str(directory / "shared/step-1")
    options = {"local_root": directory / "local", "mover": "inline"}
    save(uri, {**small_state(1), "list": [torch.ones(2), {"a": 1}]}, **options)
    step = next((directory / "local").rglob("manifest.json")).parent.parent
    pickled = next(path for path in step.rglob("*metadata*") if path.is_file()).read_bytes()
    load_metadata(pickled, where="genuine")
    rng = random.Random(SEED)
    counts = {"metadata": 0, "accepted": 0}
    end = time.monotonic() + seconds
    while time.monotonic() < end or counts["metadata"] < INPUTS_MIN:
        for _ in range(20):
            counts["metadata"] += 1
            with contextlib.suppress(UnsafeCheckpointError):
                check(load_metadata(mutate(pickled, rng), where="fuzz"))
                counts["accepted"] += 1
    return counts


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Apply one to four changes: bits, bytes, opcodes; pieces removed, repeated, moved; larger lengths."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, count = rng.randrange(len(made)), rng.randrange(1, 20)
        kind = rng.randrange(8)
        if kind == 0:
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            made[at] = rng.randrange(256)
        elif kind == 2:
            made[at] = rng.choice(OPCODES)
        elif kind == 3:
            del made[at : at + count]
        elif kind == 4:
            made[at:at] = bytes([rng.choice(OPCODES)])
        elif kind == 5:
            made[at:at] = made[at : at + count]
        elif kind == 6:
            piece = bytes(made[at : at + count])
            to = rng.randrange(len(made))
            made[to : to + count] = piece
        else:
            made[at : at + 4] = b"\xff\xff\xff\x7f"
        if not made:
            made = bytearray(b".")
    return bytes(made)


def check(found: Metadata) -> None:
    """Check S5 again, independently of the code under test."""
    entries = found.state_dict_metadata
    for entry in entries.values():
        if isinstance(entry, TensorStorageMetadata):
            assert all(0 <= size < 1 << 50 for size in entry.size)
            for chunk in entry.chunks:
                ends = [at + size for at, size in zip(chunk.offsets, chunk.sizes, strict=True)]
                inside = all(end <= size for end, size in zip(ends, entry.size, strict=True))
                assert inside or torch.Size(chunk.sizes).numel() == 0
    for info in (found.storage_data or {}).values():
        parts = Path(info.relative_path).parts
        assert parts and not Path(info.relative_path).is_absolute() and ".." not in parts
        assert info.offset >= 0 and info.length >= 0
    json.dumps(found.planner_data, default=str)


MEMORY_BYTES = 1 << 30
"""Memory limit of an attempt, above the process's size at its start."""
ATTEMPT_SECONDS = 60
BUG_SECONDS = 5
"""Time limit for endless attacks of seeded bugs. Rejections take 10 milliseconds."""
GROWN_BYTES_MAX = 300 << 20
CACHES = {"__slotnames__"}
"""Attributes that pickling leaves on a class."""
CLASSES = (
    *(kind for kind in vars(metadata).values() if isinstance(kind, type) and kind.__module__ == metadata.__name__),
    filesystem._StorageInfo,
    OldTensorProperties,
)


# --- seeded bugs ------------------------------------------------------------------------------------------------


def _lookup_any_global(self: Any, module: Any, name: Any) -> Any:
    import importlib

    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return self.known.get((module, name), machine.Function(found))


def _trusting_load(stream: Any, map_location: Any, _: str) -> Any:
    return torch.load(stream, map_location=map_location, weights_only=False)


def _put_at_any_index(self: Any, stack: list[Any], index: int, at: int) -> int:
    self.memo.extend([0] * index)
    return at


class _ContainsEverything:
    issuperset = staticmethod(lambda _: True)


BUGS: dict[str, tuple[Any, str, Any, str]] = {
    "paths are not checked": (sealed, "relative_of", lambda path: path, "path '../../etc/passwd'"),
    "any global is known": (machine.PickleMachine, "lookup", _lookup_any_global, "os.system in planner_data"),
    "keys are not checked": (machine, "KEYS", _ContainsEverything, "a million tuples deep as a key"),
    "memo indices are not checked": (machine.PickleMachine, "put_at", _put_at_any_index, "memo bomb"),
    "lengths are not checked": (machine.PickleMachine, "take", lambda *given: bytes(given[-1]), "BINBYTES of 4 GiB"),
    "nothing is counted": (sealed.MetadataBuilder, "spend", lambda *_: None, "chunks of all tensors shared"),
    "ends are not checked": (machine.PickleMachine, "result", lambda *given: given[1][0], "a second pickle behind"),
    "list positions are not checked": (sealed, "check_positions", lambda _: None, "list of 2**40 items"),
    "bytes of chunks are not counted": (sealed, "check_stored", lambda *_: None, "item shorter than its tensor"),
    "ranges are not checked": (TierStorageReader, "check_inside", lambda *_: None, "item beyond its file"),
    "items are trusted": (objects, "load_object", _trusting_load, "os.system in an item"),
    "items are handed on as they are": (objects.Objects, "inert", lambda *given: given[1], "os.system in an item"),
}
"""What to break (object, attribute, replacement), and the attack that must then succeed."""


# --- attempts ---------------------------------------------------------------------------------------------------


def save_genuine(directory: Path) -> None:
    """Save a checkpoint with stock DCP."""
    state = {"weight": torch.arange(16.0).reshape(4, 4), "list": [torch.zeros(2), {"n": 1}], "evil": {"x": "harmless"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=directory, no_dist=True)


def prepare(attack: Attack, directory: Path, canary: Path) -> Path:
    """Return a checkpoint of stock DCP that contains the attack."""
    checkpoint = directory / "checkpoint"
    shutil.rmtree(checkpoint, ignore_errors=True)
    shutil.copytree(directory / "genuine", checkpoint)
    canary.unlink(missing_ok=True)
    good: Metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    if attack.item:
        data = attack.make(canary, good)
        (checkpoint / "__9_9.distcp").write_bytes(data)
        info = good.storage_data[MetadataIndex("evil.x")]
        info.relative_path, info.offset, info.length = "__9_9.distcp", 0, len(data)
        (checkpoint / ".metadata").write_bytes(pickle.dumps(good))
    else:
        (checkpoint / ".metadata").write_bytes(attack.make(canary, good))
    return checkpoint


def fingerprint() -> dict[str, str]:
    return {
        kind.__qualname__: repr(sorted((k, repr(v)) for k, v in vars(kind).items() if k not in CACHES))
        for kind in CLASSES
    }


def open_checkpoint(checkpoint: Path, local_root: Path, **options: Any) -> None:
    target = {"weight": torch.zeros(4, 4), "list": [torch.ones(2), {"n": 0}], "evil": {"x": ""}}
    with raises_ours():
        reader = TierStorageReader(checkpoint, local_root=local_root, mover="inline", **options)
        dcp.load(target, storage_reader=reader, no_dist=True)


def attempt(action: Callable[[], None], seconds: int = ATTEMPT_SECONDS) -> dict[str, Any]:
    """Run ``action`` in a fork with little memory. Returns its error, its end, and changes of classes."""
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    out, into = os.pipe()
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(out)
        _in_child(action, into, seconds)
    os.close(into)
    with os.fdopen(out, "rb") as stream:
        said = stream.read()
    _, status, usage = os.wait4(child, 0)
    report = json.loads(said) if said else {"error": "", "message": ""}
    return {
        **report,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        "grown_bytes": max(0, usage.ru_maxrss * 1024 - before_bytes),
        "seconds": round(time.monotonic() - begun, 3),
    }


def _in_child(action: Callable[[], None], into: int, seconds: int) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)
    size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes, size_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before, report = fingerprint(), {"error": "", "message": ""}
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            action()
        except BaseException as error:
            report = {"error": type(error).__name__, "message": str(error)[:600] + str(error)[600:][-300:]}
    try:
        after = fingerprint()
    except Exception:
        after = {}
    report["polluted"] = [name for name in before if before[name] != after.get(name)]
    os.write(into, json.dumps(report).encode())
    os._exit(0)


def run_corpus(directory: Path) -> Iterator[dict[str, Any]]:
    """Run each attack on tierckpt's reader, on that reader in trusting mode, and on plain pickle."""
    canary = directory / "canary"
    for attack in CORPUS:
        report = {"name": attack.name, "sealed": _sealed_report(attack, directory)}
        checkpoint = prepare(attack, directory, canary)
        if attack.control in {"runs", "pollutes", "dies"}:
            trusting = attempt(lambda at=checkpoint: open_checkpoint(at, directory / "local", trust_pickle=True))
            report["trusted"] = {**trusting, "canary": canary.exists()}
        if attack.control in {"believed", "dies"}:
            data = (checkpoint / ".metadata").read_bytes()
            report["stock"] = attempt(lambda data=data: pickle.loads(data))
        yield report


def run_bugs(directory: Path) -> Iterator[dict[str, Any]]:
    """Run, for each seeded bug, the attack that must find it."""
    attacks = {attack.name: attack for attack in CORPUS}
    for bug, (owner, attribute, broken, name) in BUGS.items():
        original = getattr(owner, attribute)
        setattr(owner, attribute, broken)
        try:
            yield {"bug": bug, "name": name, "sealed": _sealed_report(attacks[name], directory, BUG_SECONDS)}
        finally:
            setattr(owner, attribute, original)


def _sealed_report(attack: Attack, directory: Path, seconds: int = ATTEMPT_SECONDS) -> dict[str, Any]:
    canary = directory / "canary"
    checkpoint = prepare(attack, directory, canary)
    report = attempt(lambda: open_checkpoint(checkpoint, directory / "local"), seconds)
    return {**report, "canary": canary.exists()}


def is_rejected(attack: Attack, report: dict[str, Any]) -> bool:
    """Return whether the attack was rejected for the right reason, quickly and without side effects."""
    return (
        report["error"] in {"UnsafeCheckpointError", "IntegrityError"}
        and re.search(attack.match, report["message"]) is not None
        and is_harmless(report)
    )


def is_harmless(report: dict[str, Any]) -> bool:
    return (
        not report["canary"]
        and not report["signal"]
        and not report["polluted"]
        and report["grown_bytes"] < GROWN_BYTES_MAX
        and report["seconds"] < ATTEMPT_SECONDS
    )


def has_its_effect(attack: Attack, report: dict[str, Any]) -> bool:
    """Return whether the attack has its effect on a trusting reader."""
    if attack.control == "runs":
        return bool(report["trusted"]["canary"])
    if attack.control == "pollutes":
        return bool(report["trusted"]["polluted"])
    if attack.control == "believed":
        return not report["stock"]["error"]
    tried = (report["trusted"], report["stock"])
    # Public calls raise CapacityError if the system has no memory.
    return any(one["signal"] or re.search("MemoryError|CapacityError", one["error"] + one["message"]) for one in tried)


def try_attacks(folder: Path, what: str, seconds: float = 0.0) -> list[dict[str, Any]]:
    """Return a report for each attack ("corpus"), for each seeded bug ("bugs"), or of mutated metadata ("fuzz")."""
    if what == "fuzz":
        return [attempt_fuzz(lambda: fuzz(folder, seconds))]
    save_genuine(folder / "genuine")
    return [*(run_corpus if what == "corpus" else run_bugs)(folder)]


def attempt_fuzz(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    before = fingerprint()
    size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes, size_bytes))
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts = action()
    counts["grown_bytes"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss) * 1024
    counts["polluted"] = [name for name, seen in fingerprint().items() if before[name] != seen]
    return counts


# --- the tests --------------------------------------------------------------------------------------------------------

FUZZ_SECONDS = float(os.environ.get("TIERCKPT_TEST_FUZZ_SECONDS", "2"))
CORPUS_SECONDS = 400.0
"""More than a hundred attacks, each with two or three forks, on a slow machine."""
pytestmark = pytest.mark.timeout(FUZZ_SECONDS + CORPUS_SECONDS)
ATTACKS = {attack.name: attack for attack in attacks.CORPUS}
HARMLESS = {"good and evil under one name"}
"""Torch reads the good pickle here, so tierckpt does too: the planner gets only that one."""


def run(what: str, directory: Path, timeout_seconds: float = CORPUS_SECONDS, **options: Any) -> list[dict[str, Any]]:
    job = start(try_attacks, directory, what=what, **options)
    return job.result(timeout_seconds)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    found = {report["name"]: report for report in run("corpus", tmp_path_factory.mktemp("corpus"))}
    assert found.keys() == ATTACKS.keys()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_rejected(name: str, reports: dict[str, dict[str, Any]]) -> None:
    report = reports[name]["sealed"]
    if name in HARMLESS:
        assert is_harmless(report) and not report["error"], report
    else:
        assert is_rejected(ATTACKS[name], report), report


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if attack.control])
def test_control_attack_has_its_effect_on_a_trusting_reader(name: str, reports: dict[str, dict[str, Any]]) -> None:
    """Control: a trusting reader runs it, dies of it, is changed by it, or accepts it."""
    assert has_its_effect(ATTACKS[name], reports[name]), reports[name]


def test_corpus_has_enough_attacks_of_each_kind() -> None:
    live = [attack for attack in attacks.CORPUS if attack.control]
    assert len(ATTACKS) == len(attacks.CORPUS) >= 110
    assert len([attack for attack in live if attack.control == "runs"]) >= 15
    assert len([attack for attack in live if attack.control == "pollutes"]) >= 5
    assert len([attack for attack in live if attack.control == "dies"]) >= 3


@pytest.mark.slow
def test_attacks_find_every_seeded_bug(tmp_path: Path) -> None:
    found = run("bugs", tmp_path)
    assert [report["bug"] for report in found] == list(BUGS)
    missed = [report for report in found if is_rejected(ATTACKS[report["name"]], report["sealed"])]
    assert not missed


@pytest.mark.slow
def test_fuzzed_metadata_is_rejected_or_safe(tmp_path: Path) -> None:
    """Only errors of tierckpt, no unsafe result, no changed class, bounded memory."""
    [counts] = run("fuzz", tmp_path, FUZZ_SECONDS + CORPUS_SECONDS - 20, seconds=FUZZ_SECONDS)
    print(counts)
    assert counts["polluted"] == []
    assert counts["grown_bytes"] < GROWN_BYTES_MAX
    assert counts["metadata"] >= INPUTS_MIN
    assert 0 < counts["accepted"] < counts["metadata"]


@pytest.mark.slow
def test_command_line_unpickles_nothing(tmp_path: Path, local_root: Path) -> None:
    """`ls`, `info` and `verify` work on tierckpt's and stock checkpoints without pickle and torch."""
    save(str(tmp_path / "run/step-1"), small_state())
    save_genuine(tmp_path / "stock")
    commands = [
        ["ls", str(tmp_path / "run")],
        ["info", str(tmp_path / "run/step-1")],
        ["verify", "--read-data", str(tmp_path / "run/step-1")],
        ["info", str(tmp_path / "stock")],
    ]
    program = (
        "import json, pickle, sys\n"
        "def refuse(*_, **__): print('UNPICKLED'); sys.exit(99)\n"
        "pickle.load = pickle.loads = pickle.Unpickler = refuse; sys.modules['torch'] = None\n"
        "from tierckpt.cli import main\n"
        "sys.argv = ['tierckpt', *json.loads(sys.argv[1]), '--json']; sys.exit(main())"
    )
    for command in commands:
        done = subprocess.run([sys.executable, "-c", program, json.dumps(command)], capture_output=True, timeout=120)
        assert done.returncode == 0 and json.loads(done.stdout), (command, done.stdout[-500:], done.stderr[-500:])

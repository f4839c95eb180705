"""Resume while the shared tier cannot be reached (N1 to N3 of checkpoint/select.py).

Only a store that answers can say that there is no checkpoint. If it refuses, fails, hangs, denies or truncates a
listing, tierckpt retries and then raises on every rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch.distributed as dist

import tierckpt
from tests.agents import start_after, until
from tests.compat.worker import launch
from tests.fault.scenario_tools import of_each_rank
from tests.servers.faultproxy import FaultProxy, Kind, Plan, scripted
from tests.services import S3Server, free_port
from tests.states import flip
from tierckpt import Checkpointer
from tierckpt.checkpoint import peer_copies, select
from tierckpt.checkpoint.description import describe_run
from tierckpt.client import close_all, get_client
from tierckpt.config import Settings
from tierckpt.drain.drainer import Drainer
from tierckpt.errors import (
    AlreadyCommittedError,
    CheckpointNotFoundError,
    EndpointError,
    IntegrityError,
    PermissionDeniedError,
    StoreError,
    StoreUnavailableError,
)
from tierckpt.format.layout import local_dir, parse_uri
from tierckpt.loading.export import export_safetensors
from tierckpt.restore.drill import drill
from tierckpt.restore.restore import restore
from tierckpt.stores import retry

pytestmark = pytest.mark.server

STEPS = (1, 2, 3)
Breaks = Callable[[FaultProxy, str, pytest.MonkeyPatch], None]


@pytest.fixture
def proxy(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    proxy = FaultProxy(moto.endpoint)
    with proxy.running() as endpoint:
        for name, value in {**moto.environment(), "AWS_ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(retry, "RETRIES_MAX", 1)
        monkeypatch.setenv("TIERCKPT_EXIT_TIMEOUT_SECONDS", "10")
        monkeypatch.setenv("TIERCKPT_STORE_WAIT_SECONDS", "1")
        monkeypatch.setattr(peer_copies, "DENIED_SECONDS", 0.5)
        yield proxy
        heal(proxy)


def heal(proxy: FaultProxy) -> None:
    """End all faults, and then what waits for the store."""
    proxy.answer = None
    proxy.plans.clear()
    close_all()


@dataclass
class Made:
    """Two runs with steps 1 to 3 on the shared tier and this node. Another node has saved step 4 of the second."""

    run: str
    advanced: str
    root: Path


@pytest.fixture(scope="module")
def made(moto: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    root = tmp_path_factory.mktemp("node")
    options: dict[str, Any] = {"mover": "inline"}
    with pytest.MonkeyPatch.context() as patch, moto.bucket() as bucket:
        for name, value in moto.environment().items():
            patch.setenv(name, value)
        made = Made(f"s3://{bucket}/run", f"s3://{bucket}/advanced", root / "local")
        for uri in (made.run, made.advanced):
            with Checkpointer(uri, local_root=made.root, **options) as checkpointer:
                for step in STEPS:
                    checkpointer.save(step, {"value": step})
        with Checkpointer(made.advanced, local_root=root / "other", **options) as other:
            other.save(4, {"value": 4})
        close_all()
        yield made
        close_all()


@pytest.fixture
def run(made: Made, proxy: FaultProxy, tmp_path: Path) -> str:
    shutil.copytree(made.root, tmp_path / "local", symlinks=True)
    return made.run


@pytest.fixture
def advanced(made: Made, run: str) -> str:
    return made.advanced


def answering(status: str, code: str, only: Callable[[str], bool] = lambda path: True) -> Breaks:
    """A store that answers the requests for the paths that ``only`` selects with an error."""

    def breaks(proxy: FaultProxy, uri: str, patch: pytest.MonkeyPatch) -> None:
        proxy.answer = lambda verb, path, _: scripted(status, code, verb) if only(path) else None

    return breaks


UNAVAILABLE, DENIED = ("503 Service Unavailable", "SlowDown"), ("403 Forbidden", "AccessDenied")
unavailable, denied = answering(*UNAVAILABLE), answering(*DENIED)
listing_fails = answering("500 Oops", "InternalError", lambda path: "list-type=2" in path and "delimiter" in path)
newest_fails, newest_denied = (answering(*how, lambda path: "/step-3/" in path) for how in (UNAVAILABLE, DENIED))


def refused(proxy: FaultProxy, uri: str, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")


def unknown_host(proxy: FaultProxy, uri: str, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("AWS_ENDPOINT_URL", "http://no-such-host.invalid:9000")


def hanging(proxy: FaultProxy, uri: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(select, "SEARCH_SECONDS_MIN", 2.0)
    proxy.plans[parse_uri(uri).authority] = Plan(Kind.HANG, share=1.0)


def half_listed(proxy: FaultProxy, uri: str, patch: pytest.MonkeyPatch) -> None:
    """The first page lists one old step and announces a second page, which never arrives."""
    run = parse_uri(uri)
    page = (
        f"<ListBucketResult><Name>{run.authority}</Name><Prefix>{run.path}/</Prefix><KeyCount>1</KeyCount>"
        f"<MaxKeys>1000</MaxKeys><IsTruncated>true</IsTruncated><NextContinuationToken>more</NextContinuationToken>"
        f"<CommonPrefixes><Prefix>{run.path}/step-1/</Prefix></CommonPrefixes></ListBucketResult>"
    ).encode()

    def answer(verb: str, path: str, _: bytes) -> bytes | None:
        if "list-type=2" not in path or "delimiter" not in path:
            return None
        if "continuation-token" in path:
            return scripted(*UNAVAILABLE, verb)
        return b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n%s" % (len(page), page)

    proxy.answer = answer


STORE_FAILURES = {
    "refused": refused, "unknown host": unknown_host, "unavailable": unavailable, "denied": denied, "hanging": hanging,
    "listing fails": listing_fails, "half listed": half_listed, "newest fails": newest_fails,
    "newest denied": newest_denied,
}  # fmt: skip


def is_denial(breaks: Breaks) -> bool:
    return breaks in (denied, newest_denied)


@pytest.mark.slow
@pytest.mark.parametrize("failure", STORE_FAILURES)
def test_unreachable_store_raises_and_never_returns_none(
    failure: str, run: str, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a new node, for every verb that looks for the newest step."""
    breaks = STORE_FAILURES[failure]
    monkeypatch.setenv("TIERCKPT_LOCAL_ROOT", str(tmp_path / "fresh"))
    breaks(proxy, run, monkeypatch)
    state = {"value": 0}
    checkpointer = Checkpointer(run)
    kind: Any = PermissionDeniedError if is_denial(breaks) else StoreUnavailableError
    if breaks is unknown_host:
        kind = StoreUnavailableError, EndpointError  # the latter if the resolver rejects the name
    with pytest.raises(kind) as caught:
        checkpointer.restore(state)
    assert state == {"value": 0}
    message = str(caught.value)
    assert run in message and "http://" in message and "AWS_ENDPOINT_URL" in message
    assert "does not mean that there are none" in message
    with pytest.raises(kind):
        tierckpt.latest(run)


@pytest.mark.slow
def test_every_verb_reports_the_unreachable_store(
    run: str, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERCKPT_LOCAL_ROOT", str(tmp_path / "fresh"))
    listing_fails(proxy, run, monkeypatch)
    client = get_client(Settings.load())
    location = parse_uri(run)
    verbs: dict[str, Callable[[], Any]] = {
        "latest_step": Checkpointer(run).latest_step,
        "load_model": lambda: tierckpt.load_model(run),
        "export": lambda: export_safetensors(run, tmp_path / "out"),
        "restore": lambda: client.run(restore(client.mover, location, tmp_path / "out")),
        "drill": lambda: client.run(drill(client.mover, location, seed=1, scratch=None)),
        "ls": lambda: client.run(describe_run(client.mover.selector, location)),
    }
    for name, verb in verbs.items():
        with pytest.raises(StoreUnavailableError):
            pytest.fail(f"{name} returned {verb()}")


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["refused", "unavailable", "denied", "half listed", "newest fails"])
def test_drained_local_step_is_not_assumed_to_be_the_newest(
    failure: str, advanced: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node has saved a later step. Restoring it by number needs no store."""
    breaks = STORE_FAILURES[failure]
    if breaks is newest_fails:
        answering(*UNAVAILABLE, lambda path: "/step-4/" in path)(proxy, advanced, monkeypatch)
    else:
        breaks(proxy, advanced, monkeypatch)
    checkpointer, state = Checkpointer(advanced), {"value": 0}
    with pytest.raises(StoreError) as caught:
        checkpointer.restore(state)
    assert state == {"value": 0}
    if breaks is not newest_fails:
        assert "restore(state, step=3)" in str(caught.value) and f"{advanced}/step-3" in str(caught.value)
    with pytest.raises(StoreError):
        tierckpt.latest(advanced)
    assert checkpointer.restore(state, step=3) == 3
    assert state == {"value": 3}
    assert tierckpt.latest(f"{advanced}/step-3") == f"{advanced}/step-3"


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["refused", "unavailable", "denied", "hanging"])
def test_undrained_local_step_is_resumed_with_a_warning(
    failure: str, run: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    breaks = STORE_FAILURES[failure]
    breaks(proxy, run, monkeypatch)
    monkeypatch.setenv("TIERCKPT_EXIT_TIMEOUT_SECONDS", "0")
    if is_denial(breaks):
        monkeypatch.setattr(Drainer, "drain", _never)
        proxy.answer = None
    checkpointer, state = Checkpointer(run), {"value": 0}
    checkpointer.save(5, {"value": 5}).result(timeout=60)
    breaks(proxy, run, monkeypatch)
    close_all()
    with caplog.at_level(logging.WARNING):
        assert Checkpointer(run).restore(state) == 5
    assert state == {"value": 5}
    assert any("step-5" in line and "could not be searched" in line for line in caplog.messages)
    assert tierckpt.latest(run) == f"{run}/step-5"


async def _never(self: Drainer, token: str, *, patient: bool = True) -> None:
    raise PermissionDeniedError("seeded")


@pytest.mark.slow
def test_newer_drained_step_supersedes_an_older_pending_one(
    run: str, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 2 is pending again, step 3 was drained and is damaged here: resuming at 2 would lose 3."""
    directory = local_dir(tmp_path / "local", parse_uri(run))
    (directory / "step-2" / ".tierckpt" / "drained.json").unlink()
    next((directory / "step-3").glob("*.distcp")).unlink()
    refused(proxy, run, monkeypatch)
    with pytest.raises(StoreUnavailableError):
        tierckpt.latest(run)


@pytest.mark.slow
def test_store_that_recovers_within_the_wait_is_used(
    run: str, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TIERCKPT_LOCAL_ROOT", str(tmp_path / "fresh"))
    monkeypatch.setenv("TIERCKPT_STORE_WAIT_SECONDS", "600")
    unavailable(proxy, run, monkeypatch)
    healing = start_after(lambda: "waiting for" in caplog.text, lambda: setattr(proxy, "answer", None))
    state = {"value": 0}
    with caplog.at_level(logging.WARNING):
        assert Checkpointer(run).restore(state) == 3
    healing.join()
    assert state == {"value": 3}
    warnings = [line for line in caplog.messages if "waiting for" in line]
    assert warnings and run in warnings[0] and "of 600 s" in warnings[0] and "Ctrl-C" in warnings[0]


@pytest.mark.slow
def test_transient_denial_is_retried(
    run: str, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERCKPT_LOCAL_ROOT", str(tmp_path / "fresh"))
    monkeypatch.setenv("TIERCKPT_STORE_WAIT_SECONDS", "60")
    monkeypatch.setattr(peer_copies, "DENIED_SECONDS", 20.0)
    left = [2]

    def answer(verb: str, *_: object) -> bytes | None:
        left[0] -= 1
        return scripted(*DENIED, verb) if left[0] >= 0 else None

    proxy.answer = answer
    assert tierckpt.latest(run) == f"{run}/step-3"


def test_file_with_an_unreachable_shared_copy_is_not_lost(
    run: str, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local copy is damaged and the other one unreachable: not a reason to fall back to an older step."""
    directory = local_dir(tmp_path / "local", parse_uri(run)) / "step-3"
    flip(next(directory.glob("*.distcp")))
    answering(*UNAVAILABLE, lambda path: path.endswith(".distcp"))(proxy, run, monkeypatch)
    state = {"value": 0}
    with pytest.raises(StoreUnavailableError, match="no good copy"):
        Checkpointer(run).restore(state)
    assert state == {"value": 0}
    close_all()
    answering("404 Not Found", "NoSuchKey", lambda path: ".distcp" in path)(proxy, run, monkeypatch)
    shutil.rmtree(directory)
    with pytest.raises((IntegrityError, StoreUnavailableError)):
        Checkpointer(run).restore(state, step=3)


def latest_or_none(run: str) -> str | None:
    with contextlib.suppress(StoreUnavailableError):
        return tierckpt.latest(run)
    return None


@pytest.mark.slow
def test_save_does_not_replace_steps_that_could_not_be_listed(
    proxy: FaultProxy, moto: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that catches the error and starts from scratch must not overwrite the old run's steps."""
    with moto.bucket() as bucket:
        run = f"s3://{bucket}/run"
        with Checkpointer(run) as old:
            old.save(3, {"value": 3})
        monkeypatch.setenv("TIERCKPT_LOCAL_ROOT", str(tmp_path / "fresh"))
        unavailable(proxy, run, monkeypatch)
        checkpointer = Checkpointer(run, exit_timeout_seconds=0)
        with pytest.raises(StoreUnavailableError):
            checkpointer.restore({"value": 0})
        proxy.answer = None
        until(lambda: latest_or_none(run) == f"{run}/step-3", "the store's return")
        with pytest.raises(AlreadyCommittedError):
            checkpointer.save(3, {"value": -3})
        checkpointer.save(9, {"value": 9}).result(timeout=60)
        checkpointer.save(9, {"value": 10}).result(timeout=60)  # it may replace its own step
        state = {"value": 0}
        assert checkpointer.restore(state, step=3) == 3
        assert state == {"value": 3}
        checkpointer.save(3, {"value": 33}).result(timeout=60)  # now the listing showed the replaced step
        close_all()


def _steps(entries: list[dict[str, Any]]) -> int:
    return sum("/step-" in entry["name"] for entry in entries)


@pytest.mark.slow
def test_fsspec_listing_raises_instead_of_showing_an_old_step(
    run: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, local_root: Path
) -> None:
    """Frameworks list a run's directory through fsspec and take the newest."""
    url = run.replace("s3://", "tierckpt://s3/")
    filesystem = fsspec.filesystem("tierckpt", skip_instance_cache=True)
    assert _steps(filesystem.ls(url)) == 3
    close_all()
    refused(proxy, run, monkeypatch)
    for list_files in (filesystem.ls, filesystem.find):
        with pytest.raises(StoreUnavailableError):
            list_files(url)
    assert filesystem.ls(f"{url}/step-3")
    (local_dir(local_root, parse_uri(run)) / "step-3" / ".tierckpt" / "drained.json").unlink()
    assert _steps(filesystem.ls(url)) == 3


# --- ranks ---------------------------------------------------------------------------------------------------------


def resume(uri: str, roots: list[str], endpoints: list[str]) -> dict[str, Any]:
    """Resume on ranks that are nodes with separate local roots and endpoints."""
    rank = dist.get_rank()
    os.environ["AWS_ENDPOINT_URL"] = endpoints[rank]
    state = {"value": 0}
    checkpointer = Checkpointer(uri, local_root=roots[rank], exit_timeout_seconds=0)
    outcome: dict[str, Any] = {}
    try:
        outcome["step"] = checkpointer.restore(state)
    except Exception as error:
        outcome |= {"error": type(error).__name__, "told": str(error)}
    return {"ranks": of_each_rank(outcome | {"value": state["value"]})}


def _resumed(uri: str, roots: list[Path], endpoints: list[str], **settings: str) -> list[dict[str, Any]]:
    env = {"TIERCKPT_STORE_WAIT_SECONDS": "1", "TIERCKPT_STORE_TIMEOUT_SECONDS": "20", **settings}
    scenario = "tests.integration.test_resume:resume"
    done = launch(scenario, len(roots), env=env, uri=uri, roots=[str(root) for root in roots], endpoints=endpoints)
    ranks: list[dict[str, Any]] = done["ranks"]
    return ranks


@pytest.mark.slow
@pytest.mark.parametrize("has_old_steps", [False, True])
def test_one_rank_without_the_store_does_not_decide_for_all(
    has_old_steps: bool, advanced: str, proxy: FaultProxy, moto: S3Server, tmp_path: Path
) -> None:
    roots = [tmp_path / f"node-{rank}" for rank in range(4)]
    if has_old_steps:
        shutil.copytree(tmp_path / "local", roots[2], symlinks=True)
    endpoints = [moto.endpoint] * 4
    endpoints[2] = f"http://127.0.0.1:{free_port()}"
    ranks = _resumed(advanced, roots, endpoints)
    assert [rank.get("error") for rank in ranks] == ["StoreUnavailableError"] * 4
    assert all("rank=2" in rank["told"] and rank["value"] == 0 for rank in ranks)


@pytest.mark.slow
def test_pending_step_of_a_rank_without_the_store_does_not_hold_back_others(
    run: str, proxy: FaultProxy, moto: S3Server, tmp_path: Path
) -> None:
    """Rank 1 has an old undrained step 2; the others see step 3 on the shared tier."""
    roots = [tmp_path / f"node-{rank}" for rank in range(2)]
    with Checkpointer(run, local_root=roots[1], drain=False) as old:
        old.save(2, {"value": -2})
    close_all()
    ranks = _resumed(run, roots, [moto.endpoint, f"http://127.0.0.1:{free_port()}"])
    assert [rank.get("error") for rank in ranks] == ["StoreUnavailableError"] * 2
    assert all("rank=1" in rank["told"] for rank in ranks)


@pytest.mark.slow
def test_ranks_of_one_node_resume_at_its_pending_step(moto: S3Server, proxy: FaultProxy, tmp_path: Path) -> None:
    with moto.bucket() as bucket:
        uri = f"s3://{bucket}/run"
        with Checkpointer(uri, local_root=tmp_path / "node", drain=False) as checkpointer:
            checkpointer.save(6, {"value": 6})
        close_all()
        ranks = _resumed(uri, [tmp_path / "node"] * 2, [f"http://127.0.0.1:{free_port()}"] * 2)
        assert [(rank.get("step"), rank["value"]) for rank in ranks] == [(6, 6)] * 2


def test_step_seen_by_some_ranks_only_is_an_error(moto: S3Server, proxy: FaultProxy, tmp_path: Path) -> None:
    with moto.bucket() as bucket:
        uri = f"s3://{bucket}/run"
        roots = [tmp_path / f"node-{rank}" for rank in range(2)]
        with Checkpointer(uri, local_root=roots[0], drain=False) as checkpointer:
            checkpointer.save(8, {"value": 8})
        close_all()
        ranks = _resumed(uri, roots, [moto.endpoint] * 2)
        assert [rank.get("error") for rank in ranks] == [CheckpointNotFoundError.__name__] * 2
        assert all("rank 0 sees step 8; rank 1 sees none" in rank["told"] for rank in ranks)


def test_prefetch_of_a_checkpoint_without_list_permission(
    run: str, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest names the files."""
    answering(*DENIED, lambda path: "list-type=2" in path)(proxy, run, monkeypatch)
    directory = tierckpt.prefetch(f"{run}/step-{STEPS[-1]}", to=tmp_path / "to")
    assert (directory / ".metadata").exists()

"""The ranks of the tests of the agent.

A *point* is a place in a save where a rank is killed. A rank that reaches it creates a file, which the test counts.
When all ranks are there, they die one a moment after the other, as a job's ranks do.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader, Dataset

import tierckpt
from tests.fault.scenario_tools import after, before, die, replace, until
from tests.states import same, zeros_like
from tierckpt.arena import slots
from tierckpt.checkpoint import local_commit
from tierckpt.config import Settings
from tierckpt.dcp.handoff.offer import Handoff
from tierckpt.dcp.save_session import SaveSession
from tierckpt.disk.file_lock import try_lock
from tierckpt.errors import OperationTimeoutError, TierckptError
from tierckpt.format.layout import local_dir, parse_uri
from tierckpt.ipc.agent_client import AgentClient, shared_client
from tierckpt.save import direct_put, flush
from tierckpt.training.drain_decider import DrainDecider, SaveDirective

STAGGER_SECONDS = 0.15
"""Between the deaths of two ranks: long enough for the agent to act on each before it hears of the next."""
FOR_EVER_SECONDS = 1000.0
TENSORS = 8
ELEMENTS = 1 << 16
DEFAULTS: dict[str, Any] = {"mover": "agent", "staging_memory": "shared", "shard_size_bytes_max": 600_000}
"""Shards of two tensors each: four shards and a few objects."""


def state_of(rank: int, step: int, world_size: int = 1) -> dict[str, Any]:
    """What ``rank`` saves as ``step``: no two tensors of any ranks or steps are equal."""
    state: dict[str, Any] = {}
    for index in range(TENSORS):
        generator = torch.Generator().manual_seed(1_000_000 * step + 1_000 * rank + index)
        state[f"{rank}-{index}"] = torch.randn(ELEMENTS, generator=generator)
    state["replicated"] = torch.full((ELEMENTS,), float(step))
    state["note"] = {"step": step, "world_size": world_size}
    return state


def whole_state(step: int, world_size: int = 1) -> dict[str, Any]:
    """What all ranks together save."""
    state: dict[str, Any] = {}
    for rank in range(world_size):
        state |= state_of(rank, step, world_size)
    return state


def _here() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _checkpointer(uri: str, **settings: Any) -> tierckpt.Checkpointer:
    return tierckpt.Checkpointer(uri, **DEFAULTS | {"timeout_seconds": 30.0} | settings)


def _with_step_1(uri: str, folder: Path, **settings: Any) -> tuple[Points, tierckpt.Checkpointer]:
    """Commit step 1 to the local tier."""
    points, checkpointer = Points(folder), _checkpointer(uri, **settings)
    checkpointer.save(1, state_of(points.rank, 1, points.world_size))
    checkpointer.wait("local")
    return points, checkpointer


class _Plain:
    """A job that saves with ``dcp.async_save``."""

    def __init__(self, uri: str, *, use_collectives: bool, remembers: bool, **settings: Any) -> None:
        self._uri, self._use_collectives, self._settings = uri, use_collectives, DEFAULTS | settings
        self._remembers = remembers
        self._stager = tierckpt.TierStager(**self._settings)
        self._saving: Any = None

    def save(self, step: int, state: dict[str, Any]) -> None:
        writer = tierckpt.TierStorageWriter(f"{self._uri}/step-{step}", **self._settings)
        self._saving = dcp.async_save(
            state,
            storage_writer=writer,
            planner=tierckpt.TierSavePlanner() if self._remembers else None,
            async_stager=self._stager,
            use_collectives=self._use_collectives,
        )

    def wait(self, tier: str) -> None:
        assert tier == "local"
        self._saving.result(30.0)


def _job(way: str, uri: str, **settings: Any) -> Any:
    """What saves the ``way`` of the test: "Checkpointer", "async_save" (torch's planner), "async_save, ours" (ours), or
    "without collectives".
    """
    if way == "Checkpointer":
        return _checkpointer(uri, **settings)
    return _Plain(uri, use_collectives=way.startswith("async_save"), remembers=way == "async_save, ours", **settings)


class Points:
    """Files that show which points the ranks have reached."""

    def __init__(self, folder: Path) -> None:
        self.folder, (self.rank, self.world_size) = folder, _here()

    def reach(self, point: str) -> None:
        (self.folder / f"{point}.{self.rank}").touch()

    def reach_and_stay(self, point: str) -> None:
        self.reach(point)
        time.sleep(FOR_EVER_SECONDS)

    def await_all(self, point: str) -> None:
        until(lambda: len(list(self.folder.glob(f"{point}.*"))) == self.world_size)

    def die_in_turn(self) -> None:
        time.sleep(self.rank * STAGGER_SECONDS)
        die()


def _be_on_one_of(nodes: int, points: Points) -> None:
    """Have this rank be on a node of its own, or with its neighbours: what makes a node is its local root."""
    if nodes > 1:
        per_node = points.world_size // nodes
        root = Path(os.environ["TIERCKPT_LOCAL_ROOT"])
        os.environ["TIERCKPT_LOCAL_ROOT"] = str(root.with_name(f"{root.name}-{points.rank // per_node}"))
        os.environ["LOCAL_WORLD_SIZE"] = str(per_node)


def _arm(points: Points, point: str, reached: Callable[[], None], way: str = "Checkpointer") -> None:
    """Have the next save of this rank call ``reached`` at ``point``, and get no further.

    On ranks other than the coordinator all points after ``half flushed`` are one: their shards are durable, and they
    wait for the coordinator. With ``async_save`` there are two more before that, "noted" and "told": it has not
    given its shards to the mover. Without collectives each rank is its own coordinator.
    """

    def stay(*_: Any, **__: Any) -> None:
        time.sleep(FOR_EVER_SECONDS)

    def instead(_: Any) -> Callable[..., None]:
        def call(*_: Any, **__: Any) -> None:
            reached()
            stay()

        return call

    if point == "not begun":
        replace(SaveSession, "open", instead)
    elif point == "handed in":
        after(Handoff, "send", reached)
        flush.ShardFile.write = stay  # type: ignore[method-assign]
    elif point == "half flushed":
        replace(flush.ShardFile, "finish", lambda real: _first_half(real, reached))
    elif points.rank and way.startswith("async_save") and point == "noted":
        replace(Handoff, "durable", instead)
    elif points.rank and way.startswith("async_save") and point == "told":
        replace(SaveSession, "hand_over", instead)
    elif way.startswith("async_save") and point in ("noted", "told"):
        after(SaveSession, "note", reached)
    elif points.rank and way.startswith("async_save"):
        after(SaveSession, "hand_over", reached)
    elif points.rank and way == "Checkpointer":
        after(SaveSession, "note", reached)
    elif point == "flushed":
        replace(local_commit, "write_attempt_metadata", instead)
    elif point == "ready":
        replace(local_commit, "commit_local", instead)
        replace(local_commit, "commit_local_fragment", instead)
    elif point == "committed":
        after(local_commit, "commit_local", reached)
        after(local_commit, "commit_local_fragment", reached)
        replace(SaveSession, "hand_over", lambda _: stay)
    else:
        raise ValueError(point)


def _first_half(real: Callable[..., Any], reached: Callable[[], None]) -> Callable[..., Any]:
    finished = []

    def finish(file: Any, durable: bool) -> None:
        if len(finished) >= 2:
            time.sleep(FOR_EVER_SECONDS)
        real(file, durable)
        finished.append(file)
        if len(finished) == 2:
            reached()

    return finish


def ask(folder: Path, root: str, mover: str) -> None:
    """Ask the agent for its process when three others do, print that, and stay connected."""
    contact = shared_client(Settings.load(local_root=root, mover=mover))
    (folder.parent / f"ready.{folder.name}").touch()
    until(lambda: len(list(folder.parent.glob("ready.*"))) == 4)
    print(contact.ask({"op": "status"})["pid"], flush=True)
    until((folder.parent / "leave").exists)


def hold_lock(folder: Path, path: str) -> None:
    with try_lock(Path(path)) as found:
        print(bool(found), flush=True)
        time.sleep(FOR_EVER_SECONDS)


# --- scenarios ----------------------------------------------------------------------------------------------------


def all_die(
    uri: str,
    folder: Path,
    point: str,
    way: str = "Checkpointer",
    is_direct_put: bool = False,
    nodes: int = 1,
    late: int = -1,
    **settings: Any,
) -> None:
    """Step 1 is committed, and all ranks are killed at ``point`` of step 2; rank ``late`` before it has staged that.

    ``is_direct_put``: shards go straight to the shared tier; at the point "handed in" all are still on the way.
    """
    points = Points(folder)
    _be_on_one_of(nodes, points)
    if is_direct_put:
        DrainDecider.decide = lambda *_, **__: SaveDirective(is_direct_put=True)  # type: ignore[method-assign]
        settings["exposure_seconds_max"] = math.inf
    job = _job(way, uri, **settings)
    job.save(1, state_of(points.rank, 1, points.world_size))
    job.wait("local")
    _arm(points, point, lambda: points.reach("killed"), way)
    if points.rank == late:
        replace(Handoff, "prepared", lambda _: lambda *_, **__: points.reach_and_stay("killed"))
    if is_direct_put and point == "handed in":
        direct_put.Stream.pieces = lambda _: time.sleep(FOR_EVER_SECONDS)  # type: ignore[method-assign, assignment]
    job.save(2, state_of(points.rank, 2, points.world_size))
    points.await_all("killed")
    root = Path(os.environ["TIERCKPT_LOCAL_ROOT"])
    if points.rank == 0 and local_commit.read_local_manifest(local_dir(root, parse_uri(f"{uri}/step-2"))) is not None:
        points.reach("was committed")
    points.die_in_turn()


def saves_and_lives_on(uri: str, folder: Path, way: str, fails: int = -1, nodes: int = 1, **settings: Any) -> None:
    """Save three steps, and go on training. The flush of step 2 fails on the rank ``fails``."""
    points = Points(folder)
    _be_on_one_of(nodes, points)
    job, real = _job(way, uri, **settings), flush.ShardFile.write
    after(Handoff, "send", lambda: points.reach("handed in"))
    for step in (1, 2, 3):
        if step == 2 and points.rank == fails:
            flush.ShardFile.write = _no_disk  # type: ignore[method-assign]
        job.save(step, state_of(points.rank, step, points.world_size))
        try:
            job.wait("local")
        except dcp.CheckpointException:
            points.reach(f"failed-{step}")
        flush.ShardFile.write = real  # type: ignore[method-assign]
        points.reach(f"after-{step}")
        points.await_all(f"after-{step}")
    points.reach("saved")
    until(lambda: (points.folder / "leave").exists())


def _no_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.EIO, "seeded")


def keeps_and_dies(uri: str, folder: Path, **settings: Any) -> None:
    """Of four steps only the first goes to the shared tier. Then the kill."""
    points = Points(folder)
    DrainDecider.decide = lambda _, step, *__, **___: SaveDirective(step == 1)  # type: ignore[method-assign]
    checkpointer = _checkpointer(uri, exposure_seconds_max=math.inf, **settings)
    for step in range(1, 5):
        checkpointer.save(step, state_of(0, step))
        checkpointer.wait("local")
    points.reach("killed")
    die()


def one_dies(uri: str, folder: Path, killed: int, point: str, **settings: Any) -> None:
    """Only ``killed`` is killed, at ``point`` of step 2. The others say what became of the save, and live on."""
    points, checkpointer = _with_step_1(uri, folder, timeout_seconds=8.0, **settings)
    after(Handoff, "send", lambda: points.reach("handed in"))
    if points.rank == killed:
        _arm(points, point, lambda: points.reach("killed"))
    begun = time.monotonic()
    checkpointer.save(2, state_of(points.rank, 2, points.world_size))
    points.await_all("handed in")
    if points.rank == killed:
        until(lambda: (points.folder / f"killed.{killed}").exists())
        die()
    try:
        checkpointer.wait("local")
        outcome = "no error"
    except TierckptError as error:
        outcome = type(error).__name__
    except Exception as error:  # the rendezvous store went with rank 0
        outcome = f"{type(error).__name__} of torch"
    (points.folder / f"outcome.{points.rank}").write_text(f"{outcome}|{time.monotonic() - begun:.1f}")
    until(lambda: (points.folder / "leave").exists())
    os._exit(0)  # the process group is broken: leave as a job does that is about to be restarted


def killed_while_a_slot_is_used_again(uri: str, folder: Path, seeded: bool = False, **settings: Any) -> None:
    """Step 2 is flushed and not committed; step 3 is staged into the memory of step 2; then the kill.

    Seeded bug: nobody notes that step 2 is durable.
    """
    points, checkpointer = _with_step_1(uri, folder, **settings)
    _arm(points, "flushed", lambda: points.reach("flushed"))
    if seeded:
        replace(SaveSession, "note", lambda _: _note_nothing)
    before = _allocations()
    checkpointer.save(2, state_of(0, 2))
    points.await_all("flushed")
    after(Handoff, "send", lambda: points.reach("killed"))
    checkpointer.save(3, state_of(0, 3))
    if _allocations() == before:
        points.reach("memory used again")
    points.await_all("killed")
    die()


def _note_nothing(session: Any, files: Any) -> None:
    session.entry = dataclasses.replace(session.entry, files=files)


def _allocations() -> int:
    return sum(arena.allocations for arena in slots.shared_arenas.values())


def killed_when_a_staged_one_was_dropped(
    uri: str, folder: Path, seeded: bool = False, is_deaf: bool = False, **settings: Any
) -> None:
    """The flush of step 2 hangs, step 3 is staged and gives its place to step 4; then the kill.

    Seeded bug: the handoff of step 3 is not revoked. ``is_deaf``: it is revoked, but the agent does not receive that.
    """
    points, checkpointer = _with_step_1(uri, folder, staging_policy="drop_oldest_unflushed", **settings)
    if seeded:
        replace(slots.Lease, "ask_before_drop", lambda _: lambda lease, question: None)
    if is_deaf:
        before(AgentClient, "ask", _be_deaf)
    handed: list[int] = []
    after(Handoff, "send", lambda: handed.append(1))
    flush.ShardFile.write = lambda *_: points.reach_and_stay("flushing")  # type: ignore[method-assign,assignment]
    for count, step in enumerate((2, 3, 4), 1):
        checkpointer.save(step, state_of(0, step))
        until(lambda: len(handed) >= count)  # noqa: B023
        points.await_all("flushing")  # else it is step 2 that gives its place
    if any(lease.replaced_other for lease in slots.leases()):
        points.reach("memory used again")
    points.reach("killed")
    die()


def _be_deaf(_: AgentClient, message: dict[str, Any], *__: Any) -> None:
    if message["op"] == "take_back":
        raise OperationTimeoutError("seeded")


class _Endless(Dataset[int]):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        (self._folder / "worker").write_text(str(os.getpid()))
        time.sleep(FOR_EVER_SECONDS)
        return index


def killed_while_workers_live_on(uri: str, folder: Path, **settings: Any) -> None:
    """A DataLoader worker, and a child that C code forked, have copies of descriptors and live on after the kill."""
    points, checkpointer = _with_step_1(uri, folder, **settings)
    _arm(points, "handed in", lambda: points.reach("killed"))
    checkpointer.save(2, state_of(0, 2))
    points.await_all("killed")
    loader: Iterator[Any] = iter(DataLoader(_Endless(folder), num_workers=1, multiprocessing_context="fork"))  # noqa: F841
    libc = ctypes.PyDLL(None)
    forked = libc.fork()  # no hook of Python's runs
    if forked == 0:
        libc.pause()
    (points.folder / "forked").write_text(str(forked))
    until(lambda: (points.folder / "worker").exists())
    die()


def restarts(uri: str, folder: Path, world_size: int = 1, **settings: Any) -> tuple[int | None, bool]:
    """Restore the newest step, as a restarted job. Returns it, and whether its state is right."""
    checkpointer = _checkpointer(uri, **settings)
    state = zeros_like(whole_state(0, world_size))
    step = checkpointer.restore(state)
    is_same = same(state, whole_state(step or 0, world_size))
    checkpointer.close()
    return step, is_same


def restarts_and_saves(
    uri: str, folder: Path, step: int, as_step: int, way: str = "Checkpointer", **settings: Any
) -> int | str | None:
    """Restore, and save the state of ``as_step`` as ``step``. Returns the step or the checkpoint that it found.

    Waits before the commit until the file ``go`` exists.
    """
    points = Points(folder)

    def wait(*_: Any) -> None:
        points.reach("commits")
        until((folder / "go").exists, 120)

    before(local_commit, "write_attempt_metadata", wait)
    if way == "Checkpointer":
        with _checkpointer(uri, **settings) as checkpointer:
            restored = checkpointer.restore(zeros_like(whole_state(0)))
            checkpointer.save(step, state_of(0, as_step))
        return restored
    newest = tierckpt.latest(uri, **settings)
    job = _job(way, uri, **settings)
    job.save(step, state_of(0, as_step))
    job.wait("local")
    tierckpt.wait(f"{uri}/step-{step}", **settings)
    return newest


def saves_and_stays(uri: str, folder: Path, **settings: Any) -> None:
    """Save one step, say that it is on the local tier, and go on training until killed."""
    points, _ = _with_step_1(uri, folder, **settings)
    points.reach("local")
    time.sleep(FOR_EVER_SECONDS)

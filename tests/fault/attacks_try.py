"""Runs each attack of ``attacks.py`` in a process with little memory, and finds seeded bugs with them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import resource
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldTensorProperties
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from tests.fault.attacks import CORPUS, Attack
from tests.fault.attacks_fuzz import fuzz
from tests.states import raises_ours
from tierckpt import TierStorageReader
from tierckpt.dcp.sealed_unpickler import metadata as sealed
from tierckpt.dcp.sealed_unpickler import objects
from tierckpt.format import pickle_machine as machine

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
            report["stock"] = attempt(lambda data=data: _unpickle(data))
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


def _unpickle(data: bytes) -> None:
    stream = io.BytesIO(data)
    pickle.load(stream)


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

"""Processes that are killed while they remove checkpoints. Run by test_removal_crashes.py, which judges them.

``python -m tests.fault.removal_children FOLDER BUG`` prunes a run of two checkpoints, on a local and a mounted tier,
once for each file system call that changes anything, with SIGKILL in its place; writes FOLDER/outcome.json. A forked
child does each act, so that what dies is a process, with its threads and locks.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierckpt.checkpoint import local_commit, marks, prune, shared_commit
from tierckpt.checkpoint.retention import Policy
from tierckpt.config import Settings
from tierckpt.errors import CheckpointNotFoundError, ManifestError, UncommittedCheckpointError
from tierckpt.format import layout
from tierckpt.format.layout import MANIFEST, METADATA, attempt_metadata, local_dir, parse_uri
from tierckpt.format.manifest import FileEntry, Manifest, decode, digests_of
from tierckpt.mover import Mover
from tierckpt.stores.base import Store
from tierckpt.stores.local import LocalStore

CHUNK = 4096
CHILD_SECONDS = 60
CHANGES = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.truncate"}


# --- two checkpoints on two tiers ---------------------------------------------------------------------------------


def entry_of(path: str, data: bytes, token: str, rank: int = 0, source: str = "") -> FileEntry:
    return FileEntry(path, len(data), digests_of(data, CHUNK), rank, token, source)


def build(folder: Path) -> None:
    """Commit steps 1 and 2 on both tiers, by the code that always does."""
    for step in (1, 2):
        location = parse_uri(folder / f"shared/step-{step}")
        directory = local_dir(folder / "local", location)
        attempt = f"attempt{step}"
        shards = {f"__{rank}_0-{attempt}.distcp": random.Random(step + rank).randbytes(9000) for rank in (0, 1)}
        metadata = b"what DCP needs"
        manifest = Manifest(
            attempt,
            1,
            CHUNK,
            (entry_of(METADATA, metadata, attempt, source=attempt_metadata(attempt)),),
            tuple(entry_of(name, data, attempt) for name, data in shards.items()),
        )
        directory.mkdir(parents=True)
        store = LocalStore(Path(location.path))
        for name, data in shards.items():
            (directory / name).write_bytes(data)
            asyncio.run(store.put(name, data))
        local_commit.write_attempt_metadata(directory, manifest, {METADATA: metadata})
        local_commit.commit_local(directory, location, manifest, {METADATA: metadata})
        asyncio.run(store.put(manifest.metadata[0].key, metadata))
        asyncio.run(shared_commit.commit_shared(store, location, manifest))
        marks.mark_drained(directory, attempt)


async def keep_the_newest(folder: Path) -> None:
    """What every save of a trainer ends with, and what the next process begins with."""
    mover = Mover(Settings.load(local_root=folder / "local"))
    try:
        await mover.drains.recover()
        await mover.pruner.prune(parse_uri(folder / "shared"), Policy.of(keep_last=1))
    finally:
        await mover.close()


# --- what is there afterwards -------------------------------------------------------------------------------------


def state_of(directory: Path) -> str:
    """``whole`` for tierckpt and for stock PyTorch, ``invisible`` to both, or what is wrong."""
    try:
        manifest = decode((directory / MANIFEST).read_bytes())
    except FileNotFoundError:
        shards = len(list(directory.glob("*.distcp")))
        return "invisible" if not (directory / METADATA).exists() or shards == 2 else "torn for stock PyTorch"
    except ManifestError:
        return "torn manifest"
    for entry in manifest.entries:
        for name in {entry.key, entry.path}:
            try:
                data = (directory / name).read_bytes()
            except FileNotFoundError:
                return f"torn: the manifest names {name}, which is gone"
            if entry_of(entry.path, data, entry.token).digests != entry.digests:
                return f"torn: {name} is not what was saved"
    return "whole"


def examine(folder: Path) -> dict[str, Any]:
    run = parse_uri(folder / "shared")
    places = {
        f"{tier}/{step}": base / f"step-{step}"
        for tier, base in (("local", local_dir(folder / "local", run)), ("shared", Path(run.path)))
        for step in (1, 2)
    }
    found: dict[str, Any] = {place: state_of(path) for place, path in places.items()}

    async def look() -> None:
        mover = Mover(Settings.load(local_root=folder / "local"))
        latest = (await mover.selector.newest(run)).checkpoint
        found["latest"] = latest.location.name if latest else None
        try:
            found["step-1"] = sorted((await mover.selector.find(run.child("step-1"))).tiers)
        except (CheckpointNotFoundError, UncommittedCheckpointError) as error:
            found["step-1"] = type(error).__name__
        await mover.close()

    asyncio.run(look())
    return found


def leftovers(folder: Path) -> list[str]:
    """Whatever still bears the name of step 1, or belongs to its removal. An empty directory has no mark of ours."""
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if ("step-1" in path.parts and not (path.name == "step-1" and not any(path.iterdir())))
        or path.name == "removed"
        or path.parent.name == "leases"
    )


# --- who dies, and where --------------------------------------------------------------------------------------------


def die_at(number: int) -> Callable[[], int]:
    """Kill this process in place of its ``number``-th change to a file system (0: never). Returns what counts them."""
    count = 0

    def change() -> None:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT):
            change()

    real = os.fsync

    def fsync(file: Any) -> None:
        change()
        real(file)

    sys.addaudithook(hook)
    os.fsync = fsync
    return lambda: count


def shards_first(bug: str) -> None:
    """The bugs that all of this is there to find: the manifest goes last."""
    if bug == "local":

        def remove_local(directory: Path, attempt: str | None = None) -> bool:
            manifest = local_commit.read_local_manifest(directory)
            if manifest is not None:
                for entry in manifest.entries:
                    (directory / entry.key).unlink()
                (directory / METADATA).unlink(missing_ok=True)
            (directory / MANIFEST).unlink(missing_ok=True)
            return True

        prune.local_commit.remove_local = remove_local
    if bug == "shared":

        async def remove_shared(store: Store, manifest: Manifest) -> bool:
            for entry in manifest.entries:
                await store.delete(entry.key)
            await store.delete(METADATA)
            await store.delete(MANIFEST)
            return True

        prune.retention.remove_shared = remove_shared
    if bug == "no note":

        async def forget(store: Store, key: str, data: Any, **_: Any) -> None:
            if layout.REMOVED_DIR not in key:
                await real_put(store, key, data)

        real_put = LocalStore.put
        LocalStore.put = forget  # type: ignore[method-assign,assignment]


def in_child(act: Callable[[], Any], answer: Path) -> tuple[int, Any]:
    """Fork, act, and return how the child ended and what it found."""
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            signal.alarm(CHILD_SECONDS)
            answer.write_text(json.dumps(act()))
            code = 0
        except BaseException as error:
            answer.write_text(json.dumps({"error": repr(error)[:2000]}))
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, json.loads(answer.read_text()) if answer.exists() else None


def pruning(folder: Path, number: int, bug: str = "") -> Callable[[], int]:
    def act() -> int:
        shards_first(bug)
        counted = die_at(number)
        asyncio.run(keep_the_newest(folder))
        return counted()

    return act


def sweep(folder: Path, bug: str) -> dict[str, Any]:
    """Kill a prune at every change it makes; at every third, what comes after it to finish, at a random change too.

    A seeded bug is looked for at every third change, and where it shows: torn checkpoints at once, lost notes in what
    is left at the end.
    """
    template, work, answer = folder / "template", folder / "work", folder / "answer.json"
    build(work)
    shutil.copytree(work, template)
    code, changes = in_child(pruning(work, 0, bug), answer)
    outcome: dict[str, Any] = {"changes": changes, "code": code, "left": leftovers(work), "points": []}
    chance = random.Random(7)
    outcome["planned"] = list(range(1, changes + 1, 3 if bug else 1))
    for number in outcome["planned"]:
        shutil.rmtree(work)
        shutil.copytree(template, work)
        point: dict[str, Any] = {"number": number, "killed": in_child(pruning(work, number, bug), answer)[0]}
        point["found"] = in_child(lambda: examine(work), answer)[1]
        outcome["points"].append(point)
        if bug in {"local", "shared"}:
            continue
        if number % 3 == 0 and not bug:
            point["killed_again"] = in_child(pruning(work, chance.randint(1, changes // 2)), answer)[0]
            point["found_again"] = in_child(lambda: examine(work), answer)[1]
        point["finished"] = in_child(pruning(work, 0), answer)[0]
        point["left"] = leftovers(work)
        point["end"] = in_child(lambda: examine(work), answer)[1]
    return outcome


def main() -> None:
    folder, bug = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    (folder / "outcome.json").write_text(json.dumps(sweep(folder, bug), indent=1))


if __name__ == "__main__":
    main()

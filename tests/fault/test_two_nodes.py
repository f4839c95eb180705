"""Two nodes save the same steps of one run, with other content: neither reverts an acknowledged commit of the other.

A node saves as ``dcp/writer.py`` does and drains each save at once. It logs which attempts a save replaces, each commit
on the shared tier, each refusal, and the steps that retention removes. ``judge`` compares all lines with the final
shared tier.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fault.runner import start
from tests.fault.scenario_tools import until
from tests.fault.sweep.saver import CHUNK_BYTES, Saver, content
from tierckpt.checkpoint import local_commit, retention, shared_commit
from tierckpt.checkpoint.retention import Policy, Rule
from tierckpt.config import Settings
from tierckpt.errors import AlreadyCommittedError, TierckptError
from tierckpt.format.layout import CLAIM, MANIFEST, Location, parse_uri, step_name
from tierckpt.stores import open_store, retry, verified_read
from tierckpt.stores.base import Store
from tierckpt.stores.retry import Retries

MEET_SECONDS = 1.0
LATE_SECONDS = 0.3
"""A bug that is seeded takes this long, so that the other node comes between."""


def settings_of(root: Path) -> Settings:
    return Settings.load(local_root=root, mover="inline", chunk_size_bytes=CHUNK_BYTES, commit_timeout_seconds=5.0)


class Node:
    def __init__(self, uri: str, folder: Path, name: str, keep: int, *, is_met: bool) -> None:
        self.run, self.name, self.keep = parse_uri(uri), name, keep
        self._runner = asyncio.Runner()
        self.saver = Saver(settings_of(folder / f"root-{name}"), self._runner.run)
        self.mover = self.saver.mover
        self._lines = (folder / f"{name}.jsonl").open("a", buffering=1)
        self._attempts: dict[str, str] = {}
        self._told: set[str] = set()
        self.folder, self._is_met = folder, is_met

    def meet(self, moment: str) -> None:
        """Wait for the other node to be as far, if it comes."""
        (self.folder / f"{self.name}-{moment}").touch()
        if self._is_met:
            with suppress(TimeoutError):
                until(lambda: len(list(self.folder.glob(f"*-{moment}"))) == 2, MEET_SECONDS)

    def tell(self, what: str, **facts: Any) -> None:
        self._lines.write(json.dumps({"what": what, "by": self.name, **facts}) + "\n")

    def save(self, step: int, turn: int) -> None:
        location, label = self.run.child(step_name(step)), f"{self.name}-{step}-{turn}"

        def committed() -> None:
            for entry in self.mover.journal.entries():
                if entry.uri == location.uri and entry.manifest is not None and entry.token not in self._attempts:
                    self._attempts[entry.token] = label
                    replaces = sorted(entry.manifest.replaces)
                    self.tell("save", step=step, attempt=entry.token, label=label, replaces=replaces)

        try:
            self.saver.save(location, label, planned=lambda: self.meet(f"{step}-{turn}"), committed=committed)
            results, errors = self._runner.run(self.mover.drains.drain_all(patient=True))
        except TierckptError as error:
            results, errors = [], [error]
        outcomes = {result.token: result.outcome for result in results}
        for attempt in [one for one in self._attempts if one not in self._told]:
            # With hard links the commit is done before the save returns, and the local copy has the mark.
            is_linked = local_commit.is_drained(self.mover.directory(location), attempt)
            if outcomes.get(attempt) == "committed" or is_linked:
                self._told.add(attempt)
                self.tell("acknowledged", step=step, attempt=attempt)
        for error in errors:
            if not isinstance(error, AlreadyCommittedError):
                self.tell("failed", step=step, error=repr(error))
        for entry in self.mover.journal.entries():
            if entry.error:
                self.mover.journal.remove(entry.token)  # a refusal; only the next save's result counts
                self.tell("refused", step=step, attempt=entry.token)

    def prune(self) -> None:
        if not self.keep:
            return
        try:
            result = self._runner.run(self.mover.pruner.prune(self.run, Policy(shared=Rule(self.keep))))
        except TierckptError as error:
            self.tell("failed", step=-1, error=repr(error))
            return
        for one in result.only("removed"):
            self.tell("removed", step=one.copy.step, attempt=one.copy.attempt)


@dataclass
class Verdict:
    """``wrong`` names each acknowledged attempt that is torn, or that is gone without a decision of a node."""

    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def judge(uri: str, lines: list[dict[str, Any]]) -> Verdict:
    return asyncio.run(_judge(parse_uri(uri), lines))


async def _judge(run: Location, lines: list[dict[str, Any]]) -> Verdict:
    verdict = Verdict(counts=Counter(line["what"] for line in lines))
    saves = {line["attempt"]: line for line in lines if line["what"] == "save"}
    acknowledged = {line["attempt"] for line in lines if line["what"] == "acknowledged"}
    removed = {line["attempt"] for line in lines if line["what"] == "removed"}
    replaced = {seen for attempt in acknowledged for seen in saves[attempt]["replaces"]}
    verdict.wrong += [f"failed: {line}" for line in lines if line["what"] == "failed"]
    settings = Settings.load()
    for step in sorted({save["step"] for save in saves.values()}):
        location = run.child(step_name(step))
        store = open_store(location, settings, Retries(settings))
        standing = await shared_commit.read_shared_manifest(store)
        mine = {attempt for attempt in acknowledged if saves[attempt]["step"] == step}
        for attempt in mine - removed - replaced - ({standing.attempt} if standing else set()):
            verdict.wrong.append(f"step {step}: {attempt} was acknowledged and is gone without a decision of a node")
        if standing is not None:
            verdict.counts["standing"] += 1
            verdict.wrong += [text async for text in _torn(store, standing.attempt, saves, location)]
        await store.close()
    return verdict


async def _torn(store: Store, attempt: str, saves: dict[str, Any], location: Location) -> AsyncIterator[str]:
    label = saves[attempt]["label"]
    manifest = await shared_commit.read_shared_manifest(store)
    assert manifest is not None
    for index, entry in enumerate(one for one in manifest.files if one.path.endswith(".distcp")):
        try:
            if await store.get(entry.key) != content(label, 0, index):
                yield f"{location.uri}: {entry.key} is not what {label} saved"
        except TierckptError as error:
            yield f"{location.uri}: {label} stands and lacks {entry.key}: {error.message}"
    for entry in manifest.metadata:
        try:
            verified_read.check_bytes(await store.get(entry.path), entry, manifest.chunk_size_bytes, store.uri)
        except TierckptError as error:
            yield f"{location.uri}: stock PyTorch does not read {label}: {error.message}"


def no_condition(_: Path) -> None:
    """A commit replaces any checkpoint, without a condition.

    A claim is written when the other node is between its last look and the commit.
    """

    async def replace(store: Store, key: str, data: bytes, etag: str | None) -> None:
        await asyncio.sleep(LATE_SECONDS * (random.random() if key == CLAIM else 1.0))
        await store.put(key, data)

    shared_commit.replace = replace


def no_look(folder: Path) -> None:
    """Retention removes the step without a condition. The other node saves it between the look and the delete."""

    async def remove(store: Store, key: str, etag: str | None) -> bool:
        if key == MANIFEST:
            step = Path(store.uri).name.removeprefix("step-")
            saved = folder / f"saved-{step}"
            (folder / "removing").write_text(step)
            for _ in range(1000):
                await asyncio.sleep(0 if saved.exists() else 0.001)
        await store.delete(key)
        return True

    shared_commit.remove = remove
    assert retention.shared_commit is shared_commit


def save_what_is_removed(node: Node, last: int) -> None:
    """Save each step that the other node is about to remove, until it removes none any more."""
    deadline = time.monotonic() + 10 * MEET_SECONDS
    removing = node.folder / "removing"
    while len(list(node.folder.glob("saved-*"))) < last // 2 and time.monotonic() < deadline:
        step = int(removing.read_text() or 0) if removing.exists() else 0
        if step and not (node.folder / f"saved-{step}").exists():
            node.save(step, 1)
            (node.folder / f"saved-{step}").touch()
        time.sleep(0.001)


BUGS: dict[str, Callable[[Path], None]] = {"no condition": no_condition, "no look": no_look}


def save_steps(folder: Path, uri: str, name: str, steps: int, keep: int, bug: str) -> None:
    """Save each step and the second half once more, as a node that comes back. Log the results."""
    retry.PAUSE_SECONDS_MAX = 0.05
    if bug:
        BUGS[bug](folder)
    node, draw = Node(uri, folder, name, keep, is_met=bug == "no condition"), random.Random(name)
    if bug == "no look" and name == "two":
        save_what_is_removed(node, steps)
        return
    for turn, begin in enumerate((1, steps // 2)):
        for step in range(begin, steps + 1):
            node.save(step, turn)
            node.prune()
            time.sleep(draw.random() * 0.005)


# --- the tests --------------------------------------------------------------------------------------------------------

STEPS = int(os.environ.get("TIERCKPT_TEST_TWO_NODES", "6"))
"""Steps of each node; the second half is saved twice."""
SECONDS_MAX = 120 + 20 * STEPS  # longer than a slow run takes

pytestmark = pytest.mark.timeout(SECONDS_MAX + 30)


def run(uri: str, folder: Path, *, keep: int = 0, bug: str = "", steps: int = STEPS) -> Verdict:
    options: dict[str, Any] = {"uri": uri, "steps": steps, "keep": keep, "bug": bug}
    for job in [start(save_steps, folder, **options, name=name) for name in ("one", "two")]:
        assert job.codes(SECONDS_MAX) == [0], job.output()[-3000:]
    lines = [json.loads(line) for name in ("one", "two") for line in (folder / f"{name}.jsonl").open()]
    return judge(uri, lines)


@pytest.mark.parametrize(
    ("tier", "keep"),
    [
        ("file", 1),
        pytest.param("s3", 0, marks=pytest.mark.server),
        pytest.param("file", 0, marks=pytest.mark.slow),
        pytest.param("s3", 1, marks=[pytest.mark.server, pytest.mark.slow]),
    ],
)
def test_two_nodes_save_one_run_consistently(
    tier: str, keep: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    uri = request.getfixturevalue(f"{tier}_uri")
    verdict = run(uri, tmp_path / "nodes", keep=keep)
    print(verdict.counts)
    assert not verdict.wrong
    assert verdict.counts["acknowledged"] >= STEPS and verdict.counts["save"] >= 2 * STEPS
    assert verdict.counts["removed"] >= STEPS // 2 if keep else verdict.counts["standing"] == STEPS


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "keep"), [("no condition", 0), ("no look", 1)])
def test_two_nodes_find_a_seeded_bug(bug: str, keep: int, file_uri: str, tmp_path: Path) -> None:
    for turn in range(5):
        if run(f"{file_uri}-{turn}", tmp_path / f"nodes-{turn}", keep=keep, bug=bug, steps=8).wrong:
            return
    pytest.fail(f"{bug!r} was not found")

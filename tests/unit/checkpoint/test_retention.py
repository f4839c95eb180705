"""The rules of retention, read from top to bottom. N1 to N3 of checkpoint/retention.py, and with them I5, for any
run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierckpt.checkpoint.retention import CheckpointCopy, Health, Policy, Rule, Verdict, local_health, protect
from tierckpt.checkpoint.select import age_of, newest_of
from tierckpt.errors import ConfigError
from tierckpt.format.manifest import FileEntry, Manifest
from tierckpt.types import Tier

WHOLE, PARTIAL, DAMAGED = Health


def local(step: int, health: Health = WHOLE, *, drained: bool = True, held: str = "") -> CheckpointCopy:
    return CheckpointCopy(f"step-{step}", step, Tier.LOCAL, health, drained, held)


def shared(step: int, health: Health = WHOLE, held: str = "") -> CheckpointCopy:
    return CheckpointCopy(f"step-{step}", step, Tier.SHARED, health, held=held)


def removed(verdicts: Sequence[Verdict], tier: Tier) -> list[int]:
    return sorted(verdict.copy.step for verdict in verdicts if verdict.remove and verdict.copy.tier is tier)


def run_of(*steps: int) -> list[CheckpointCopy]:
    return [copy for step in steps for copy in (local(step), shared(step))]


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "3", {"local": 0}, {"attic": 3}])
@pytest.mark.parametrize("name", ["keep_last", "keep_every"])
def test_a_rule_that_makes_no_sense_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        Policy.of(**{name: value})


def test_on_one_node_of_several_a_partial_copy_is_sound_and_a_whole_one_is_kept_too() -> None:
    verdicts = Policy.of(keep_last=1).judge(
        [local(1), local(2), local(3, PARTIAL), local(4, PARTIAL), *map(shared, (1, 2, 3, 4))]
    )
    assert removed(verdicts, Tier.LOCAL) == [1, 3]
    reasons = {one.copy.step: one.reason for one in verdicts if one.copy.tier is Tier.LOCAL}
    assert reasons[2] == "the newest whole one"


def test_a_local_copy_may_go_after_the_shared_tier_has_given_that_step_up() -> None:
    verdicts = Policy.of({"local": 2, "shared": 1}).judge([local(1), local(2), local(3), shared(3)])
    assert removed(verdicts, Tier.LOCAL) == [1]


# --- for any run (I5) -------------------------------------------------------------------------------------------

counts = st.none() | st.integers(1, 6)
policies = st.builds(Policy, st.builds(Rule, counts, counts), st.builds(Rule, counts, counts))


@st.composite
def runs(draw: st.DrawFn) -> list[CheckpointCopy]:
    copies = []
    for step in draw(st.lists(st.integers(0, 30), unique=True, max_size=10)):
        health = st.sampled_from(Health)
        held = st.sampled_from(["", "", "being read"])
        if draw(st.booleans()):
            copies.append(local(step, draw(health), drained=draw(st.booleans()), held=draw(held)))
        if draw(st.booleans()):
            whole_or_not = draw(st.sampled_from([WHOLE, DAMAGED]))
            copies.append(shared(step, whole_or_not, draw(held)))
    return copies


def left(verdicts: Sequence[Verdict], tier: Tier) -> list[CheckpointCopy]:
    return [verdict.copy for verdict in verdicts if not verdict.remove and verdict.copy.tier is tier]


def check_i5(copies: list[CheckpointCopy], verdicts: Sequence[Verdict], *, drains: bool) -> None:
    """Invariants after a removal, stated independently of the code that decides."""
    assert sorted(map(repr, copies)) == sorted(repr(verdict.copy) for verdict in verdicts)
    for tier in (Tier.LOCAL, Tier.SHARED):
        here = [copy for copy in copies if copy.tier is tier]
        stay = left(verdicts, tier)
        for healths in ({*Health}, {WHOLE, PARTIAL}, {WHOLE}):
            newest = max((copy.step for copy in here if copy.health in healths), default=None)
            still = max((copy.step for copy in stay if copy.health in healths), default=None)
            assert still == newest, f"the newest of {healths} on {tier}"
    safe = [copy.step for copy in left(verdicts, Tier.SHARED) if copy.health is WHOLE]
    for verdict in verdicts:
        if verdict.remove:
            assert not verdict.copy.held
            assert verdict.reason
        if verdict.remove and drains and verdict.copy.tier is Tier.LOCAL:
            assert verdict.copy.is_drained, "the only copy was removed"
            assert any(step >= verdict.copy.step for step in safe), "nothing as new is left on the shared tier"


@pytest.mark.slow
@given(runs(), policies, st.booleans())
@settings(max_examples=600, deadline=None)
def test_the_last_good_copy_and_the_only_copy_stay(copies: list[CheckpointCopy], policy: Policy, drains: bool) -> None:
    check_i5(copies, policy.judge(copies, drains=drains), drains=drains)


@given(runs(), policies)
@settings(max_examples=200, deadline=None)
def test_pruning_twice_removes_nothing_more(copies: list[CheckpointCopy], policy: Policy) -> None:
    stay = [verdict.copy for verdict in policy.judge(copies) if not verdict.remove]
    assert not [verdict for verdict in policy.judge(stay) if verdict.remove]


@given(runs(), policies)
@settings(max_examples=200, deadline=None)
def test_what_the_rule_keeps_stays(copies: list[CheckpointCopy], policy: Policy) -> None:
    verdicts = policy.judge(copies)
    for tier, rule in ((Tier.LOCAL, policy.local), (Tier.SHARED, policy.shared)):
        steps = {copy.step for copy in copies if copy.tier is tier}
        wanted = set(sorted(steps)[-rule.last :]) if rule.last else set()
        wanted |= {step for step in steps if rule.every and step % rule.every == 0}
        assert wanted <= {copy.step for copy in left(verdicts, tier)}


SEEDED = {
    "the newest is not protected": lambda verdict: replace(verdict, remove=True),
    "drained or not": lambda verdict: replace(verdict, remove=verdict.remove or verdict.reason.startswith("not on")),
    "read or not": lambda verdict: replace(verdict, remove=verdict.remove or verdict.reason == "being read"),
}


@pytest.mark.parametrize("bug", SEEDED)
def test_a_policy_with_a_bug_is_caught(bug: str) -> None:
    """The negative control of ``check_i5``."""
    copies = [*run_of(1, 2, 3), local(4, drained=False), local(0, held="being read"), local(5, drained=False)]
    verdicts = Policy.of(keep_last=1).judge(copies)
    check_i5(copies, verdicts, drains=True)
    with pytest.raises(AssertionError):
        check_i5(copies, [SEEDED[bug](verdict) for verdict in verdicts], drains=True)


# --- how much of a copy is there --------------------------------------------------------------------------------


def manifest_of(*ranks: int) -> Manifest:
    digest = ("0" * 32,)
    files = tuple(
        FileEntry(f"__{rank}_{index}-t{rank}.distcp", 10, digest, rank, f"t{rank}")
        for rank in ranks
        for index in (0, 1)
    )
    return Manifest("a", len(ranks), 4096, (FileEntry(".metadata", 5, digest, source=".tierckpt/metadata/a"),), files)


def write(directory: Path, manifest: Manifest) -> None:
    for entry in manifest.entries:
        (directory / entry.key).parent.mkdir(parents=True, exist_ok=True)
        (directory / entry.key).write_bytes(bytes(entry.size_bytes))


@pytest.mark.parametrize(
    ("lost", "health"),
    [
        ((), WHOLE),
        (("__1_0-t1.distcp", "__1_1-t1.distcp"), PARTIAL),
        (("__1_0-t1.distcp",), DAMAGED),
        ((".tierckpt/metadata/a",), DAMAGED),
        (("__0_0-t0.distcp", "__0_1-t0.distcp", "__1_0-t1.distcp", "__1_1-t1.distcp"), DAMAGED),
    ],
)
def test_a_rank_is_here_or_not_but_never_half(lost: tuple[str, ...], health: Health, tmp_path: Path) -> None:
    manifest = manifest_of(0, 1)
    write(tmp_path, manifest)
    for name in lost:
        (tmp_path / name).unlink()
    assert local_health(tmp_path, manifest) is health


def test_a_file_of_another_size_or_put_aside_is_damage(tmp_path: Path) -> None:
    manifest = manifest_of(0, 1)
    write(tmp_path, manifest)
    (tmp_path / "__1_1-t1.distcp").write_bytes(b"short")
    assert local_health(tmp_path, manifest) is DAMAGED
    write(tmp_path, manifest)
    for index in (0, 1):
        path = tmp_path / f"__1_{index}-t1.distcp"
        path.rename(path.with_name(f"{path.name}.bad"))
    assert local_health(tmp_path, manifest) is DAMAGED


def test_copies_without_a_step_above_them_are_all_newest() -> None:
    twins = [local(5), replace(local(5), name="other-5")]
    assert protect(twins).keys() == {"step-5", "other-5"}


def test_newer_is_the_higher_step_and_what_has_none_is_older_than_all() -> None:
    names = ["last", "step-9", "other-10", "step-10", "step-0"]
    assert newest_of(names) == ["other-10", "step-10"]
    assert newest_of(["last", "best"]) == ["last", "best"]
    assert not newest_of([])
    assert sorted(names, key=age_of) == ["last", "step-0", "step-9", "other-10", "step-10"]


@pytest.mark.parametrize("tier", [Tier.LOCAL, Tier.SHARED])
def test_a_process_keeps_its_own_saves_beside_newer_ones_of_another(tier: Tier) -> None:
    steps, own = (12, 14, 16, 100, 200, 300), [12, 14, 16]
    copies = [local(step) if tier is Tier.LOCAL else shared(step) for step in steps]

    def gone(policy: Policy, own: Sequence[int]) -> list[int]:
        return removed(policy.judge(copies, drains=False, own=own), tier)

    assert gone(Policy.of(keep_last=2), []) == [12, 14, 16, 100]
    assert gone(Policy.of(keep_last=2), own) == [12, 100]
    assert gone(Policy.of(keep_last=1, keep_every=7), own) == [12, 100, 200]
    assert gone(Policy(), own) == []


def test_of_own_saves_the_latest_count() -> None:
    """A job that goes back saves lower steps later."""
    verdicts = Policy.of(keep_last=1).judge([shared(step) for step in (10, 20, 30)], own=[20, 30, 10])
    assert removed(verdicts, Tier.SHARED) == [20]

"""Branches of a run: the steps of a branch, the branch that a job continues, and the recorded notes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierckpt.checkpoint import branches
from tierckpt.checkpoint.branches import Branch, branch_going_back, current_branch
from tierckpt.format.manifest import Manifest


def manifest(branch: Branch | None, attempt: str = "attempt") -> Manifest:
    notes = {branches.NOTE: branch.encode()} if branch is not None else {}
    return Manifest(attempt, 1, 4096, (), (), notes=notes)


ROOT = Branch("root", order=1)


def test_no_branch_is_abandoned_until_a_job_goes_back() -> None:
    seen: list[tuple[Branch, int | None]] = [(ROOT, 10), (ROOT, 20), (Branch("other", 7), 15), (Branch("foreign"), 30)]
    assert current_branch(seen) is None


def test_going_back_abandons_what_is_newer() -> None:
    second = branch_going_back("second", ROOT, 10, None, [ROOT, ROOT])
    assert second.order > ROOT.order and second.base == 10
    assert second.holds(ROOT, 10) and not second.holds(ROOT, 11)
    assert second.holds(second, 99)
    assert current_branch([(ROOT, 20), (second, 12)], second) == second
    assert current_branch([(ROOT, 20), (second, 12)]) is None  # B2: a restore of this run reads notes only


def test_a_foreign_checkpoint_counts_unless_it_was_there_and_newer() -> None:
    before = Branch("before")
    second = branch_going_back("second", ROOT, 10, None, [ROOT, before])
    assert not second.holds(before, 15)
    assert second.holds(Branch("after"), 15)  # B6


def test_going_back_twice() -> None:
    second = branch_going_back("second", ROOT, 10, None, [ROOT])
    third = branch_going_back("third", second, 12, second, [second])
    assert third.holds(second, 12) and not third.holds(second, 14)
    assert third.holds(ROOT, 10) and not third.holds(ROOT, 20)
    fourth = branch_going_back("fourth", ROOT, 5, third, [ROOT, second, third])
    assert fourth.holds(ROOT, 5) and not fourth.holds(ROOT, 10)
    assert not fourth.holds(second, 12) and not fourth.holds(third, 13)
    assert current_branch([(third, 13), (fourth, 6), (second, 12), (ROOT, 20)], third, fourth) == fourth


def test_going_back_to_an_abandoned_step_abandons_the_branch_that_left_it() -> None:
    second = branch_going_back("second", ROOT, 10, None, [ROOT])
    third = branch_going_back("third", ROOT, 30, second, [])
    assert third.holds(ROOT, 20) and third.holds(ROOT, 30) and not third.holds(ROOT, 31)
    assert not third.holds(second, 12)


def test_the_later_start_decides_between_processes_that_did_not_see_each_other() -> None:
    second = branch_going_back("second", ROOT, 10, None, [ROOT])
    unaware = Branch("root", order=second.order + 1)
    assert current_branch([(second, 12), (unaware, 40), (ROOT, 30)], second) == unaware
    assert not unaware.holds(second, 12)
    assert current_branch([(second, 50), (unaware, 40)], second) == second  # as without branches: the higher step
    late = Branch("root", order=second.order - 1)
    assert current_branch([(second, 12), (late, 40)], second) == second  # a late drain


def test_the_order_does_not_depend_on_a_clock_that_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    second = branch_going_back("second", ROOT, 10, None, [])
    monkeypatch.setattr("tierckpt.checkpoint.branches.time.time_ns", lambda: 0)
    assert branch_going_back("third", ROOT, 10, second, []).order == second.order + 1


@pytest.mark.parametrize(
    "branch", [ROOT, Branch("a.b_c-1", 5, 0, {}), Branch("x", 2**52, 10, {"root": 10, "other": 3}), Branch("x", 0)]
)
def test_a_branch_survives_its_note(branch: Branch) -> None:
    assert branches.parse(branch.encode()) == branch
    assert branches.branch_of(manifest(branch), "step-1") == branch


@pytest.mark.parametrize(
    "note", ["", "x", "1", "1 ", "-1 a", "1 a went back to x", "1 a ends", "1 a ends b", 7, None, "1 a b"]
)
def test_what_no_release_writes_is_no_branch(note: object) -> None:
    assert branches.parse(note) is None


def test_the_notes_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert branches.read_local(run) is None
    branches.note_local(run / "step-10", manifest(ROOT))
    assert not run.exists()  # it went back to nothing
    second = branch_going_back("second", ROOT, 10, None, [])
    branches.note_local(run / "step-12", manifest(second))
    assert branches.read_local(run) == second
    again = Branch("second", second.order + 5, second.base, second.ends)
    branches.note_local(run / ".tierckpt-windows" / "step-14", manifest(again))
    assert branches.read_local(run) == again
    (note,) = (run / ".tierckpt-branches").iterdir()
    note.with_name("9999999999999999-damaged.json").write_bytes(b"{}")
    assert branches.read_local(run) == again


def test_abandoned_here(tmp_path: Path) -> None:
    second = branch_going_back("second", ROOT, 10, None, [])
    run = [(tmp_path / "run" / f"step-{step}", manifest(one)) for step, one in ((10, ROOT), (20, ROOT), (12, second))]
    other = [(tmp_path / "other" / "step-20", manifest(ROOT))]
    assert not branches.abandoned_here([*run, *other])
    branches.note_local(tmp_path / "run" / "step-12", manifest(second))
    assert branches.abandoned_here([*run, *other]) == {tmp_path / "run" / "step-20"}


def test_a_step_that_is_saved_again_takes_the_place_of_an_abandoned_one() -> None:
    """B5: for the first commit, and not for a step that the new branch continues."""
    first = Branch("first", 5)
    second = Branch("second", 9, 10, {"first": 10})
    assert branches.replaces_abandoned(manifest(second), first, "step-20")
    assert not branches.replaces_abandoned(manifest(second), first, "step-10")
    assert not branches.replaces_abandoned(manifest(first), second, "step-20")
    assert not branches.replaces_abandoned(manifest(second), Branch("late", 12, 8, {"first": 8}), "step-20")
    assert not branches.replaces_abandoned(manifest(second), None, "step-20")

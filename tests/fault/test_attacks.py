"""No checkpoint runs code in the process that opens it, kills it, or makes it act on false metadata.

The corpus is in attacks.py; docs/adr/0008-no-code-from-a-checkpoint.md describes the defence.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fault import attacks, attacks_try
from tests.fault.attacks_fuzz import INPUTS_MIN
from tests.fault.runner import start
from tests.states import save, small_state

FUZZ_SECONDS = float(os.environ.get("TIERCKPT_TEST_FUZZ_SECONDS", "2"))
CORPUS_SECONDS = 400.0
"""More than a hundred attacks, each with two or three forks, on a slow machine."""
pytestmark = pytest.mark.timeout(FUZZ_SECONDS + CORPUS_SECONDS)
ATTACKS = {attack.name: attack for attack in attacks.CORPUS}
HARMLESS = {"good and evil under one name"}
"""Torch reads the good pickle here, so tierckpt does too: the planner gets only that one."""


def run(what: str, directory: Path, timeout_seconds: float = CORPUS_SECONDS, **options: Any) -> list[dict[str, Any]]:
    reports: list[dict[str, Any]] = start(attacks_try.try_attacks, directory, what=what, **options).result(
        timeout_seconds
    )
    return reports


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
        assert attacks_try.is_harmless(report) and not report["error"], report
    else:
        assert attacks_try.is_rejected(ATTACKS[name], report), report


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if attack.control])
def test_control_attack_has_its_effect_on_a_trusting_reader(name: str, reports: dict[str, dict[str, Any]]) -> None:
    """Control: a trusting reader runs it, dies of it, is changed by it, or accepts it."""
    assert attacks_try.has_its_effect(ATTACKS[name], reports[name]), reports[name]


def test_corpus_has_enough_attacks_of_each_kind() -> None:
    live = [attack for attack in attacks.CORPUS if attack.control]
    assert len(ATTACKS) == len(attacks.CORPUS) >= 110
    assert len([attack for attack in live if attack.control == "runs"]) >= 15
    assert len([attack for attack in live if attack.control == "pollutes"]) >= 5
    assert len([attack for attack in live if attack.control == "dies"]) >= 3


@pytest.mark.slow
def test_attacks_find_every_seeded_bug(tmp_path: Path) -> None:
    found = run("bugs", tmp_path)
    assert [report["bug"] for report in found] == list(attacks_try.BUGS)
    missed = [report for report in found if attacks_try.is_rejected(ATTACKS[report["name"]], report["sealed"])]
    assert not missed


@pytest.mark.slow
def test_fuzzed_metadata_is_rejected_or_safe(tmp_path: Path) -> None:
    """Only errors of tierckpt, no unsafe result, no changed class, bounded memory."""
    [counts] = run("fuzz", tmp_path, FUZZ_SECONDS + CORPUS_SECONDS - 20, seconds=FUZZ_SECONDS)
    print(counts)
    assert counts["polluted"] == []
    assert counts["grown_bytes"] < attacks_try.GROWN_BYTES_MAX
    assert counts["metadata"] >= INPUTS_MIN
    assert 0 < counts["accepted"] < counts["metadata"]


@pytest.mark.slow
def test_command_line_unpickles_nothing(tmp_path: Path, local_root: Path) -> None:
    """`ls`, `info` and `verify` work on tierckpt's and stock checkpoints without pickle and torch."""
    save(str(tmp_path / "run/step-1"), small_state())
    attacks_try.save_genuine(tmp_path / "stock")
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

"""The lock in requirements/ satisfies pyproject.toml on every Python, in exact versions with hashes."""

from __future__ import annotations

import datetime
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import environments  # noqa: E402
import matrix  # noqa: E402

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PARTS = ("demo", "dev", "docs")
FILES = sorted(path.stem for path in environments.REQUIREMENTS.glob("*.txt"))
AGAIN = "run `make lock`"


def pins(part: str, python: str, machine: str = "x86_64") -> dict[str, Version]:
    """Return the version of each requirement of ``part`` that pip installs on Linux with ``python``."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.5",
        "platform_machine": machine,
        "sys_platform": "linux",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    found: dict[str, Version] = {}
    for text in environments.read(part):
        requirement = Requirement(text.splitlines()[0].rstrip("\\ "))
        if requirement.marker is None or requirement.marker.evaluate(environment):
            (exactly,) = requirement.specifier
            assert exactly.operator == "==", text
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} twice for Python {python}"
            found[name] = Version(exactly.version)
    return found


def requirements_of(extra: str) -> Iterator[Requirement]:
    """Yield the requirements of ``extra``, including those of the extras that it names."""
    for text in PYPROJECT["project"]["optional-dependencies"][extra]:
        requirement = Requirement(text)
        if requirement.name == PYPROJECT["project"]["name"]:
            for other in requirement.extras:
                yield from requirements_of(other)
        else:
            yield requirement


@pytest.mark.parametrize("python", environments.PYTHONS)
@pytest.mark.parametrize("torch", environments.TORCH["matrix"])
def test_the_lock_satisfies_every_extra(python: str, torch: str) -> None:
    versions = {name: version for part in (*PARTS, f"torch-{torch}") for name, version in pins(part, python).items()}
    always = PYPROJECT["project"]["dependencies"] + PYPROJECT["build-system"]["requires"]
    needed = [Requirement(text) for text in always]
    for extra in PYPROJECT["project"]["optional-dependencies"]:
        needed += requirements_of(extra)
    for requirement in needed:
        name = canonicalize_name(requirement.name)
        assert name in versions, f"the lock has no {name} for Python {python}: {AGAIN}"
        assert requirement.specifier.contains(versions[name]), f"{name} {versions[name]} is not {requirement}: {AGAIN}"


@pytest.mark.parametrize("part", PARTS[:2])
def test_each_part_satisfies_its_target(part: str) -> None:
    held = pins("demo", "3.11") | (pins("dev", "3.11") if part == "dev" else {}) | {"torch": Version("0")}
    needed = {"demo": ["torch", "cli", "s3"], "dev": ["dev"]}[part]
    missing = {
        canonicalize_name(requirement.name) for extra in needed for requirement in requirements_of(extra)
    } - held.keys()
    assert not missing, AGAIN


@pytest.mark.parametrize("file", FILES)
def test_every_entry_has_hashes_and_no_url(file: str) -> None:
    requirements = environments.read(file)
    assert requirements
    for requirement in requirements:
        first, *hashes = requirement.splitlines()
        assert hashes, f"{first} has no hash"
        for line in hashes:
            assert re.fullmatch(r" +--hash=sha256:[0-9a-f]{64}( \\)?", line), line
    rest = (environments.REQUIREMENTS / f"{file}.txt").read_text()
    assert "://" not in rest and not re.search(r"^-", rest, re.MULTILINE)


def test_each_package_is_in_one_part() -> None:
    for python in environments.PYTHONS:
        held = [set(pins(part, python)) for part in (*PARTS, f"torch-{environments.TORCH['default']}")]
        assert sum(map(len, held)) == len(set().union(*held))


def test_each_torch_version_has_a_lock_and_a_test() -> None:
    versions = environments.TORCH["matrix"]
    files = [name for name in FILES if re.match(r"torch-[\d.]+$", name)]
    assert files == sorted(f"torch-{version}" for version in versions)
    assert versions == sorted(versions, key=Version) and environments.TORCH["default"] in versions
    for version in versions:
        assert pins(f"torch-{version}", "3.14", "aarch64")["torch"] == Version(version)
    assert [path for path in environments.TORCH["tests"] if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("newest", "days", "late", "said"),
    [
        (matrix.NEWEST, 400, False, ""),
        ("", 400, False, "warning: pip finds no torch"),
        ("99.0.1", 30, False, "warning (an error after 30 days): torch 99.0.1 can be installed"),
        ("99.0.1", 31, True, "error: torch 99.0.1 can be installed"),
    ],
)
def test_a_newer_torch_is_an_error_after_a_month(
    newest: str, days: int, late: bool, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert matrix.is_late(newest, environments.TORCH["checked"] + datetime.timedelta(days)) is late
    assert capsys.readouterr().out.startswith(said)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 3.10", r"is Python 3\.10, and the lock is for 3\.11"),
        ('case "$*" in *venv*) exit 1;; *) echo 3.11;; esac', "apt install python3-venv"),
    ],
)
def test_unusable_python_is_explained(script: str, said: str, tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    with pytest.raises(SystemExit, match=said):
        environments.create(tmp_path / "env", str(python))

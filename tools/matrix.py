"""Runs the tests that touch torch with each torch and each Python, each in an environment of its own.

    make matrix                            # each torch on Python 3.11, all pairs of them, the newest on other Pythons
    make matrix JOBS="3.11/2.15.0 newest"  # PYTHON/TORCH; `newest` is the newest of all that pyproject.toml allows
    make newest-torch                      # the job of .ci/run: the newest torch, and a look for a newer one

`pairs` crosses checkpoints between all torches of the jobs before it. Their environments, 5 GB each, stay until then;
others of .venv-matrix are removed after their job; KEEP=1 keeps all. A Python that is not installed is skipped, with
the reason. The exit code is 1 if a job failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from environments import PYTHONS, ROOT, TORCH, build, create, run, uv

NEWEST = TORCH["matrix"][-1]
DAYS = 30
"""`.ci/run` fails when a newer torch stays untested for longer."""
EVERYTHING, PAIRS = "newest", "pairs"
ENVIRONMENTS = ROOT / ".venv-matrix"


def main() -> int:
    """Return 0 when every job passed."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("jobs", nargs="*")
    arguments.add_argument("--newest-torch", action="store_true")
    given = arguments.parse_args()
    # Constraints of pip's configuration may exclude the versions that this tests.
    os.environ["PIP_CONSTRAINT"] = os.devnull
    late = given.newest_torch and is_late(newest_on_index(), datetime.datetime.now(datetime.UTC).date())
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    every = [f"{PYTHONS[0]}/{torch}" for torch in TORCH["matrix"]]
    every += [PAIRS, *(f"{python}/{NEWEST}" for python in PYTHONS[1:]), EVERYTHING]
    jobs = given.jobs or ([f"{ours}/{NEWEST}"] if given.newest_torch else every)
    rows = []
    for number, job in enumerate(jobs):
        print(f"== {job}", flush=True)
        rows.append((job, try_pairs() if job == PAIRS else try_job(job)))
        if not os.environ.get("KEEP") and PAIRS not in jobs[number + 1 :]:
            shutil.rmtree(ENVIRONMENTS, ignore_errors=True)
    print("\nPython/torch  result")
    for job, result in rows:
        print(f"{job:13} {result}")
    return int(late or any(result.startswith("FAILED") for _, result in rows))


def try_job(job: str) -> str:
    """Build the environment of ``job`` and run the tests in it. Returns the result."""
    version, _, torch = job.partition("/")
    python = sys.executable if job == EVERYTHING else interpreter(version)
    if not python:
        return f"skipped: no Python {version} with venv is on PATH or under ~/.pyenv"
    directory = ENVIRONMENTS / job.replace("/", "-")
    if job == EVERYTHING:
        create(directory, python)
        asked = ["--quiet", "--upgrade", f"--python={directory}/bin/python", f"-e{ROOT}[dev]"]
        built = run(uv(), "pip", "install", *asked)
    else:
        built = build(directory, ["demo", "dev"], torch, python)
    return test(directory / "bin/python", TORCH["tests"]) if built else "FAILED: the installer's message is above"


def try_pairs() -> str:
    """Save a checkpoint in each environment that is there, and load it in each. Returns the result."""
    pythons = sorted(map(str, ENVIRONMENTS.glob(f"{PYTHONS[0]}-*/bin/python")))
    if len(pythons) < 2:
        return f"skipped: {PAIRS} needs two jobs of Python {PYTHONS[0]} before it"
    os.environ["TIERCKPT_TEST_TORCHES"] = ":".join(pythons)
    try:
        return test(pythons[0], ["tests/compat/test_torch_versions.py"], slow=True)
    finally:
        del os.environ["TIERCKPT_TEST_TORCHES"]


def test(python: str | Path, paths: list[str], slow: bool = False) -> str:
    """Run ``paths`` with ``python``, and print what pytest says when it fails. Returns pytest's closing line."""
    begun = time.monotonic()
    command = [str(python), "-m", "pytest", "-q", "-n3", "--dist=loadfile", *([] if slow else ["-mnot slow"]), *paths]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout if done.returncode else "", flush=True)
    closing = (done.stdout.strip().splitlines() or ["pytest printed nothing"])[-1].strip("= ")
    return f"{'FAILED: ' if done.returncode else ''}{closing} (the whole run {time.monotonic() - begun:.0f} s)"


def interpreter(version: str) -> str:
    """Return a Python of ``version`` that can build environments, or nothing."""
    pyenv = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    found = [sys.executable, shutil.which(f"python{version}"), *map(str, pyenv)]
    check = f"import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    return next((python for python in found if python and run(python, "-c", check, quiet=True)), "")


def newest_on_index() -> str:
    """Return the newest torch that pip finds, or nothing, for instance without a network."""
    said = subprocess.run([sys.executable, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True)
    found = re.search(r"^torch \((\d[\d.]*)", said.stdout, re.MULTILINE)
    return found[1] if found else ""


def is_late(newest: str, today: datetime.date) -> bool:
    """Warn of a torch that is newer than the tested ones. Returns whether it stayed untested for too long."""
    days = (today - TORCH["checked"]).days
    if not newest:
        print("warning: pip finds no torch, so whether there is a newer one than", NEWEST, "is not known")
    elif numbers(newest) > numbers(NEWEST):
        late = days > DAYS
        what = f"torch {newest} can be installed; the tests ran with {NEWEST} at most, {days} days ago."
        what += " Add it to requirements/torch.toml, then `make lock newest-torch`."
        print("error:" if late else f"warning (an error after {DAYS} days):", what)
        return late
    return False


def numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


if __name__ == "__main__":
    sys.exit(main())

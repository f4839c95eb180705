"""Builds an environment from the lock. The Python that runs this needs nothing but its standard library.

    python3 tools/environments.py .venv demo dev     # and the torch that requirements/torch.toml calls the default
    python3 tools/environments.py .venv-newest demo dev --torch 2.15.0

The hash of every file is checked, and nothing is resolved. The pip that comes with Python and tierckpt itself, which is
installed from this directory, have no hash. uv installs if it is on PATH, else pip, and pip if uv fails.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:
    sys.exit("tierckpt needs Python 3.11 or newer; set PYTHON=")

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements"
TORCH = tomllib.loads((REQUIREMENTS / "torch.toml").read_text())
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""The Pythons of the lock."""
PIPS = 4
"""pip fetches one file after another: four processes share the files, and take half the time. One may fail on a package
that another has half installed: then a single pip installs the rest."""


def build(directory: Path, parts: Sequence[str], torch: str = TORCH["default"], python: str = sys.executable) -> bool:
    """Bring ``directory`` up to date: an environment with ``parts`` of the lock, ``torch`` and tierckpt from here.

    Returns whether that worked; the installer has said why not.
    """
    create(directory, python)
    cpu = f"torch-{torch}+cpu"
    if not ((REQUIREMENTS / f"{cpu}.txt").exists() and install(directory, [cpu], quiet=True)):
        parts = [*parts, f"torch-{torch}"]
    tierckpt = ["install", "--quiet", "--no-deps", "--no-build-isolation", f"-e{ROOT}"]
    return install(directory, parts) and pip(directory, *tierckpt)


def create(directory: Path, python: str = sys.executable) -> None:
    """Create the environment at ``directory`` where there is none, with a pip."""
    there = (directory / "bin/python").exists()
    version = subprocess.check_output([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], text=True)
    if not there and version.strip() not in PYTHONS:
        sys.exit(f"{python} is Python {version.strip()}, and the lock is for {', '.join(PYTHONS)}; set PYTHON=")
    if there and list(directory.glob("lib/python3*/site-packages/pip")):
        return
    words = [directory / "bin/python", "-m", "ensurepip"] if there else [python, "-m", "venv", directory]
    made = run(*words, quiet=True)
    if not made:
        shutil.rmtree(directory, ignore_errors=True)
        sys.exit(f"{python} -m venv {directory} failed. On Debian and Ubuntu: apt install python3-venv")


def install(directory: Path, parts: Sequence[str], quiet: bool = False) -> bool:
    """Install ``parts`` of the lock. Returns whether that worked; ``quiet`` where it may fail."""
    lock = [requirement for part in parts for requirement in read(part)]
    words = ["install", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    with tempfile.TemporaryDirectory() as scratch:
        shares = [Path(scratch, f"{number}.txt") for number in range(min(PIPS, len(lock)))]
        for number, share in enumerate(shares):
            share.write_text("".join(lock[number :: len(shares)]))
        files = [f"-r{share}" for share in shares]
        if shutil.which("uv") and run("uv", "pip", *words, f"--python={directory}/bin/python", *files, quiet=quiet):
            return True
        one = functools.partial(pip, directory, *words, "--no-compile")
        with ThreadPoolExecutor(PIPS) as pips:
            worked = all(list(pips.map(lambda file: one(file, quiet=True), files)))
        return worked or one(*files, quiet=quiet)


def pip(directory: Path, *words: str, quiet: bool = False) -> bool:
    return run(directory / "bin/python", "-m", "pip", "--disable-pip-version-check", *words, quiet=quiet)


def run(*words: object, quiet: bool = False) -> bool:
    """Run a command. uv is told where pip looks for wheels. Returns whether it succeeded."""
    environment = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "")} | os.environ
    return not subprocess.run([str(word) for word in words], env=environment, capture_output=quiet).returncode


def read(part: str) -> list[str]:
    """Return the requirements of a file of the lock, each with the lines of its hashes."""
    path = REQUIREMENTS / f"{part}.txt"
    return re.findall(r"^\w.*\n(?: .*\n)*", path.read_text(), re.MULTILINE) if path.exists() else []


def uv() -> str:
    """Return the path of a uv, of an environment of its own where none is on PATH."""
    found = shutil.which("uv")
    if not found:
        directory = ROOT / ".venv-matrix/uv"
        create(directory)
        pip(directory, "install", "--quiet", "uv")
        found = str(directory / "bin/uv")
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("directory", type=Path)
    arguments.add_argument("parts", nargs="*", help="files of requirements/: demo, dev, docs")
    arguments.add_argument("--torch", default=TORCH["default"], choices=TORCH["matrix"])
    given = arguments.parse_args()
    if not build(given.directory, given.parts, given.torch):
        sys.exit(f"{given.directory} is not complete: the installer's message is above")


if __name__ == "__main__":
    main()

"""Writes the lock: requirements/*.txt, exact versions and hashes for Python 3.11 to 3.14.

    make lock                 # after a change of pyproject.toml: keeps every version that still fits
    make lock LOCK_ARGS=--upgrade  # the newest of everything

demo.txt serves `make demo`; dev.txt adds the packages of `make test`, docs.txt those of the site and of the extra gcs.
torch-VERSION.txt is one torch with its CUDA libraries; each of them fits the same other files. torch-VERSION+cpu.txt is
not written here: PyPI has no such build.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

from environments import REQUIREMENTS, ROOT, TORCH, read, uv

PARTS = {
    "demo": ["--extra=torch", "--extra=cli", "--extra=s3"],
    "dev": ["--extra=dev"],
    "docs": ["--extra=dev", "--extra=docs", "--extra=gcs"],
}
"""Each includes the ones before it."""
TOOLS = ["editables", "moto[s3,server]", "setuptools<82"]
"""Requirements of no extra: an editable installation, the server of the demo; torch 2.11 takes no newer setuptools."""
CUDA = re.compile(r"(torch|triton|(nvidia|cuda)-.*)==")
HEADER = "# Written by `make lock` (tools/lock.py), installed by tools/environments.py: nothing is resolved.\n"


def main(options: list[str]) -> None:
    """Write every file of the lock."""
    old = {name: [] if "--upgrade" in options else read(name) for name in [*PARTS, *map(torch_file, TORCH["matrix"])]}
    kept = [requirement for part in PARTS for requirement in old[part]]
    whole = resolve(PARTS["docs"], TORCH["default"], preferred=kept + old[torch_file(TORCH["default"])])
    left = [requirement for requirement in whole if not CUDA.match(requirement)]
    pins = [first_line(requirement) for requirement in left]
    for part, extras in PARTS.items():
        needed = {first_line(requirement) for requirement in resolve(extras, TORCH["default"], pins)}
        write(part, [requirement for requirement in left if first_line(requirement) in needed])
        left = [requirement for requirement in left if first_line(requirement) not in needed]
    for torch in TORCH["matrix"]:
        name = torch_file(torch)
        write(name, filter(CUDA.match, resolve(PARTS["docs"], torch, pins, preferred=old[name])))


def resolve(extras: list[str], torch: str, pins: Iterable[str] = (), preferred: Iterable[str] = ()) -> list[str]:
    """Return the requirements of ``extras``, of the build and of one ``torch``, each with its hashes."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    with tempfile.TemporaryDirectory() as scratch:
        given, limits, lock = (Path(scratch, name) for name in ("given.txt", "limits.txt", "lock.txt"))
        given.write_text("\n".join([*build, *TOOLS, f"torch=={torch}"]))
        limits.write_text("\n".join(pins))
        lock.write_text("".join(preferred))
        command = [uv(), "pip", "compile", "--quiet", "--universal", "--python-version=3.11", "--generate-hashes"]
        command += ["--no-header", "--no-annotate", "--no-emit-index-url"]
        command += [*extras, f"-c{limits}", f"-o{lock}", "pyproject.toml", str(given)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return re.findall(r"^\w.*\n(?: .*\n)*", lock.read_text(), re.MULTILINE)


def torch_file(version: str) -> str:
    return f"torch-{version}"


def first_line(requirement: str) -> str:
    return requirement.splitlines()[0].rstrip("\\ ")


def write(name: str, requirements: Iterable[str]) -> None:
    (REQUIREMENTS / f"{name}.txt").write_text(HEADER + "".join(requirements))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Builds the wheel and tries it where nothing else is: one bare environment for each extra.

    python tools/check_package.py [EXTRA ...]

In each: what the extra is for works, and what needs another one says which. Exits with 1 when something does not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from environments import ROOT, TORCH, read

IMPORT = "import tierckpt, sys; assert 'torch' not in sys.modules; tierckpt.Settings()"
SAVE = """
import torch, tierckpt
state = {"model": torch.nn.Linear(4, 4), "step": 3}
with tierckpt.Checkpointer("run", mover="inline") as checkpointer:
    checkpointer.save(3, state).result()
again = {"model": torch.nn.Linear(4, 4), "step": 0}
with tierckpt.Checkpointer("run", mover="inline") as checkpointer:
    assert checkpointer.restore(again) == 3 and again["step"] == 3
assert torch.equal(state["model"].weight, again["model"].weight)
"""
PREFETCH = """
import pathlib, subprocess, sys
model = pathlib.Path("model"); model.mkdir()
(model / "weights.bin").write_bytes(bytes(range(256)) * 4096)
run = lambda *words: subprocess.run([sys.executable, "-m", "tierckpt", *words], check=True)
run("prefetch", str(model.absolute()), "--to", "here", "--json")
assert pathlib.Path("here/weights.bin").read_bytes() == (model / "weights.bin").read_bytes()
run("status", "--json")
"""
NO_CLI = """
import subprocess, sys
done = subprocess.run([sys.executable, "-m", "tierckpt", "--help"], capture_output=True, text=True)
assert done.returncode == 2 and "tierckpt[cli]" in done.stderr, done
"""
NO_TORCH = """
import tierckpt
try:
    tierckpt.Checkpointer
except tierckpt.errors.MissingExtraError as error:
    assert "tierckpt[torch]" in str(error.hint)
else:
    raise SystemExit("Checkpointer without torch")
"""
CHECKS = {
    "bare": [IMPORT, NO_CLI, NO_TORCH],
    "cli": [PREFETCH],
    "s3": ["import s3fs"],
    "azure": ["import adlfs"],
    "gcs": ["import gcsfs"],
    "agent": ["import tierckpt.agent.metrics, tierckpt.agent.peer_server, tierckpt.agent.hub_proxy"],
    "plot": ["import matplotlib"],
    "torch": [IMPORT, SAVE],
}


def main(extras: list[str]) -> int:
    """Return 0 when every extra works."""
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch)
        venv.create(here / "pip", with_pip=True)
        pip = [here / "pip/bin/python", "-m", "pip"]
        run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", scratch, ROOT], here)
        (wheel,) = here.glob("tierckpt-*.whl")
        # The wheel says what it needs, so pip resolves, within the versions of the lock. Their hashes are not checked:
        # pip would want one of the wheel, too.
        parts = ["demo", "dev", "docs", f"torch-{TORCH['default']}"]
        lock = [requirement for part in parts for requirement in read(part)]
        (here / "constraints.txt").write_text("".join(line.splitlines()[0].rstrip("\\") + "\n" for line in lock))
        for extra in extras or CHECKS:
            begun = time.monotonic()
            error = try_extra(pip, wheel, extra, here / extra)
            failed += error != ""
            result = "works" if not error else "FAILS"
            print(f"{extra:8} {result} {time.monotonic() - begun:6.1f} s  {error}", flush=True)
    return min(1, failed)


def try_extra(pip: list[object], wheel: Path, extra: str, directory: Path) -> str:
    """Install ``wheel`` with ``extra`` into an environment of its own and try it. Returns what is wrong."""
    venv.create(directory / "env")
    python = directory / "env/bin/python"
    lock = directory.parent / "constraints.txt"
    install = [*pip, "--python", python, "install", "--quiet", "--no-compile", "-c", lock]
    try:
        run([*install, wheel if extra == "bare" else f"{wheel}[{extra}]"], directory)
        for number, check in enumerate(CHECKS[extra]):
            (directory / str(number)).mkdir()
            run([python, "-c", check], directory / str(number))
    except subprocess.CalledProcessError as error:
        return str(error.stderr or error.stdout).strip()[-2000:]
    return ""


def run(command: list[object], directory: Path) -> None:
    """Run ``command`` in ``directory``, with a local root of its own and none of the caller's settings."""
    environment = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    environment |= {"PATH": "/usr/bin:/bin", "HOME": str(directory), "TIERCKPT_LOCAL_ROOT": str(directory / "local")}
    words = [str(word) for word in command]
    subprocess.run(words, cwd=directory, env=environment, check=True, capture_output=True, text=True, timeout=600)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

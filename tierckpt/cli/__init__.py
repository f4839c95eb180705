"""The ``tierckpt`` command. One file per verb; ``app.py`` joins them, ``output.py`` prints, nothing else does either.

Every verb returns a ``Report`` and raises our own errors; exit codes are those of errors.py. Nothing here imports
torch except ``export``, so that ``tierckpt prefetch`` runs in an image without it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NoReturn

NEEDED = ("typer", "rich")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code. Without the ``cli`` extra: say how to get it, exit 2."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"error: the tierckpt command needs {' and '.join(missing)}\nhint: pip install 'tierckpt[cli]'\n"
        )
        sys.exit(2)
    from .app import run

    sys.exit(run(sys.argv[1:] if arguments is None else arguments))

"""The ``tierckpt`` command. One file per verb; ``ui/app.py`` joins them, ``ui/output.py`` alone prints.

Verbs return a ``Report``. Only ``export`` and ``size --checkpoint`` import torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..errors import MissingExtraError
from ..process_start import INTERRUPTED, begin_command, end_command, watch_interrupts

NEEDED = ("typer", "rich")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code; 2 without the ``cli`` extra."""
    begin_command()
    watch_interrupts()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        from .ui.app import run
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in NEEDED:
            raise
        _say(MissingExtraError(f"the tierckpt command needs {package}", hint="pip install 'tierckpt[cli]'"), arguments)
        sys.exit(MissingExtraError.exit_code)
    except KeyboardInterrupt:
        end_command(INTERRUPTED)
    end_command(run(arguments))


def _say(error: MissingExtraError, arguments: Sequence[str]) -> None:
    """The printer's packages are missing."""
    as_json = "--json" in arguments
    text = json.dumps(error.to_json()) if as_json else f"error: {error.message}\nhint: {error.hint}"
    sys.stderr.write(text + "\n")

"""The verbs joined into one command, and the one place where errors become exit codes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import ConfigError, TierckptError
from ..stores.local import translate_os_error
from ..types import Tier
from . import doctor, drain, export, info, ls, prefetch, restore, status, verify
from .output import Output, Report, hush

INTERRUPTED = 130
TRACEBACK_VARIABLE = "TIERCKPT_TRACEBACK"

app = typer.Typer(
    help="Checkpoints and models on node-local SSD and shared storage.",
    epilog="Exit codes: 0 ok, 1 error, 2 usage or configuration, 3 partial, 4 not found, 5 integrity, 6 permission, "
    "7 try again later.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for _verb in (
    ls.ls,
    info.info,
    verify.verify,
    drain.drain,
    prefetch.prefetch,
    restore.restore,
    status.status,
    doctor.doctor,
    export.export,
):
    app.command()(_verb)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tierckpt {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Checkpoints and models on node-local SSD and shared storage."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line; print its report or its error. Returns the exit code, never raises."""
    output = Output(as_json="--json" in arguments)
    command = typer.main.get_command(app)
    try:
        outcome: Any = command.main(list(arguments) or ["--help"], prog_name="tierckpt", standalone_mode=False)
        if isinstance(outcome, Report):
            output.show(outcome)
            return outcome.exit_code
        code = outcome if isinstance(outcome, int) else 0  # --help and --version
    except BrokenPipeError:
        hush()
        return 1
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        ours = _as_ours(error)
        output.error(ours)
        return ours.exit_code
    finally:
        output.close()
    if code == INTERRUPTED:  # some releases of typer turn Ctrl-C into this code
        output.error(TierckptError("interrupted", hint="Nothing partial was published; run it again to go on"))
    return code


def _as_ours(error: Exception) -> TierckptError:
    if isinstance(error, TierckptError):
        return error
    if hasattr(error, "format_message"):  # typer's usage errors: their class has moved between its releases
        return ConfigError(
            error.format_message().rstrip("."), hint="`tierckpt --help` and `tierckpt VERB --help` show the usage"
        )
    if isinstance(error, OSError) and error.filename is not None:
        return translate_os_error(error, Path(os.fsdecode(error.filename)), Tier.LOCAL)
    return TierckptError(
        f"this is a bug in tierckpt: {type(error).__name__}: {error}",
        hint=f"Set {TRACEBACK_VARIABLE}=1 to see where, and report it",
    )

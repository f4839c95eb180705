"""Joins the verbs into one command, and turns errors into exit codes."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ... import __version__
from ...disk.durable import translate_os_error
from ...errors import ConfigError, TierckptError
from ...process_start import INTERRUPTED, OutputError
from ...redaction import redact, redact_all
from ...telemetry import LogFormat, LogLevel
from ...tracebacks import TRACEBACK_VARIABLE, keeps_tracebacks
from ...types import Tier
from .. import (
    adopt,
    agent,
    cache,
    doctor,
    drain,
    drill,
    export,
    info,
    ls,
    prefetch,
    prune,
    report,
    restore,
    simulate,
    size,
    status,
    verify,
)
from .output import Output, Report
from .session import taking_options

SHOWING = frozenset({None, "ls", "info", "status", "size", "simulate", "report"})
"""They fail if they cannot show a result. None: ``--help``."""

app = typer.Typer(
    help="Checkpoints and models on node-local SSD and shared storage.",
    epilog="Exit codes: 0 ok, 1 error, 2 usage or configuration, 3 partial, 4 not found, 5 integrity, 6 permission, "
    "7 try again later.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_FILES = (ls, info, verify, drain, prefetch, restore, adopt, drill, status, agent, prune, doctor, export)
for _file in (*_FILES, size, simulate, report):  # each has the function of its name
    app.command()(taking_options(getattr(_file, _file.__name__.rpartition(".")[2])))
app.add_typer(cache.cache, name="cache")


def _version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"tierckpt {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    log_level: Annotated[
        LogLevel, typer.Option("--log-level", help="Minimum severity of events on stderr.")
    ] = "warning",
    log_format: Annotated[LogFormat, typer.Option("--log-format", help="json: one object per line.")] = "text",
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Checkpoints and models on node-local SSD and shared storage."""
    context.obj.verb = context.invoked_subcommand
    context.obj.log(log_format, log_level)


def run(arguments: Sequence[str]) -> int:
    """Return the exit code, never raise."""
    output = Output(as_json="--json" in arguments)
    command = typer.main.get_command(app)
    code = 0
    try:
        outcome: Any = command.main(
            list(arguments) or ["--help"], prog_name="tierckpt", standalone_mode=False, obj=output
        )
        if isinstance(outcome, Report):
            code = outcome.exit_code
            output.show(replace(outcome, document=redact_all(outcome.document)))
            return code
        code = outcome if isinstance(outcome, int) else 0  # --help and --version
    except OutputError as error:
        return _without_output(error.cause, code, output)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except (Exception, SystemExit) as error:
        if keeps_tracebacks():
            raise
        if isinstance(error, SystemExit) and error.__context__ is None:  # shell completion has printed its result
            return int(error.code or 0)
        # typer turns a closed pipe into an exit without a message
        cause = error.__context__ if isinstance(error, SystemExit) else error
        ours = _as_ours(cause if isinstance(cause, Exception) else RuntimeError(f"{type(error).__name__}: {error}"))
        output.error(ours)
        return ours.exit_code
    finally:
        output.close()
    if code == INTERRUPTED:  # some releases of typer turn Ctrl-C into it
        output.error(TierckptError("interrupted", hint="Nothing partial was published; run it again to continue"))
    return code


def _without_output(cause: OSError, code: int, output: Output) -> int:
    """Print why a command could not write its report, except to ``| head``.

    Returns ``code`` of the finished work unless the report is the only purpose of the command.
    """
    verb = output.verb
    is_lost = verb in SHOWING or output.as_json
    if verb not in SHOWING or cause.errno != errno.EPIPE:
        work = "" if verb in SHOWING else f"{verb} ended with exit code {code}, but "
        text = f"{work}its output cannot be written: {cause.strerror}"
        if is_lost:
            output.error(TierckptError(text, hint="Check the target of standard output", errno=cause.errno))
        elif cause.errno != errno.EPIPE:
            output.warn(text)
    return code or int(is_lost)


def _as_ours(error: Exception) -> TierckptError:
    """Return a tierckpt error, without credentials that a server may have repeated."""
    if isinstance(error, TierckptError):
        error.message, error.hint, error.context = redact(error.message), redact(error.hint), redact_all(error.context)
        return error
    if hasattr(error, "format_message"):  # typer's usage errors have no stable module
        return ConfigError(
            error.format_message().rstrip("."), hint="`tierckpt --help` and `tierckpt VERB --help` show the usage"
        )
    if isinstance(error, OSError) and error.filename is not None:
        return translate_os_error(error, Path(os.fsdecode(error.filename)), Tier.LOCAL)
    return TierckptError(
        f"this is a bug in tierckpt: {type(error).__name__}: {error}",
        hint=f"Set {TRACEBACK_VARIABLE}=1 to see where, and report it",
    )

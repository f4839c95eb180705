"""Options that all verbs share, and their client."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import ByteSize, TypeAdapter, ValidationError
from typer import Argument, Option

from ...client import Client, close_all
from ...config import Settings
from ...disk.local_root import use_local_root
from ...errors import ConfigError
from ...format.layout import Location, parse_uri
from ...stores.schemes import check_location
from ...telemetry import ignore_progress
from ...types import ProgressListener
from .output import Progressing, Report, progress_bar

UriArgument = Annotated[
    str, Argument(metavar="URI", help="s3://bucket/key, az://container/key, gs://bucket/key, file:///path or a path.")
]
JsonOption = Annotated[bool, Option("--json", help="Print one JSON document; errors as JSON on stderr.")]


@dataclass(frozen=True)
class Session:
    as_json: JsonOption = False
    local_root: Annotated[
        Path | None,
        Option(metavar="PATH", help="Local tier and journal. Default: TIERCKPT_LOCAL_ROOT, else a cache directory."),
    ] = None

    def settings(self, **overrides: Any) -> Settings:
        """Raise ConfigError; PermissionDeniedError: an unsafe local root."""
        if self.local_root is not None:
            overrides["local_root"] = self.local_root
        settings = Settings.load(**overrides)
        use_local_root(settings)
        return settings

    def client(self, listener: ProgressListener = ignore_progress, **overrides: Any) -> closing[Client]:
        return closing(Client(self.settings(**overrides), listener))


@dataclass(frozen=True)
class ProgressSession(Session):
    progress: Annotated[
        Progressing, Option(help="json: one object per line on stderr; none. Default: a bar on a terminal.")
    ] = "auto"

    def progress_bar(self) -> AbstractContextManager[ProgressListener]:
        return progress_bar(as_json=self.as_json, progress=self.progress)


def taking_options(verb: Callable[..., Report]) -> Callable[..., Report]:
    """Return ``verb`` for typer: each parameter that is a dataclass of options becomes an option for each field.

    A flag without a name has that of its parameter.
    """
    hints = get_type_hints(verb, include_extras=True)
    parameters = inspect.signature(verb).parameters.values()
    groups = {one.name: hints[one.name] for one in parameters if is_dataclass(hints[one.name])}
    options = [(one.name, one.default, hints[one.name]) for one in parameters if one.name not in groups]
    for kind in groups.values():
        kinds = get_type_hints(kind, include_extras=True)
        options += [(one.name, one.default, kinds[one.name]) for one in fields(kind)]
    for name, default, kind in options:
        if default is False and (option := kind.__metadata__[0]).default is ...:
            option.param_decls = (f"--{name.replace('_', '-')}",)  # else typer adds --no-NAME

    def command(**values: Any) -> Report:
        for name, kind in groups.items():
            values[name] = kind(**{one.name: values.pop(one.name) for one in fields(kind)})
        return verb(**values)

    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    command.__annotations__ = {name: kind for name, _, kind in options}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, default, kind in options
        ]
    )
    return command


def rate_of(option: str, text: str | None, hint: str = "Write it like 200MiB/s") -> int | None:
    """Read ``200MiB/s``. Raises ConfigError."""
    if text is None:
        return None
    try:
        return int(TypeAdapter(ByteSize).validate_python(text.removesuffix("/s")))
    except ValidationError:
        raise ConfigError(f"{option} is {text!r}", hint=hint) from None


def size_of(option: str, text: str | None) -> int | None:
    """Read ``100GiB``. Raises ConfigError."""
    return rate_of(option, text, "Write it like 100GiB")


def location_of(uri: str) -> Location:
    return check_location(parse_uri(uri))


@contextmanager
def closing_clients() -> Iterator[None]:
    try:
        yield
    finally:
        close_all()

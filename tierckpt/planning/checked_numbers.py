"""Parse numbers with units: decimal (``GB`` is 1e9 bytes), binary (``GiB``), or bits (``Gb/s``, ``Gbit/s``).

Every function raises a ConfigError that names the value.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias, get_type_hints

from ..errors import ConfigError

_NUMBER = re.compile(r"^\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*(?:/s)?)\s*\Z")
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_COUNTS |= {unit.upper(): scale for unit, scale in _COUNTS.items()}
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_BYTES = {"": 1.0} | {f"{name}B": scale for name, scale in (_PREFIXES | _BINARY).items()}
_BITS = {f"{name}{bit}": scale / 8 for name, scale in _PREFIXES.items() if name for bit in ("b", "bit")}
_RATES = {f"{unit}{per}": scale for unit, scale in (_BYTES | _BITS).items() for per in ("", "/s")}


def parse_count(text: str | float, what: str) -> int:
    """Parse ``"175e9"``, ``"70b"``, ``"1.3T"``."""
    return round(positive(_parse(text, what, _COUNTS, "a count", "175e9, 70b or 1.5t"), what))


def parse_bytes(text: str | float, what: str) -> float:
    """Parse ``"30TB"``, ``"512GiB"``."""
    return positive(_parse(text, what, _BYTES, "a size", "30TB or 512GiB"), what)


def parse_rate(text: str | float, what: str) -> float:
    """Parse ``"25GB/s"``, ``"200Gb/s"`` as bytes per second."""
    rate = _parse(text, what, _RATES, "a rate", "25GB/s (bytes) or 200Gb/s (bits)")
    return positive(rate, what)


def parse_seconds(text: str | float, what: str, *, zero: bool = False) -> float:
    """Parse ``"90"``, ``"5min"``, ``"2.5h"``, ``"1d"``."""
    seconds = _parse(text, what, _SECONDS, "a duration", "90s, 5min, 2h or 1d")
    return not_negative(seconds, what) if zero else positive(seconds, what)


def positive(value: float, what: str) -> float:
    if not (math.isfinite(value) and value > 0):
        raise _number_error(what, value, "it must be a number above 0")
    return value


def not_negative(value: float, what: str) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise _number_error(what, value, "it must be 0 or more")
    return value


def whole(value: int, what: str, *, at_least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise _number_error(what, value, f"it must be a whole number of at least {at_least}")
    return value


def share(value: float, what: str) -> float:
    if not 0 <= value <= 1:
        raise _number_error(what, value, "it must be a share between 0 and 1")
    return value


Positive: TypeAlias = Annotated[float, positive]
NotNegative: TypeAlias = Annotated[float, not_negative]
Share: TypeAlias = Annotated[float, share]
Count: TypeAlias = Annotated[int, whole]


class Checked:
    """A dataclass whose fields are checked by the functions that annotate them, unless they are None."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, check in _checks_of(type(self)):  # type: ignore[arg-type]
            if (value := getattr(self, name)) is not None:
                check(value, name.replace("_", " "))


@functools.cache
def _checks_of(kind: Any) -> list[tuple[str, Callable[[Any, str], object]]]:
    hints = get_type_hints(kind, include_extras=True)
    return [(name, check) for name, hint in hints.items() for check in getattr(hint, "__metadata__", ())]


def _parse(text: str | float, what: str, units: Mapping[str, float], kind: str, examples: str) -> float:
    match = _NUMBER.match(str(text))
    if not match:
        raise _number_error(what, text, f"write it like {examples}")
    if match[2] not in units:
        raise _number_error(what, text, f"write {kind} like {examples}")
    return float(match[1].replace("_", "")) * units[match[2]]


def _number_error(what: str, value: object, valid: str) -> ConfigError:
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return ConfigError(f"{what} is {shown}: {valid}", hint="`tierckpt size --help` lists every value with its unit")

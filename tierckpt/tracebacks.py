"""Short tracebacks: the caller's lines and the message. Set TIERCKPT_TRACEBACK=1 for the full ones."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from .errors import TierckptError
from .resources import exhausted

P = ParamSpec("P")
T = TypeVar("T")

TRACEBACK_VARIABLE = "TIERCKPT_TRACEBACK"


def keeps_tracebacks() -> bool:
    return bool(os.environ.get(TRACEBACK_VARIABLE))


def short_traceback(function: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except TierckptError as error:
            if keeps_tracebacks():
                raise
            raise error.with_traceback(None) from None
        except (MemoryError, RuntimeError, OSError) as error:
            if (found := exhausted(error)) is None:
                raise
            raise found from error

    return call

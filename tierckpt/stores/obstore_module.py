"""Imports obstore; a forked child gets a second copy of the library.

Its threads start with the first request and form one pool for the lifetime of the library. A forked child has the
memory but not the threads: a request there would hang, and the pool cannot be made again. So a child, and a
process whose obstore was used before by other code, loads a copy of the library with its own data and
threads: 0.1 s and 7 MiB at the first request of each such child.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import os
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ..errors import StoreError

EXIT_PAUSE_SECONDS: Final = 0.1

_NAME: Final = "obstore._obstore"
_lock = threading.Lock()
_library: ModuleType | None = None
_parents: list[ModuleType | None] = []
"""Never freed: native code may wait for threads that do not exist here."""
_needs_copy = _NAME in sys.modules
"""True where the threads of the library that is loaded may be another process's."""


class Module:
    """What obstore has under ``path``, of the library that this process may use. Loads it on first use.

    Raises StoreError when a forked child cannot have a copy.
    """

    def __init__(self, path: str = "") -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        module: Any = _library or _load()
        return getattr(getattr(module, self._path) if self._path else module, name)


def _load() -> ModuleType:
    global _library
    with _lock:
        if _library is None:
            from obstore import _obstore

            _library = _copy_of(_obstore) if _needs_copy else _obstore
            # Its threads release Python objects a moment after a request has been answered, and need the interpreter
            # for it. One that is shutting down aborts the process then, after everything was done. So the exit leaves
            # them that moment.
            atexit.register(time.sleep, EXIT_PAUSE_SECONDS)
        return _library


def _copy_of(module: ModuleType) -> ModuleType:
    """Load ``module`` once more. The linker tells libraries apart by their files: a copy of the file is another one."""
    known = {name: found for name, found in sys.modules.items() if name.partition(".")[0] == "obstore"}
    try:
        with os.fdopen(os.memfd_create("obstore"), "wb", buffering=0) as copy:
            copy.write(Path(str(module.__file__)).read_bytes())
            loader = importlib.machinery.ExtensionFileLoader(_NAME, f"/proc/self/fd/{copy.fileno()}")
            spec = importlib.util.spec_from_loader(_NAME, loader)
            fresh = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
            loader.exec_module(fresh)
    except (OSError, ImportError) as error:
        raise StoreError(
            f"this process was forked from one that may have used object storage, and cannot reload obstore: {error}",
            hint='Start it with the "spawn" or "forkserver" method (multiprocessing_context of a DataLoader)',
        ) from error
    finally:
        sys.modules.update(known)  # it has put its own parts there, and other users of obstore keep theirs
    return fresh


def _start_anew() -> None:
    global _library, _lock, _needs_copy
    _lock = threading.Lock()
    _parents.append(_library)
    _library, _needs_copy = None, _needs_copy or _NAME in sys.modules


os.register_at_fork(after_in_child=_start_anew)

"""Imports obstore; a forked child gets a second copy of the library.

obstore's thread pool is never restarted: a request in a forked child would hang. So a child, and a process whose
obstore was used by other code, loads a copy: 0.1 s and 7 MiB.
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
"""Never freed: native code may wait for threads."""
_needs_copy = _NAME in sys.modules
"""The loaded library's threads may belong to another process."""


class Module:
    """Loads obstore's ``path`` on first use. Raises StoreError if a forked child cannot have a copy."""

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
            # Its threads release Python objects after a response. During shutdown that would abort the process: wait a
            # moment.
            atexit.register(time.sleep, EXIT_PAUSE_SECONDS)
        return _library


def _copy_of(module: ModuleType) -> ModuleType:
    """Load from a copy of the file, which the linker treats as another library."""
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
        sys.modules.update(known)  # other users of obstore keep theirs
    return fresh


def _reset_after_fork() -> None:
    global _library, _lock, _needs_copy
    _lock = threading.Lock()
    _parents.append(_library)
    _library, _needs_copy = None, _needs_copy or _NAME in sys.modules


os.register_at_fork(after_in_child=_reset_after_fork)

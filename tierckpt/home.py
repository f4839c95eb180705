"""The home directory of this user."""

from __future__ import annotations

import os
import pwd
from pathlib import Path


def home() -> Path:
    """Return ``HOME``, else the home in the user database, else ``/``. Never raises.

    An empty or relative value counts as not set, and so does a directory that this user may not enter.
    """
    path = os.environ.get("HOME", "")
    if not os.path.isabs(path):  # noqa: PTH117
        try:
            path = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:  # OpenShift, `docker run --user`
            path = "/"
    return Path(path) if os.path.isabs(path) and not _is_closed(path) else Path("/")  # noqa: PTH117


def cache_home() -> Path:
    """A relative ``XDG_CACHE_HOME`` counts as not set."""
    path = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(path):  # noqa: PTH117
        return Path(path)
    below_home = home() / ".cache"
    return below_home if not _is_closed(str(below_home)) else Path("/.cache")


def expand_user(path: str) -> str:
    """``~name`` of an unknown user stays."""
    if path == "~" or path.startswith("~/"):
        return str(home()) + path[1:] if str(home()) != "/" else path[1:] or "/"
    return os.path.expanduser(path)  # noqa: PTH111


def _is_closed(directory: str) -> bool:
    try:
        os.stat(os.path.join(directory, "."))  # noqa: PTH116, PTH118  # Path would drop the dot
    except PermissionError:
        return True
    except OSError:
        return False
    return False

"""The home directory of this user, which a container's random user does not have."""

from __future__ import annotations

import os
import pwd
from pathlib import Path


def home() -> Path:
    """``HOME``, else the home in the user database, else ``/`` as bash and container runtimes have it.

    An empty or relative value counts as not set. So does a directory that this user may not enter: an image sets
    ``HOME=/root``, and its container runs as another user. Never raises; the directory may be missing or read-only.
    """
    path = os.environ.get("HOME", "")
    if not os.path.isabs(path):  # noqa: PTH117
        try:
            path = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:  # a user without an entry: OpenShift, `docker run --user`
            path = "/"
    return Path(path) if os.path.isabs(path) and not _is_closed(path) else Path("/")  # noqa: PTH117


def cache_home() -> Path:
    """``XDG_CACHE_HOME``, else ``.cache`` below the home directory. A relative value counts as not set."""
    path = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(path):  # noqa: PTH117
        return Path(path)
    below_home = home() / ".cache"
    return below_home if not _is_closed(str(below_home)) else Path("/.cache")


def expand_user(path: str) -> str:
    """Return ``path`` with a leading ``~`` replaced by the home directory; ``~name`` of an unknown user stays."""
    if path == "~" or path.startswith("~/"):
        return str(home()) + path[1:] if str(home()) != "/" else path[1:] or "/"
    return os.path.expanduser(path)  # noqa: PTH111


def _is_closed(directory: str) -> bool:
    """Return True if this user cannot access ``directory``."""
    try:
        os.stat(os.path.join(directory, "."))  # noqa: PTH116, PTH118  # Path would drop the dot
    except PermissionError:
        return True
    except OSError:
        return False
    return False

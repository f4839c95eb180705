"""The settings file ``tierckpt.toml`` of the working directory, and whether it is to be believed.

The working directory may be a scratch directory that others write to, or belong to another user. So the
file counts only if this user or root wrote it and no other user can replace it. Otherwise it is not
read at all: neither its peers, secret and local_root, nor settings that would slow down or disable features.
"""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .ownership import distrust
from .telemetry import logger

log = logger("config")

NAME = "tierckpt.toml"
BYTES_MAX = 1 << 20

reported: set[tuple[str, str]] = set()


def read_settings_file() -> dict[str, Any]:
    """Return the settings of the file by name; {} without one, or if it is not trusted, which is logged once.

    Raises:
        ConfigError: it counts, and is no TOML, no file, unreadable or too large; says which file.
    """
    path = Path(NAME)
    try:
        path.lstat()
        path = path.absolute()
    except OSError:  # none, or no working directory
        return {}
    if why := distrust(path):
        if (str(path), why) not in reported:
            reported.add((str(path), why))
            log.warning(
                "%s is ignored: %s. Settings are taken from a file that this user or root owns and nobody else can "
                "write to or replace (`chmod go-w` the file and its directory), and from TIERCKPT_* variables",
                path,
                why,
            )
        return {}
    try:
        return tomllib.loads(_read(path).decode())
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no TOML: {error}", hint="Write lines like `concurrency = 2`") from None


def _read(path: Path) -> bytes:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a FIFO is not waited for
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ConfigError(f"{path} is not a file", hint="Move it away: settings are read from a file of that name")
        data = file.read(BYTES_MAX + 1)
    if len(data) > BYTES_MAX:
        raise ConfigError(f"{path} is larger than the {BYTES_MAX} bytes that settings may take")
    return data

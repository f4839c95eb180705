"""Opens files under a directory without following any symbolic link.

Cost: two system calls for each part of the path.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_DIRECTORY = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY


def open_beneath(directory: Path, relative: str) -> int:
    """Open the regular file ``relative`` of ``directory`` for reading; the caller closes it.

    The last part of ``directory`` may be no link either; what leads there is the administrator's.

    Raises:
        OSError: it is not there, is no regular file, or some part of it is a symbolic link or leads out.
    """
    *folders, name = relative.split("/")
    if "\0" in relative or any(part in ("", ".", "..") for part in (*folders, name)):
        raise OSError(errno.EXDEV, "it leads out, or is no path", relative)
    at = os.open(directory, _DIRECTORY)
    try:
        for folder in folders:
            below = os.open(folder, _DIRECTORY, dir_fd=at)
            os.close(at)
            at = below
        file = os.open(name, _FLAGS, dir_fd=at)
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "no regular file", relative)
    return file

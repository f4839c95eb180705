"""Runs parts of a test as other users of the machine. Needs root."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence


def as_user(
    uid: int, work: Callable[[], object], *, gid: int | None = None, groups: Sequence[int] = (), umask: int = 0o022
) -> str:
    """Run ``work`` in a child with the user ``uid`` and no group of root's. Returns '' or the error that it raised."""
    out, into = os.pipe()
    child = os.fork()
    if not child:
        said = "nothing"
        try:
            os.close(out)
            os.setgroups(groups)
            os.setgid(uid if gid is None else gid)
            os.setuid(uid)
            os.umask(umask)
            work()
            said = ""
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(into, said.encode()[:4000])
            os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as stream:
        said = stream.read().decode()
    os.waitpid(child, 0)
    return said

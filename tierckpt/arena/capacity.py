"""The memory that this process may still take before the kernel's OOM killer acts.

Limits: the machine (``MemAvailable``), and every memory cgroup above this process. All ranks of a node see the same
free bytes: each limit keeps a margin, and a large buffer is filled in small, checked pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import CapacityError

ROOT = Path("/")
MARGIN_BYTES_MAX = 1 << 30
_PIECE_BYTES_MAX = 64 << 20
_PIECE_BYTES_MIN = 2 << 20
_SHARERS = 32  # processes times threads that fill memory at once
_UNLIMITED_BYTES = 1 << 60  # "no limit" in version 1


@dataclass(frozen=True, slots=True)
class Limit:
    name: str
    total_bytes: int
    free_bytes: int
    remedy: str

    @property
    def usable_bytes(self) -> int:
        return max(0, self.free_bytes - margin_bytes(self.total_bytes))


def margin_bytes(total_bytes: int) -> int:
    return min(MARGIN_BYTES_MAX, total_bytes // 20)


def limits(root: Path = ROOT) -> list[Limit]:
    return [*_machine(root), *_cgroups(root)]


def require(more_bytes: int, *, asked_bytes: int, root: Path = ROOT) -> None:
    """Raise CapacityError, with a remedy, unless ``more_bytes`` fit under every limit."""
    limit = min(limits(root), key=lambda limit: limit.usable_bytes, default=None)
    if limit is None or limit.usable_bytes >= more_bytes:
        return
    kept_bytes = margin_bytes(limit.total_bytes)
    raise CapacityError(
        f"no room for {mebibytes(asked_bytes)} of staging memory: {mebibytes(limit.free_bytes)} of "
        f"{mebibytes(limit.total_bytes)} of {limit.name} are free, {mebibytes(kept_bytes)} must stay so",
        hint=f"Use a smaller arena, or {limit.remedy}",
        asked_bytes=asked_bytes,
        free_bytes=limit.free_bytes,
    )


def piece_bytes(*, asked_bytes: int, root: Path = ROOT) -> int:
    """Raises CapacityError."""
    usable_bytes = min((limit.usable_bytes for limit in limits(root)), default=_PIECE_BYTES_MAX * _SHARERS)
    if usable_bytes < _PIECE_BYTES_MIN:
        require(_PIECE_BYTES_MIN, asked_bytes=asked_bytes, root=root)
    share_bytes = usable_bytes // _SHARERS // _PIECE_BYTES_MIN * _PIECE_BYTES_MIN
    return max(_PIECE_BYTES_MIN, min(_PIECE_BYTES_MAX, share_bytes))


def mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.0f} MiB"


def meminfo_bytes(path: Path) -> dict[str, int]:
    fields: dict[str, int] = {}
    for line in read_text(path).splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[0].isdigit():
            fields[name.split()[-1]] = int(words[0]) * 1024
    return fields


def _machine(root: Path) -> Iterator[Limit]:
    fields = meminfo_bytes(root / "proc/meminfo")
    if "MemAvailable" in fields and "MemTotal" in fields:
        yield Limit("memory", fields["MemTotal"], fields["MemAvailable"], "end other processes on this node")


def _cgroups(root: Path) -> Iterator[Limit]:
    for directory, version in _memory_groups(root):
        if version == 2:
            limit, used = read_number(directory / "memory.max"), read_number(directory / "memory.current")
            cache = _fields(directory / "memory.stat", "inactive_file", "active_file")
        else:
            limit = read_number(directory / "memory.limit_in_bytes")
            used = read_number(directory / "memory.usage_in_bytes")
            cache = _fields(directory / "memory.stat", "total_inactive_file", "total_active_file")
        if limit is None or used is None or limit >= _UNLIMITED_BYTES:
            continue
        remedy = "raise the memory limit of this container or job"
        yield Limit(f"the limit of cgroup {directory}", limit, max(0, limit - used + min(used, cache)), remedy)


def _memory_groups(root: Path) -> Iterator[tuple[Path, int]]:
    paths = _own_paths(root)
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.partition(" ")
        version = (
            2 if kind == "cgroup2" else 1 if kind == "cgroup" and "memory" in options.split()[-1].split(",") else 0
        )
        if not version or version not in paths:
            continue
        inner, mount = left.split()[3], root / left.split()[4].replace("\\040", " ").lstrip("/")
        # A container's mount may show only its own part of the tree, under a path that names all of it.
        own = paths[version]
        own = own[len(inner.rstrip("/")) :] if own == inner or own.startswith(inner.rstrip("/") + "/") else ""
        directory = mount / own.strip("/")
        yield from ((above, version) for above in (directory, *directory.parents) if above.is_relative_to(mount))


def _own_paths(root: Path) -> dict[int, str]:
    paths: dict[int, str] = {}
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    return paths


def read_number(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None


def _fields(path: Path, *names: str) -> int:
    pairs = (line.split() for line in read_text(path).splitlines())
    return sum(int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in names)


def read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

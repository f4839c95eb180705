"""Quick answers about the entries of the cache, in SQLite. The files are the truth; this is rebuilt from them.

Every answer can be had from the files alone (pool.py scans them): a database that is gone, damaged or locked for long
costs time, never a wrong decision. A connection lives for one call, so nothing crosses a fork.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Literal, TypeAlias

from ..disk.quarantine import kind_of, set_aside
from ..telemetry import logger

log = logger("cache")

BUSY_SECONDS = 10.0
State: TypeAlias = Literal["partial", "complete"]


@dataclass(frozen=True, slots=True)
class Row:
    """One entry. ``reserved_bytes`` is what the quota counts: of a partial entry, what it may take."""

    name: str
    uri: str
    version: str
    state: State
    files: int
    size_bytes: int
    reserved_bytes: int
    is_pinned: bool
    used_unix_ns: int


_COLUMNS = tuple(field.name for field in fields(Row))
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    name TEXT PRIMARY KEY, uri TEXT NOT NULL, version TEXT NOT NULL, state TEXT NOT NULL, files INTEGER NOT NULL,
    size_bytes INTEGER NOT NULL, reserved_bytes INTEGER NOT NULL, is_pinned INTEGER NOT NULL,
    used_unix_ns INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_uri ON entries (uri);
"""


class Index:
    """The database ``path``. ``scan`` gives the rows that the files say, to build it from."""

    def __init__(self, path: Path, scan: Callable[[], Iterable[Row]]) -> None:
        self.path = path
        self._scan = scan

    def rows(self, uris: Sequence[str] | None = None) -> list[Row]:
        """Return all entries, or those of ``uris``, the least recently used first."""
        where, values = (f"WHERE uri IN ({', '.join('?' * len(uris))}) ", tuple(uris)) if uris is not None else ("", ())
        try:
            with self._open() as database:
                found = database.execute(f"SELECT * FROM entries {where}ORDER BY used_unix_ns, name", values).fetchall()
            return [Row(**{**dict(zip(_COLUMNS, row, strict=True)), "is_pinned": bool(row[7])}) for row in found]
        except sqlite3.Error as error:
            self._trouble(error)
            rows = [row for row in self._scan() if uris is None or row.uri in uris]
            return sorted(rows, key=lambda row: (row.used_unix_ns, row.name))

    def put(self, row: Row) -> None:
        self._write("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", astuple(row))

    def remove(self, name: str) -> None:
        self._write("DELETE FROM entries WHERE name = ?", (name,))

    def touch(self, name: str, used_unix_ns: int) -> None:
        self._write("UPDATE entries SET used_unix_ns = ? WHERE name = ?", (used_unix_ns, name))

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        try:
            with self._open() as database:
                database.execute(statement, values)
        except sqlite3.Error as error:
            self._trouble(error)

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        if kind_of(self.path) not in ("a file", "nothing"):
            set_aside(self.path)
        is_new = not self.path.exists()
        database = sqlite3.connect(self.path, timeout=BUSY_SECONDS)
        try:
            database.execute("PRAGMA synchronous = OFF")  # a power cut costs a scan
            with database:
                if is_new:
                    self._build(database)
                yield database
        finally:
            database.close()

    def _build(self, database: sqlite3.Connection) -> None:
        database.execute("PRAGMA journal_mode = WAL")
        database.executescript(_SCHEMA)
        rows = list(self._scan())
        if rows:
            log.info("%s is new: built from the %d entries that are there", self.path, len(rows))
        database.executemany(
            "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", [astuple(row) for row in rows]
        )

    def _trouble(self, error: sqlite3.Error) -> None:
        """A damaged database goes; the next call builds another. One that is locked stays."""
        if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
            log.warning("%s is locked: reading the files instead", self.path)
            return
        log.warning("%s is damaged (%s): it is built anew from the files", self.path, error)
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                self.path.with_name(self.path.name + suffix).unlink()

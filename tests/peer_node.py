"""One node's peer server and its files, in this process, for the tests of the wire."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tierckpt.agent.peer_server import PeerServer
from tierckpt.cache.file_set import FileSet, FileSpec
from tierckpt.cache.partial_entry import PartialEntry
from tierckpt.config import Settings
from tierckpt.format.layout import METADATA, attempt_metadata, local_dir, parse_uri
from tierckpt.format.manifest import FileEntry, Manifest, digest_of, digests_of
from tierckpt.peer.inventory import Answers, Holdings
from tierckpt.peer.membership import Member
from tierckpt.peer.peer_client import PeerClient
from tierckpt.types import Json

SECRET = "what all nodes of this test know"
CHUNK = 64 * 1024
EVENT_SECONDS = 60.0
Data = Mapping[str, bytes]


def model(chunks: int = 5, files: int = 2) -> dict[str, bytes]:
    """Files of some chunks each, the last one not whole."""
    return {f"part-{number}/model.bin": os.urandom(chunks * CHUNK - 100) for number in range(files)}


def freeze(data: Data, chunk_size_bytes: int = CHUNK, uri: str = "s3://bucket/model", known: bool = False) -> FileSet:
    """``known``: the digests of the chunks are part of the version."""
    files = tuple(
        FileSpec(name, name, len(value), "etag-1", digests_of(value, chunk_size_bytes) if known else ())
        for name, value in sorted(data.items())
    )
    return FileSet(uri, files, chunk_size_bytes)


def begin(root: Path, frozen: FileSet) -> PartialEntry:
    return PartialEntry(root / "cache" / frozen.name, frozen, preallocate=True)


def land(filling: PartialEntry, data: Data, ordinals: Sequence[int] | None = None) -> None:
    frozen = filling.frozen
    for ordinal, (index, chunk) in enumerate(frozen.chunks()):
        if ordinals is None or ordinal in ordinals:
            filling.store_chunk(index, chunk, bytes_of(frozen, data, ordinal))


def bytes_of(frozen: FileSet, data: Data, ordinal: int) -> bytes:
    index, chunk = list(frozen.chunks())[ordinal]
    at = frozen.chunk_range(index, chunk)
    return data[frozen.files[index].path][at.start : at.stop]


def publish(root: Path, data: Data, **changed: Any) -> FileSet:
    """Have a whole entry in the node's cache."""
    frozen = freeze(data, **changed)
    filling = begin(root, frozen)
    land(filling, data)
    if not filling.publish():
        raise AssertionError("the entry did not become whole")
    filling.close()
    return frozen


def commit(root: Path, uri: str, data: Data, *, leave_out: Sequence[str] = ()) -> Manifest:
    """Have a checkpoint on the node's local tier, without some of its files."""
    attempt = secrets.token_hex(8)
    source = attempt_metadata(attempt)
    entries = tuple(FileEntry(name, len(value), digests_of(value, CHUNK)) for name, value in data.items())
    about = b"what DCP knows of it"
    metadata = (FileEntry(METADATA, len(about), (digest_of(about),), source=source),)
    manifest = Manifest(attempt, 1, CHUNK, metadata, entries)
    directory = local_dir(root, parse_uri(uri))
    for name, value in {**data, source: about}.items():
        if name not in leave_out:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(value)
    (directory / ".tierckpt" / "manifest.json").write_bytes(manifest.encode())
    return manifest


class Alone:
    """The members that the server knows."""

    def __init__(self, name: str = "server") -> None:
        self.me = Member(name, "127.0.0.1:0")
        self.heard: list[Json | None] = []

    def answer(self, row: Json | None) -> Json:
        self.heard.append(row)
        return {"me": self.me.to_json(), "members": []}

    def asked(self, name: str) -> None: ...


def secret_file(folder: Path, secret: str = SECRET, mode: int = 0o600) -> Path:
    """A file in ``folder`` with the cluster's secret."""
    path = folder / f"secret-{digest_of(secret.encode())}"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(secret + "\n")
    path.chmod(mode)
    return path


def settings_of(root: Path, **changed: Any) -> Settings:
    """Settings of a node with its secret next to its local root. Its cache keeps files on a full disk, too."""
    given = {"local_root": root, "peer_listen": "127.0.0.1:0", "local_high_water": 1.0, **changed}
    if "peer_secret_file" not in given:
        given["peer_secret_file"] = secret_file(root.with_name(f"{root.name}-secrets"))
    return Settings.load(**given)


class Node:
    """A running server. ``client`` makes one more client of it; all are closed at the end."""

    def __init__(
        self, root: Path, *, name: str = "server", hub: Any = None, bytes_per_second: int | None = None, **changed: Any
    ) -> None:
        self.root, self.settings = root, settings_of(root, **changed)
        self.members, self.holdings = Alone(name), Holdings(root)
        self.server = PeerServer(
            self.settings,
            self.holdings,
            self.members,
            Answers(fresh=lambda: {"runs": []}, hub=hub),
            bytes_per_second=bytes_per_second,
        )
        self._clients: list[PeerClient] = []

    @property
    def member(self) -> Member:
        return Member(self.members.me.name, self.server.address)

    def client(self, name: str = "client", **changed: Any) -> PeerClient:
        settings = Settings.load(self.settings, **changed) if changed else self.settings
        self._clients.append(PeerClient(settings, name))
        return self._clients[-1]

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        await self.server.close()


@asynccontextmanager
async def serving(root: Path, **changed: Any) -> AsyncIterator[Node]:
    node = Node(root, **changed)
    await node.server.start()
    try:
        yield node
    finally:
        await node.close()


async def until(holds: Callable[[], bool]) -> None:
    """Wait until the server has reached that point, by polling."""
    async with asyncio.timeout(EVENT_SECONDS):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def get(client: PeerClient, member: Member, frozen: FileSet, ordinal: int, **asked: Any) -> bytes:
    """One chunk, as bytes."""
    index, chunk = list(frozen.chunks())[ordinal]
    into = memoryview(bytearray(frozen.chunk_range(index, chunk).size_bytes))
    await client.chunk(member, frozen.version, frozen.chunk_size_bytes, ordinal, into, **asked)
    return bytes(into)

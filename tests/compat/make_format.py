"""Makes the test data of one on-disk format. Run it with the last commit of that format, before it changes.

    python -m tests.compat.make_format tests/data/format-N.tar.gz

Its URIs begin with ``/proc/self/cwd``: unpack it into the working directory, and the shared tier (``shared/``) and the
local root (``local/``) are where they were. Tensor ``index`` of ``step-N`` is full of ``1000 * N + index``. It holds:

    shared/run/step-1         committed and drained, its local copy marked as drained
    local  run/step-2         committed and not drained: its journal entry is ``ready``
    local  run/step-3         local-only, with two newer ones before it: marked as superseded
    local  run/step-4         local-only, in the journal; another node's shards are copied here (replica, replicated)
    local  run/step-5         the same, the newest
    local  run/step-6         a rank died while it wrote: a shard, the mark of the node that saves, a journal entry
    local  run/step-7         a rank died when its shards were durable: its journal entry waits for the commit
    shared run/step-7         what an agent told of that rank's part of a staged save
    local  gone/step-1        its removal was killed when it had begun
    local  run/step-1         a fetch from peers was killed: files on their way
    local/cache               s3://format-data/whole complete and pinned, s3://format-data/partial: one chunk of two
    local, shared run/        the log of a run
    local                     how each device is read best
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import sys
import tarfile
import tempfile
import time
from dataclasses import replace
from gzip import GzipFile
from pathlib import Path
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

import tierckpt
from tierckpt.cache.partial_entry import PartialEntry
from tierckpt.cache.pool import Pool
from tierckpt.checkpoint import local_commit, local_only, marks
from tierckpt.checkpoint.journal import AWAITING_COMMIT, LOCAL_ONLY, Journal
from tierckpt.client import Client, close_all
from tierckpt.config import Settings
from tierckpt.dcp.handoff.multi_node import ResultExchange
from tierckpt.dcp.save_session import told
from tierckpt.disk.io_tuner import WAYS, read_tuner_for
from tierckpt.drain.background_drains import BackgroundDrains
from tierckpt.drain.drainer import Drainer
from tierckpt.format import layout
from tierckpt.format.manifest import FileEntry, digest_of, digests_of
from tierckpt.replication import local_index

from ..services import S3Server, moto_server

HERE = "/proc/self/cwd"
RUN, GONE = f"{HERE}/shared/run", f"{HERE}/shared/gone"
CHUNK = 1 << 16
BUCKET = "format-data"
MODELS = {"whole": 150_000, "partial": 2 * CHUNK}


def state(step: int) -> dict[str, torch.Tensor]:
    return {f"tensor{index}": torch.full((1000,), float(1000 * step + index)) for index in range(3)}


def save(step: int, run: str = RUN, *, drain: bool = True) -> Path:
    uri = f"{run}/step-{step}"
    dcp.save(state(step), storage_writer=tierckpt.TierStorageWriter(uri, drain=drain, chunk_size_bytes=CHUNK))
    return local(uri)


def local(uri: str) -> Path:
    return layout.local_dir(Path("local").absolute(), layout.parse_uri(uri))


def pattern(size_bytes: int) -> bytes:
    return bytes(index * 31 % 251 for index in range(size_bytes))


async def never(*_: object) -> None:
    await asyncio.sleep(3600)


async def not_linked(*_: object) -> bool:
    return False


def make_run(journal: Journal) -> None:
    with tierckpt.Checkpointer(RUN, chunk_size_bytes=CHUNK) as checkpointer:
        checkpointer.save(1, state(1)).result(60)
        checkpointer.wait("shared")
    close_all()
    incoming = local(f"{RUN}/step-1") / layout.INCOMING_DIR / "0123456789abcdef" / ".tierckpt"
    incoming.mkdir(parents=True)
    (incoming / "left").write_bytes(pattern(100))

    with mock.patch.object(Drainer, "drain", never), mock.patch.object(BackgroundDrains, "send_linked", not_linked):
        for step in (2, 3, 4, 5):
            save(step)
        close_all()
    for step in (3, 4, 5):
        [entry] = [one for one in journal.entries() if one.uri == f"{RUN}/step-{step}"]
        entry = journal.write(replace(entry, state=LOCAL_ONLY))
        local_only.supersede_older(Path("local").absolute(), journal, entry)

    copied = local(f"{RUN}/step-4")
    manifest = local_commit.read_local_manifest(copied)
    assert manifest is not None
    local_index.note(copied, manifest, dict.fromkeys(manifest.tokens, "other-node"))
    marks.mark_replicated(copied, manifest.attempt)


def make_deaths(journal: Journal) -> None:
    for step, (token, rank) in {6: ("6" * 16, 0), 7: ("7" * 16, 1)}.items():
        location = layout.parse_uri(f"{RUN}/step-{step}")
        directory = local(location.uri)
        directory.mkdir(parents=True)
        entry = journal.open(token, location, rank, CHUNK)
        marks.mark_origin(directory, token)
        shard = layout.shard_name(f"__{rank}_", 0, token)
        (directory / shard).write_bytes(pattern(5000))
        files = (FileEntry(shard, 5000, digests_of(pattern(5000), CHUNK), rank, token),)
        if step == 7:
            journal.write(replace(entry, state=AWAITING_COMMIT, files=files, created_unix_seconds=time.time() + 1e9))
            client = Client(Settings.load())
            written = WriteResult(MetadataIndex("tensor0", torch.Size([0])), 5000, _StorageInfo(shard, 0, 5000))
            ResultExchange(client, location, "job/7", CHUNK, 1.0).tell(rank, told([written], files, ()))
            client.close()


def make_removal() -> None:
    directory = save(1, GONE, drain=False)
    manifest = local_commit.read_local_manifest(directory)
    assert manifest is not None
    note = directory / layout.removal_note(manifest.attempt)
    note.parent.mkdir()
    (directory / layout.MANIFEST).rename(note)


def put_models(server: S3Server) -> None:
    """Put the objects that the cache is of. Those who unpack do it too; equal bytes have equal etags there."""
    client = server.client()
    client.create_bucket(Bucket=BUCKET)
    for name, size_bytes in MODELS.items():
        client.put_object(Bucket=BUCKET, Key=f"{name}/weights.bin", Body=pattern(size_bytes))


def make_cache(server: S3Server) -> None:
    put_models(server)
    tierckpt.prefetch(f"s3://{BUCKET}/whole", pin=True)
    client = Client(Settings.load(chunk_size_bytes=CHUNK))
    frozen = client.run(client.mover.node_cache.freeze(layout.parse_uri(f"s3://{BUCKET}/partial"))).frozen
    client.close()
    pool = Pool(Settings.load())
    lease = pool.lease(frozen.name)
    filling = PartialEntry(pool.directory(frozen.name), frozen, preallocate=True)
    pool.reserve(frozen, frozen.size_bytes)
    filling.land(0, 0, pattern(CHUNK), digest_of(pattern(CHUNK)))
    filling.close()
    lease.close()


def main(target: Path) -> None:
    place = Path(tempfile.mkdtemp())
    os.chdir(place)
    os.environ |= {"TIERCKPT_LOCAL_ROOT": f"{place}/local", "TIERCKPT_MOVER": "inline"}
    journal = Journal(place / "local")
    make_run(journal)
    make_removal()
    with moto_server() as server:
        os.environ |= server.environment()
        make_cache(server)
    make_deaths(journal)
    read_tuner_for(Settings.load()).decide("8:0 21 a-boot", {WAYS[0]: 1e9, WAYS[1]: 9e9}, "a disk")
    close_all()
    for changing in ("control.json", "control.lock", "epochs", "agent"):
        path = place / "local" / changing
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(place.rglob("*")):
            info = tar.gettarinfo(str(path), str(path.relative_to(place)))
            info.mtime, info.uid, info.gid, info.uname, info.gname = 1_700_000_000, 0, 0, "", ""
            if path.is_symlink() or not path.is_file():
                tar.addfile(info)
            else:
                with path.open("rb") as file:
                    tar.addfile(info, file)
    with target.open("wb") as raw, GzipFile("", "wb", 9, raw, mtime=0) as file:
        file.write(packed.getvalue())
    shutil.rmtree(place)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())

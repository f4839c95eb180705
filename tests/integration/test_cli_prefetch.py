"""``tierckpt prefetch`` as a process that is throttled, killed, interrupted and watched."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

import tierckpt
from tests.integration.test_cli import COMMAND, KIB, for_people, tierckpt_
from tests.services import S3Server


class SlowProxy:
    """A TCP proxy that relays a server's answers at a limited rate and counts the bytes."""

    def __init__(self, server: S3Server) -> None:
        self.bytes_per_second: float = 1e12
        self.relayed_bytes = 0
        self._target = (urlsplit(server.endpoint).hostname, urlsplit(server.endpoint).port)
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, slow: bool) -> None:
        try:
            while data := source.recv(8 * KIB):
                if slow:
                    with self._lock:  # one budget for all connections
                        time.sleep(len(data) / self.bytes_per_second)
                        self.relayed_bytes += len(data)
                sink.sendall(data)
        except OSError:
            pass  # one side has closed
        finally:
            for end in (source, sink):
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass


@pytest.fixture
def proxy(moto: S3Server, s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowProxy]:
    server = SlowProxy(moto)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    yield server
    server.close()


@pytest.fixture
def model(s3_uri: str, moto: S3Server) -> dict[str, bytes]:
    """Put a sharded model in the layout of Hugging Face under ``s3_uri``/model. Returns its files by name."""
    from safetensors.torch import save as to_bytes

    generator = torch.Generator().manual_seed(7)
    files, weight_map = {}, {}
    for index in range(1, 4):
        name = f"model-{index:05d}-of-00003.safetensors"
        tensors = {f"layers.{index}.{part}": torch.randn(256, 256, generator=generator) for part in "ab"}
        files[name] = to_bytes(tensors)
        weight_map |= dict.fromkeys(tensors, name)
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    files["config.json"] = b'{"architectures": ["Tiny"]}'
    files["tokenizer/vocab.txt"] = b"a\nb\n"
    for name, data in files.items():
        moto.client().put_object(Bucket=urlsplit(s3_uri).netloc, Key=f"run/model/{name}", Body=data)
    return files


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and ".tierckpt" not in path.parts
    }


@pytest.mark.slow
def test_info_and_prefetch_of_a_model_directory(s3_uri: str, model: dict[str, bytes], tmp_path: Path) -> None:
    info = tierckpt_("info", f"{s3_uri}/model").document
    assert info["kind"] == "files"
    assert info["size_bytes"] == sum(map(len, model.values()))
    done = tierckpt_("prefetch", f"{s3_uri}/model", "--to", tmp_path / "served")
    assert (done.code, done.document["files"]) == (0, len(model))
    assert files_of(tmp_path / "served") == model
    default = tierckpt_("prefetch", f"{s3_uri}/model").document["directory"]
    assert files_of(Path(default)) == model
    assert [(item["uri"], item["kind"]) for item in tierckpt_("status").document["local"]] == [
        (f"{s3_uri}/model", "prefetched")
    ]
    loaded = tierckpt.load_safetensors(tmp_path / "served")
    assert len(loaded) == 6


@pytest.mark.slow
def test_prefetch_killed_half_way_resumes(
    proxy: SlowProxy,
    moto: S3Server,
    s3_uri: str,
    model: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TIERCKPT_CHUNK_SIZE_BYTES", "64KiB")
    total, served = sum(map(len, model.values())), tmp_path / "node" / "served"
    command = [*COMMAND, "prefetch", f"{s3_uri}/model", "--to", str(served), "--json"]
    kills, landed_before = 0, 0
    for goal_bytes in (total // 4, total // 2):  # two kills
        proxy.bytes_per_second = 700 * KIB
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            wait_for_landing(served, model, goal_bytes, process)
            assert not served.exists()
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        kills += 1
        assert not served.exists()
        landed = landed_bytes(served, model)
        assert landed_before < landed < total
        landed_before = landed
    assert kills == 2

    last = SlowProxy(moto)  # the old proxy may hold bytes for closed connections
    monkeypatch.setenv("AWS_ENDPOINT_URL", last.endpoint)
    done = tierckpt_("prefetch", f"{s3_uri}/model", "--to", served)
    last.close()
    assert done.code == 0
    assert done.document["fetched_bytes"] == total - landed_before
    assert last.relayed_bytes < total - landed_before + 100 * KIB  # slack for headers
    assert files_of(served) == model
    assert [path.name for path in served.parent.iterdir()] == ["served"]


def wait_for_landing(served: Path, model: dict[str, bytes], goal_bytes: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while landed_bytes(served, model) < goal_bytes:
        assert process.poll() is None, f"exited before the kill: {process.communicate()}"
        assert time.monotonic() < deadline, "no chunk arrived"
        time.sleep(0.02)


def landed_bytes(served: Path, model: dict[str, bytes]) -> int:
    """Return the bytes of all chunks in the progress file, checked against the data files."""
    incoming = next(served.parent.glob(f".{served.name}.*.incoming"), None)
    progress = next(incoming.glob(".tierckpt/filling/progress-*"), None) if incoming else None
    if incoming is None or progress is None:
        return 0
    names, count = sorted(model), 0
    for line in progress.read_text().splitlines():
        if not line or line[0] in "!=":
            continue
        index, chunk = map(int, line.split()[:2])
        expected = model[names[index]][chunk * 64 * KIB : (chunk + 1) * 64 * KIB]
        with (incoming / names[index]).open("rb") as file:
            file.seek(chunk * 64 * KIB)
            assert file.read(len(expected)) == expected
        count += len(expected)
    return count


@pytest.mark.slow
def test_model_changed_after_a_killed_prefetch_is_fetched_in_full(
    proxy: SlowProxy,
    moto: S3Server,
    s3_uri: str,
    model: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TIERCKPT_CHUNK_SIZE_BYTES", "64KiB")
    served, name = tmp_path / "served", "model-00002-of-00003.safetensors"
    proxy.bytes_per_second = 700 * KIB
    process = subprocess.Popen([*COMMAND, "prefetch", f"{s3_uri}/model", "--to", str(served)])
    try:
        wait_for_landing(served, model, sum(map(len, model.values())) // 4, process)
    finally:
        process.kill()
        process.wait(60)
    changed = {**model, name: model[name][:-4] + b"\x01\x02\x03\x04"}
    moto.client().put_object(Bucket=urlsplit(s3_uri).netloc, Key=f"run/model/{name}", Body=changed[name])
    proxy.bytes_per_second = 1e12
    done = tierckpt_("prefetch", f"{s3_uri}/model", "--to", served)
    assert done.code == 0
    assert files_of(served) == changed


@pytest.mark.slow
def test_progress_bar_on_a_terminal_but_not_in_a_pipe(
    proxy: SlowProxy, s3_uri: str, model: dict[str, bytes], tmp_path: Path
) -> None:
    proxy.bytes_per_second = 1024 * KIB
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(
        [*COMMAND, "prefetch", f"{s3_uri}/model", "--to", str(tmp_path / "served")],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment,
        text=True,
    )
    os.close(theirs)
    seen = read_all(ours)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert f"prefetch {s3_uri}/m" in seen  # a name too long for its column ends in an ellipsis
    assert "MiB" in seen
    assert "/s" in seen
    assert "fetched now" in out
    piped = for_people("prefetch", f"{s3_uri}/model", "--to", tmp_path / "again")
    assert piped.err == ""


def read_all(terminal: int) -> str:
    data = b""
    try:
        while piece := os.read(terminal, 4096):
            data += piece
    except OSError:
        pass  # Linux raises EIO when the other end has closed
    finally:
        os.close(terminal)
    return data.decode()


@pytest.mark.slow
def test_interrupt_leaves_no_directory_and_no_traceback(
    proxy: SlowProxy, s3_uri: str, model: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERCKPT_CHUNK_SIZE_BYTES", "64KiB")
    proxy.bytes_per_second = 700 * KIB
    served = tmp_path / "served"
    process = subprocess.Popen(
        [*COMMAND, "prefetch", f"{s3_uri}/model", "--to", str(served), "--json"], stderr=subprocess.PIPE, text=True
    )
    wait_for_landing(served, model, 100 * KIB, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(errors)["message"] == "interrupted", errors
    assert not served.exists()

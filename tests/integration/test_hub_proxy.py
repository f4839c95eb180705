"""The agent as a Hub: unmodified clients get the Hub's files, and the Hub sends each byte once."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

import tierckpt
from tests import loop_thread
from tests.command_line import python
from tests.files import contents
from tests.integration.test_hugging_face import KIB, MIB, REPO, Files, hub
from tests.peer_node import Node, serving, settings_of
from tests.servers.cluster import Cluster, Model
from tests.servers.fleet import Fleet
from tests.servers.hub import TOKEN, FakeHub, Repository, oid
from tests.servers.origin import Origin
from tests.services import free_port
from tierckpt.agent import hub_proxy
from tierckpt.agent.hub_proxy import HubProxy
from tierckpt.cache.partial_entry import PUBLISHES
from tierckpt.config import Settings
from tierckpt.disk.file_lock import Claims
from tierckpt.errors import ConfigError, ObjectNotFoundError, PeerError
from tierckpt.peer.fetch import scheduler
from tierckpt.peer.membership import Member
from tierckpt.peer.peer_catalog import Live
from tierckpt.peer.peer_client import PeerClient

__all__ = ["hub"]  # a fixture
DOWNLOAD = "from huggingface_hub.cli.hf import main; main()"


@pytest.fixture
def endpoint(hub: FakeHub, tmp_path: Path) -> Iterator[str]:
    settings = Settings.load(local_root=tmp_path / "root", chunk_size_bytes=64 * KIB, local_high_water=1.0)
    proxy = HubProxy(settings)  # the cache must keep fetched chunks, however full the test machine's disk is
    port = loop_thread.run(proxy.start(0))
    yield f"http://127.0.0.1:{port}"
    loop_thread.run(proxy.close())


def published(hub: FakeHub, files: int = 3, size_bytes: int = 300 * KIB, gated: bool = False) -> Files:
    found = {f"model-{index:05d}.safetensors": os.urandom(size_bytes + index) for index in range(files)}
    found |= {"config.json": b'{"a": 1}', "sub dir/vocab.txt": b"a b c", "empty": b""}
    found |= {"d@x/a#1?b=%20[c]&é.txt": b"small", "d@x/a#2?b=%20[c]&é.bin": os.urandom(3000)}
    hub.repositories[REPO] = Repository(gated=gated)
    hub.repositories[REPO].commit(found)
    return found


@pytest.fixture
def files(hub: FakeHub) -> Files:
    """The files that are on the Hub."""
    return published(hub)


def downloading(endpoint: str, into: Path, *more: str) -> subprocess.Popen[str]:
    """Start an unmodified ``hf download`` with an empty Hugging Face cache."""
    pytest.importorskip("huggingface_hub")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TIERCKPT_"))}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(into.with_name(f"{into.name}-home"))}
    command = [sys.executable, "-c", DOWNLOAD, "download", REPO, "--local-dir", str(into), *more]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def assert_downloaded(download: subprocess.Popen[str], into: Path, files: Files) -> None:
    output = download.communicate(timeout=150)[0]
    assert download.returncode == 0, output
    assert contents(into) == files


def ask(endpoint: str, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    with closing(http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=60)) as connection:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


@pytest.mark.slow
def test_concurrent_hf_downloads_cost_one_copy_from_the_hub(hub: FakeHub, endpoint: str, tmp_path: Path) -> None:
    files = published(hub)
    for name in ("first", "second"):
        assert_downloaded(downloading(endpoint, tmp_path / name), tmp_path / name, files)
    assert dict(hub.sent) == sizes(files)
    assert hub.requests <= len(files) + 3, hub.calls


def test_prefetch_from_a_mirror(hub: FakeHub, files: Files, endpoint: str, tmp_path: Path) -> None:
    """A Hub that sends ranges itself and never redirects, as mirrors do."""
    environment = os.environ | {"HF_ENDPOINT": endpoint, "TIERCKPT_LOCAL_ROOT": str(tmp_path / "other")}
    command = [sys.executable, "-m", "tierckpt", "prefetch", f"hf://{REPO}", "--to", str(tmp_path / "here")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "here") == files
    assert hub.sent.total() == sum(map(len, files.values()))


def test_hub_proxy_is_not_its_own_upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``HF_ENDPOINT`` set for the whole node must not apply to the agent."""
    port = free_port()
    monkeypatch.setenv("HF_ENDPOINT", f"http://localhost:{port}/")
    proxy = HubProxy(Settings.load(local_root=tmp_path / "root"))
    with pytest.raises(ConfigError, match="HF_ENDPOINT"):
        loop_thread.run(proxy.start(port))
    loop_thread.run(proxy.close())


def test_only_requested_files_are_fetched(hub: FakeHub, files: Files, endpoint: str, tmp_path: Path) -> None:
    wanted = {name: data for name, data in files.items() if name in ("config.json", "model-00001.safetensors")}
    assert_downloaded(downloading(endpoint, tmp_path / "some", *wanted), tmp_path / "some", wanted)
    assert hub.sent.total() == sum(map(len, wanted.values()))


def test_range_requests_and_their_headers(hub: FakeHub, endpoint: str) -> None:
    files, path = published(hub), f"/{REPO}/resolve/main/model-00001.safetensors"
    data = files["model-00001.safetensors"]
    status, headers, body = ask(endpoint, path, "HEAD")
    assert (status, body, headers["content-length"]) == (200, b"", str(len(data)))
    assert headers["x-repo-commit"] == hub.repositories[REPO].revisions["main"]
    assert headers["x-linked-size"] == str(len(data)) and len(headers["x-linked-etag"].strip('"')) == 64
    status, headers, body = ask(endpoint, path, Range="bytes=70000-200000")
    assert (status, body) == (206, data[70000:200001])
    assert hub.sent.total() == 3 * 64 * KIB, "only the chunks that the range touches"
    assert headers["content-range"] == f"bytes 70000-200000/{len(data)}"
    assert ask(endpoint, path, Range=f"bytes={len(data) - 5}-")[::2] == (206, data[-5:])
    assert ask(endpoint, path, Range=f"bytes={len(data)}-")[0] == 416
    assert ask(endpoint, f"/{REPO}/resolve/main/empty")[::2] == (200, b"")
    assert ask(endpoint, f"/{REPO}/resolve/main/sub%20dir/vocab.txt")[::2] == (200, b"a b c")
    assert hub.calls["tree"] == 1, "one listing for all directories"


def test_hub_proxy_refusals(hub: FakeHub, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    published(hub, gated=True)
    config = f"/{REPO}/resolve/main/config.json"
    assert ask(endpoint, config)[0] == 403
    assert ask(endpoint, config, Authorization=f"Bearer {TOKEN}")[0] == 403, (
        "the agent's token applies, not the client's"
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert ask(endpoint, config)[0] == 200
    status, headers, _ = ask(endpoint, f"/{REPO}/resolve/main/none.bin")
    assert (status, headers["x-error-code"]) == (404, "EntryNotFound")
    assert ask(endpoint, "/api/models/org/none/revision/main")[:2][0] == 404
    for path, code in (("org/none/resolve/main", "RepoNotFound"), (f"{REPO}/resolve/none", "RevisionNotFound")):
        status, headers, _ = ask(endpoint, f"/{path}/config.json")  # from_pretrained distinguishes these errors
        assert (status, headers["x-error-code"]) == (404, code)
    assert ask(endpoint, config, Range=f"bytes={'9' * 5000}-")[::2] == (200, b'{"a": 1}')
    assert ask(endpoint, config, Host="evil.example")[0] == 403
    assert ask(endpoint, config, "POST")[0] == 404


def test_waiting_client_receives_a_byte_before_its_timeout(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a client times out and requests the rest again while nodes wait for a slow Hub."""
    monkeypatch.setattr(hub_proxy, "TURN_SECONDS", 0.05)
    write, sizes_sent = hub_proxy.write, []

    async def counted(response: Any, data: memoryview) -> None:
        sizes_sent.append(len(data))
        await write(response, data)

    monkeypatch.setattr(hub_proxy, "write", counted)
    files, path = published(hub), f"/{REPO}/resolve/main/model-00001.safetensors"
    hub.seconds_per_answer = 0.3
    proxy = HubProxy(Settings.load(local_root=tmp_path / "root", chunk_size_bytes=64 * KIB, concurrency=1))
    try:
        connection = http.client.HTTPConnection("127.0.0.1", loop_thread.run(proxy.start(0)), timeout=60)
        connection.request("GET", path)
        received = connection.getresponse().read()
        connection.close()
    finally:
        loop_thread.run(proxy.close())
    assert received == files["model-00001.safetensors"]
    assert sizes_sent.count(1) >= 2
    assert hub.sent.total() == len(files["model-00001.safetensors"])


def test_prefetched_model_is_not_fetched_again(hub: FakeHub, files: Files, endpoint: str, tmp_path: Path) -> None:
    tierckpt.prefetch(f"hf://{REPO}@{hub.repositories[REPO].revisions['main']}", local_root=tmp_path / "root")
    before = hub.sent.total()
    for name, data in files.items():
        assert ask(endpoint, f"/{REPO}/resolve/main/{quote(name)}")[::2] == (200, data)
    assert hub.sent.total() == before


OUTSIDE_READ_API = (
    f"/api/models/{REPO}/xet-write-token/main",
    f"/api/models/{REPO}/jwt",
    "/api/whoami-v2",
    "/api/models/../whoami-v2",
    f"/api/models/{REPO}/tree/..%2f..%2f../whoami-v2",
    "/api/models/org%2Fmodel%3F/x",
    "m.example:/api/models",
    "/org/a%20b/resolve/main/config.json",
    "/org/model%23/resolve/main/config.json",
    f"/{REPO}/resolve/main/..%2f..%2fconfig.json",
)


@pytest.mark.parametrize("path", OUTSIDE_READ_API)
def test_paths_outside_the_read_api_never_reach_the_hub(path: str, hub: FakeHub, files: Files, endpoint: str) -> None:
    """A Hub answers some of these with the agent's tokens; others resolve to another path than they show."""
    assert ask(endpoint, path)[0] in (400, 404)
    assert not hub.requests
    assert ask(endpoint, f"/api/models/{REPO}/tree/main?recursive=true")[0] == 200


def test_damaged_file_is_never_sent_in_full(hub: FakeHub, endpoint: str) -> None:
    """The last bytes of a file are wrong: the download fails, and the next one gets the correct bytes."""
    files, path = published(hub), f"/{REPO}/resolve/main/model-00001.safetensors"
    hub.damaged = {"model-00001.safetensors"}
    for _ in range(2):
        with pytest.raises(http.client.IncompleteRead):
            status, _, body = ask(endpoint, path)
            assert status == 502, body
            raise http.client.IncompleteRead(b"")
    hub.damaged = set()
    assert ask(endpoint, path)[::2] == (200, files["model-00001.safetensors"])


def test_client_that_reconnects_causes_no_second_fetch(hub: FakeHub, endpoint: str) -> None:
    """The fetch it started completes and is cached."""
    files, path = published(hub), f"/{REPO}/resolve/main/model-00001.safetensors"
    hub.seconds_per_answer = 0.05
    for _ in range(3):
        connection = http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=60)
        connection.request("GET", path)
        assert connection.getresponse().read(10) == files["model-00001.safetensors"][:10]
        connection.close()
    assert ask(endpoint, path, Range="bytes=10-")[::2] == (206, files["model-00001.safetensors"][10:])
    assert dict(hub.sent) == sizes(files, "model-00001.safetensors")


# --- several nodes ---------------------------------------------------------------------------------------------------


class ProxyNodes:
    """Nodes in this process, each a Hub proxy and a peer server. Membership is fixed and no timeout picks a reader."""

    def __init__(self, folder: Path, count: int) -> None:
        self.nodes: list[Node] = []
        self.proxies: list[HubProxy] = []
        for number in range(count):
            root = folder / f"node-{number}"
            self.proxies.append(HubProxy(settings_of(root, chunk_size_bytes=64 * KIB), partial(self._live, number)))
            self.nodes.append(Node(root, name=root.name, hub=self.proxies[-1].fetch_range))
            loop_thread.run(self.nodes[-1].server.start())
        self.members: Sequence[Member] = [node.member for node in self.nodes]
        self.come = count
        """So many of them are members by now."""
        self.endpoints = [f"http://127.0.0.1:{loop_thread.run(proxy.start(0))}" for proxy in self.proxies]

    async def _live(self, number: int) -> Live:
        others = [one for one in self.members[: self.come] if one is not self.members[number]]
        return Live(self.members[number], tuple(others))

    def get(self, number: int, name: str) -> bytes:
        path = f"/{REPO}/resolve/main/{quote(name)}"
        assert ask(self.endpoints[number], path, "HEAD")[0] == 200
        status, _, data = ask(self.endpoints[number], path)
        assert status == 200, data
        return data

    def all_get(self, numbers: Sequence[int], files: Mapping[str, bytes], seed: int = 0) -> None:
        """Download all files through two clients on each node at once, each in its own order."""

        def download(number: int, client: int) -> Files:
            names = random.Random(f"{seed} {number} {client}").sample(sorted(files), len(files))
            return {name: self.get(number, name) for name in names}

        with ThreadPoolExecutor(2 * len(numbers)) as threads:
            downloads = [threads.submit(download, number, client) for number in numbers for client in range(2)]
            assert all(one.result() == files for one in downloads)

    def close(self) -> None:
        for proxy in self.proxies:
            loop_thread.run(proxy.close())
        for node in self.nodes:
            loop_thread.run(node.close())


def sizes(files: Mapping[str, bytes], *names: str) -> dict[str, int]:
    """Return the bytes the Hub sends if it sends each byte once."""
    return {name: len(data) for name, data in files.items() if data and (not names or name in names)}


def owner(hub: FakeHub, name: str, start: int, nodes: int) -> int:
    """Return the node that owns a chunk."""
    data = next(iter(hub.repositories[REPO].commits.values()))[name]
    key = f"{'sha256' if len(data) >= 1000 else 'git'}:{oid(data)}/{start}"
    return min(range(nodes), key=lambda number: scheduler.fraction(f"{key}/node-{number}"))


@pytest.mark.parametrize("seed", [1, 2])
def test_hub_sends_each_byte_once_to_one_of_several_nodes(seed: int, hub: FakeHub, tmp_path: Path) -> None:
    """Small files too, in any start order, with two clients on each node."""
    files = published(hub)
    with closing(ProxyNodes(tmp_path, 4)) as hubs:
        if seed == 1:
            hub.seconds_per_answer = 0.02
            assert hubs.get(3, "config.json") == files["config.json"]
            assert hub.calls["tree"] <= 2, "requested by this node and the owner, not by members without data"
            assert hubs.get(3, "model-00000.safetensors") == files["model-00000.safetensors"]
        hubs.all_get(range(4), files, seed)
        assert dict(hub.sent) == sizes(files)
        starts = {name: range(0, len(data), 64 * KIB) for name, data in files.items()}
        owners_of_chunks = sum(len({owner(hub, name, start, 4) for start in starts[name]}) for name in files)
        assert hub.calls["tree"] == 4
        assert hub.calls["resolve"] <= owners_of_chunks, "each chunk owner resolves the URL once"


@pytest.mark.slow
def test_late_nodes_fetch_from_nodes_that_hold_the_model(hub: FakeHub, files: Files, tmp_path: Path) -> None:
    """The late nodes own chunks that other nodes already hold."""
    with closing(ProxyNodes(tmp_path, 4)) as hubs:
        hubs.come = 2
        hubs.all_get(range(2), files)
        hubs.come = 4
        hubs.all_get(range(2, 4), files)
    assert dict(hub.sent) == sizes(files)


def no_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    async def receive(*_: object) -> None: ...

    monkeypatch.setattr(hub_proxy.HubOwners, "receive", receive)


def no_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Claims.take
    monkeypatch.setattr(Claims, "take", lambda self, at: at != PUBLISHES or take(self, at))


@pytest.mark.parametrize("bug", [no_owners, no_claims])
def test_a_seeded_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = published(hub, files=1)
    hub.seconds_per_answer = 0.05
    bug(monkeypatch)
    with closing(ProxyNodes(tmp_path, 3)) as hubs:
        hubs.all_get(range(3), files)
    assert hub.sent.total() > sum(map(len, files.values())), bug.__name__


@pytest.mark.slow
@pytest.mark.parametrize("is_silent", [False, True])
def test_lost_owner_costs_only_the_chunks_it_alone_held(
    is_silent: bool, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next node in rank re-reads the chunks that only the lost owner held, and no others."""
    hub_range = PeerClient.hub_range

    async def patient(client: Any, member: Member, uri: str, start: int, into: Any, *_: float, **options: Any) -> str:
        return await hub_range(client, member, uri, start, into, 2.0 if member.name == "node-0" else 60.0, **options)

    files, first = published(hub), "model-00000.safetensors"
    with closing(ProxyNodes(tmp_path, 4)) as hubs:
        assert hubs.get(0, first) == files[first]
        loop_thread.run(hubs.nodes[0].server.close())
        host, _, port = hubs.members[0].address.partition(":")
        listener = socket.create_server((host, int(port))) if is_silent else None
        monkeypatch.setattr(PeerClient, "hub_range", patient)
        hubs.all_get(range(1, 4), files)
        if listener is not None:
            listener.close()
    again = 0
    for start in range(0, len(files[first]), 64 * KIB):
        again += min(64 * KIB, len(files[first]) - start) if owner(hub, first, start, 4) == 0 else 0
    assert dict(hub.sent) == sizes(files) | {first: len(files[first]) + again}


def test_chunk_damaged_at_its_owner_is_read_from_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    """An owner with some chunks of a file does not know that the Hub sent one of them damaged."""
    files, name = published(hub), "model-00001.safetensors"
    hub.damaged = {name}
    with closing(ProxyNodes(tmp_path, 3)) as hubs:
        failed = 0
        for number in range(3):
            try:
                assert hubs.get(number, name) == files[name]
            except (http.client.IncompleteRead, AssertionError):
                hub.damaged = set()
                failed += 1
                assert hubs.get(number, name) == files[name]
        assert failed


NOT_COMMIT_FILES = ("file:///etc/passwd", f"hf://{REPO}/config.json", "hf://org", f"hf://{REPO}@{'0' * 40}/x")


@pytest.mark.parametrize("uri", NOT_COMMIT_FILES)
async def test_member_gets_only_files_of_commits(uri: str, hub: FakeHub, files: Files, tmp_path: Path) -> None:
    proxy = HubProxy(settings_of(tmp_path / "proxied"))
    try:
        async with serving(tmp_path / "node", hub=proxy.fetch_range) as node:
            with pytest.raises(ObjectNotFoundError):
                await node.client().hub_range(node.member, uri, 0, memoryview(bytearray(8)))
            commit = hub.repositories[REPO].revisions["main"]
            into = memoryview(bytearray(8))
            await node.client().hub_range(node.member, f"hf://{REPO}@{commit}/config.json", 0, into)
            assert into == b'{"a": 1}'
        async with serving(tmp_path / "other") as node:
            with pytest.raises(PeerError, match="HTTP 405"):  # not a Hub
                await node.client().hub_range(node.member, f"hf://{REPO}@{commit}/config.json", 0, into)
    finally:
        await proxy.close()


@pytest.mark.slow
def test_three_nodes_download_with_one_copy_from_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    files = published(hub, files=2, size_bytes=16 * MIB)
    hub.seconds_per_answer = 0.05
    (tmp_path / "store").mkdir()
    ports = [free_port() for _ in range(3)]
    with Origin.running(tmp_path / "store") as origin, Fleet.running(tmp_path / "logs") as fleet:
        cluster = Cluster(fleet, origin, Model(tmp_path, "none", {}, 0), tmp_path / "nodes")
        settings = {"HF_ENDPOINT": hub.endpoint, "TIERCKPT_CHUNK_SIZE_BYTES": str(MIB // 8)}
        cluster.add([f"127.0.0.1:{free_port()}" for _ in range(3)], settings)
        try:
            for node, port in zip(cluster.nodes, ports, strict=True):
                node.agent = fleet.start(["agent", "--hf-proxy", str(port)], node.env, name=f"{node.name}-agent")
            cluster.await_members(3)
            places = [tmp_path / f"download-{number}" for number in range(3)]
            downloads = [
                downloading(f"http://127.0.0.1:{port}", into) for port, into in zip(ports, places, strict=True)
            ]
            for download, into in zip(downloads, places, strict=True):
                assert_downloaded(download, into, files)
        finally:
            cluster.close()
    assert dict(hub.sent) == sizes(files)


CLIENT = """
import json, os, sys
from huggingface_hub import HfApi, HfFileSystem, hf_hub_download, snapshot_download
repo, token, what = sys.argv[1], {"None": None, "True": True, "False": False}.get(sys.argv[2], sys.argv[2]), sys.argv[3]
if what == "paths":
    found = HfApi().get_paths_info(repo, ["config.json", "model-00000.safetensors", "sub dir", "gone"], token=token)
    print(json.dumps([[type(one).__name__, one.path, getattr(one, "size", None)] for one in found]))
elif what == "file system":
    files = HfFileSystem(token=token)
    print(json.dumps([
        sorted(files.ls(repo, detail=False)),
        files.info(f"{repo}/sub dir/vocab.txt")["size"],
        files.isdir(f"{repo}/sub dir"),
        files.exists(f"{repo}/gone"),
        files.open(f"{repo}/model-00000.safetensors").read()[100:110].hex(),
    ]))
elif what == "one":
    print(json.dumps(open(hf_hub_download(repo, "config.json", token=token)).read()))
elif what == "snapshot":
    folder = snapshot_download(repo, token=token, allow_patterns=["config.json", "sub dir/*"])
    print(json.dumps(sorted(os.listdir(folder))))
elif what == "dataset":
    import datasets
    print(json.dumps(datasets.load_dataset(repo, split="train", token=token)["a"][:]))
"""


def run_client(endpoint: str, home: Path, what: str, token: str = "None", **environment: str) -> Any:
    """Return the result of an unmodified client in its own process."""
    pytest.importorskip("huggingface_hub")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TIERCKPT_"))}
    clean |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), **environment}
    done = python(CLIENT, REPO, token, what, env=clean)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("token", ["None", "False", "hf_of_the_client"])
def test_client_get_paths_info(token: str, hub: FakeHub, files: Files, endpoint: str, tmp_path: Path) -> None:
    found = run_client(endpoint, tmp_path / "home", "paths", token)
    assert sorted(found) == [
        ["RepoFile", "config.json", len(files["config.json"])],
        ["RepoFile", "model-00000.safetensors", len(files["model-00000.safetensors"])],
        ["RepoFolder", "sub dir", None],
    ]


def test_client_file_system(hub: FakeHub, files: Files, endpoint: str, tmp_path: Path) -> None:
    names, size, is_dir, exists, data = run_client(endpoint, tmp_path / "home", "file system")
    assert f"{REPO}/config.json" in names and is_dir and not exists
    assert (size, data) == (len(files["sub dir/vocab.txt"]), files["model-00000.safetensors"][100:110].hex())


@pytest.mark.slow
@pytest.mark.parametrize("token", ["None", "True", "False", "hf_of_the_client"])
def test_downloads_with_tokens_of_any_kind(token: str, hub: FakeHub, endpoint: str, tmp_path: Path) -> None:
    files = published(hub)
    home = tmp_path / "home"
    assert run_client(endpoint, home, "one", token, HF_TOKEN="hf_of_the_client") == files["config.json"].decode()
    assert run_client(endpoint, home, "snapshot", token, HF_TOKEN="hf_of_the_client") == ["config.json", "sub dir"]


@pytest.mark.slow
def test_a_dataset_is_loaded(hub: FakeHub, endpoint: str, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    hub.repositories[REPO] = Repository()
    hub.repositories[REPO].commit({"train.csv": b"a,b\n1,2\n3,4\n", "README.md": b"# data\n"})
    assert run_client(endpoint, tmp_path / "home", "dataset") == [1, 3]


def test_other_posts_never_reach_the_hub(hub: FakeHub, files: Files, endpoint: str) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    api = f"/api/models/{REPO}"
    for path in (f"{api}/commit/main", f"{api}/tree/main", f"/{REPO}/resolve/main/config.json"):
        assert ask(endpoint, path, "POST", Content_Length="0", **form)[0] == 404
    assert ask(endpoint, f"{api}/paths-info/main")[0] == 404  # GET
    assert ask(endpoint, f"{api}/paths-info/main", "POST", Content_Length=str(1 << 40), **form)[0] == 404
    assert not hub.requests

"""Fixtures for every suite. A URI fixture yields an empty place and sets the environment that reaches it.

local_root   the local tier of this test (TIERCKPT_LOCAL_ROOT is set for every test)
file_uri     a directory standing for an NFS mount
s3_uri       a fresh bucket of the moto server that these tests start
rgw_uri      a fresh bucket of a real S3 server, az_uri a fresh container of Azurite: where they are configured
shared_uri   each of the four in turn
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socketserver
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import patience
from tests.fault import runner
from tests.services import AzureServer, S3Server, azurite_server, moto_server, rgw_server
from tierckpt.client import close_all

# DCP logs every step of every save here; a failing test is easier to read without.
logging.getLogger("c10d-NullHandler-dcp_logger").propagate = False

# Under these pytest explains a failed comparison in full, whatever its length: minutes for a file's bytes. The controls
# of the harnesses fail on purpose, so they would pay that on every CI run.
for variable in ("CI", "BUILD_NUMBER"):
    os.environ.pop(variable, None)

# The same examples in every run, so that a failure belongs to a change. `make torture-properties` draws others.
hypothesis.settings.register_profile("drawn", derandomize=False, deadline=None)
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.load_profile("fixed")

# A shell that starts a command in the background may have it ignore Ctrl-C, and all its children then do.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A server of the standard library checks twice a second whether to stop, and a stop waits for that.
socketserver.BaseServer.serve_forever.__defaults__ = (0.02,)

LONGEST_FIRST = (
    "test_sweeps.py",
    "test_flush_faults.py",
    "test_store_faults.py",
    "test_preemption.py",
    "test_rank_deaths.py",
    "test_cli.py",
    "test_attacks.py",
    "test_resharding.py",
    "test_agent.py",
    "test_wire_save.py",
    "test_fanout.py",
    "test_peers_agent.py",
    "test_replica_faults.py",
    "test_replicas.py",
)
"""Files that take minutes. Each worker takes a file at a time: these files start first."""


DEVICE = os.environ.get("TIERCKPT_TEST_DEVICE", "")
"""Device of the tests' tensors (``make test-device``): ``cuda`` if available."""

SHARE = os.environ.get("TIERCKPT_TEST_SLOW_SHARE", "")
"""``SEED/N``: every N-th of the slow tests, starting at a random one: each share has equally many of each file, and
takes equally long. The others are deselected, and counted as such."""


def left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    seed, _, of = SHARE.rpartition("/")
    slow = [item for item in items if item.get_closest_marker("slow")]
    return set(slow) - set(slow[zlib.crc32(seed.encode()) % int(of) :: int(of)]) if SHARE else set()


HOST_ONLY = (
    *("Adagrad-fused", "Adagrad fused", "numpy", "all_meta"),
    *("test_exact_save_is_a_checkpoint_at_once", "test_a_rounding_of_another", "test_gradients_that_were_reduced"),
    "before the next update",  # a device computes its digest a step later
)
"""Parts of the names of tests for the host: CUDA has no such kernel, or they simulate a device."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if DEVICE:
        items[:] = [item for item in items if not any(part in item.nodeid for part in HOST_ONLY)]
    rank = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))
    left = left_out(items)
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]


CLOUD_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_", "AZURITE_")


@pytest.fixture(autouse=True)
def isolated_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees the user's settings or cloud credentials, or writes outside tmp_path."""
    for name in os.environ:
        ours = name.startswith("TIERCKPT_") and not name.startswith("TIERCKPT_TEST_")
        if ours or name.startswith(CLOUD_PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TIERCKPT_LOCAL_ROOT", str(tmp_path / "local"))
    monkeypatch.setenv("TIERCKPT_MOVER", "inline")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-aws-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    yield
    close_all()


@pytest.fixture(autouse=True)
def patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("ill") is None:
        patience.extend(monkeypatch.setattr)
        monkeypatch.setenv(patience.VARIABLE, "1")


@pytest.fixture(scope="module", autouse=True)
def no_rank_is_left() -> Iterator[None]:
    """Kill the processes that the tests of a module leave running."""
    yield
    runner.kill_all()


@pytest.fixture(scope="module", autouse=True)
def no_lease_is_left() -> Iterator[None]:
    """A lease that is not released writes for as long as its process lives, and later tests count writes."""
    yield
    beats = [thread for thread in threading.enumerate() if thread.name == "tierckpt-lease"]
    for thread in beats:
        thread.join(10)
    assert not any(thread.is_alive() for thread in beats), "a test of this module did not release a lease"


@pytest.fixture(autouse=bool(DEVICE))
def default_device() -> Iterator[None]:
    import torch

    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)


@pytest.fixture
def local_root(tmp_path: Path) -> Path:
    return tmp_path / "local"


@pytest.fixture
def shared_tmp(tmp_path: Path) -> Iterator[Path]:
    """A directory that every user of the machine can reach, like ``/tmp``: sticky, and writable by all."""
    path = Path("/tmp") / f"tierckpt-machine-{os.getpid()}-{tmp_path.parent.name}-{tmp_path.name[-20:]}"
    path.mkdir()
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def rgw() -> S3Server:
    return rgw_server()


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    with azurite_server(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture
def file_uri(tmp_path: Path) -> str:
    return str(tmp_path / "shared" / "run")


@pytest.fixture
def s3_uri(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield from _fresh_s3(moto, monkeypatch)


@pytest.fixture
def rgw_uri(rgw: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield from _fresh_s3(rgw, monkeypatch)


@pytest.fixture
def az_uri(azurite: AzureServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, value in azurite.environment().items():
        monkeypatch.setenv(name, value)
    with azurite.container() as container:
        yield f"az://{container}/run"
        close_all()  # no drain goes on while its container is removed


@pytest.fixture(
    params=[
        "file",
        pytest.param("s3", marks=pytest.mark.server),
        pytest.param("rgw", marks=pytest.mark.server),
        pytest.param("az", marks=pytest.mark.server),
    ]
)
def shared_uri(request: pytest.FixtureRequest) -> str:
    uri: str = request.getfixturevalue(f"{request.param}_uri")
    return uri


def _fresh_s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    with server.bucket() as bucket:
        yield f"s3://{bucket}/run"
        close_all()  # no drain goes on while its bucket is removed

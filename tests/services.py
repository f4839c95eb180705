"""Object-store servers for the tests. moto is always started here; Ceph RGW and Azurite are used where they are.

TIERCKPT_TEST_S3_ENDPOINT, _S3_ACCESS_KEY, _S3_SECRET_KEY     a real S3 server (tests/servers/rgw.sh starts one)
TIERCKPT_TEST_AZURE_ENDPOINT, _AZURE_ACCOUNT, _AZURE_KEY      a running Azurite (tests/servers/azurite.sh)
TIERCKPT_TEST_AZURITE                                         path of azurite-blob, if not in .services or PATH
TIERCKPT_TEST_REQUIRE_SERVERS=1                               a server that is not there fails the test
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.servers.fleet import REPOSITORY, die_with_parent
from tierckpt.disk.file_lock import lock
from tierckpt.poll import Poll

PORTS = range(20_000, 32_000)
START_TIMEOUT_SECONDS = 60.0
REMOVED_SECONDS = 60.0
ALONE_SECONDS = 300.0
"""Those before it need a minute each on a slow machine."""

# Taken once, before any test clears or changes the environment.
ENVIRONMENT = dict(os.environ)


def in_full(cases: list[Any]) -> list[Any]:
    """Cases that are more of what others show already: `make torture` has them (TIERCKPT_TEST_CASES=all)."""
    return cases if ENVIRONMENT.get("TIERCKPT_TEST_CASES") == "all" else []


def unavailable(reason: str) -> NoReturn:
    """Skip the test, with the reason; fail it where servers are required (CI)."""
    if ENVIRONMENT.get("TIERCKPT_TEST_REQUIRE_SERVERS") == "1":
        pytest.fail(f"TIERCKPT_TEST_REQUIRE_SERVERS=1 and {reason}")
    pytest.skip(reason)


def needs(tool: str) -> None:
    """Skip the test where ``tool`` is not installed; fail it where CI has to have it."""
    if shutil.which(tool) is None and not Path("/usr/sbin", tool).exists():
        unavailable(f"{tool} is not installed")


def pid_namespace() -> list[str]:
    """Return what goes before a command to make it process 1 of a namespace."""
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        unavailable(f"cannot create a pid namespace: {error}")
    return command


def init_of(process: subprocess.Popen[bytes]) -> int:
    """Return the number here of process 1 of the namespace that ``process`` made."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


@contextmanager
def shared_memory_alone() -> Iterator[None]:
    """Exclude other tests that measure or use much of the machine's shared memory.

    Tests run in several processes, and the kernel counts that memory for all of them together.
    """
    with lock(Path(tempfile.gettempdir()) / "shared-memory-of-tests.lock", ALONE_SECONDS, "other tests"):
        yield
    time.sleep(0.2)  # lets the next waiting process run


class HttpServer:
    """A server in this process, on a port of its own. ``answer`` handles the requests of ``verbs``."""

    verbs: tuple[str, ...] = ("GET", "HEAD")

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                server.answer(self)

        for verb in self.verbs:
            setattr(Handler, f"do_{verb}", Handler.do_GET)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{self._server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        raise NotImplementedError

    @staticmethod
    def say(
        request: BaseHTTPRequestHandler, status: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@dataclass(frozen=True)
class S3Server:
    endpoint: str
    access_key: str
    secret_key: str

    def environment(self) -> dict[str, str]:
        """Return the environment variables for an S3 client of this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
        }

    def client(self) -> Any:
        """Return a boto3 client: the tests' own way in, independent of the stores."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
            config=Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    @contextmanager
    def bucket(self) -> Iterator[str]:
        """Make a bucket with a new name; remove it and its objects at the end."""
        client = self.client()
        name = f"test-{secrets.token_hex(6)}"
        client.create_bucket(Bucket=name)
        try:
            yield name
        finally:
            assert any(self._removed(client, name) for _ in Poll(REMOVED_SECONDS)), f"{name} is still written to"

    @staticmethod
    def _removed(client: Any, name: str) -> bool:
        """Remove a bucket and its objects; False if a remaining drain of a test adds objects."""
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=name):
            keys = [{"Key": item["Key"]} for item in page.get("Contents", [])]
            if keys:
                client.delete_objects(Bucket=name, Delete={"Objects": keys, "Quiet": True})
        for item in client.list_multipart_uploads(Bucket=name).get("Uploads", []):
            client.abort_multipart_upload(Bucket=name, Key=item["Key"], UploadId=item["UploadId"])
        try:
            client.delete_bucket(Bucket=name)
        except client.exceptions.ClientError as error:
            if error.response["Error"]["Code"] != "BucketNotEmpty":
                raise
            return False
        return True


@dataclass(frozen=True)
class AzureServer:
    endpoint: str
    account: str
    key: str

    def environment(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
            "AZURE_STORAGE_ACCOUNT_NAME": self.account,
            "AZURE_STORAGE_ACCOUNT_KEY": self.key,
        }

    def client(self, container: str) -> Any:
        """Return Microsoft's own client of a container."""
        from azure.storage.blob import ContainerClient

        credential = {"account_name": self.account, "account_key": self.key}
        return ContainerClient(self.endpoint, container, credential=credential)

    @contextmanager
    def container(self) -> Iterator[str]:
        """Make a container with a new name; remove it at the end."""
        name = f"test-{secrets.token_hex(6)}"
        with self.client(name) as client:
            client.create_container()
            try:
                yield name
            finally:
                client.delete_container()


@contextmanager
def moto_server(*, keep_alive: bool = False) -> Iterator[S3Server]:
    """Start moto in a process of its own, so that it shares neither the interpreter lock nor a crash with the tests.

    ``keep_alive``: it leaves connections open after an answer, as every real server does.
    """
    port, server = free_port(), REPOSITORY / "tests/servers/moto_s3.py"
    command = [sys.executable, "-P", str(server), str(port), "HTTP/1.1" if keep_alive else "HTTP/1.0"]
    with _running(command, f"http://127.0.0.1:{port}/", {}):
        yield S3Server(f"http://127.0.0.1:{port}", "testing", "testing")


def rgw_server() -> S3Server:
    """Return the real S3 server the environment names."""
    endpoint = ENVIRONMENT.get("TIERCKPT_TEST_S3_ENDPOINT")
    if not endpoint:
        unavailable("TIERCKPT_TEST_S3_ENDPOINT names no S3 server (tests/servers/rgw.sh starts one)")
    return S3Server(
        endpoint.rstrip("/"),
        ENVIRONMENT.get("TIERCKPT_TEST_S3_ACCESS_KEY") or ENVIRONMENT["AWS_ACCESS_KEY_ID"],
        ENVIRONMENT.get("TIERCKPT_TEST_S3_SECRET_KEY") or ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
    )


@contextmanager
def azurite_server(directory: Path) -> Iterator[AzureServer]:
    """Use the running Azurite the environment names, or start one from the binary that is there."""
    endpoint = ENVIRONMENT.get("TIERCKPT_TEST_AZURE_ENDPOINT")
    if endpoint:
        yield AzureServer(
            endpoint.rstrip("/"), ENVIRONMENT["TIERCKPT_TEST_AZURE_ACCOUNT"], ENVIRONMENT["TIERCKPT_TEST_AZURE_KEY"]
        )
        return
    binary = _find_azurite()
    if binary is None:
        unavailable("azurite-blob is not installed (npm i --prefix .services azurite)")
    port, account = free_port(), "tierckpttest"
    key = base64.b64encode(secrets.token_bytes(64)).decode()
    where = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(directory)]
    command = [binary, *where, "--disableTelemetry", "--skipApiVersionCheck", "--silent"]
    with _running(command, f"http://127.0.0.1:{port}/", {"AZURITE_ACCOUNTS": f"{account}:{key}"}):
        yield AzureServer(f"http://127.0.0.1:{port}/{account}", account, key)


def _find_azurite() -> str | None:
    named = ENVIRONMENT.get("TIERCKPT_TEST_AZURITE")
    local = REPOSITORY / ".services/node_modules/.bin/azurite-blob"
    return named or (str(local) if local.exists() else shutil.which("azurite-blob"))


@contextmanager
def _running(command: list[str], url: str, environment: dict[str, str]) -> Iterator[None]:
    process = subprocess.Popen(
        command,
        env={**ENVIRONMENT, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )
    try:
        _wait_for_answer(url, process)
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def _wait_for_answer(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in Poll(START_TIMEOUT_SECONDS):
        with contextlib.suppress(OSError):
            try:
                urllib.request.urlopen(url, timeout=5).close()
            except urllib.error.HTTPError:
                pass  # an error status is an answer
            return
        if process.poll() is not None:
            raise RuntimeError(f"{process.args} ended with {process.returncode}")
    raise RuntimeError(f"no answer from {url} after {START_TIMEOUT_SECONDS} s")


def free_port() -> int:
    """Return a port of loopback that no other test of this machine is given for long, whatever process it runs in.

    The port is below the kernel's ephemeral range: a port from that range may be taken before its server starts.
    """
    with (Path(tempfile.gettempdir()) / "ports-of-tests").open("a+") as last:
        fcntl.flock(last, fcntl.LOCK_EX)
        last.seek(0)
        port = int(last.read() or 0)
        while True:
            port = port + 1 if PORTS.start <= port < PORTS.stop - 1 else PORTS.start
            try:
                socket.create_server(("127.0.0.1", port)).close()
            except OSError:
                continue  # somebody else's
            last.truncate(0)
            last.write(str(port))
            return port

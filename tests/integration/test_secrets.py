"""No secret is printed, logged or written: canaries in every credential, logging at DEBUG, and all output searched.

The server of ``echo`` refuses every request and repeats the credentials it received, as S3 does with an expired session
token.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote, unquote

import pytest

from tests.command_line import python
from tests.services import HttpServer, S3Server

CANARIES = {
    "AWS_ACCESS_KEY_ID": "AKIACANARY0000000001",
    "AWS_SECRET_ACCESS_KEY": "canarySecret/0123456789+abcdefghijklmnop",
    "AWS_SESSION_TOKEN": "canarySessionToken//0123456789+abcdef==",
    "AZURE_STORAGE_SAS_TOKEN": "sv=2022-11-02&ss=b&sp=rwdl&sig=canarySignature%2B0123456789abc%3D",
    "AZURE_STORAGE_TOKEN": "canaryBearer.0123456789-abcdef",
    "GOOGLE_BEARER_TOKEN": "canaryGoogleBearer.0123456789",
}
URL_CANARY = "canaryPresigned0123456789abcdef"
VARIABLE_CANARIES = (
    *("AKIACANARY", "canarySecret", "canarySessionToken"),
    *("canarySignature", "canaryBearer", "canaryGoogle"),
)
ALL_CANARIES = (*VARIABLE_CANARIES, URL_CANARY)

# Logs of all libraries at DEBUG: to stderr, and through a user's handler to a file.
DEBUG_LOGGING = """
import logging, sys, time
logging.basicConfig(level=logging.DEBUG, handlers=[logging.StreamHandler(), logging.FileHandler(sys.argv[1])])
"""
SAVE = """
import torch, torch.distributed.checkpoint as dcp, tierckpt
from tierckpt.config import Settings
from tierckpt.drain.rate_limiter import change_control
for step in (1, 2):
    uri = f"{sys.argv[2]}/step-{step}"
    dcp.save({"w": torch.randn(50_000)}, storage_writer=tierckpt.TierStorageWriter(uri), no_dist=True)
    if step == 1:
        tierckpt.wait(uri, timeout_seconds=60)
        change_control(Settings.load().local_root, paused=True)  # the second one waits for the verbs
        time.sleep(1.1)  # a mover looks once a second
"""
SAVE_BADLY = """
import torch, torch.distributed.checkpoint as dcp, tierckpt
from tierckpt.errors import TierckptError
try:
    dcp.save({"w": torch.randn(50)}, storage_writer=tierckpt.TierStorageWriter(sys.argv[2] + "/step-1"), no_dist=True)
    tierckpt.wait(sys.argv[2] + "/step-1", timeout_seconds=5)
except (TierckptError, dcp.CheckpointException) as error:
    logging.getLogger("tierckpt.test").error("failed: %s", error)
"""
VERBS = (
    ("drain", "--resume"),
    ("drain", "--wait", "--timeout", "{drain_seconds}"),
    ("ls", "{run}"),
    ("info", "{run}/step-1"),
    ("verify", "{run}/step-1"),
    ("verify", "{run}/step-1", "--read-data"),
    ("prefetch", "{run}/step-1", "--to", "{to}"),
    ("restore", "{run}/step-1", "--to", "{to}-restored"),
    ("drill", "{run}"),
    ("status",),
    ("doctor", "{run}"),
)
TEXT_VERBS = ("ls", "verify", "status", "prefetch", "drill")
"""These are also run without ``--json``."""


class Runs:
    """Processes with canaries in their environment, and all their output."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.directory = directory
        self.environment = {**os.environ, **CANARIES, **environment}
        self.said: dict[str, str] = {}
        self.log = directory / "debug.log"

    def python(self, name: str, code: str, *arguments: str) -> None:
        self._run(name, DEBUG_LOGGING + code, str(self.log), *arguments)

    def verbs(
        self, *uris: str, verbs: tuple[tuple[str, ...], ...] = VERBS, before: str = "", drain_seconds: int = 5
    ) -> None:
        """Run verbs in one process, with JSON logs at DEBUG."""
        values = {"to": self.directory / "to", "drain_seconds": drain_seconds}
        lines = [[part.format(run=uri, **values) for part in verb] for uri in uris for verb in verbs]
        code = (
            f"{before}\nimport json, sys\nfrom tierckpt.cli.ui.app import run\n"
            "LOGS = ['--log-format', 'json', '--log-level', 'debug']\n"
            "for line in json.loads(sys.argv[1]):\n    print('##', line[0], run([*LOGS, *line]), flush=True)"
        )
        every = [[*line, "--json"] for line in lines] + [line for line in lines if line[0] in TEXT_VERBS]
        self._run("verbs", code, json.dumps(every))

    def _run(self, name: str, *command: str) -> None:
        done = python(*command, env=self.environment)
        assert done.returncode == 0, done.stderr[-2000:]
        self.said |= {f"{name} stdout": done.stdout, f"{name} stderr": done.stderr}

    def everything(self) -> dict[str, str]:
        """Return all printed output and every written file."""
        files = {str(path): path.read_bytes().decode("latin-1") for path in self.directory.rglob("*") if path.is_file()}
        names = {"names of files": "\n".join(str(path) for path in self.directory.rglob("*"))}
        return {**self.said, **files, **names}


def leaks(texts: dict[str, str]) -> list[str]:
    """Return the places that hold a canary, in any encoding."""
    found = []
    for where, text in texts.items():
        for mark in ALL_CANARIES:
            forms = {mark, quote(mark, safe=""), base64.b64encode(mark.encode()).decode().rstrip("=")[:-1]}
            found += [f"{where}: {mark}" for form in forms if form in text or form in unquote(text)]
    return sorted(set(found))


class Echo(HttpServer):
    """Refuses every request and repeats its credentials in the answer."""

    verbs = ("GET", "HEAD", "PUT", "POST", "DELETE")
    requests = 0

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.requests += 1
        request.rfile.read(int(request.headers.get("Content-Length", 0)))
        echoed = "".join(f"<{name}>{value}</{name}>" for name, value in request.headers.items())
        token = request.headers.get("x-amz-security-token", "")
        body = (
            f"<?xml version='1.0'?><Error><Code>InvalidArgument</Code>"
            f"<Message>{token} is not {request.path}</Message><Token-0>{token}</Token-0>{echoed}"
            f"<Resource>{request.path}</Resource></Error>"
        ).encode()
        self.say(request, 400, body)

    def cloud(self, scheme: str) -> dict[str, str]:
        if scheme == "s3":
            return {"AWS_ENDPOINT_URL": self.endpoint}
        account = {"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_TOKEN": ""}
        return {**account, "AZURE_STORAGE_ENDPOINT": self.endpoint}


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


def settings(tmp_path: Path) -> dict[str, str]:
    return {
        "TIERCKPT_LOCAL_ROOT": str(tmp_path / "node"),
        "TIERCKPT_MOVER": "inline",
        "TIERCKPT_EXIT_TIMEOUT_SECONDS": "1",
        "TIERCKPT_STORE_TIMEOUT_SECONDS": "3",
        "AWS_REGION": "us-east-1",
    }


@pytest.mark.slow
@pytest.mark.server
def test_no_secret_in_output_at_debug(tmp_path: Path, moto: S3Server) -> None:
    with moto.bucket() as bucket:
        runs = Runs(tmp_path, {**settings(tmp_path), "AWS_ENDPOINT_URL": moto.endpoint})
        runs.python("save", SAVE, f"s3://{bucket}/run")
        runs.verbs(f"s3://{bucket}/run", drain_seconds=60)
        objects = {
            item["Key"]: moto.client().get_object(Bucket=bucket, Key=item["Key"])["Body"].read().decode("latin-1")
            for item in moto.client().list_objects_v2(Bucket=bucket)["Contents"]
        }
    texts = {**runs.everything(), **objects}
    assert leaks(texts) == []
    assert runs.said["verbs stdout"].count("## ") == len(VERBS) + sum(verb[0] in TEXT_VERBS for verb in VERBS)
    assert "## drain 0" in runs.said["verbs stdout"]
    assert "## verify 0" in runs.said["verbs stdout"]
    assert "## drill 0" in runs.said["verbs stdout"]
    assert any("manifest" in key for key in objects)
    logged = [json.loads(line) for line in runs.said["verbs stderr"].splitlines() if line.startswith('{"time"')]
    (drained,) = [line for line in logged if line["event"].startswith("drained")]
    assert {"time", "level", "logger", "event", "uri", "size_bytes", "seconds", "outcome"} == {*drained} - {"rank"}
    assert "tierckpt.commit" in runs.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["s3", "az"])
def test_credentials_repeated_by_a_server_are_redacted(scheme: str, tmp_path: Path, echo: Echo) -> None:
    runs = Runs(tmp_path, {**settings(tmp_path), **echo.cloud(scheme)})
    runs.python("save", SAVE_BADLY, f"{scheme}://bucket/run")
    runs.verbs(f"{scheme}://bucket/run")
    assert echo.requests > 10
    assert "## verify 1" in runs.said["verbs stdout"]  # the verb did fail
    assert "InvalidArgument" in runs.said["verbs stderr"]
    assert leaks(runs.everything()) == []


@pytest.mark.slow
def test_control_without_redaction_the_credentials_leak(tmp_path: Path, echo: Echo) -> None:
    """The previous test can fail."""
    runs = Runs(tmp_path, {**settings(tmp_path), **echo.cloud("s3")})
    blind = "import tierckpt.redaction as r; r._pattern, r._SHAPES = lambda values: None, ()"
    runs.verbs("s3://bucket/run", before=blind)
    assert any("canarySessionToken" in leak for leak in leaks(runs.everything()))


def test_control_logged_credentials_are_detected(tmp_path: Path) -> None:
    leak = (
        "import os; logging.getLogger('elsewhere').info('%s', "
        "{k: v for k, v in os.environ.items() if k.startswith(('AWS_', 'AZURE_', 'GOOGLE_'))})"
    )
    runs = Runs(tmp_path, settings(tmp_path))
    runs.python("leak", leak)
    found = leaks(runs.everything())
    assert {leak.rpartition(" ")[2] for leak in found} == {*VARIABLE_CANARIES}
    assert any("debug.log" in leak for leak in found)
    assert any("stderr" in leak for leak in found)


def test_tierckpt_loggers_redact_credentials(tmp_path: Path) -> None:
    """T1: with any handler."""
    leak = (
        "import os; from tierckpt.telemetry import logger\n"
        "secrets = {k: v for k, v in os.environ.items() if k.startswith(('AWS_', 'AZURE_', 'GOOGLE_'))}\n"
        "logger('test').info('%s', secrets)\n"
        "try: raise RuntimeError(str(secrets))\n"
        "except RuntimeError: logger('test').exception('and with its traceback')\n"
    )
    runs = Runs(tmp_path, settings(tmp_path))
    runs.python("leak", leak)
    assert "and with its traceback" in runs.log.read_text()
    assert "***" in runs.log.read_text()
    assert leaks(runs.everything()) == []


@pytest.mark.slow
def test_uri_with_a_credential_is_refused_without_repeating_it(tmp_path: Path) -> None:
    uris = (
        f"https://bucket.s3.amazonaws.com/run?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature={URL_CANARY}",
        f"https://account.blob.core.windows.net/box/run?sv=2022&sig={URL_CANARY}",
        f"sftp://somebody:{URL_CANARY}@host/run",
        f"s3://somebody:{URL_CANARY}@bucket/run",
    )
    runs = Runs(tmp_path, settings(tmp_path))
    runs.verbs(*uris, verbs=(("ls", "{run}"), ("prefetch", "{run}", "--to", "{to}"), ("drill", "{run}")))
    runs.python("save", SAVE_BADLY, uris[0])
    refused = ["## ls 2", "## prefetch 2", "## drill 2"]
    assert sorted(runs.said["verbs stdout"].splitlines()) == sorted(refused * 2 * len(uris))
    assert leaks(runs.everything()) == []

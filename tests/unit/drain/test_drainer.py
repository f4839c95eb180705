"""A drain to a store that refuses for good: it ends with the cause, its files stay, and it can be tried again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.servers.ill_endpoints import Says
from tests.services import S3Server
from tests.states import save, small_state
from tierckpt.checkpoint.journal import READY, Journal
from tierckpt.cli.ui.app import run as cli
from tierckpt.client import Client, close_all
from tierckpt.config import Settings
from tierckpt.errors import EndpointError, TierckptError
from tierckpt.mover import Mover


async def drained(local_root: Path, uri: str) -> tuple[list[TierckptError], bool]:
    """The errors of one patient drain of all entries, and whether the store counts as down after it."""
    mover = Mover(Settings.load(local_root=local_root))
    try:
        async with asyncio.timeout(60):
            _, errors = await mover.drains.drain_all(patient=True)
        return errors, mover.drainer.retries.breaker(uri.rpartition("/")[0]).is_open
    finally:
        await mover.close()


def saved(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is committed on this node, with a pending drain."""
    with monkeypatch.context() as patch:
        patch.setattr(Client, "drain_in_background", lambda *_: None)
        save(uri, small_state(1))
    close_all()


def test_a_final_error_ends_a_drain_that_is_tried_again_when_it_is_mended(
    s3_uri: str, moto: S3Server, local_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    saved(f"{s3_uri}/step-1", monkeypatch)
    server = Says(404, tls=Authority(tmp_path).server_side())
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    for _ in range(3):
        errors, is_down = asyncio.run(drained(local_root, s3_uri))
        assert [type(error) for error in errors] == [EndpointError]
        assert "certificate" in str(errors[0]) and not is_down
    [entry] = Journal(local_root).entries()
    assert entry.state == READY and "certificate" in entry.error
    assert cli(["drain", "--wait"]) == EndpointError.exit_code
    assert "certificate" in capsys.readouterr().out
    assert cli(["status"]) == 0 and "certificate" in capsys.readouterr().out
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.endpoint)
    assert asyncio.run(drained(local_root, s3_uri)) == ([], False)
    assert not Journal(local_root).entries()
    server.close()

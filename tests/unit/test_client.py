"""The thread that a mover runs on: a call during its shutdown gets an answer."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from pathlib import Path

import pytest

from tierckpt.client import Client
from tierckpt.config import Settings
from tierckpt.errors import TierckptError


async def nothing() -> None:
    await asyncio.sleep(0)


def test_no_call_waits_for_a_loop_that_has_ended(local_root: Path) -> None:
    """A thread that waits for ever keeps the process from ending: retention did, at the end of a job."""
    for _ in range(20):
        client, begun = Client(Settings.load(local_root=local_root)), threading.Event()
        ended: list[BaseException] = []

        def ask(client: Client = client, begun: threading.Event = begun, ended: list[BaseException] = ended) -> None:
            try:
                while True:
                    begun.set()
                    client.run(nothing())
            except (TierckptError, concurrent.futures.CancelledError, asyncio.CancelledError) as error:
                ended.append(error)

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(6)]
        for thread in threads:
            thread.start()
        begun.wait(60)
        client.close()
        client.close()
        for thread in threads:
            thread.join(60)
        assert len(ended) == len(threads), "somebody still waits"
        with pytest.raises(TierckptError, match="closed"):
            client.run(nothing())


def test_what_was_begun_ends_with_the_client(local_root: Path) -> None:
    client = Client(Settings.load(local_root=local_root))

    async def for_ever() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    begun = client.start(for_ever())
    client.settings = client.settings.model_copy(update={"exit_timeout_seconds": 0.0})
    client.close()
    with pytest.raises(concurrent.futures.CancelledError):
        begun.result(60)
    with pytest.raises(TierckptError, match="closed"):
        client.start(nothing())


@pytest.mark.parametrize("mover", ["inline", "agent"])
def test_what_is_given_to_a_closed_client_is_refused(mover: str, local_root: Path) -> None:
    client = Client(Settings.load(local_root=local_root, mover=mover))
    client.close()
    with pytest.raises(TierckptError, match="closed"):
        client.drain_in_background("0123456789abcdef")
    with pytest.raises(TierckptError, match="closed"):
        client.throttle(1 << 20, 1.0)


def test_a_listener_that_ends_the_process_ends_its_own_call_only(local_root: Path) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    client = Client(Settings.load(local_root=local_root))
    try:
        with pytest.raises(SystemExit):
            client.start(leave()).result(timeout=60)
        client.start(nothing()).result(timeout=60)
    finally:
        client.close()

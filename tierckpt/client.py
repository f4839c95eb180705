"""The ``Mover`` of a process for synchronous callers, and its requests to the node's agent.

At exit the process waits for its saves, and up to ``exit_timeout_seconds`` for their drains; the rest stays in the
journal. A forked child starts without a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from .arena.slots import close_arenas
from .checkpoint import epoch, in_flight
from .checkpoint.journal import JournalEntry
from .config import Settings
from .errors import ConfigError, OperationTimeoutError, TierckptError
from .event_loop import LoopThread, at_exit
from .format.layout import Location, parse_uri, step_of
from .ipc.agent_client import AgentUnavailableError, close_clients, has_socket, is_known, private_client, shared_client
from .mover import Mover
from .poll import announced
from .resources import Tasks
from .stores.schemes import check_location
from .telemetry import MetricsRelay, ignore_progress, listen, logger
from .tracebacks import short_traceback
from .types import Json, ProgressListener, Tier

log = logger("client")

SETTLE_SECONDS = 300.0
"""Maximum wait for the agent to write the staged saves of ended trainers."""
EXIT_SECONDS = 300.0
"""Maximum wait at exit for a save that has no client yet."""
STALLED_SECONDS = 5.0
"""Maximum wait for an agent that answers without progress."""
WARNING_SECONDS = 1.0
POLL_SECONDS = 1.0


class Client(LoopThread):
    """A blocking, thread-safe ``Mover``."""

    def __init__(self, settings: Settings, listener: ProgressListener = ignore_progress) -> None:
        self.settings = settings
        self.mover = Mover(settings, listener)
        self._recovered = False
        self._recovering = threading.Lock()
        self._telling = Tasks()
        super().__init__(settings.local_root)

    @property
    def patience(self) -> float:
        return self.settings.exit_timeout_seconds

    async def _stop(self) -> None:
        await super()._stop()
        await self.mover.close()

    def drain_in_background(self, token: str) -> None:
        """Drain here if no agent answers. Raises TierckptError if closed; the entry stays in the journal."""

        async def here() -> None:
            self.mover.drains.submit(token)

        if self.settings.mover == "agent":
            problem = "no agent drains, so this process does"
            self._tell_agent({"op": "submit", "token": token}, problem, here)
        else:
            self.call_soon(self.mover.drains.submit, token)

    def throttle(self, bytes_per_second: int | None, seconds: float) -> None:
        """None: the rate of the settings."""
        if self.settings.mover == "agent":
            message = {"op": "throttle", "bytes_per_second": bytes_per_second, "seconds": seconds}
            self._tell_agent(message, "could not set the drain rate on the agent")
        self.call_soon(self.mover.limiter.throttle, bytes_per_second, seconds)

    def stop_probing(self) -> None:
        """End the waits of saves for a silent store: training waits for the save."""
        self.call_soon(self.mover.replaced.stop_probing)

    def _tell_agent(self, message: Json, problem: str, instead: Callable[[], Awaitable[None]] | None = None) -> None:
        """If no agent answers, log ``problem`` and run ``instead``."""

        async def tell() -> None:
            try:
                contact = shared_client(self.settings)
                await asyncio.to_thread(contact.ask, message)
                if message["op"] == "submit" and (rows := _tally.take()):
                    await asyncio.to_thread(contact.ask, {"op": "metrics", "rows": rows})
            except (TierckptError, OSError) as error:
                if not is_known(error):
                    log.warning("%s: %s", problem, error)
                if instead is not None:
                    await instead()

        self.call_soon(lambda: self._telling.spawn(tell()))

    def recover(self) -> None:
        """Take over the work of earlier processes, once per process. A second caller waits for the first."""
        with self._recovering:
            if not self._recovered:
                self._recover()
            self._recovered = True

    def _recover(self) -> None:
        async def here() -> None:
            try:
                await self.mover.drains.recover()
            except (TierckptError, OSError) as error:
                log.error("cannot take over the journal entries of earlier processes now: %s", error)

        if self.settings.mover != "agent":
            self.run(self.mover.drains.recover())
            return
        self.wait_for_handoffs()
        if any(self.mover.journal.entries()):  # an agent recovers when it starts
            self._tell_agent({"op": "here"}, "no agent recovers, so this process does", here)

    def enter(self, run: Location, *, trains: bool) -> None:
        """Reject later commits of ended trainers of ``run`` if this process ``trains``."""
        if trains:
            self.recover()
        else:
            self.wait_for_handoffs()
        epoch.enter(self.settings.local_root, run, trains=trains and self.settings.mover == "agent")

    def wait_for_handoffs(self) -> None:
        """Wait up to ``SETTLE_SECONDS``."""
        if self.settings.mover != "agent" or not has_socket(self.settings.local_root):
            return
        contact = private_client(self.settings)  # other requests must not wait for it
        try:
            message = {"op": "settle"}
            contact.ask(message, start=False, timeout_seconds=SETTLE_SECONDS, on_busy=_Watch())
        except AgentUnavailableError:
            pass  # it does not answer, which was logged
        except (TierckptError, OSError) as error:
            log.warning("staged saves of ended trainers may not be on the local tier yet: %s", error)
        finally:
            contact.close()

    def wait(self, location: Location, tier: Tier, timeout_seconds: float) -> None:
        """Replace an agent that stops answering, so that its drains continue."""
        is_agents = self.settings.mover == "agent" and tier is Tier.SHARED

        async def watched(mover: Mover) -> None:
            asking = asyncio.create_task(self._keep_asking()) if is_agents else None
            try:
                await mover.drains.wait(location, tier, timeout_seconds)
            finally:
                if asking is not None:
                    asking.cancel()

        self.run(watched(self.mover))

    async def _keep_asking(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            with contextlib.suppress(TierckptError, OSError):
                await asyncio.to_thread(shared_client(self.settings).ask, {"op": "here"}, start=False)

    def finish(self) -> None:
        """Wait up to ``exit_timeout_seconds`` for drains, log unfinished ones, and close."""
        timeout = self.settings.exit_timeout_seconds
        deadline = time.monotonic() + timeout

        def describe() -> str:
            return (
                f"this process exits after its drains: {len(self.mover.drains.draining)} are running, "
                f"{max(0.0, deadline - time.monotonic()):.0f} of {timeout:g} s left (exit_timeout_seconds). "
                "Ctrl-C stops: the rest stays on this node, `tierckpt drain --wait` finishes it"
            )

        with announced(log, describe):
            left = self.run(self._idle(self.mover, deadline))
        for entry in left:
            log.warning("%s is not on the shared tier yet; `tierckpt drain --wait` on this node finishes it", entry.uri)
        self.close()

    async def _idle(self, mover: Mover, deadline: float) -> list[JournalEntry]:
        if self._telling:
            await asyncio.wait(set(self._telling), timeout=max(0.0, deadline - time.monotonic()))
        return await mover.drains.idle(max(0.0, deadline - time.monotonic()))


class _Watch:
    def __init__(self) -> None:
        self._begun = self._moved_at = time.monotonic()
        self._work: Any = None
        self._has_told = False

    def __call__(self, progress: Any) -> None:
        now, details = time.monotonic(), progress if isinstance(progress, dict) else {}
        if details.get("work") != self._work:
            self._work, self._moved_at = details.get("work"), now
        if not self._has_told and now - self._begun > WARNING_SECONDS:
            self._has_told = True
            saves, size_bytes = details.get("saves"), details.get("size_bytes")
            text = "waiting for the agent to write the staged saves of ended trainers (%s saves, %s bytes): up to %g s"
            log.warning(text, saves, size_bytes, SETTLE_SECONDS)
        if now - self._moved_at > STALLED_SECONDS:
            raise OperationTimeoutError("the agent makes no progress", waited_seconds=now - self._begun)


_tally = MetricsRelay()
"""Measurements since the last message to the agent."""
listen(_tally)

_clients: dict[Settings, Client] = {}
_lock = threading.Lock()


def get_client(settings: Settings) -> Client:
    with _lock:
        if settings not in _clients:
            _clients[settings] = Client(settings)
        return _clients[settings]


@short_traceback
def wait(
    uri: str | os.PathLike[str],
    tier: str = "shared",
    timeout_seconds: float = 600.0,
    *,
    settings: Settings | None = None,
    **overrides: Any,
) -> None:
    """Wait until the newest save to ``uri``, also of another thread, is committed on ``tier``.

    Args:
        uri: one checkpoint (``s3://bucket/run/step-100``), not a run.
        tier: ``"local"``: durable on this node. ``"shared"``: drained, and visible to other nodes.

    Raises:
        ConfigError: another ``tier``, or an invalid URI or setting.
        OperationTimeoutError: not committed within ``timeout_seconds``, or no save to ``uri`` exists.
        TierckptError: a save by another thread failed, or its drain permanently (permission, damage, a rival save).

    Example:
        >>> dcp.save({"weight": torch.ones(4)}, storage_writer=TierStorageWriter("run/step-1"))
        Metadata(...)
        >>> tierckpt.wait("run/step-1", tier="shared", timeout_seconds=60)
    """
    try:
        target_tier = Tier(tier)
    except ValueError:
        raise ConfigError(f"tier is {tier!r}", hint="Use 'local' or 'shared'") from None
    location = check_location(parse_uri(uri))
    client = get_client(Settings.load(settings, **overrides))
    deadline = time.monotonic() + timeout_seconds
    in_flight.wait(client.settings.local_root, location.uri, timeout_seconds)
    client.wait(location, target_tier, max(0.0, deadline - time.monotonic()))


@short_traceback
def latest(uri: str | os.PathLike[str], *, settings: Settings | None = None, **overrides: Any) -> str | None:
    """Return the URI of the newest usable checkpoint at or under ``uri``, or None.

    Usable: committed, and every file has a copy of its size on this node, a peer or the shared tier. Newest: the
    highest step number at the end of the name. Waits for the staged saves of this node's ended trainers.

    None means that shared storage was listed and has no checkpoint. If it does not answer, this waits up to
    ``store_wait_seconds``, unless the newest step on this node was saved here and is not drained: returns that one.

    Raises:
        ConfigError: an invalid URI or setting.
        StoreUnavailableError, PermissionDeniedError: shared storage could not be listed.
    Cost: one listing of ``uri``, and the manifest of each checkpoint that is checked, newest first.

    Example:
        >>> tierckpt.latest("run") is None
        True
        >>> for step in (9, 10):
        ...     metadata = dcp.save({"weight": torch.ones(4)}, storage_writer=TierStorageWriter(f"run/step-{step}"))
        >>> tierckpt.latest("run")
        '.../run/step-10'
    """
    location = check_location(parse_uri(uri))
    client = get_client(Settings.load(settings, **overrides))
    client.enter(location if step_of(location.name) is None else location.parent, trains=False)
    checkpoint = client.run(client.mover.selector.newest(location))
    return checkpoint.location.uri if checkpoint is not None else None


def close_all() -> None:
    """Stop every shared client. Unfinished drains stay in the journal."""
    with _lock:
        clients = list(_clients.values())
        _clients.clear()
    for client in clients:
        client.close()
    close_clients()
    close_arenas()


def _finish_all() -> None:
    def describe() -> str:
        return f"this process exits after its saves: {in_flight.left()} are running. Ctrl-C stops"

    # Their threads need the clients. Without this, a save that nobody waits for would fail, and nobody would see it.
    timeouts = [client.settings.exit_timeout_seconds for client in _clients.values()]
    if in_flight.left():
        with announced(log, describe):
            in_flight.finish(max(timeouts, default=EXIT_SECONDS))
    for client in list(_clients.values()):
        client.finish()
    _clients.clear()
    close_clients()


def _start_anew() -> None:
    _clients.clear()
    _lock._at_fork_reinit()  # type: ignore[attr-defined]
    _tally.start_anew()


os.register_at_fork(after_in_child=_start_anew)
at_exit(_finish_all)

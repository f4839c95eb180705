"""The agent process: serves the socket, drains the journal, finishes handoffs, and exits when it is idle.

Its journal is on the SSD: killing it at any instruction loses no acknowledged save.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import math
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from ..checkpoint.journal import DRAIN_STATES, JournalEntry
from ..checkpoint.prune import has_due
from ..config import Settings
from ..disk import priority
from ..disk.file_lock import try_lock
from ..disk.local_root import use_local_root
from ..disk.quarantine import set_aside
from ..errors import ConfigError, PartialTransferError, StoreError, TierckptError
from ..ipc.agent_client import (
    BUSY_SECONDS,
    DESCRIPTORS_MAX,
    LOCK,
    SOCKET,
    encode,
    keep_log_small,
    peer_of,
    private_directory,
    socket_path,
    take_message,
)
from ..mover import Mover
from ..peer.inventory import Answers
from ..peer.peer_catalog import Live, live_of
from ..poll import LOCAL, Poll
from ..process_start import END_SECONDS, end_later, is_ready
from ..quantities import human_bytes
from ..replication.replicator import Replicator
from ..resources import Tasks
from ..telemetry import emit_rows, logger
from ..types import Json, Progress, Tier
from .handoffs import ClientProcess, Handoffs
from .options import AgentOptions
from .page_documents import PageSource
from .peer_service import PeerService

log = logger("agent")


_SO_PEERPIDFD = 77


class Connection:
    """Connection to one process of the job. Reads without blocking.

    ``pidfd`` reports the end of the process. Without one (-1: an old kernel and a process of another container), the
    end of the connection counts, and locks are not taken over, since their owner may be alive.
    """

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.socket = sock
        self.owner = ClientProcess(pid)
        self.pidfd = _pidfd_of(sock, pid)
        self.buffer = bytearray()
        self.descriptors: list[int] = []
        self.received: list[int] = []
        """Those of the message in execution."""

    def read(self) -> bool:
        """False at the end of the connection."""
        size = DESCRIPTORS_MAX * array.array("i").itemsize
        data, ancillary, flags, _ = self.socket.recvmsg(1 << 16, socket.CMSG_SPACE(size), socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(content[: len(content) - len(content) % received.itemsize])
                self.descriptors.extend(received)
        if flags & socket.MSG_CTRUNC:
            return False  # descriptors were lost, so later messages cannot be assigned theirs
        self.buffer += data
        return bool(data)

    def close(self) -> None:
        self.socket.close()
        close_all(self.descriptors)


def _pidfd_of(sock: socket.socket, pid: int) -> int:
    """Return a descriptor that becomes readable when the process ends; -1 if there is none."""
    with contextlib.suppress(OSError):
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid)
    return -1


def close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


RESCAN_SECONDS = 1.0
LOG_CHECK_SECONDS = 1.0
PRUNE_AGAIN_SECONDS = 5.0
CONNECTIONS_MAX = 1024
RECOVER_SECONDS = 60.0
ENDING_SECONDS = 0.1
ACCEPT_AGAIN_SECONDS = 1.0
SEND_SECONDS = 10.0


def run(settings: Settings, options: AgentOptions) -> int:
    """Run the agent of ``settings.local_root`` until it is idle or gets a signal.

    Returns 0, also if an agent already runs; 3 if a signal came before everything was on the shared tier.
    """
    use_local_root(settings)
    directory = private_directory(settings.local_root)
    with try_lock(directory / LOCK) as lock:
        if not lock:
            log.info("an agent already runs for %s", settings.local_root)
            return 0
        os.truncate(lock.descriptor, 0)
        os.pwrite(lock.descriptor, f"{os.getpid()}\n".encode(), 0)
        _allow_descriptors()
        priority.lower_this_thread(priority.BACKGROUND_NICE)
        inline = settings.model_copy(update={"mover": "inline"})
        return asyncio.run(Agent(inline, directory, options).run())


class Agent:
    def __init__(self, settings: Settings, directory: Path, options: AgentOptions) -> None:
        self.settings, self.options = settings, options
        self.mover = Mover(settings, self._on_progress, live=self._live)
        self.handoffs = Handoffs(on_ended=lambda: self._tasks.spawn(self._recover()))
        self._directory = directory
        self._connections: set[Connection] = set()
        self._watched: set[Connection] = set()
        self._begun = self._busy_at = time.monotonic()
        self._prune_at = 0.0
        """Monotonic time of the next retry of retention; infinite while it runs."""
        self._moving: dict[str, Progress] = {}
        self._signalled = False
        self._metrics: Any = None
        self._hub_proxy: Any = None
        self.replicator: Replicator | None = None
        self.peers: PeerService | None = None
        if self.mover.peers is not None:
            own, peers = self.mover, self.mover.peers
            self.replicator = Replicator(settings, own.journal, own.limiter, peers, own.store, self._on_progress)
            answers = Answers(
                fresh=self.replicator.fresh,
                segment=self.replicator.logs.open,
                hub=lambda *asked: self._hub_proxy.fetch_range(*asked) if self._hub_proxy is not None else None,
                drains=lambda: self.page.cluster.own(),
            )
            self.peers = PeerService(settings, directory, options, answers)
        self.page = PageSource(self.mover, self.status, self.peers)
        self._recovered_at = 0.0
        self._tasks = Tasks()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in _ending_signals():
            loop.add_signal_handler(number, self._on_signal, number, loop)
        await self._serve_metrics()
        tasks = [asyncio.create_task(self._keep_log_small()), asyncio.create_task(self.page.run())]
        if self.peers is not None:
            self.peers.start()
        if self.replicator is not None:
            tasks.append(asyncio.create_task(self.replicator.run()))
        with self._listen() as listener:
            loop.add_reader(listener, self._accept, listener)
            log.info("agent of %s is ready (process %d)", self.settings.local_root, os.getpid())
            await self._serve_hub()
            try:
                await self._work_until_told()
                code = await self._finish() if self._signalled else 0
            finally:
                loop.remove_reader(listener)
                (self._directory / SOCKET).unlink(missing_ok=True)
        self.handoffs.leave()
        for task in tasks:
            task.cancel()
            await asyncio.wait([task])
        if self.peers is not None:
            await self.peers.close()
        await self.page.write()
        await self.mover.close()
        for site in (self._metrics, self._hub_proxy):
            if site is not None:
                await site.close()
        for connection in self._connections:
            if connection.owner.pid == os.getpid():
                connection.close()  # a thread of the page waits for it, and this process for that thread
        return code

    async def _keep_log_small(self) -> None:
        while True:
            keep_log_small(self._directory)
            await asyncio.sleep(LOG_CHECK_SECONDS)

    async def _serve_metrics(self) -> None:
        if self.options.metrics_port is None:
            return
        try:
            from .metrics import Metrics

            self._metrics = Metrics(self.settings, self.mover.limiter)
            await self._metrics.serve(self.options.metrics_port)
        except (ImportError, TierckptError) as error:
            log.error("metrics cannot be served: %s", error)

    async def _serve_hub(self) -> None:
        if self.options.hf_proxy_port is None:
            return
        try:
            from .hub_proxy import HubProxy

            settings, loop = self.settings.model_copy(update={"mover": "agent"}), asyncio.get_running_loop()

            def live() -> asyncio.Future[Live]:
                return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._live(), loop))

            self._hub_proxy = HubProxy(settings, live if self.peers is not None else None)
            await self._hub_proxy.start(self.options.hf_proxy_port)
        except TierckptError as error:
            log.error("the Hub cannot be served: %s", error)

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        socket_file = self._directory / SOCKET
        if not (socket_file.is_dir() and set_aside(socket_file)):
            socket_file.unlink(missing_ok=True)  # stale: this process has the lock
        with socket_path(self._directory) as path:
            try:
                listener.bind(path)
            except OSError as error:
                raise StoreError(
                    f"cannot create a Unix socket in {self._directory}: {error.strerror}",
                    hint="Set TIERCKPT_LOCAL_ROOT to a directory on a disk of this node; until then each process "
                    "drains its own saves",
                    tier=Tier.LOCAL,
                ) from error
        with contextlib.suppress(PermissionError):  # a file system without modes; the directory is private
            (self._directory / SOCKET).chmod(0o600)
        listener.listen(128)
        return listener

    def _on_signal(self, number: signal.Signals, loop: asyncio.AbstractEventLoop) -> None:
        """Drain within the grace period. A second signal ends the process at once; the journal keeps the rest."""
        for each in _ending_signals():
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        self._finish_within_grace(number.name)

    def _finish_within_grace(self, why: str) -> None:
        grace_seconds = self.settings.grace_seconds
        log.info("%s: the agent drains for at most %g s; a second signal ends it at once", why, grace_seconds)
        # Python waits for its threads without a limit, and they may hang in a disk or store.
        end_later(PartialTransferError.exit_code, grace_seconds + END_SECONDS)
        self._signalled = True
        self.mover.drains.drained.set()

    async def _work_until_told(self) -> None:
        """Scan the journal periodically: a process may die before it sends its message."""
        await self._recover()
        while not self._signalled:
            self.mover.drains.submit_due(await self._entries())
            await self._prune_what_is_due()
            if time.monotonic() - self._recovered_at > RECOVER_SECONDS:
                await self._recover()
            if not self._may_leave():
                self._busy_at = time.monotonic()
            elif time.monotonic() - self._busy_at >= self.options.idle_seconds:
                if await self._release_kept():
                    continue
                if not self.options.stay:
                    log.info("agent exits: idle for %g s", self.options.idle_seconds)
                    return
            next_look_at = time.monotonic() + RESCAN_SECONDS
            while not self._signalled and (left_seconds := next_look_at - time.monotonic()) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.mover.drains.drained.wait(), left_seconds)
                    self.mover.drains.drained.clear()
                    await self._prune_what_is_due()

    def _may_leave(self) -> bool:
        has_work = self._connections or self._tasks or not self.mover.drains.is_idle or self._prune_at
        is_needed = self.peers is not None and self.peers.is_needed
        is_needed = is_needed or (self.replicator is not None and self.replicator.is_needed)
        return not (has_work or is_needed) and self.handoffs.is_empty

    async def _release_kept(self) -> bool:
        """Drain the newest local-only checkpoint of each run of a job that ended without closing."""
        try:
            await self.mover.drains.drop_superseded()
            released = await self.mover.drains.promote_newest()
        except (OSError, TierckptError) as error:
            log.error("cannot release local-only checkpoints: %s", error)
            return False
        for entry in released:
            log.info("%s: draining it: its job ended, and nothing newer is on shared storage", entry.uri)
        return bool(released)

    async def _prune_what_is_due(self) -> None:
        if time.monotonic() < self._prune_at:
            return
        try:
            is_due = await asyncio.to_thread(has_due, self.settings.local_root)
        except (OSError, TierckptError) as error:
            log.error("cannot look for runs to prune: %s", error)
            return
        if is_due:
            self._prune_at = math.inf
            self._tasks.spawn(self._prune())
        else:
            self._prune_at = 0.0

    async def _prune(self) -> None:
        is_left = True
        try:
            is_left = await self.mover.pruner.prune_due(self.mover.drainer.is_away)
        except Exception:
            if not self._signalled:  # otherwise the stores are closed
                log.exception("retention failed; it will be retried")
        self._prune_at = time.monotonic() + (PRUNE_AGAIN_SECONDS if is_left else 0.0)

    async def _finish(self) -> int:
        """Flush staged saves to the SSD, and drain within the grace period, newest first."""
        await self.mover.drains.prefer_newest()
        async for _ in Poll(self.settings.grace_seconds, LOCAL):
            self.mover.drains.submit_due(await self._entries())
            await self._prune_what_is_due()
            is_drained = not (self.mover.drains.draining or self._prune_at or await self._unfinished_entries())
            if self.handoffs.is_empty and is_drained:
                break
        left = await self._unfinished_entries()
        for entry in left:
            size = human_bytes(entry.size_bytes)
            log.warning("%s (%s) is not on the shared tier yet; the next agent continues", entry.uri, size)
        for save in self.handoffs.saves:
            log.warning("%s is staged but not on the local tier", save.name)
        return 3 if left or self.handoffs.saves else 0

    async def _unfinished_entries(self) -> list[JournalEntry]:
        return [entry for entry in await self._entries() if entry.state in DRAIN_STATES]

    async def _entries(self) -> list[JournalEntry]:
        try:
            self.page.entries = entries = await asyncio.to_thread(self.mover.journal.entries)
        except (OSError, TierckptError) as error:
            log.error("the journal cannot be read: %s", error)
            return []
        return entries

    def _on_progress(self, progress: Progress) -> None:
        before = self._moving.get(progress.what)
        known_bytes = before.done_bytes if before is not None and before.done_bytes <= progress.done_bytes else 0
        self.page.moved(progress, progress.done_bytes - known_bytes)
        self._moving[progress.what] = progress
        if progress.done_bytes >= progress.total_bytes:
            del self._moving[progress.what]

    # --- the socket ---------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.error("cannot accept a connection: %s", error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            loop.call_later(ACCEPT_AGAIN_SECONDS, self._accept_again, listener)
            return
        pid, uid = peer_of(sock)
        if uid not in (os.getuid(), 0) or len(self._connections) >= CONNECTIONS_MAX:
            log.warning("rejected a connection of process %d, user %d", pid, uid)
            sock.close()
            return
        sock.setblocking(False)
        connection = Connection(sock, pid)
        self._connections.add(connection)
        loop = asyncio.get_running_loop()
        loop.add_reader(sock, self._readable, connection)
        if connection.pidfd >= 0:
            self._watched.add(connection)
            loop.add_reader(connection.pidfd, self._ended, connection)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _readable(self, connection: Connection) -> bool:
        try:
            alive = connection.read()
            while (message := take_message(connection.buffer)) is not None:
                self._handle(connection, message)
        except BlockingIOError:
            return False
        except (OSError, ValueError, TypeError, RecursionError) as error:
            log.warning("closed the connection of process %d: %s", connection.owner.pid, error)
            alive = False
        if not alive:
            self._hang_up(connection)
        return alive

    def _hang_up(self, connection: Connection) -> None:
        asyncio.get_running_loop().remove_reader(connection.socket)
        connection.close()
        self._connections.discard(connection)
        if self.peers is not None:
            self.peers.end_fills(connection)
        self._busy_at = time.monotonic()
        if connection not in self._watched:
            self.handoffs.process_exited(connection.owner)
        elif self.handoffs.has_handoff_of(connection.owner):
            return
        else:
            self._unwatch(connection)
        if connection.owner.pid != os.getpid():
            self._tasks.spawn(self._after_an_end())

    def _ended(self, connection: Connection) -> None:
        """A forked child may keep the connection of the ended process open."""
        self._unwatch(connection)
        if connection in self._connections:
            while self._readable(connection):
                pass  # read its last messages
        if connection in self._connections:
            self._hang_up(connection)
        else:
            self.handoffs.process_exited(connection.owner)
            self._tasks.spawn(self._after_an_end())

    def _unwatch(self, connection: Connection) -> None:
        self._watched.discard(connection)
        asyncio.get_running_loop().remove_reader(connection.pidfd)
        os.close(connection.pidfd)
        connection.pidfd = -1

    async def _after_an_end(self) -> None:
        await asyncio.sleep(ENDING_SECONDS)  # the kernel may close the connection before it releases the locks
        await self.handoffs.finished()
        await self._recover()

    async def _recover(self) -> None:
        self._recovered_at = time.monotonic()
        try:
            await self.mover.drains.recover()
        except (OSError, TierckptError) as error:
            log.error("cannot recover the entries of ended processes now: %s", error)

    def _handle(self, connection: Connection, message: Json) -> None:
        count = message.pop("descriptors", 0)
        connection.received, connection.descriptors = connection.descriptors[:count], connection.descriptors[count:]
        verb: Callable[..., Any] | None = getattr(self, f"_on_{message.pop('op', '')}", None)
        try:
            answer = verb(connection, **message) if verb is not None else _unknown()
        except Exception as error:
            self._tasks.spawn(self._answer(connection, {"error": f"{type(error).__name__}: {error}"}))
            return
        finally:
            close_all(connection.received)  # unless the operation took them
        if asyncio.iscoroutine(answer):
            self._tasks.spawn(self._answer_later(connection, answer))
        else:
            self._tasks.spawn(self._answer(connection, {"ok": answer}))

    async def _answer_later(self, connection: Connection, work: Coroutine[Any, Any, Any]) -> None:
        """Send "busy" until the work is done: a silent agent counts as unresponsive."""
        task = asyncio.ensure_future(work)
        while not (await asyncio.wait([task], timeout=BUSY_SECONDS))[0]:
            await self._answer(connection, {"busy": self.handoffs.progress()})
        try:
            answer: Json = {"ok": await task}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        await self._answer(connection, answer)

    async def _answer(self, connection: Connection, answer: Json) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(SEND_SECONDS):
                await asyncio.get_running_loop().sock_sendall(connection.socket, encode(answer))

    # --- operations ---------------------------------------------------------------------------------------------

    def _on_submit(self, connection: Connection, token: str) -> None:
        self.mover.drains.submit(token)

    def _on_here(self, connection: Connection) -> None:
        """Answer that an agent runs."""

    def _on_hand_in(
        self,
        connection: Connection,
        save: str, rank: int, world_size: int, is_of_this_node: bool, names: list[str],
    ) -> None:  # fmt: skip
        received = connection.received
        if len(received) != len(names) or len(set(names)) != len(names):
            raise ValueError(f"{len(received)} descriptors for the names {names}")
        descriptors = dict(zip(names, received, strict=True))
        received.clear()
        self.handoffs.hand_in(connection.owner, save, rank, world_size, is_of_this_node, descriptors)

    def _on_begun(self, connection: Connection, save: str, rank: int) -> None:
        if len(connection.received) != 1:
            raise ValueError(f"{len(connection.received)} locks on one journal entry")
        self.handoffs.write_started(save, rank, connection.received.pop() if connection in self._watched else None)

    def _on_take_back(self, connection: Connection, save: str) -> None:
        self.handoffs.take_back(save)

    def _on_throttle(self, connection: Connection, bytes_per_second: int | None, seconds: float) -> None:
        self.mover.limiter.throttle(bytes_per_second, seconds)

    async def _on_settle(self, connection: Connection) -> None:
        """Answer when no handoff is in execution: the local tier then has every save that it can have."""
        for ended in [watched for watched in self._watched if is_ready(watched.pidfd, select.POLLIN)]:
            self._ended(ended)
        await self.handoffs.finished()

    def _on_metrics(self, connection: Connection, rows: list[list[Any]]) -> int:
        return emit_rows(rows)

    def _on_peers(
        self, connection: Connection, version: str | None = None, directory: str | None = None
    ) -> Coroutine[Any, Any, Json]:
        """Return the other nodes. With a version: also note that this process fills ``directory``."""
        return self._cluster().ask(connection, version, directory)

    def _on_peers_done(self, connection: Connection, version: str) -> None:
        self._cluster().end_fills(connection, version)

    def _on_fetched(self, connection: Connection, version: str, report: Json) -> None:
        self._cluster().report(connection, version, report)

    def _on_peer_addresses(self, connection: Connection, addresses: list[str]) -> None:
        self._cluster().add_job_addresses(addresses)

    def _on_peer_status(self, connection: Connection) -> Coroutine[Any, Any, Json]:
        return self._cluster().status()

    async def _live(self) -> Live:
        return live_of(await self._cluster().ask(None, None, None))

    def _cluster(self) -> PeerService:
        if self.peers is None:
            raise ConfigError(
                "this agent was started without `peers`; stop it (`tierckpt agent --stop`) to start a new one"
            )
        return self.peers

    def _on_stop(self, connection: Connection) -> None:
        self._finish_within_grace("stop")

    def _on_page(self, connection: Connection, what: str, request: Json) -> Coroutine[Any, Any, Json]:
        return self.page.answer(what, request)

    def _on_status(self, connection: Connection) -> Json:
        return self.status() | {"processes": len(self._connections) - 1}

    def status(self) -> Json:
        return {
            "pid": os.getpid(),
            "uptime_seconds": time.monotonic() - self._begun,
            "processes": len(self._connections),
            "staged_saves": len(self.handoffs.saves),
            "memory_held_bytes": self.handoffs.size_bytes,
            "handoffs_executed": self.handoffs.executed,
            "draining": len(self.mover.drains.draining),
            "moving": [
                {"what": what, "done_bytes": progress.done_bytes, "total_bytes": progress.total_bytes}
                for what, progress in self._moving.items()
            ],
            "bytes_per_second": self.page.history.bytes_per_second,
            "drains": self.mover.drains.active,
            "stores": self.mover.drainer.retries.outages,
            "drain_bytes_per_second": self.mover.limiter.rate,
            "errors": list(self.mover.drains.errors),
            "replicas": self.replicator.status() if self.replicator is not None else None,
            "page": server.url if (server := getattr(self._metrics, "server", None)) is not None else None,
        }


def _ending_signals() -> list[signal.Signals]:
    """SIGHUP (closed terminal) ends the agent too, unless nohup ignores it."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if is_ignored else [signal.SIGHUP])]


def _allow_descriptors() -> None:
    """Each staged checkpoint of each rank keeps a few open files."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _unknown() -> Json:
    raise ValueError("unknown operation: client and agent have different versions of tierckpt")

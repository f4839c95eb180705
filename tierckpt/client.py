"""The client: synchronous callers to the async ``Mover`` of this process, and to the agent of the node.

One daemon thread runs one event loop; every call is handed to it and waited for. Timeouts are applied inside the loop,
so they cancel what they time out. After a fork the child starts with no client: locks, sockets and drains stay with
the parent. At exit the process waits for its drains, at most ``exit_timeout_seconds``; the journal keeps the rest.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import concurrent.futures.thread  # imported first, so that its own exit hook runs after ours
import contextlib
import ctypes
import inspect
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .announce import announced
from .arena.slots import close_arenas
from .cache.node_cache import retry_until_available
from .cache.prefetch import PrefetchResult
from .checkpoint import epoch, in_flight
from .checkpoint.journal import Entry
from .config import Settings
from .disk.durable import translate_os_error
from .errors import ConfigError, OperationTimeoutError, TierckptError
from .format.layout import Location, parse_uri, step_of
from .format.uris import local_path
from .ipc.agent_client import AgentUnavailableError, close_contacts, contact_for, has_socket, is_known, own_contact
from .mover import Mover
from .resources import ThreadPool, start_thread
from .stores.schemes import check_location
from .telemetry import MetricsRelay, ignore_progress, listen, logger
from .tracebacks import short_traceback
from .types import ProgressListener, Tier

log = logger("client")

T = TypeVar("T")

CLOSE_TIMEOUT_SECONDS = 10.0
CLOSE_SECONDS_MIN = 1.0
SETTLE_SECONDS = 300.0
"""How long a process waits for the agent to bring what its predecessor had staged to the local tier."""
STALLED_SECONDS = 5.0
"""How long it waits for one that answers, but of whose work nothing comes."""
TOLD_AFTER_SECONDS = 1.0
ASK_SECONDS = 1.0
"""Between two looks at the agent while it is waited for what it drains."""


class Client:
    """A ``Mover`` on a thread of its own. Blocking, thread-safe. Use ``get_client`` to share one per settings."""

    def __init__(self, settings: Settings, listener: ProgressListener = ignore_progress) -> None:
        self.settings = settings
        self.mover = Mover(settings, listener)
        self._recovered = False
        self._recovering = threading.Lock()
        self._telling: set[asyncio.Task[None]] = set()
        self._calls: set[concurrent.futures.Future[Any]] = set()
        """What threads wait for."""
        self._is_closed, self._entering = False, threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="tierckpt", daemon=True)
        self._loop.set_default_executor(ThreadPool(thread_name_prefix="tierckpt-loop"))
        start_thread(self._thread)
        self._pid = os.getpid()
        _every.add(self)

    @short_traceback
    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of ``mover`` on the loop and return its result. Never call it from the loop itself."""
        tasks: list[asyncio.Task[Any]] = []

        async def call() -> T:
            tasks.extend(filter(None, [asyncio.current_task()]))
            return await work

        try:
            self._check_caller()
            future = self._begin(call)
        except BaseException:
            work.close()
            raise
        try:
            return future.result()
        except OSError as error:
            if isinstance(error, TierckptError) or error.errno is None:
                raise
            path = Path(os.fsdecode(error.filename)) if error.filename else self.mover.settings.local_root
            raise translate_os_error(error, path, Tier.LOCAL) from error
        except BaseException:
            if not future.done():  # interrupted: the caller closes what the work uses, so first the work ends
                future.cancel()
                asyncio.run_coroutine_threadsafe(_ended(tasks), self._loop).result(CLOSE_TIMEOUT_SECONDS)
            raise
        finally:
            self._calls.discard(future)
            del future  # it holds its error, whose traceback holds this frame
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()  # it was cancelled before its turn came

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin a coroutine of ``mover`` on the loop and return at once."""
        try:
            future = self._begin(lambda: work)
        except BaseException:
            work.close()
            raise
        future.add_done_callback(self._calls.discard)
        return future

    def _begin(self, call: Callable[[], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        with self._entering:  # a call is known to ``close``, which ends it, or comes too late and is told so
            self._check_open()
            future = asyncio.run_coroutine_threadsafe(call(), self._loop)
            self._calls.add(future)
        return future

    def _check_caller(self) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError("a blocking tierckpt call was made on tierckpt's own event loop")
        if not self.is_ours:
            raise TierckptError(
                "what a process has opened was used in a forked child of it", hint="Open it again, in the child"
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierckptError("tierckpt has been closed in this process, or the process ends", hint="Open it again")

    def drain_in_background(self, token: str) -> None:
        """Have a journal entry drained in the background: by the node's agent, or here where none answers.

        Raises TierckptError when this client is closed: the journal has the entry, for the next process.
        """
        is_agents = self.settings.mover == "agent"
        self._call_soon(self._give_to_agent if is_agents else self.mover.drains.submit, token)

    def _call_soon(self, call: Callable[..., object], *arguments: Any) -> None:
        """Have the loop make a call. Raises TierckptError when this client is closed."""
        with self._entering:
            self._check_open()
            self._loop.call_soon_threadsafe(call, *arguments)

    def throttle(self, bytes_per_second: int | None, seconds: float) -> None:
        """Let the drains of this node take no more than that for ``seconds``; None: as much as the settings say."""
        if self.settings.mover == "agent":
            self._call_soon(lambda: self._telling_agent(self._throttle_agent(bytes_per_second, seconds)))
        self._call_soon(self.mover.limiter.throttle, bytes_per_second, seconds)

    def ask_no_longer(self) -> None:
        """Let no save wait any longer for what a silent store has: training waits for the save."""
        self._call_soon(self.mover.ask_no_longer)

    async def _throttle_agent(self, bytes_per_second: int | None, seconds: float) -> None:
        message = {"op": "throttle", "bytes_per_second": bytes_per_second, "seconds": seconds}
        try:
            await asyncio.to_thread(contact_for(self.settings).ask, message)
        except (TierckptError, OSError) as error:
            if not is_known(error):
                log.warning("could not set the drain rate on the agent: %s", error)

    def _give_to_agent(self, token: str) -> None:
        self._telling_agent(self._tell_agent(token))

    def _telling_agent(self, words: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(words)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell_agent(self, token: str) -> None:
        try:
            contact = contact_for(self.settings)
            await asyncio.to_thread(contact.ask, {"op": "submit", "token": token})
            if rows := _tally.take():
                await asyncio.to_thread(contact.ask, {"op": "metrics", "rows": rows})
        except (TierckptError, OSError) as error:
            if not is_known(error):
                log.warning("no agent to drain with, so this process does it: %s", error)
            self.mover.drains.submit(token)

    def recover(self) -> None:
        """Take up, once per process, what earlier processes left in the journal and in the agent's hands."""
        with self._recovering:  # who comes second waits: only then is there all that there is going to be
            if not self._recovered:
                self._recover()
            self._recovered = True

    def _recover(self) -> None:
        if self.settings.mover != "agent":
            self.run(self.mover.drains.recover())
            return
        self.wait_for_handoffs()  # a save that was only staged has no journal entry yet
        if any(self.mover.journal.entries()):
            self._call_soon(lambda: self._telling_agent(self._have_recovered()))

    async def _have_recovered(self) -> None:
        """An agent that starts recovers. Nobody waits for that: no save depends on what of others is drained."""
        try:
            await asyncio.to_thread(contact_for(self.settings).ask, {"op": "here"})
        except (TierckptError, OSError) as error:
            if not is_known(error):
                log.warning("no agent to recover with, so this process does it: %s", error)
            try:
                await self.mover.drains.recover()
            except (TierckptError, OSError) as failure:
                log.error("what earlier processes left cannot be taken up now: %s", failure)

    def enter(self, run: Location, *, trains: bool) -> None:
        """Come to a run: wait for what its dead trainers had staged, and let nothing of theirs be committed later.

        ``trains``: this process saves to it. Else it looks for what there is.
        """
        if trains:
            self.recover()
        else:
            self.wait_for_handoffs()
        epoch.enter(self.settings.local_root, run, trains=trains and self.settings.mover == "agent")

    def wait_for_handoffs(self) -> None:
        """Return when the agent, if there is one, has brought to the local tier what ended trainers had staged.

        An agent that works on it is waited for, up to ``SETTLE_SECONDS``; one that does not answer, or of whose work
        nothing comes, is not.
        """
        if self.settings.mover != "agent" or not has_socket(self.settings.local_root):
            return
        contact = own_contact(self.settings)  # of its own: this may take long, and others have to ask meanwhile
        try:
            message = {"op": "settle"}
            contact.ask(message, start=False, timeout_seconds=SETTLE_SECONDS, on_busy=_Watch())
        except AgentUnavailableError:
            pass  # it has left nothing to wait for, or the log has said that it does not answer
        except (TierckptError, OSError) as error:
            log.warning("what ended trainers had staged may not be there yet: %s", error)
        finally:
            contact.close()

    def wait(self, location: Location, tier: Tier, timeout_seconds: float) -> None:
        """As ``BackgroundDrains.wait``; and should the agent stop answering, what it had to drain is drained."""
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
            await asyncio.sleep(ASK_SECONDS)
            with contextlib.suppress(TierckptError, OSError):
                await asyncio.to_thread(contact_for(self.settings).ask, {"op": "here"}, start=False)

    @property
    def is_ours(self) -> bool:
        """False in a forked child, which has neither the thread nor the connections."""
        return self._pid == os.getpid()

    def close(self) -> None:
        """Stop the drains (the journal keeps them) and the thread. Idempotent."""
        if self._is_closed or not self.is_ours:
            return
        self.run(self._stop(self.mover))
        with self._entering:
            self._is_closed = True
        for call in tuple(self._calls):
            call.cancel()  # it hangs or came late, and the thread that waits for it would keep the process from ending
        self._loop.call_soon_threadsafe(self._stop_loop)
        self._thread.join(timeout=10.0)
        if not self._thread.is_alive():
            self._loop.close()

    def _stop_loop(self, turns: int = 3) -> None:
        """Stop the loop once what was cancelled has had its turn."""
        if turns:
            self._loop.call_soon(self._stop_loop, turns - 1)
        else:
            self._loop.stop()

    async def _stop(self, mover: Mover) -> None:
        """Cancel what still runs and let it put its files away, then close the mover."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            patience = max(CLOSE_SECONDS_MIN, self.settings.exit_timeout_seconds)
            _, hung = await asyncio.wait(left, timeout=min(CLOSE_TIMEOUT_SECONDS, patience))
            for task in hung:
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # it ends with the process
        await mover.close()

    def finish(self) -> None:
        """Wait for the drains in this process, at most ``exit_timeout_seconds``; say what is left; close."""
        timeout = self.settings.exit_timeout_seconds
        deadline = time.monotonic() + timeout

        def describe() -> str:
            return (
                f"this process ends when its drains have ended: {len(self.mover.drains.draining)} are under way, "
                f"{max(0.0, deadline - time.monotonic()):.0f} of {timeout:g} s left (exit_timeout_seconds). "
                "Ctrl-C stops: what is left stays on this node, `tierckpt drain --wait` finishes it"
            )

        with announced(log, describe):
            left = self.run(self._idle(self.mover, deadline))
        for entry in left:
            log.warning("%s is not on the shared tier yet; `tierckpt drain --wait` on this node finishes it", entry.uri)
        self.close()

    async def _idle(self, mover: Mover, deadline: float) -> list[Entry]:
        if self._telling:
            await asyncio.wait(set(self._telling), timeout=max(0.0, deadline - time.monotonic()))
        return await mover.drains.idle(max(0.0, deadline - time.monotonic()))


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run ``loop`` until it is stopped.

    A listener of the caller may raise SystemExit, which ends ``run_forever``; its own call raises it then, and all
    other calls continue.
    """
    while True:
        try:
            return loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            continue


async def _ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_SECONDS / 2)


class _Watch:
    """Sees to it that something comes of what an agent says it works on, and says what is waited for."""

    def __init__(self) -> None:
        self._begun = self._moved_at = time.monotonic()
        self._work: Any = None
        self._has_told = False

    def __call__(self, progress: Any) -> None:
        """Raises OperationTimeoutError when nothing has come of it for ``STALLED_SECONDS``."""
        now, told = time.monotonic(), progress if isinstance(progress, dict) else {}
        if told.get("work") != self._work:
            self._work, self._moved_at = told.get("work"), now
        if not self._has_told and now - self._begun > TOLD_AFTER_SECONDS:
            self._has_told = True
            log.warning(
                "waiting for the agent to write what ended trainers had staged (%s saves, %s bytes): %g s at most",
                told.get("saves"),
                told.get("size_bytes"),
                SETTLE_SECONDS,
            )
        if now - self._moved_at > STALLED_SECONDS:
            waited = now - self._begun
            raise OperationTimeoutError("the agent works on it and nothing comes of that", waited_seconds=waited)


_tally = MetricsRelay()
"""What this process has measured since the agent, which serves the metrics of the node, was last told."""
listen(_tally)

_clients: dict[Settings, Client] = {}
_every: weakref.WeakSet[Client] = weakref.WeakSet()
_lock = threading.Lock()


def get_client(settings: Settings) -> Client:
    """Return this process's client for ``settings``, made on first use."""
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
    """Return when the newest save to ``uri`` is committed on ``tier`` (``"local"`` or ``"shared"``).

    Saves that this process has begun, and that another thread is still writing, count.

    Args:
        uri: one checkpoint (``s3://bucket/run/step-100``), not a run.
        tier: ``"local"``: durable on this node. ``"shared"``: drained, and visible to other nodes.
        timeout_seconds: of the whole call.
        settings: a ``Settings``; ``overrides`` are single fields of it (``local_root=...``).

    Raises:
        ConfigError: another ``tier``, or a URI or setting that cannot work.
        OperationTimeoutError: not within ``timeout_seconds``, or nobody saves to ``uri``.
        TierckptError: a save that another thread of this process began failed; or its drain failed for a reason that
            waiting does not mend (permission, damage, a rival save).

    Example:
        >>> dcp.save({"weight": torch.ones(4)}, storage_writer=TierStorageWriter("run/step-1"))
        Metadata(...)
        >>> tierckpt.wait("run/step-1", tier="shared", timeout_seconds=60)
    """
    try:
        wanted = Tier(tier)
    except ValueError:
        raise ConfigError(f"tier is {tier!r}", hint="It is 'local' or 'shared'") from None
    location = check_location(parse_uri(uri))
    client = get_client(Settings.load(settings, **overrides))
    deadline = time.monotonic() + timeout_seconds
    in_flight.wait(client.settings.local_root, location.uri, timeout_seconds)
    client.wait(location, wanted, max(0.0, deadline - time.monotonic()))


@short_traceback
def latest(uri: str | os.PathLike[str], *, settings: Settings | None = None, **overrides: Any) -> str | None:
    """Return the URI of the newest usable checkpoint at or under ``uri``, None when there is none.

    Usable means committed, and every file has a copy of its size on this node, a peer or the shared tier. Newest is the
    highest step number at the end of the name. What trainers of this node had staged when they ended is waited for.

    None means that shared storage was listed, and has none. While it does not answer it is waited for,
    ``store_wait_seconds``, unless the newest step on this node was saved here and has not been drained: that is
    returned, with a warning.

    Args:
        uri: a run (``s3://bucket/run``), or one checkpoint.
        settings: a ``Settings``; ``overrides`` are single fields of it (``store_wait_seconds=0``).

    Raises:
        ConfigError: a URI or setting that cannot work.
        StoreUnavailableError, PermissionDeniedError: shared storage could not be asked.
    Cost: one listing of ``uri``, and the manifest of each checkpoint looked at, newest first.

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
    checkpoint = client.run(client.mover.latest(location))
    return checkpoint.location.uri if checkpoint is not None else None


@short_traceback
def prefetch(
    uri: str | os.PathLike[str],
    to: str | os.PathLike[str] | None = None,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    pin: bool = False,
    wait_seconds: float | None = None,
    hf_cache: bool = False,
    settings: Settings | None = None,
    listener: ProgressListener = ignore_progress,
    **overrides: Any,
) -> Path:
    """Fill a directory of this node with a checkpoint or the files of a model; return the directory.

    When it returns every file is there, whole and durable; until then the directory is not there at all (or, where it
    held other files before, has no receipt). A killed prefetch goes on where it stopped, and several processes of a
    node that ask for the same share the work. While this process lives, nobody evicts what it was given.

    Args:
        to: the directory. Default: the node cache, and for a checkpoint of ours the local tier, where restore finds it.
        include: globs of the files to take, by path below ``uri``; none takes all. ``*`` matches slashes too.
        exclude: globs of files to leave out.
        pin: keep it in the node cache until it is unpinned; other versions of ``uri`` are unpinned.
        wait_seconds: wait so long for what is not committed or not there yet. None: that is an error.
        hf_cache: of ``hf://org/name``: fill the Hugging Face cache (``HF_HUB_CACHE``, or ``to``), where
            ``from_pretrained("org/name")`` finds it. Returns the snapshot's directory.
        settings: a ``Settings``; ``overrides`` are single fields of it (``local_root=...``).
        listener: called with a ``Progress`` as bytes arrive, on the client's thread: it must return at once.

    Raises:
        PartialTransferError: some files could not be fetched; ``.failures`` names them.
        CheckpointNotFoundError, ObjectNotFoundError, UncommittedCheckpointError: nothing usable at ``uri``.
        CapacityError: the files do not fit on the disk; nothing was fetched.
        IntegrityError, StoreError, ConfigError: damage, what the store answered, a setting that cannot work.
        OperationTimeoutError: ``wait_seconds`` have passed.
    Cost: each byte is read from shared storage once per cluster, and written once per node.

    Example:
        >>> save_file({"weight": torch.ones(4)}, "model.safetensors")
        >>> directory = tierckpt.prefetch(pathlib.Path.cwd(), to="copy", include=["*.safetensors"])
        >>> tierckpt.load_safetensors(directory)["weight"].sum().item()
        4.0
    """
    location = check_location(parse_uri(uri))
    include, exclude = _globs(include), _globs(exclude)
    client = Client(Settings.load(settings, **overrides), listener)
    try:
        target = local_path(to, "to") if to is not None else None

        async def fetch(mover: Mover) -> PrefetchResult:
            def once() -> Awaitable[PrefetchResult]:
                return mover.prefetch(
                    location, target, include=include, exclude=exclude, pin=pin, keep=True, hf_cache=hf_cache
                )

            return (
                await once() if wait_seconds is None else await retry_until_available(once, wait_seconds, location.uri)
            )

        return client.run(fetch(client.mover)).directory
    finally:
        client.close()


def _globs(value: str | Sequence[str]) -> Sequence[str]:
    return (value,) if isinstance(value, str) else tuple(value)


def close_all() -> None:
    """Stop every shared client of this process at once, and release staging memory that nothing refers to.

    What the clients were draining stays in the journal.
    """
    with _lock:
        clients = list(_clients.values())
        _clients.clear()
    for client in clients:
        client.close()
    close_contacts()
    close_arenas()


def _finish_all() -> None:
    for client in list(_clients.values()):
        client.finish()
    _clients.clear()
    close_contacts()


def _start_anew() -> None:
    """In a forked child: what the parent's clients hold stays the parent's."""
    # None of it may be freed here, not even when the child ends: a coroutine that is closed lets go of its locks and
    # connections, which are the parent's, and what is native waits for threads that are not here. So it lives for ever.
    parents = [(client, asyncio.all_tasks(client._loop)) for client in list(_every)]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(parents))
    _every.clear()
    _clients.clear()
    _lock._at_fork_reinit()  # type: ignore[attr-defined]
    _tally.start_anew()


os.register_at_fork(after_in_child=_start_anew)
# atexit would be too late: by then the interpreter has stopped thread pools, and file I/O of the drains with them.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]

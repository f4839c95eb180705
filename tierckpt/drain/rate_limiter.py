"""The rate limit of drains (P8): bytes per second, concurrent files, pause, room for a flush. One limiter per mover.

Invariants (tests cite them):
    G1  Over any time t at most ``rate * t`` bytes are admitted, plus the larger of 0.25 s worth and one chunk, plus
        0.25 s worth to compensate a late wake-up.
    G2  Chunks are admitted in the order of their requests.
    G3  While a flush writes on this node, drains yield the disk to it for at most half of the time.
    G4  Files of begun checkpoints get slots first: otherwise a job that saves faster than it drains would
        never have a whole checkpoint on the shared tier. Then files of the newest checkpoint. After ``prefer_newest``
        the newest waits for no slot and no turn, and all others wait while it sends.
    G5  A damaged control file changes nothing; without one the settings apply.
"""

from __future__ import annotations

import asyncio
import enum
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, Field, PositiveInt, ValidationError

from ..disk.durable import durable_write, make_dirs, read_whole
from ..disk.file_lock import lock
from ..disk.priority import FlushMark, FlushYield, lower_this_thread
from ..errors import ConfigError, PermissionDeniedError, TierckptError
from ..format.layout import control_file
from ..resources import ThreadPool
from ..telemetry import logger
from ..types import Json

log = logger("rate_limiter")

T = TypeVar("T")

BURST_SECONDS = 0.25
SLEEP_SECONDS_MAX = 0.1
"""Longest sleep, and so the delay of a change."""
CONTROL_CHECK_SECONDS = 1.0
FLUSH_CHECK_SECONDS = 0.02
THREADS_MAX = 8
CONTROL_LOCK_SECONDS = 10.0
CONCURRENCY_MAX = 256
CONTROL_BYTES_MAX = 1 << 16


class Unchanged(enum.Enum):
    """Distinguishes "unchanged" from None, no limit."""

    UNCHANGED = "unchanged"


UNCHANGED = Unchanged.UNCHANGED


class Control(BaseModel, frozen=True, strict=True, extra="forbid"):
    """Contents of a node's control file. UNCHANGED and None fall back to the settings."""

    bytes_per_second: PositiveInt | Unchanged | None = UNCHANGED
    concurrency: Annotated[int, Field(ge=1, le=CONCURRENCY_MAX)] | None = None
    paused: bool = False

    def changed(
        self,
        bytes_per_second: int | str | Unchanged | None = UNCHANGED,
        concurrency: int | None = None,
        paused: bool | None = None,
    ) -> Control:
        """``bytes_per_second``: "default" is UNCHANGED. Raises ConfigError: a value that no limiter accepts."""
        changes = {"concurrency": concurrency, "paused": paused}
        new = dict(self) | {name: value for name, value in changes.items() if value is not None}
        if bytes_per_second is not UNCHANGED:
            new["bytes_per_second"] = UNCHANGED if bytes_per_second == "default" else bytes_per_second
        try:
            return Control.model_validate(new)
        except ValidationError as error:
            raise ConfigError(f"invalid drain limit: {_reason(error)}") from None

    def to_json(self) -> Json:
        return {"paused": self.paused, **self.model_dump(exclude_defaults=True)}


def _reason(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{first['loc'][0] if first['loc'] else 'the file'}: {first['msg']}"


@dataclass(slots=True)
class DrainFlow:
    """The drain of one checkpoint, as the limiter sees it.

    Attributes:
        created_at: Unix seconds of the save.
        has_begun: whether a file of it has had a slot.
        sending: files that have a slot and wait neither for the rate nor for the end of a pause.
        granted_at: when (monotonic seconds) the limiter last admitted some of it.
    """

    limiter: RateLimiter
    created_at: float = 0.0
    has_begun: bool = False
    sending: int = 0
    granted_at: float = 0.0

    async def spend(self, size_bytes: int) -> None:
        self.sending -= 1
        try:
            await self.limiter.spend(size_bytes, self.created_at)
        finally:
            self.sending, self.granted_at = self.sending + 1, time.monotonic()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold one of the ``concurrency`` slots (G4); first come, first served among equals."""
        await self.limiter.take_slot(self)
        self.sending, self.granted_at = self.sending + 1, time.monotonic()
        try:
            yield
        finally:
            self.sending -= 1
            self.limiter.free_slot(self)


class RateLimiter:
    """Limits the drains of one mover. Belongs to one event loop.

    Args:
        bytes_per_second: None for no limit.
        concurrency: files in flight.
        local_root: directory of the control file and the flush lock; None for neither.
        nice: CPU priority of the threads of ``in_background``; 0 is the caller's own.
    """

    def __init__(
        self,
        bytes_per_second: int | None,
        concurrency: int,
        *,
        local_root: Path | None = None,
        nice: int = 0,
        clock: Callable[[], float] = time.monotonic,
        nap: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._default = self._limits = Control().changed(bytes_per_second, concurrency)
        self._throttle: tuple[int, float] | None = None
        self._clock, self._nap, self._nice = clock, nap, nice
        self._credit_bytes = self._burst_bytes()
        self._credited_at = clock()
        self._turn = asyncio.Lock()
        self._hurried = False
        self.running: Counter[float] = Counter()
        self._queue: list[tuple[asyncio.Future[None], DrainFlow]] = []
        self._local_root = local_root
        self._control_seen: tuple[int, int, int] | None = None
        self._look_at = 0.0
        self._stepping = FlushYield(FlushMark(local_root)) if local_root is not None else None
        self._threads: ThreadPool | None = None

    def update(self, **changes: Any) -> None:
        """Change limits within ``SLEEP_SECONDS_MAX``, also for running drains. Raises as ``Control.changed``."""
        before, limits = self._limits, self._limits.changed(**changes)
        self._refill(self._burst_bytes())
        self._limits = limits
        self._credit_bytes = min(self._credit_bytes, self._burst_bytes()) if self.bytes_per_second else 0.0
        self._admit()
        if limits != before:
            self._log_state()

    @property
    def bytes_per_second(self) -> int | None:
        return cast("int | None", self._limits.bytes_per_second)

    @property
    def concurrency(self) -> int:
        return cast("int", self._limits.concurrency)

    @property
    def paused(self) -> bool:
        return self._limits.paused

    def throttle(self, bytes_per_second: int | None, seconds: float) -> None:
        """Limit the rate further for the next ``seconds``. None removes the throttle.

        It expires, so that an ended job does not slow the next one.
        """
        self._limits.changed(bytes_per_second)
        credit = self._credit_bytes if self.rate is not None else 0.0
        self._refill(self._burst_bytes())
        self._throttle = None if bytes_per_second is None else (bytes_per_second, self._clock() + seconds)
        self._credit_bytes = min(credit, self._burst_bytes())

    @property
    def rate(self) -> int | None:
        if self._throttle is not None and self._clock() >= self._throttle[1]:
            self._throttle = None
        if self._throttle is None or (self.bytes_per_second or self._throttle[0]) < self._throttle[0]:
            return self.bytes_per_second
        return self._throttle[0]

    def prefer_newest(self) -> None:
        self._hurried = True
        self._admit()

    def refresh(self) -> None:
        """Apply a changed control file. Cost: one stat, at most once a second."""
        now = self._clock()
        if self._local_root is None or now < self._look_at:
            return
        self._look_at = now + CONTROL_CHECK_SECONDS
        stamp = stamp_of(control_file(self._local_root))
        if stamp == self._control_seen:
            return
        self._control_seen = stamp
        try:
            control = read_control(self._local_root)
            self.update(**dict(self._default.changed(**dict(control))))
        except ConfigError as error:
            log.warning("ignoring the control file, drain limits are unchanged: %s", error)  # G5

    def _log_state(self) -> None:
        rate = "no limit" if self.bytes_per_second is None else f"{self.bytes_per_second} bytes/s"
        if self.paused:
            log.warning("drains on this node are paused; `tierckpt drain --resume` resumes them")
        else:
            log.info("drains: %s, %d files at a time", rate, self.concurrency)

    def flow(self, created_at: float) -> DrainFlow:
        return DrainFlow(self, created_at)

    async def spend(self, size_bytes: int, created_at: float = 0.0) -> None:
        """Wait until ``size_bytes`` may be read and sent (G1 to G4)."""
        while not await self._try_spend(size_bytes, created_at):
            await self._nap(SLEEP_SECONDS_MAX)

    async def _try_spend(self, size_bytes: int, created_at: float) -> bool:
        """Return False if a newer checkpoint must go first (G4)."""
        if self._must_yield(created_at):
            return False
        async with self._turn:
            self._refill(self._burst_bytes())
            while (seconds := self._seconds_to_wait(size_bytes)) > 0:
                await self._nap(min(seconds, SLEEP_SECONDS_MAX))
                # After a wait for credit, compensate a late wake-up; otherwise earn only a burst.
                self._refill(self._burst_bytes() * (1 if self.paused else 2))
                if self._must_yield(created_at):
                    return False
            if self.rate is not None:
                self._credit_bytes -= size_bytes
            return True

    def _must_yield(self, created_at: float) -> bool:
        return self._hurried and any(other > created_at for other in self.running)

    def _seconds_to_wait(self, size_bytes: int) -> float:
        self.refresh()
        if self.paused:
            return SLEEP_SECONDS_MAX
        if self._stepping is not None and self._stepping.must_wait(self._clock()):
            return FLUSH_CHECK_SECONDS
        rate = self.rate
        if rate is None:
            return 0.0
        missing = min(float(size_bytes), self._burst_bytes()) - self._credit_bytes
        # A sleep below the clock resolution would loop without progress.
        return max(missing / rate, 0.0) if missing > 1e-6 * rate else 0.0

    def _burst_bytes(self) -> float:
        return BURST_SECONDS * (self.rate or 0)

    def _refill(self, capacity_bytes: float) -> None:
        now = self._clock()
        earned = (now - self._credited_at) * (self.rate or 0)
        self._credited_at = now
        self._credit_bytes = min(self._credit_bytes + earned, capacity_bytes)

    async def take_slot(self, flow: DrainFlow) -> None:
        self.refresh()
        place = asyncio.get_running_loop().create_future()
        self._queue.append((place, flow))
        self._admit()
        try:
            await place
        except BaseException:
            if (place, flow) in self._queue:
                self._queue.remove((place, flow))
            elif not place.cancelled():
                self.free_slot(flow)  # granted and cancelled at once: pass it on
            raise

    def free_slot(self, flow: DrainFlow) -> None:
        self.running[flow.created_at] -= 1
        self.running += Counter()  # drops zeros
        self._admit()

    def _admit(self) -> None:
        while self._queue:
            place, flow = first = min(self._queue, key=lambda waiting: self._rank(waiting[1]))
            if self.running.total() >= self.concurrency and not self._may_skip_queue(flow):
                return
            self._queue.remove(first)
            if not place.done():
                flow.has_begun = True
                self.running[flow.created_at] += 1
                place.set_result(None)

    def _rank(self, flow: DrainFlow) -> tuple[bool, float]:
        return not self._hurried and not flow.has_begun, -flow.created_at

    def _may_skip_queue(self, flow: DrainFlow) -> bool:
        holders = self.running.items()
        return (
            self._hurried
            and flow.created_at > 0
            and all(created_at <= flow.created_at for created_at, _ in holders)
            and self.running[flow.created_at] < self.concurrency
        )

    async def in_background(self, work: Callable[..., T], *arguments: Any) -> T:
        if self._threads is None:
            begin = partial(lower_this_thread, self._nice) if self._nice else None
            self._threads = ThreadPool(THREADS_MAX, "tierckpt-drain", begin)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        if self._stepping is not None:
            self._stepping.mark.close()


def read_control(local_root: Path) -> Control:
    """Raises ConfigError if the file is damaged."""
    path = control_file(local_root)
    try:
        return Control.model_validate_json(read_whole(path, CONTROL_BYTES_MAX))
    except FileNotFoundError:
        return Control()
    except PermissionDeniedError:
        raise
    except (TierckptError, ValidationError) as error:
        reason = _reason(error) if isinstance(error, ValidationError) else error
        hint = "`tierckpt drain --resume` writes a good one"
        raise ConfigError(f"{path} is not a control file: {reason}", hint=hint, path=path) from None


def change_control(
    local_root: Path,
    *,
    bytes_per_second: int | str | Unchanged | None = UNCHANGED,
    concurrency: int | None = None,
    paused: bool | None = None,
) -> Control:
    """Change the limits for every mover of this node, durably; applied within about 1 s.

    Args:
        bytes_per_second: ``"default"`` restores each mover's settings; None is no limit.

    Raises:
        ConfigError: a value that no limiter accepts; nothing was written.
    """
    path = control_file(local_root)
    make_dirs(path.parent)
    with lock(path.with_suffix(".lock"), CONTROL_LOCK_SECONDS, str(path)):
        try:
            current = read_control(local_root)
        except ConfigError:
            current = Control()  # repairs a damaged file
        control = current.changed(bytes_per_second, concurrency, paused)
        durable_write(path, json.dumps(control.to_json()).encode())
    return control


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size

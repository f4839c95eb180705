"""The stores, drains, node cache and limits shared by the operations of one process.

Operations are functions in their folders that take a ``Mover``. If ``settings.mover`` is "agent", a process drains only
if its agent does not answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from .cache.node_cache import NodeCache
from .checkpoint.catalog import Checkpoint
from .checkpoint.namespace import Browser
from .checkpoint.prune import Pruner
from .checkpoint.select import Selector
from .config import Settings
from .disk import read_lease
from .disk.local_root import use_local_root
from .drain.background_drains import BackgroundDrains
from .drain.drainer import Drainer
from .peer.fetch.fetch_session import PeerJoiner
from .peer.peer_catalog import Live, PeerCatalog
from .save.replaced_attempts import ReplacedAttempts
from .telemetry import ignore_progress
from .types import ProgressListener


class Mover:
    """Not thread-safe: every coroutine runs on the loop that created it."""

    def __init__(
        self,
        settings: Settings,
        listener: ProgressListener = ignore_progress,
        *,
        live: Callable[[], Awaitable[Live]] | None = None,
    ) -> None:
        """Raise PermissionDeniedError if ``local_root`` is not safe to use."""
        use_local_root(settings)
        self.settings, self.listener = settings, listener
        self.drainer = drainer = Drainer(settings, listener)
        self.journal, self.limiter = drainer.journal, drainer.limiter
        self.store, self.directory = drainer.store, drainer.directory
        self.drains = BackgroundDrains(settings, drainer)
        # The agent has its own list, and fetches nothing from other nodes.
        self.sharing = PeerJoiner(settings) if settings.peers is not None and live is None else None
        self.node_cache = NodeCache(settings, drainer.store, listener, self.sharing)
        self.peers = PeerCatalog(settings, live) if settings.peers is not None else None
        self.selector = Selector(settings, drainer.store, drainer.directory, self.peers)
        self.pruner = Pruner(settings, drainer.journal, drainer.store, self.selector)
        self.replaced = ReplacedAttempts(drainer, self.selector)
        self.browser = Browser(drainer.store, self.selector.find, drainer.directory, drainer.journal)

    def reading(self, checkpoint: Checkpoint) -> AbstractAsyncContextManager[None]:
        """Protect ``checkpoint`` from retention and eviction."""
        return read_lease.reading_async(self.settings.local_root, checkpoint.directory)

    async def close(self) -> None:
        await self.drains.close()
        if self.peers is not None:
            await self.peers.close()

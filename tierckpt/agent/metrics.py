"""Prometheus metrics of a node, on the loopback address only, because there is no password.

Measurements (``telemetry.METRICS``) are added as they happen; ``GAUGES`` are read on each scrape.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector
except ImportError as error:
    from ..errors import MissingExtraError

    raise MissingExtraError("metrics need prometheus-client", hint="pip install 'tierckpt[agent]'") from error

from .. import telemetry
from ..checkpoint.journal import DRAIN_STATES, LOCAL_ONLY, SET_ASIDE_STATES
from ..config import Settings
from ..drain.active_drain import STORE
from ..drain.rate_limiter import RateLimiter
from ..format.layout import parse_uri, step_of
from ..telemetry import Labels, Metric, logger
from ..types import Json, Tier
from .node_document import Known, node_document
from .run_catalog import REFUSED
from .web import LOOPBACK, WebServer

log = logger("agent.metrics")

GAUGES = {
    "tierckpt_lag_seconds": "Age of the oldest save that this tier has not committed; 0 when there is none.",
    "tierckpt_lag_bytes": "Bytes committed on the local tier that the shared tier has not committed.",
    "tierckpt_queue_entries": "Journal entries by state; failed ones wait for their store, or it refuses them.",
    "tierckpt_store_waiting_seconds": "Seconds that drains have waited for this store; absent while it answers.",
    "tierckpt_store_waiting_bytes": "Bytes that wait for this store.",
    "tierckpt_run_lag_steps": "Steps of the run that are lost if this node fails, copies on peers not counted.",
    "tierckpt_run_lag_bytes": "Size of these steps.",
    "tierckpt_run_lag_seconds": "From the newest step on shared storage to the newest step here; absent without one.",
    "tierckpt_run_safe_step": "Newest step of the run on shared storage; absent without one.",
    "tierckpt_last_commit_step": "Step of the newest checkpoint that the tier has committed, as known to this node.",
    "tierckpt_last_commit_time_seconds": "Save time of the newest checkpoint that the tier has committed (Unix).",
    "tierckpt_local_free_bytes": "Free bytes of the disk of the local tier.",
    "tierckpt_local_size_bytes": "Size of the disk of the local tier.",
    "tierckpt_drain_limit_bytes_per_second": "Rate limit of this agent's drains; 0 for no limit.",
    "tierckpt_drain_paused": "1 while drains are paused.",
}

KINDS: dict[str, tuple[Any, Callable[..., None]]] = {
    "counter": (Counter, Counter.inc),
    "gauge": (Gauge, Gauge.set),
    "histogram": (Histogram, Histogram.observe),
}

Sample: TypeAlias = tuple[str, dict[str, str], float]


class Metrics:
    def __init__(self, settings: Settings, limiter: RateLimiter | None = None) -> None:
        self.settings = settings
        self.server: WebServer | None = None
        self.registry = CollectorRegistry()
        self._measured = {metric.name: _prometheus(metric, self.registry) for metric in telemetry.METRICS.values()}
        self.registry.register(NodeState(settings, limiter))
        self._stop = telemetry.listen(self._record)

    def _record(self, metric: Metric, value: float, labels: Labels, /) -> None:
        ours = self._measured[metric.name]
        _, add = KINDS[metric.kind]
        add(ours.labels(**labels) if metric.labels else ours, value)

    async def serve(self, port: int) -> int:
        """Serve ``/metrics`` and the page until ``close``. Returns the port; 0 chooses a free one.

        Raises ConfigError: the port is taken.
        """
        server = WebServer(self.settings, host=LOOPBACK, port=port, routes={"/metrics": self.page})
        await server.start()
        self.server = server
        log.info("metrics on %smetrics", server.url)
        return server.port

    def page(self, accept: str) -> tuple[bytes, str]:
        encode, kind = choose_encoder(accept)
        return encode(self.registry), kind

    async def close(self) -> None:
        self._stop()
        if self.server is not None:
            await self.server.close()


def _prometheus(metric: Metric, registry: CollectorRegistry) -> Any:
    kind, _ = KINDS[metric.kind]
    options = {"buckets": metric.buckets} if metric.kind == "histogram" else {}
    return kind(metric.name, metric.help, metric.labels, registry=registry, **options)


# --- state -----------------------------------------------------------------------------------------------------


class NodeState(Collector):
    """Gauge values from the node's document, blocking."""

    def __init__(self, settings: Settings, limiter: RateLimiter | None) -> None:
        self.settings, self.limiter = settings, limiter
        self._known: Known = {}
        self._lock = threading.Lock()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        families: dict[str, GaugeMetricFamily] = {}
        try:
            with self._lock:
                samples = [*self._read()]
        except OSError as error:
            log.warning("the state of %s could not be read: %s", self.settings.local_root, error)
            samples = []
        for name, labels, value in samples:
            if name not in families:
                families[name] = GaugeMetricFamily(name, GAUGES[name], labels=[*labels])
            families[name].add_metric([*labels.values()], value)
        return families.values()

    def _read(self) -> Iterator[Sample]:
        document = node_document(self.settings, self._known)
        yield from _queue(document["journal"])
        yield "tierckpt_lag_bytes", {"tier": Tier.SHARED}, document["lag_bytes"]
        yield from _commits(document["local"])
        for row in document["stores"]:
            labels = {"store": row["store"]}
            yield "tierckpt_store_waiting_seconds", labels, max(0.0, time.time() - row["since_unix_seconds"])
            yield "tierckpt_store_waiting_bytes", labels, row["size_bytes"]
        for row in document["runs"]:
            for name in ("lag_steps", "lag_bytes", "lag_seconds", "safe_step"):
                if row[name] is not None:
                    yield f"tierckpt_run_{name}", {"run": row["run"]}, row[name]
        yield "tierckpt_local_free_bytes", {}, document["free_bytes"]
        yield "tierckpt_local_size_bytes", {}, document["total_bytes"]
        if self.limiter is not None:
            yield "tierckpt_drain_limit_bytes_per_second", {}, self.limiter.rate or 0
            yield "tierckpt_drain_paused", {}, float(self.limiter.paused)


def _queue(journal: Sequence[Json]) -> Iterator[Sample]:
    waiting = [row for row in journal if row["state"] in DRAIN_STATES]
    unwritten = [row for row in journal if row["drain"] is None and row["state"] != LOCAL_ONLY]
    for tier, rows in ((Tier.SHARED, waiting), (Tier.LOCAL, unwritten)):
        yield "tierckpt_lag_seconds", {"tier": tier}, max((row["age_seconds"] for row in rows), default=0.0)
    failed = sum(row["drain"]["state"] in (STORE, REFUSED) for row in waiting)
    counts = {"writing": len(unwritten), "ready": len(waiting) - failed, "failed": failed}
    counts["set_aside"] = sum(row["state"] in SET_ASIDE_STATES for row in journal)
    for state, count in counts.items():
        yield "tierckpt_queue_entries", {"state": state}, count


def _commits(local: Sequence[Json]) -> Iterator[Sample]:
    committed = [row for row in local if row["kind"] == "checkpoint"]
    drained = [row for row in committed if row["drained"]]
    for tier, rows in ((Tier.LOCAL, committed), (Tier.SHARED, drained)):
        if not rows:
            continue
        row = max(rows, key=itemgetter("saved_unix_seconds"))
        step = step_of(parse_uri(row["uri"]).name)
        if step is not None:
            yield "tierckpt_last_commit_step", {"tier": tier}, step
        yield "tierckpt_last_commit_time_seconds", {"tier": tier}, row["saved_unix_seconds"]

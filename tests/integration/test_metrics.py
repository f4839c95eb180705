"""Prometheus metrics of a node over HTTP, while real checkpoints are saved, drained and fail."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from prometheus_client.parser import text_string_to_metric_families

import tierckpt
from tests import loop_thread
from tests.states import save, save_drained
from tierckpt import telemetry
from tierckpt.agent.metrics import GAUGES, Metrics
from tierckpt.checkpoint.journal import Journal
from tierckpt.client import Client, close_all
from tierckpt.config import Settings
from tierckpt.disk.priority import flushing
from tierckpt.drain.rate_limiter import change_control
from tierckpt.format.layout import local_dir
from tierckpt.telemetry import BLOCKED_SECONDS, ERRORS, METRICS, QUARANTINES, RETRIES, MetricsRelay, emit_rows

REPOSITORY = Path(__file__).parents[2]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Page:
    """Serves and scrapes the metrics of this node."""

    def __init__(self, local_root: Path, client: Client | None = None) -> None:
        self.metrics = Metrics(Settings.load(local_root=local_root), client.mover.limiter if client else None)
        self.port = loop_thread.run(self.metrics.serve(0))

    def close(self) -> None:
        loop_thread.run(self.metrics.close())

    def text(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    def samples(self) -> Samples:
        families = text_string_to_metric_families(self.text())
        return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}

    def get(self, name: str, **labels: str) -> float | None:
        return self.samples().get((name, frozenset(labels.items())))


@pytest.fixture
def page(local_root: Path) -> Iterator[Page]:
    with closing(Page(local_root)) as page:
        yield page


@pytest.mark.slow
@pytest.mark.server
def test_checkpoint_is_exported_as_pending_draining_and_committed(page: Page, s3_uri: str, local_root: Path) -> None:
    change_control(local_root, paused=True)
    with flushing(local_root, 5):
        pass
    save(f"{s3_uri}/step-7", {"w": torch.randn(1 << 18)})
    (entry,) = Journal(local_root).entries()
    assert page.get("tierckpt_lag_bytes", tier="shared") == entry.size_bytes > 1 << 20
    assert 0 < (page.get("tierckpt_lag_seconds", tier="shared") or 0) < 60
    assert page.get("tierckpt_queue_entries", state="ready") == 1
    assert page.get("tierckpt_last_commit_step", tier="local") == 7
    assert page.get("tierckpt_last_commit_step", tier="shared") is None
    assert page.get("tierckpt_bytes_total", tier="shared", direction="written") is None
    assert (page.get("tierckpt_flush_seconds_count") or 0) >= 1

    change_control(local_root, paused=False)
    tierckpt.wait(f"{s3_uri}/step-7", timeout_seconds=60)
    close_all()
    assert page.get("tierckpt_lag_bytes", tier="shared") == page.get("tierckpt_lag_seconds", tier="shared") == 0
    assert page.get("tierckpt_bytes_total", tier="shared", direction="written") == entry.size_bytes
    assert page.get("tierckpt_bytes_total", tier="local", direction="read") == entry.size_bytes
    assert page.get("tierckpt_files_total", operation="send") == len(entry.files)
    assert page.get("tierckpt_commits_total", tier="shared") == 1
    assert page.get("tierckpt_drain_seconds_count") == 1
    assert page.get("tierckpt_last_commit_step", tier="shared") == 7
    assert page.get("tierckpt_last_commit_time_seconds", tier="shared") == pytest.approx(
        entry.created_unix_seconds, abs=30
    )
    free, size = page.get("tierckpt_local_free_bytes"), page.get("tierckpt_local_size_bytes")
    assert free is not None and size is not None and 0 < free < size


@pytest.mark.slow
@pytest.mark.server
def test_failing_drain_is_counted_by_error(page: Page, s3_uri: str, local_root: Path) -> None:
    change_control(local_root, paused=True)
    with closing(Client(Settings.load())) as client:
        journal = client.mover.journal
        save(f"{s3_uri}/step-1", {"w": torch.randn(4)})
        close_all()
        (entry,) = journal.entries()
        (local_dir(local_root, entry.location) / entry.files[0].key).unlink()
        change_control(local_root, paused=False)
        _, errors = client.run(client.mover.drains.drain_all(patient=False))
    assert [type(error).__name__ for error in errors] == ["ObjectNotFoundError"]
    assert page.get("tierckpt_errors_total", operation="drain", error="ObjectNotFoundError") == 1
    assert page.get("tierckpt_queue_entries", state="failed") == 1
    assert page.get("tierckpt_queue_entries", state="ready") == 0


def test_current_rate_limit_is_exported(local_root: Path) -> None:
    settings = Settings.load(drain_bytes_per_second="5MiB")
    with closing(Client(settings)) as client, closing(Page(local_root, client)) as page:
        assert page.get("tierckpt_drain_limit_bytes_per_second") == 5 << 20
        client.mover.limiter.update(bytes_per_second=None, paused=True)
        assert page.get("tierckpt_drain_limit_bytes_per_second") == 0
        assert page.get("tierckpt_drain_paused") == 1


def test_trainer_measurements_are_exported(page: Page) -> None:
    tally = MetricsRelay()
    stop = telemetry.listen(tally)
    BLOCKED_SECONDS.emit(0.2)
    BLOCKED_SECONDS.emit(0.4)
    RETRIES.emit(1, operation="drain")
    RETRIES.emit(2, operation="drain")
    stop()
    rows = json.loads(json.dumps(tally.take()))
    assert tally.take() == []
    before = (page.get("tierckpt_save_blocked_seconds_sum"), page.get("tierckpt_retries_total", operation="drain"))
    rubbish: list[Any] = [["no_such", 1, {}], ["tierckpt_retries_total", 1, {"uri": "x"}], [1], "x", [[], 1, {}], None]
    assert emit_rows([*rows, *rubbish]) == 3
    after = (page.get("tierckpt_save_blocked_seconds_sum"), page.get("tierckpt_retries_total", operation="drain"))
    assert after[0] - (before[0] or 0) == pytest.approx(0.6)  # type: ignore[operator]
    assert after[1] - (before[1] or 0) == 3  # type: ignore[operator]


def test_metrics_page_survives_a_damaged_manifest_and_journal(page: Page, file_uri: str, local_root: Path) -> None:
    for step in (1, 2):
        save_drained(f"{file_uri}/step-{step}", {"w": torch.randn(4)})
    newest = max(local_root.rglob("manifest.json"), key=str)
    newest.write_bytes(b"{")
    (local_root / "journal" / "bad.json").write_bytes(b"\0")
    assert page.get("tierckpt_last_commit_step", tier="local") == 1
    assert page.get("tierckpt_queue_entries", state="ready") == 0


def test_close_stops_measurements_and_server(local_root: Path) -> None:
    listeners = telemetry.listeners
    page = Page(local_root)
    page.close()
    page.close()
    assert telemetry.listeners == listeners
    with pytest.raises(OSError):
        page.text()


# --- dashboard and alerts --------------------------------------------------------------------------------------

_USE = re.compile(r"(tierckpt_[a-z_]+)(?:\{([^}]*)\})?")


def exposed(page: Page) -> dict[str, set[str]]:
    """Return every possible sample name with its labels."""
    names: dict[str, set[str]] = {}
    for metric in METRICS.values():
        endings = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        for ending in endings:
            names[metric.name + ending] = {*metric.labels} | ({"le"} if ending == "_bucket" else set())
    labels = {"tierckpt_queue_entries": {"state"}} | {
        name: {"tier"} for name in GAUGES if name.startswith(("tierckpt_lag", "tierckpt_last"))
    }
    labels |= {name: {"store"} for name in GAUGES if name.startswith("tierckpt_store_")}
    labels |= {name: {"run"} for name in GAUGES if name.startswith("tierckpt_run_")}
    names |= {name: labels.get(name, set()) for name in GAUGES}
    for name, present in page.samples():  # consistent with the page
        if name.startswith("tierckpt_") and not name.endswith("_created"):
            assert {key for key, _ in present} <= names[name], name
    return names


def problems(expressions: list[str], known: dict[str, set[str]]) -> list[str]:
    """Return the parts of ``expressions`` that match no metric."""
    found = []
    for expression in expressions:
        for name, selector in _USE.findall(expression):
            if name not in known:
                found.append(name)
                continue
            matchers = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)
            found += [f"{name}{{{label}}}" for label in matchers if label not in known[name] | {"instance", "job"}]
    return found


def test_dashboard_and_alerts_use_existing_metrics(page: Page) -> None:
    for metric in (ERRORS, QUARANTINES, RETRIES):
        metric.emit(0, **dict.fromkeys(metric.labels, "x"))
    known = exposed(page)
    board = json.loads((REPOSITORY / "deploy/grafana/tierckpt.json").read_text())
    rules = yaml.safe_load((REPOSITORY / "deploy/prometheus/tierckpt-alerts.yaml").read_text())
    expressions = [
        *(target["expr"] for panel in board["panels"] for target in panel["targets"]),
        *(item["query"]["query"] for item in board["templating"]["list"] if item["type"] == "query"),
        *(rule["expr"] for group in rules["groups"] for rule in group["rules"]),
    ]
    assert len(expressions) > 25
    assert problems(expressions, known) == []
    assert problems(["rate(tierckpt_lags_total[5m])", 'tierckpt_lag_seconds{teir="x"}'], known) == [
        "tierckpt_lags_total",
        "tierckpt_lag_seconds{teir}",
    ]
    everything = " ".join(expressions)
    assert [m.name for m in METRICS.values() if m.name not in everything] == []
    assert [name for name in GAUGES if name not in everything] == []


def test_label_values_are_bounded() -> None:
    labels = {label for metric in METRICS.values() for label in metric.labels}
    assert labels <= {"tier", "direction", "operation", "error", "state", "reason", "outcome", "kind"}
    assert all(name == name.lower() and name.startswith("tierckpt_") for name in METRICS)

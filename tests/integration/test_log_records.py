"""Each event has one log record, with one severity, in its process."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.agents import until
from tests.integration.test_store_trouble import forbidden, overloaded, reset, silent
from tests.servers.faultproxy import FaultProxy
from tests.services import S3Server
from tierckpt.client import close_all
from tierckpt.drain import active_drain, drainer
from tierckpt.ipc.agent_client import LOG
from tierckpt.save import replaced_attempts
from tierckpt.stores import retry

DETECTION_SECONDS = 10.0
WAIT_SECONDS = 90.0
BEGIN = {
    reset: (logging.WARNING, r"^{bucket} does not answer: .* cannot be reached"),
    silent: (logging.WARNING, r"^{bucket} does not answer: .*no answer to a "),
    overloaded: (logging.WARNING, r"^{bucket} does not answer: .*503"),
    forbidden: (logging.ERROR, r"^{bucket}/run is refused by its store; .* was refused"),
}
"""Fault: severity and text of the record at its begin."""
END = r"^{bucket}(/run)? (answers|is accepted by its store) again after [\d.]+ s$"
DETAILS = r"\(since [\d:]{8}, (next attempt in [\d.]+ s|requests are under way), ([\d.]+ [KM]iB wait|nothing waits) for"


class Records:
    """The records of tierckpt in this process."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog, self.clear = caplog, caplog.clear

    @property
    def all(self) -> list[logging.LogRecord]:
        found = [one for one in self._caplog.records if one.name.startswith("tierckpt")]
        return [one for one in found if not one.getMessage().startswith("closing: waiting for ")]  # of a slow machine

    def of(self, pattern: str, level: int = logging.INFO) -> list[logging.LogRecord]:
        return [one for one in self.all if one.levelno >= level and re.search(pattern, one.getMessage())]

    def lines(self, level: int = logging.WARNING) -> list[str]:
        return [f"{one.levelname} {one.name}: {one.getMessage()}" for one in self.of("", level)]


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> Iterator[Records]:
    caplog.set_level(logging.DEBUG, "tierckpt")
    yield Records(caplog)
    close_all()


def save(checkpointer: tierckpt.Checkpointer, step: int) -> None:
    checkpointer.save(step, {"w": torch.full((1 << 16,), float(step))}).result(timeout=WAIT_SECONDS)


Fault = Callable[[FaultProxy, str], None]


def outage(
    fault: Fault, uri: str, records: Records, moto: S3Server, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """Run a job whose store fails after its first checkpoint, for two more saves, and recovers."""
    monkeypatch.setattr(retry, "PAUSE_SECONDS_MAX", 1.0)
    silence_seconds = active_drain.SILENT_SECONDS + drainer.WATCH_SECONDS
    assert max(replaced_attempts.REPORT_SECONDS, silence_seconds) < DETECTION_SECONDS
    bucket, proxy = uri.removesuffix("/run"), FaultProxy(moto.endpoint)
    level, text = BEGIN[fault]
    with proxy.running() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        checkpointer = tierckpt.Checkpointer(uri, store_timeout_seconds=14, exit_timeout_seconds=20, **options)
        save(checkpointer, 1)
        checkpointer.wait(timeout_seconds=WAIT_SECONDS)
        records.clear()
        fault(proxy, bucket.removeprefix("s3://"))
        begun = time.time()
        with monkeypatch.context() as patch:
            if fault is silent:
                patch.setattr(replaced_attempts, "REPORT_SECONDS", 2.0)  # leaves a busy machine the rest
            save(checkpointer, 2)
        until(lambda: records.of(text.format(bucket=bucket), level), "the record", WAIT_SECONDS)
        assert records.of(text.format(bucket=bucket), level)[0].created - begun <= DETECTION_SECONDS
        save(checkpointer, 3)
        if fault is not silent:
            time.sleep(3.0)  # time for retries
        proxy.plans.clear()
        proxy.answer = None
        save(checkpointer, 4)
        checkpointer.wait(timeout_seconds=WAIT_SECONDS)
        until(lambda: records.of(END.format(bucket=bucket)), "its end", WAIT_SECONDS)
        checkpointer.close()


def assert_one_record_each(fault: Fault, uri: str, records: Records) -> None:
    bucket, (level, text) = uri.removesuffix("/run"), BEGIN[fault]
    [begin] = records.of("", logging.WARNING) or [None]
    assert begin is not None and begin.levelno == level and re.search(text.format(bucket=bucket), begin.getMessage())
    [end] = records.of(END.format(bucket=bucket))
    assert end.levelno == logging.INFO and records.all.index(end) > records.all.index(begin)
    if fault is not forbidden:
        assert re.search(DETAILS, begin.getMessage())
        facts = vars(begin)
        assert facts["store"] == bucket and facts["cause"] in begin.getMessage() and "waiting_bytes" in facts
    for step in (2, 3, 4):
        for event in (f"^committed {uri}/step-{step} on the local tier", f"^drained {uri}/step-{step} "):
            assert len(records.of(event)) == 1, records.lines(logging.INFO)
    assert [one.getMessage() for one in records.all if one.exc_info and one.levelno > logging.DEBUG] == []


@pytest.mark.slow
@pytest.mark.parametrize("keep_last", [None, 2])
@pytest.mark.parametrize("fault", BEGIN, ids=lambda fault: fault.__name__)
def test_outage_and_recovery_have_one_record_each(
    fault: Fault, keep_last: int | None, moto: S3Server, s3_uri: str, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an agent: in the trainer's log, within ten seconds."""
    outage(fault, s3_uri, records, moto, monkeypatch, mover="inline", keep_last=keep_last)
    assert_one_record_each(fault, s3_uri, records)


SEEDED: dict[str, tuple[str, Any]] = {
    "retention": ("tierckpt.checkpoint.select.log_failure", None),
    "drains": ("tierckpt.drain.background_drains.log_failure", None),
    "saves": ("tierckpt.training.saves.log_failure", None),
    "breaker": ("tierckpt.stores.retry.StoreBreaker.is_reported", property(lambda self: False)),
}


def twice(log: logging.Logger, error: BaseException, message: str, *arguments: object, level: int) -> None:
    log.log(level, message, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "fault"), [("retention", reset), ("breaker", reset), ("drains", forbidden), ("saves", forbidden)]
)
def test_control_duplicate_record_is_detected(
    layer: str, fault: Fault, moto: S3Server, s3_uri: str, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded bug: a layer logs an outage that another layer has logged."""
    place, seeded = SEEDED[layer]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, seeded or twice)
        with contextlib.suppress(AssertionError):  # a breaker that forgets the start does not log the end
            outage(fault, s3_uri, records, moto, monkeypatch, mover="inline", keep_last=2)
    assert len(records.lines()) > 1
    with pytest.raises((AssertionError, ValueError)):
        assert_one_record_each(fault, s3_uri, records)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [reset, silent, forbidden], ids=lambda fault: fault.__name__)
def test_agent_and_trainer_have_one_record_each(
    fault: Fault, moto: S3Server, s3_uri: str, local_root: Path, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent drains; the trainer contacts the store before each save."""
    outage(fault, s3_uri, records, moto, monkeypatch, mover="agent", keep_last=2)
    bucket, (level, text) = s3_uri.removesuffix("/run"), BEGIN[fault]
    [begin] = records.of("", logging.WARNING)
    [_] = records.of(END.format(bucket=bucket))
    assert begin.levelno == level and re.search(text.format(bucket=bucket), begin.getMessage())
    assert len(records.of("^started the agent")) <= 1

    lines = (local_root / "agent" / LOG).read_text().splitlines()
    print("\n".join(lines))
    agent_records = [line.split(": ", 1) for line in lines]
    bad = [words for head, words in agent_records if " WARNING " in head or " ERROR " in head]
    assert len(bad) == 1 and re.search(text.format(bucket=bucket), bad[0]), lines
    assert sum(bool(re.search(END.format(bucket=bucket), words)) for _, words in agent_records) == 1
    for step in (2, 3, 4):  # retention keeps the last two; a waiting trainer drains one that the agent has delayed
        drained = f"drained {s3_uri}/step-{step} "
        count = sum(words.startswith(drained) for _, words in agent_records) + len(records.of(f"^{drained}"))
        assert count == 1 or (count == 0 and step == 2)
    assert sum("is ready" in words for _, words in agent_records) == 1
    assert not any(line.startswith("Traceback") for line in lines)

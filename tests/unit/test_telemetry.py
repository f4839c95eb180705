"""The library's telemetry: optional metrics, machine-readable log lines, no secrets in either."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tierckpt import telemetry
from tierckpt.errors import ConfigError
from tierckpt.format.layout import parse_uri
from tierckpt.redaction import carries_credential, printable, redact, redact_all
from tierckpt.telemetry import BYTES, RELAYED_VALUES_MAX, Metric, MetricsRelay, listen, log_to, logger

SECRET = "wJalrXUtnFEMIcanaryK7MDENGbPxRfiCYEXAMPLEKEY"


def test_every_listener_hears_until_it_stops_and_a_failing_one_harms_nobody() -> None:
    heard: list[tuple[str, float]] = []

    def good(metric: Metric, value: float, labels: object) -> None:
        heard.append((metric.name, value))

    def bad(*_: object) -> None:
        raise ValueError("no")

    stops = [listen(bad), listen(good)]
    BYTES.emit(3, tier="local", direction="read")
    for stop in stops:
        stop()
    BYTES.emit(4, tier="local", direction="read")
    assert heard == [("tierckpt_bytes_total", 3)]


def test_a_tally_adds_up_across_threads_and_keeps_a_bound() -> None:
    tally = MetricsRelay()
    stop = listen(tally)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda value: BYTES.emit(value, tier="local", direction="read"), [2] * 4000))
    for _ in range(RELAYED_VALUES_MAX + 10):
        telemetry.FLUSH_SECONDS.emit(0.1)
    stop()
    rows = tally.take()
    assert ["tierckpt_bytes_total", 8000.0, {"tier": "local", "direction": "read"}] in rows
    assert len(rows) == 1 + RELAYED_VALUES_MAX


# --- logs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("closed"), BrokenPipeError(), SystemExit(1)], ids=type)
def test_a_handler_that_fails_harms_no_thread_that_logs(error: BaseException) -> None:
    def fail(record: logging.LogRecord) -> None:
        raise error

    tree, failing, heard = logging.getLogger("tierckpt"), logging.Handler(), io.StringIO()
    failing.emit = fail  # type: ignore[method-assign]
    tree.addHandler(failing)
    try:
        logger("somewhere").warning("the disk is odd")
        tree.removeHandler(failing)
        stop = log_to(heard, "text", "warning")
        logger("somewhere").warning("the disk is odd")
        stop()
    finally:
        tree.removeHandler(failing)
    assert heard.getvalue().count("the disk is odd") == 1


def test_a_full_pipe_holds_up_no_thread_that_logs() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    heard = io.StringIO()
    with os.fdopen(writing, "w") as pipe, os.fdopen(reading, "rb") as reader:
        stops = [log_to(pipe, "text", "warning"), log_to(heard, "text", "warning")]
        for number in range(3):
            logger("somewhere").warning("event %d", number)
        reader.read1(1 << 16)
        logger("somewhere").warning("it is read again")
        assert b"it is read again" in reader.read1(1 << 16)
        for stop in stops:
            stop()
    assert heard.getvalue().count("event") == 3


def test_a_closed_standard_error_harms_no_thread_that_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stderr", closed)
    stop = log_to(closed, "text", "warning")
    logger("somewhere").warning("logging.raiseExceptions prints to standard error, which is closed")
    stop()


def lines_of(log_format: str, say: object, level: str = "info") -> list[str]:
    stream = io.StringIO()
    stop = log_to(stream, log_format, level)  # type: ignore[arg-type]
    try:
        say()  # type: ignore[operator]
    finally:
        stop()
    return stream.getvalue().splitlines()


def test_two_who_write_to_one_stream_write_each_event_once() -> None:
    stream = io.StringIO()
    stop = log_to(stream, "text", "warning")
    stop_inner = log_to(stream, "text", "info")
    logger("test").info("once")
    stop_inner()
    logger("test").info("not at this level")
    logger("test").warning("again")
    stop()
    logger("test").warning("nobody listens")
    assert [line.rpartition(": ")[2] for line in stream.getvalue().splitlines()] == ["once", "again"]


def test_an_event_is_one_line_of_json_with_its_fields() -> None:
    def say() -> None:
        logger("test").info("drained %s", "s3://b/run", extra={"uri": "s3://b/run", "size_bytes": 5, "path": object})
        logger("test").debug("not at this level")

    (line,) = lines_of("json", say)
    event = json.loads(line)
    assert (event["level"], event["logger"], event["event"]) == ("info", "tierckpt.test", "drained s3://b/run")
    assert (event["uri"], event["size_bytes"]) == ("s3://b/run", 5)
    assert event["time"].endswith("+00:00")


def test_a_line_stays_one_line_whatever_is_in_it() -> None:
    def say() -> None:
        logger("test").error("two\nlines \u2028 and %s", 'a "quote"')
        try:
            int(f"AWS_SECRET_ACCESS_KEY={SECRET}")
        except ValueError:
            logger("test").exception("it failed")

    lines = lines_of("json", say)
    assert len(lines) == 2
    assert json.loads(lines[0])["event"] == 'two\nlines \u2028 and a "quote"'
    assert "ValueError" in json.loads(lines[1])["traceback"]
    assert SECRET not in "".join(lines)


def test_a_message_that_cannot_be_formed_is_no_error() -> None:
    (line,) = lines_of("json", lambda: logger("test").warning("%d", "not a number"))
    assert "could not be formed" in json.loads(line)["event"]


# --- redaction -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"https://h/b?X-Amz-Signature={SECRET}&x=1",
        f"https://h/b?sv=1&sig={SECRET}",
        f"sig={SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"authorization: AWS4-HMAC-SHA256 Credential={SECRET}/2024/s3, SignedHeaders=host, Signature={SECRET}",
        f"x-amz-security-token: {SECRET}",
        f"'x-amz-security-token': '{SECRET}'",
        f"AccountName=a;AccountKey={SECRET};EndpointSuffix=core",
        f"aws_secret_access_key={SECRET}",
        f"<Token-0>{SECRET}</Token-0>",
        f"<StringToSign>{SECRET} and more",
        f"SharedKey account:{SECRET}",
        f"sftp://user:{SECRET}@host/path",
        f"https%3A%2F%2Fh%3Fsig%3D{SECRET}",
    ],
)
def test_what_looks_like_a_secret_is_masked_and_the_rest_stays(text: str) -> None:
    assert SECRET not in redact(text)
    assert "***" in redact(text)
    assert redact(f"before {text}").startswith("before ")


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "HF_TOKEN", "MY_PASSWORD"])
def test_what_the_environment_holds_is_masked_wherever_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "odd/Value+with=signs.0123456789"
    assert redact(f"told {secret} aloud") == f"told {secret} aloud"
    monkeypatch.setenv(name, secret)
    assert redact(f"told {secret} aloud") == "told *** aloud"
    assert redact("odd%2FValue%2Bwith%3Dsigns.0123456789") == "***"
    assert redact(f"cut in the middle: {secret[:20]}") == "cut in the middle: ***"


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/run/step-100: attempt 3f9c1d20aa5e77b1 was replaced before it was drained",
        "the basic idea; a bearer of news; signature of a function; token 3f9c1d20aa5e77b1, key=.tierckpt/claim",
        "az://box/run cannot be reached: HTTP 503 [uri=az://box/run, endpoint=http://127.0.0.1:10000, tier=shared]",
        "/data/run?x=1 has 5 bytes, the manifest says 6",
    ],
)
def test_what_people_need_to_read_stays(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/data/run")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:10000")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "s3://bucket/run")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "short")
    assert redact(text) == text


def test_documents_are_redacted_by_name_and_by_value() -> None:
    document = {"secret_access_key": "anything", "nested": [{"url": f"http://h?sig={SECRET}"}], "count": 3, "no": None}
    redacted = {"secret_access_key": "***", "nested": [{"url": "http://h?sig=***"}], "count": 3, "no": None}
    assert redact_all(document) == redacted


def test_an_error_is_a_printable_cause_unless_its_text_or_that_of_what_it_came_from_tells_a_secret() -> None:
    told = ValueError(f"GET http://h/b?sig={SECRET} failed")
    behind = ValueError("refused")
    behind.__cause__ = told
    assert [printable(error) for error in (told, behind)] == [None, None]
    harmless = ValueError("refused")
    assert printable(harmless) is harmless


@pytest.mark.parametrize(
    "uri", ["https://h/b?a=1&X-Amz-Signature=abc", "az://b/r?sig=x", "sftp://u:p@h/r", "s3://:p@b"]
)
def test_a_uri_with_a_credential_in_it_is_refused_without_repeating_it(uri: str) -> None:
    assert carries_credential(uri)
    with pytest.raises(ConfigError, match="carries a credential"):
        parse_uri(uri)


@pytest.mark.parametrize(
    "uri", ["s3://b/a?b", "abfss://box@account.dfs.core.windows.net/r", "sftp://u@h:22/r", "/a?sig=1"]
)
def test_other_uris_are_what_they_were(uri: str) -> None:
    parse_uri(uri)


class Seconds:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(telemetry.time, "monotonic", lambda: self.now)


def test_a_repeat_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = Seconds(monkeypatch)
    repeats = telemetry.Repeats(logger("test"), logging.WARNING, "refused from %s: %s")
    for _ in range(1000):
        repeats.note("one", "no proof")
        repeats.note("two", "no proof")
    assert caplog.messages == ["refused from one: no proof", "refused from two: no proof"]
    seconds.now += telemetry.REPEAT_SECONDS
    repeats.note("one", "a wrong proof")
    assert caplog.messages[2:] == ["refused from one: a wrong proof (and 999 more since the last message)"]


def test_sources_without_number_are_bounded(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = Seconds(monkeypatch)
    repeats = telemetry.Repeats(logger("test"), logging.WARNING, "refused from %s: %s")
    for minute in range(3):
        for number in range(5000):
            repeats.note(f"{minute}-{number}", "no proof")
        assert len(repeats.seen) <= telemetry.SOURCES_MAX + 1
        seconds.now += telemetry.REPEAT_SECONDS + 1
    assert len(caplog.messages) <= 3 * (telemetry.SOURCES_MAX + 1)


def test_a_line_that_is_said_again_and_again_is_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int) -> None:
        logger("test").warning("drain of %d failed", number)

    seconds, stream = Seconds(monkeypatch), io.StringIO()
    stop = log_to(stream, "text", "info", is_sparing=True)
    try:
        for number in range(5000):
            fail(number)
        logger("test").warning("something else")
        assert stream.getvalue().count("\n") == telemetry.EVENTS_PER_MINUTE + 1
        assert "something else" in stream.getvalue()
        seconds.now += telemetry.REPEAT_SECONDS
        for _ in range(3):
            logger("test").warning("something else")
        fail(5000)
    finally:
        stop()
    assert stream.getvalue().count("\n") == telemetry.EVENTS_PER_MINUTE + 5
    dropped = 5000 - telemetry.EVENTS_PER_MINUTE
    assert f"({dropped} similar events were dropped before it)" in stream.getvalue().splitlines()[-1]

"""A variable that resembles a setting is reported once, with the nearest setting."""

from __future__ import annotations

import json
import logging

import pytest

from tierckpt import config
from tierckpt.cli.ui.app import run
from tierckpt.config import Settings, unknown_variables


@pytest.fixture(autouse=True)
def _clear_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "reported", set())


@pytest.mark.parametrize(
    ("variable", "advice"),
    [
        ("TIERCKPT_LOCAL_ROT", "did you mean TIERCKPT_LOCAL_ROOT?"),
        ("TIERCKPT_LOCAL_DIR", "did you mean TIERCKPT_LOCAL_ROOT?"),
        ("tierckpt_replica", "did you mean TIERCKPT_REPLICAS?"),
        ("TIERCKPT_CHUNK_SIZE", "did you mean TIERCKPT_CHUNK_SIZE_BYTES?"),
        ("TIERCKPT_STORE_TIMEOUT", "did you mean TIERCKPT_STORE_TIMEOUT_SECONDS?"),
        ("TIERCHKPT_LOCAL_ROOT", "did you mean TIERCKPT_LOCAL_ROOT?"),
        ("TIER_CKPT_MOVER", "did you mean TIERCKPT_MOVER?"),
        ("TIERCKPT_FROBNICATE", "docs/guide/settings.md"),  # no setting has a similar name
    ],
)
def test_a_misspelled_variable_names_the_setting(variable: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "a-secret-value")
    [(name, problem)] = unknown_variables().items()
    assert name == variable and advice in problem and "a-secret-value" not in problem


def test_known_variables_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {f"TIERCKPT_{name}".upper(): "1" for name in Settings.model_fields}
    known |= {"tierckpt_concurrency": "2", "TIERCKPT_TRACEBACK": "1", "TIERCKPT_TEST_SWEEP": "8", "TIERNEY": "1"}
    known |= {"TIERCKPT_DEMO_S3_ENDPOINT": "http://h", "TIERCKPT_PREFETCH_MINUTES": "30"}
    of_kubernetes = {
        "TIERCKPT_SERVICE_HOST": "10.0.0.1",
        "TIERCKPT_PEERS_SERVICE_PORT": "7117",
        "TIERCKPT_SERVICE_PORT_HTTP": "7117",
        "TIERCKPT_PORT": "tcp://10.0.0.1:7117",
        "TIERCKPT_PORT_7117_TCP": "tcp://10.0.0.1:7117",
        "TIERCKPT_PORT_7117_TCP_ADDR": "10.0.0.1",
    }
    for name, value in (known | of_kubernetes).items():
        monkeypatch.setenv(name, value)
    assert unknown_variables() == {}


def test_one_warning_when_variables_are_read(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    read = Settings.load()
    monkeypatch.setenv("TIERCKPT_LOCAL_ROT", "/mnt")
    with caplog.at_level(logging.WARNING, "tierckpt"):
        Settings.load(read, concurrency=2)
        assert caplog.messages == []
        for _ in range(3):
            assert Settings.load().local_root == read.local_root
    assert [message.partition(" ")[0] for message in caplog.messages] == ["TIERCKPT_LOCAL_ROT"]


def test_doctor_reports_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TIERCKPT_LOCAL_ROT", "/mnt")
    assert run(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    [check] = [check for check in document["checks"] if check["name"] == "environment"]
    assert check["status"] == "warn" and "TIERCKPT_LOCAL_ROOT" in check["detail"]
    assert document["warnings"] == [check["detail"]]


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"TIERCKPT_{name}".upper() for name in Settings.model_fields]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    without = Settings.load()
    for name in names:
        monkeypatch.setenv(name, "")
    assert Settings.load() == without

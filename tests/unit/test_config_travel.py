"""Settings are unchanged after serialization to another process, or to a table."""

from __future__ import annotations

import math
import os
import pickle
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tierckpt
from tests.states import small_state
from tierckpt.client import get_client
from tierckpt.config import MiB, Settings
from tierckpt.dcp.handoff import description as descriptions
from tierckpt.dcp.handoff.offer import Handoff

OTHER: dict[str, Any] = {
    "local_root": "/elsewhere",
    "drain": False,
    "shard_size_bytes_max": "7MiB",
    "chunk_size_bytes": "4MiB",
    "staging_bytes_max": "9GiB",
    "checkpoints_in_flight_max": 3,
    "staging_policy": "skip",
    "concurrency": 7,
    "mover": "agent",  # the tests say inline
    "grace_seconds": 0.0,
    "staging_memory": "shared",
    "preempt_signals": ("SIGUSR1", "SIGTERM"),
    "preempt_notices": "aws",
    "exposure_seconds_max": 60.0,
    "drain_bytes_per_second": "3MiB",
    "local_full_policy": "error",
    "peers": "node[01-03]",
    "peer_listen": "[::1]:7118",
    "peer_domain": "rack 1",
    "replicas": 2,
}


def _another(name: str) -> Any:
    """A value of the field that is not the default."""
    if name in OTHER:
        return OTHER[name]
    default = Settings.model_fields[name].default
    annotation = str(Settings.model_fields[name].annotation)
    if isinstance(default, str):
        return next(choice for choice in get_args(Settings.model_fields[name].annotation) if choice != default)
    if default is None:
        return "/some/file" if "Path" in annotation else 1 * MiB
    if isinstance(default, bool):
        return not default
    if isinstance(default, float) and default <= 1:
        return default / 2
    return default * 2


def settings_of(names: set[str]) -> Settings:
    names = names | {"peers"} if "replicas" in names else names
    return Settings.load(**{name: _another(name) for name in names})


@pytest.mark.slow
@given(st.sets(st.sampled_from(sorted(Settings.model_fields))))
def test_settings_come_out_of_a_pipe_and_of_a_pickle_as_they_went_in(names: set[str]) -> None:
    settings = settings_of(names)
    for came in (
        Settings.received(settings.model_dump_json()),
        pickle.loads(pickle.dumps(settings)),
        Settings.load(settings, commit_timeout_seconds=settings.commit_timeout_seconds),
    ):
        assert came == settings
        assert came.model_dump_json() == settings.model_dump_json()


def test_no_bound_comes_out_as_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCKPT_EXPOSURE_SECONDS_MAX", "inf")
    settings = Settings.load()
    assert settings.exposure_seconds_max == math.inf
    assert Settings.received(settings.model_dump_json()) == settings


def test_each_field_is_among_them() -> None:
    changed = settings_of(set(Settings.model_fields))
    plain = Settings.load()
    same = {name for name in Settings.model_fields if getattr(changed, name) == getattr(plain, name)}
    assert not same, "a field with the same alternative value"


def test_clients_with_other_secrets_are_others(local_root: Path, tmp_path: Path) -> None:
    def client_of(name: str) -> object:
        return get_client(Settings.load(local_root=local_root, peer_secret_file=tmp_path / name))

    assert client_of("a") is not client_of("b")
    assert client_of("a") is client_of("a")


def test_a_handoff_hides_its_credentials(local_root: Path, file_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "only this trainer knows")
    left: list[descriptions.SaveHandoff] = []
    monkeypatch.setattr(Handoff, "send", lambda self, _: left.append(self.handoff))
    with tierckpt.Checkpointer(file_uri, local_root=local_root, mover="agent", staging_memory="shared") as checkpointer:
        checkpointer.save(1, small_state(1)).result(60)
    written = left[0].written()
    read = descriptions.read(os.dup(written.fileno()))
    assert read is not None
    found = Settings.received(read.settings)
    assert found == checkpointer.settings
    assert read.environment["AWS_SECRET_ACCESS_KEY"] == "only this trainer knows"
    assert "only this trainer" not in repr(read)

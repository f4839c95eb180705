"""The tests of stores see no variable of this machine that says how to reach one."""

from __future__ import annotations

from pathlib import Path

import pytest

VARIABLES = [
    *(spelling for name in ("http", "https", "all", "no") for spelling in (f"{name}_proxy", f"{name}_proxy".upper())),
    *("REQUEST_METHOD", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HUGGING_FACE_HUB_TOKEN"),
    *("HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_HUB_DISABLE_IMPLICIT_TOKEN"),
    "TRANSFORMERS_OFFLINE",
]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))

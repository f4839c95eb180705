"""fsspec's own suite for file systems, on ``tierckpt://`` over a directory and over S3.

Every fifth of its glob cases is always run; the others are slow over a directory, and left out over S3.
``TIERCKPT_TEST_FSSPEC=all`` runs all (they pass).
"""

from __future__ import annotations

import os
import secrets
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.tests import abstract
from fsspec.tests.abstract.common import GLOB_EDGE_CASES_TESTS

from tests.services import S3Server

EACH = 1 if os.environ.get("TIERCKPT_TEST_FSSPEC") == "all" else 5


def sampled(test: Any, *, others: bool = False) -> Any:
    """``test`` with fewer of its cases, or with the ``others`` marked slow."""
    some = types.FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__)
    cases = [
        pytest.param(*case, marks=[pytest.mark.slow] if number % EACH else [])
        for number, case in enumerate(GLOB_EDGE_CASES_TESTS["argvalues"])
        if others or not number % EACH
    ]
    mark = pytest.mark.parametrize(GLOB_EDGE_CASES_TESTS["argnames"], cases)
    some.pytestmark = [mark.mark]  # type: ignore[attr-defined]
    return some


class OverFiles(abstract.AbstractFixtures):
    """A directory: there are empty directories."""

    @pytest.fixture
    def fs(self) -> Any:
        return fsspec.filesystem("tierckpt", skip_instance_cache=True)

    @pytest.fixture
    def fs_path(self, tmp_path: Path) -> str:
        (tmp_path / "shared").mkdir()
        return f"file{tmp_path}/shared"

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return lambda *parts: "/".join(parts)


@pytest.mark.server
class OverS3(OverFiles):
    """A bucket: directories are in names only."""

    @pytest.fixture(scope="class")
    @classmethod
    def bucket(cls, moto: S3Server) -> Iterator[str]:
        with moto.bucket() as bucket:
            yield bucket

    @pytest.fixture
    def fs_path(self, bucket: str, moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:  # type: ignore[override]
        for name, value in moto.environment().items():
            monkeypatch.setenv(name, value)
        return f"s3/{bucket}/{secrets.token_hex(4)}"

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        return False


class TestCopyOverFiles(abstract.AbstractCopyTests, OverFiles):
    test_copy_glob_edge_cases = sampled(abstract.AbstractCopyTests.test_copy_glob_edge_cases, others=True)


class TestGetOverFiles(abstract.AbstractGetTests, OverFiles):
    test_get_glob_edge_cases = sampled(abstract.AbstractGetTests.test_get_glob_edge_cases, others=True)


class TestPutOverFiles(abstract.AbstractPutTests, OverFiles):
    test_put_glob_edge_cases = sampled(abstract.AbstractPutTests.test_put_glob_edge_cases, others=True)


class TestOpenOverFiles(abstract.AbstractOpenTests, OverFiles): ...


class TestPipeOverFiles(abstract.AbstractPipeTests, OverFiles): ...


@pytest.mark.slow
class TestCopyOverS3(abstract.AbstractCopyTests, OverS3):
    test_copy_glob_edge_cases = sampled(abstract.AbstractCopyTests.test_copy_glob_edge_cases)


@pytest.mark.slow
class TestGetOverS3(abstract.AbstractGetTests, OverS3):
    test_get_glob_edge_cases = sampled(abstract.AbstractGetTests.test_get_glob_edge_cases)


@pytest.mark.slow
class TestPutOverS3(abstract.AbstractPutTests, OverS3):
    test_put_glob_edge_cases = sampled(abstract.AbstractPutTests.test_put_glob_edge_cases)


class TestOpenOverS3(abstract.AbstractOpenTests, OverS3): ...


class TestPipeOverS3(abstract.AbstractPipeTests, OverS3): ...

"""``tierckpt://`` for SGLang (checked with 0.5.23): a model in any store, through the node cache.

    sglang serve --model-path tierckpt://s3/models/llama-70b

SGLang calls ``register``, by the entry point group ``sglang.srt.plugins``, in each of its processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import Settings
from ..disk.io_tuner import MODEL_READ_MODES, SHARED_READ_MODES
from ..loading.cached_view import open_cached
from ..loading.safetensors import BYTES_IN_FLIGHT_MAX, WantedTensors
from ..loading.tensor_parts import Parts

SCHEME = "tierckpt://"
TARGET = "sglang.srt.connector.create_remote_connector"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, _connect, HookType.AROUND)


def _connect(original: Callable[..., Any], url: Any, device: Any = None, **options: Any) -> Any:
    if not os.fspath(url).startswith(SCHEME):
        return original(url, device, **options)
    return _connector_class()(os.fspath(url))


def _connector_class() -> Any:
    from sglang.srt.connector.base_connector import BaseFileConnector

    class TierckptConnector(BaseFileConnector):  # type: ignore[misc]
        """Files of ``pull_files`` are removed with it."""

        def glob(self, allow_pattern: str | Sequence[str] | None = None) -> list[str]:
            with open_cached(self.url, settings=Settings.load()) as view:
                return [f"{self.url}/{name}" for name in sorted(view.files) if _matches(name, allow_pattern)]

        def pull_files(
            self, allow_pattern: Sequence[str] | None = None, ignore_pattern: Sequence[str] | None = None
        ) -> None:
            """Raises TierckptError."""
            with open_cached(self.url, settings=Settings.load()) as view:
                for name in sorted(view.files):
                    if not _matches(name, allow_pattern) or (ignore_pattern and _matches(name, ignore_pattern)):
                        continue
                    path = Path(self.get_local_dir()) / name  # a file set has no name that leaves its directory
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(view.read(name))

        def weight_iterator(self, rank: int = 0) -> Generator[tuple[str, Tensor], None, None]:
            ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
            modes = SHARED_READ_MODES if ranks > 1 else MODEL_READ_MODES
            selected = WantedTensors(self.url, "cpu", None, "", Parts(), Settings.load(), modes)
            selected.begin()
            return selected.stream(BYTES_IN_FLIGHT_MAX)

    return TierckptConnector


def _matches(name: str, patterns: str | Sequence[str] | None) -> bool:
    globs = [patterns] if isinstance(patterns, str) else patterns
    return globs is None or any(fnmatchcase(name, glob) for glob in globs)

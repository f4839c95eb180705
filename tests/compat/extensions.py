"""Stream extensions of DCP's kind, as a user would write them. Imports torch alone."""

from __future__ import annotations

import io
from typing import IO, Any

from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension


class Flipped(StreamTransformExtension):
    """Inverts every bit, so the file is unreadable without the extension."""

    @staticmethod
    def registry_name() -> str:
        return "stream.flipped"

    @staticmethod
    def from_descriptor(version: str) -> Flipped:
        if version != "1":
            raise ValueError(f"flipped has no version {version}")
        return Flipped()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return _FlippedWriter(output)  # type: ignore[return-value]

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return _FlippedReader(input)  # type: ignore[return-value]


_FLIP = bytes(255 - value for value in range(256))


class _FlippedWriter(io.RawIOBase):
    def __init__(self, output: IO[bytes]) -> None:
        self._output = output

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._output.write(bytes(data).translate(_FLIP))

    def flush(self) -> None:
        self._output.flush()


class _FlippedReader(io.RawIOBase):
    """Readable, not seekable, and with short reads, like a compressor."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def readinto(self, buffer: Any) -> int:
        data = self._source.read(min(len(buffer), 1000)).translate(_FLIP)
        buffer[: len(data)] = data
        return len(data)


def registry() -> ExtensionRegistry:
    known = ExtensionRegistry()
    known.register(Flipped)
    return known

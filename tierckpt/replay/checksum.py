"""Compares tensors bit by bit, by a digest of 8 bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import xxhash

from .. import torch_internals

_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK_ELEMENTS = 1 << 20
ROW_ELEMENTS = 1 << 12
SAMPLE_ELEMENTS = 64
SMALL_BYTES, SMALL_TENSORS_MAX = 1 << 14, 1 << 10
"""Tensors of up to 16 KiB are digested together, at most 1,024 at a time."""
JOINED_BYTES = 64 << 20
"""A kernel launch costs as much as a megabyte."""


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over all elements of (bits of the element) x (2 x its index + 1), modulo 2**64.

    The sum is an int64 scalar on the tensor's device, the same on every device. Does not wait for the device.
    """
    data = tensor.detach()
    if data.is_complex():
        data = torch.view_as_real(data)
    flat = data.contiguous().view(-1)
    bits = flat.view(_VIEWS[flat.element_size()])
    if not bits.is_cpu:
        return _checksum_by_rows(bits)
    weights = _weights(bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, bits.numel(), CHUNK_ELEMENTS):
        part = bits[begin : begin + CHUNK_ELEMENTS]
        total += (weights[: part.numel()] * part).sum()
        if begin:
            total += 2 * begin * part.sum(dtype=torch.int64)
    return total


def _checksum_by_rows(bits: torch.Tensor) -> torch.Tensor:
    """2 (row x ROW_ELEMENTS + column) + 1 = row weight + column weight."""
    weights = _weights(bits.device)
    whole = bits.numel() // ROW_ELEMENTS * ROW_ELEMENTS
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    if whole:
        rows = bits[:whole].view(-1, ROW_ELEMENTS)
        total += (rows.sum(0, dtype=torch.int64) * weights[:ROW_ELEMENTS]).sum()
        if len(rows) > 1:
            numbers = torch.arange(0, 2 * whole, 2 * ROW_ELEMENTS, device=bits.device)
            total += (rows.sum(1, dtype=torch.int64) * numbers).sum()
    if rest := bits.numel() - whole:
        total += (bits[whole:] * (weights[:rest] + 2 * whole)).sum()
    return total


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    return torch.arange(1, 2 * CHUNK_ELEMENTS, 2, device=device)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """XXH3 in host memory, where it is faster; ``checksum`` on a device.

    ``sample`` distinguishes different rounding from a different tensor.
    """

    value: int | torch.Tensor
    sample: torch.Tensor
    is_sum: bool

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor) -> Fingerprint:
        is_sum = tensor.device.type != "cpu"
        return cls(checksum(tensor) if is_sum else _hash(tensor), sample_of(tensor).clone(), is_sum)

    def matches(self, copy: torch.Tensor) -> bool:
        """Waits for the device."""
        return self.int_value == (int(checksum(copy).item()) if self.is_sum else _hash(copy))

    def to_host(self) -> Fingerprint:
        """Waits for the device."""
        return Fingerprint(self.int_value, self.sample.cpu(), self.is_sum)

    @property
    def int_value(self) -> int:
        return self.value if isinstance(self.value, int) else int(self.value.item())


Digests = list[int | torch.Tensor]


def digests_of(tensors: Iterable[torch.Tensor]) -> Digests:
    return begin_digests(tensors)()


def begin_digests(tensors: Iterable[torch.Tensor]) -> Callable[[], Digests]:
    """Digest tensors on a device in stream order, and others in the returned function.

    Another thread may call the function if nothing writes to the tensors then.
    """
    host, device = list[torch.Tensor](), list[torch.Tensor]()
    for one in tensors:
        (host if one.device.type == "cpu" else device).append(one)
    on_device: Digests = [checksum(one) for one in _join_small_tensors(device)]
    return lambda: [*map(_hash, _join_small_tensors(host)), *on_device]


def _join_small_tensors(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """A call into torch costs more than reading small tensors."""
    small: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for one in tensors:
        if one.nbytes > (SMALL_BYTES if one.is_cpu else JOINED_BYTES):
            yield one
        elif one.numel():
            small.setdefault((one.device, one.dtype), []).append(one)
    for small_tensors in small.values():
        yield from map(torch_internals.flatten_dense_tensors, _bounded_groups(small_tensors))


def _bounded_groups(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    group: list[torch.Tensor] = []
    size_bytes = 0
    for one in tensors:
        if group and (len(group) == SMALL_TENSORS_MAX or size_bytes + one.nbytes > JOINED_BYTES):
            yield group
            group, size_bytes = [], 0
        group.append(one)
        size_bytes += one.nbytes
    if group:
        yield group


def digest_values(digests: Digests) -> list[int]:
    """Waits for the device."""
    return [int(one) % 2**64 for one in digests]


def combined_digest(digests: Digests) -> str:
    """Waits for the device."""
    return xxhash.xxh3_64_hexdigest(b"".join(one.to_bytes(8, "little") for one in digest_values(digests)))


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """The result may share memory."""
    flat = tensor.detach().contiguous().view(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLE_ELEMENTS))]


def _hash(tensor: torch.Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().view(-1)
    if not flat.numel():
        return 0
    return xxhash.xxh3_64_intdigest(memoryview(cast(Any, flat.view(torch.uint8).numpy())))

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
"""Maximum size of a small tensor, and the number of small tensors that are digested together."""
JOINED_BYTES = 64 << 20
"""Size to which tensors on an accelerator are joined: a kernel launch takes the time of reading a megabyte."""


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over all elements of (bits of the element) x (2 x its index + 1), modulo 2**64.

    An int64 scalar on the device of ``tensor``; does not wait for the device. Integer addition is associative, so every
    device returns the same sum. A changed element, or two swapped elements, change the sum.
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
    """Return the same sum with a few kernels for any size, by rows and by columns.

    The weight of an element, 2 (row x ROW_ELEMENTS + column) + 1, is the sum of a row weight and a column weight.
    """
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
    """Return the first odd numbers. Cached, as a state has hundreds of tensors."""
    return torch.arange(1, 2 * CHUNK_ELEMENTS, 2, device=device)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Fingerprint of a tensor: XXH3 in host memory (10 GB/s; ``checksum``: 0.3 GB/s), ``checksum`` on a device.

    ``sample`` has some of the elements, to distinguish different rounding from a different tensor.
    """

    value: int | torch.Tensor
    sample: torch.Tensor
    is_sum: bool
    """``value`` is a ``checksum``."""

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor) -> Fingerprint:
        is_sum = tensor.device.type != "cpu"
        return cls(checksum(tensor) if is_sum else _hash(tensor), sample_of(tensor).clone(), is_sum)

    def matches(self, copy: torch.Tensor) -> bool:
        """Return True if ``copy`` has the same bits. Waits for the device."""
        return self.int_value == (int(checksum(copy).item()) if self.is_sum else _hash(copy))

    def to_host(self) -> Fingerprint:
        """Return the fingerprint in host memory. Waits for the device."""
        return Fingerprint(self.int_value, self.sample.cpu(), self.is_sum)

    @property
    def int_value(self) -> int:
        return self.value if isinstance(self.value, int) else int(self.value.item())


Digests = list[int | torch.Tensor]
"""Digests of tensors: numbers, or scalars on a device."""


def digests_of(tensors: Iterable[torch.Tensor]) -> Digests:
    """Return the digests of ``tensors``. Does not wait for a device. Cost: one pass over the tensors."""
    return begin_digests(tensors)()


def begin_digests(tensors: Iterable[torch.Tensor]) -> Callable[[], Digests]:
    """Digest tensors on a device in stream order. Return a function for those in host memory.

    The function returns the digests of all ``tensors``. It may run on another thread if nothing writes to them then.
    Small tensors are digested together: a call into torch costs more than reading their bytes.
    """
    host, device = list[torch.Tensor](), list[torch.Tensor]()
    for one in tensors:
        (host if one.device.type == "cpu" else device).append(one)
    on_device: Digests = [checksum(one) for one in _join_small_tensors(device)]
    return lambda: [*map(_hash, _join_small_tensors(host)), *on_device]


def _join_small_tensors(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield large tensors, then small ones joined by device and dtype."""
    small: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for one in tensors:
        if one.nbytes > (SMALL_BYTES if one.is_cpu else JOINED_BYTES):
            yield one
        elif one.numel():
            small.setdefault((one.device, one.dtype), []).append(one)
    for small_tensors in small.values():
        yield from map(torch_internals.flatten_dense_tensors, _bounded_groups(small_tensors))


def _bounded_groups(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield ``tensors`` in order, in groups of bounded count and size."""
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
    """Return ``digests`` as numbers. Waits for their devices."""
    return [int(one) % 2**64 for one in digests]


def combined_digest(digests: Digests) -> str:
    """Return one digest of all ``digests``. Waits for their devices."""
    return xxhash.xxh3_64_hexdigest(b"".join(one.to_bytes(8, "little") for one in digest_values(digests)))


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return some elements of ``tensor``, evenly spaced. May share its memory."""
    flat = tensor.detach().contiguous().view(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLE_ELEMENTS))]


def _hash(tensor: torch.Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().view(-1)
    if not flat.numel():
        return 0
    return xxhash.xxh3_64_intdigest(memoryview(cast(Any, flat.view(torch.uint8).numpy())))

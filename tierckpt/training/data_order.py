"""The order of the data, and where training is in it: saved with the step, so that no sample is seen twice or missed.

The samples of all epochs form one stream: the dataset in a new order, again and again. A position in that stream is one
number for the whole job, however many ranks read from it and however far a loader reads ahead of training. So a job
that comes back with other ranks goes on at the same sample; and no batch is padded or dropped at the end of an epoch,
because the next one follows in the same batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import CheckpointError, ConfigError, StateMismatchError

B = TypeVar("B")


class DataOrder:
    """A batch sampler for a map dataset whose place is part of the checkpoint.

    ::

        order = DataOrder(dataset, batch_size=32, seed=7)
        loader = DataLoader(dataset, batch_sampler=order, num_workers=4)
        state = {"model": model, "optimizer": optimizer, "data": order}
        checkpointer.restore(state)
        for step, batch in enumerate(order.over(loader), start):
            ...
            checkpointer.step(step, state)

    Guarantees: over the life of the job every epoch has each sample exactly once, whatever is killed in between and
    with whatever number of ranks it goes on. All ranks have as many batches. A batch counts from when the loop receives
    it, so a step that is saved includes it; what workers have read ahead does not count.

    Args:
        dataset: anything with a length, or the length.
        batch_size: samples of one batch of one rank.
        seed: of the order. All ranks must give the same; a restore takes the one of the checkpoint.
        shuffle: a new order for each epoch, the same for all ranks. False: as the dataset has it.
        epochs: where the stream ends; its last batches may be one sample longer or shorter. None: never.
        rank: of the job; None: as torch.distributed has it.
        world_size: likewise.

    Raises:
        ConfigError: an empty dataset, or a size below 1; names which.

    Example:
        >>> order = tierckpt.DataOrder(6, batch_size=2, shuffle=False, epochs=1)
        >>> first = next(iter(order.over(order)))
        >>> place = order.state_dict()
        >>> resumed = tierckpt.DataOrder(6, batch_size=2, shuffle=False, epochs=1)
        >>> resumed.load_state_dict(place)
        >>> first, list(resumed.over(resumed))
        ([0, 1], [[2, 3], [4, 5]])
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        is_job = dist.is_available() and dist.is_initialized()
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        self.batch_size, self.seed, self.shuffle, self.epochs = batch_size, seed, shuffle, epochs
        self.world_size = world_size if world_size is not None else dist.get_world_size() if is_job else 1
        self.rank = rank if rank is not None else dist.get_rank() if is_job else 0
        for name, value in {
            "the length of the dataset": self.length,
            "batch_size": batch_size,
            "world_size": self.world_size,
            "epochs": 1 if epochs is None else epochs,
        }.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}: it must be a whole number of at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank is {self.rank}: with {self.world_size} ranks it is 0 to {self.world_size - 1}")
        self.position = 0
        """Samples that the whole job has received since the beginning of the first epoch."""
        self._orders: dict[int, torch.Tensor] = {}
        self._is_counted = False
        self._ahead = False

    @property
    def epoch(self) -> int:
        """The epoch that the next sample belongs to, from 0."""
        return self.position // self.length

    @property
    def _end(self) -> int | None:
        return None if self.epochs is None else self.epochs * self.length

    def over(self, loader: Iterable[B]) -> Iterator[B]:
        """Iterate over ``loader``, and count what the loop receives. The loop ends with the last epoch."""
        self._is_counted = True
        try:
            for batch in loader:
                self.position = self._after(self.position)
                yield batch
        finally:
            self._is_counted = self._ahead = False

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of this rank, from the present position on: what a DataLoader reads, ahead of training."""
        position = self.position
        while self._end is None or position < self._end:
            after = self._after(position)
            self._ahead = True
            yield [self._sample(place) for place in self._share(position, after)]
            position = after

    def _after(self, position: int) -> int:
        """The position after one batch of each rank. Fewer samples than ranks are never left over for a last one."""
        after = position + self.world_size * self.batch_size
        end = self._end
        return after if end is None or end - after >= self.world_size else end

    def _share(self, start: int, stop: int) -> range:
        """The places of this rank among those from ``start`` to ``stop``."""
        return range(start + self.rank, stop, self.world_size)

    def _sample(self, place: int) -> int:
        epoch, index = divmod(place, self.length)
        if not self.shuffle:
            return index
        if epoch not in self._orders:
            self._orders = {known: order for known, order in self._orders.items() if known >= epoch - 1}
            self._orders[epoch] = self._shuffled(epoch)
        return int(self._orders[epoch][index])

    def _shuffled(self, epoch: int) -> torch.Tensor:
        digest = hashlib.sha256(f"{self.seed}/{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.randperm(self.length, generator=generator, device="cpu")

    def state_dict(self) -> dict[str, Any]:
        """Where training is. The same on every rank.

        Raises CheckpointError where batches are read and nobody counts them: the place would be wrong.
        """
        if self._ahead and not self._is_counted:
            raise CheckpointError(
                "the position in the data is unknown: batches were read without DataOrder.over",
                hint="Write `for batch in order.over(loader):`",
            )
        return {"position": self.position, "seed": self.seed, "length": self.length, "shuffle": self.shuffle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken.

        Raises StateMismatchError when it is of a dataset of another length: the order would be another.
        """
        if state["length"] != self.length:
            raise StateMismatchError(
                f"the dataset has {self.length} samples here and had {state['length']} in the checkpoint",
                hint="Train on the same data, or leave the DataOrder out of the state to begin it anew",
            )
        self.position, self.seed, self.shuffle = int(state["position"]), int(state["seed"]), bool(state["shuffle"])
        self._orders.clear()
        self._ahead = False

"""Lightning: the sharded checkpoints of ``ModelParallelStrategy`` (FSDP2, tensor parallelism) are adopted.

    strategy = TierModelParallelStrategy("s3://bucket/run", data_parallel_size=8, tensor_parallel_size=1)
    trainer = Trainer(strategy=strategy, callbacks=[ModelCheckpoint(dirpath="out", every_n_train_steps=100)])
    trainer.fit(model, data, ckpt_path=newest("out"))

``save_top_k`` removes from ``out`` only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

try:
    from lightning.pytorch.strategies import ModelParallelStrategy
except ModuleNotFoundError:
    from pytorch_lightning.strategies import ModelParallelStrategy

from ..config import Settings
from ..disk.durable import remove_tree
from ..format.layout import step_name
from .directories import Directories, make_way
from .lightning import NEWEST, is_of_host, nothing_to_restore


class TierModelParallelStrategy(ModelParallelStrategy):  # type: ignore[misc]
    """Adopts Lightning's checkpoint directories as ``uri/step-N``, on every rank.

    Raises (in saves) as ``tierckpt.adopt``. Cost: one additional read of the files.
    """

    def __init__(self, uri: str | os.PathLike[str], settings: Settings | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.run = Directories(uri, settings)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        directory, step = Path(self.broadcast(filepath)), checkpoint["global_step"]
        if is_of_host(directory):
            super().save_checkpoint(checkpoint, directory, storage_options)
            return
        make_way(directory)  # last.ckpt is written in place, repeatedly
        self.barrier()
        super().save_checkpoint(checkpoint, directory, storage_options)
        self.run.save(directory, step_name(step))

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """For ``newest``, load the newest usable checkpoint of the run, or nothing."""
        if Path(checkpoint_path).name != NEWEST:
            return dict(super().load_checkpoint(checkpoint_path, weights_only))
        found = self.run.restore(Path(checkpoint_path).parent)
        if found is None:
            return nothing_to_restore(self.run.location.uri)
        loaded = dict(super().load_checkpoint(found, weights_only))
        self.barrier()
        if self.local_rank == 0:
            remove_tree(found, ignore_errors=True)
        return loaded

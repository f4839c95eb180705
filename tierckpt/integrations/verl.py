"""verl: what its trainers write as ``global_step_N`` is adopted, and a run resumes on nodes that never had it.

PPO, by configuration alone:
    trainer.checkpoint_callback_class=tierckpt.integrations.verl.TierCheckpointCallback
    +trainer.checkpoint_uri=s3://bucket/run

SFT, with ``trainer.default_hdfs_dir=s3://bucket/run``:
    sft_trainer.CheckpointHandler = TierCheckpointHandler

Both resume with ``trainer.resume_mode=auto``. Settings are ``TIERCKPT_*`` variables, on every node.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.utils.checkpoint.checkpoint_handler import CheckpointHandler, OrchestrationMode
from verl.utils.checkpoint.checkpoint_manager import get_checkpoint_tracker_filename

from ..adoption import adopt
from ..client import latest
from ..errors import ConfigError
from ..format.layout import parse_uri, step_of
from ..save.adopted_directory import identity
from ..stores.schemes import check_location
from .directories import Directories, make_way
from .ray import alive_nodes, on_nodes


class TierCheckpointCallback(CheckpointCallback):  # type: ignore[misc]
    """Adopts each ``global_step_N``, on every node with a part of it, as ``trainer.checkpoint_uri/global_step_N``.

    Make it before the trainer looks for a checkpoint: it restores the newest one on every node. Raises ConfigError: no
    URI, or ``async_save``; as ``tierckpt.adopt``.
    """

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        writers = (config.actor_rollout_ref.actor, config.get("critic") or {})
        if any((writer.get("checkpoint") or {}).get("async_save") for writer in writers):
            raise ConfigError(
                "verl's async_save calls before the files are written", hint="Set checkpoint.async_save=False"
            )
        self.run = _Cluster(_checked(config.trainer.get("checkpoint_uri"), "+trainer.checkpoint_uri"))
        if config.trainer.resume_mode == "auto":
            self.run.restore(config.trainer.default_local_dir)

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **_: Any) -> None:
        self.run.save(checkpoint_dir)


class TierCheckpointHandler(CheckpointHandler):  # type: ignore[misc]
    """Adopts checkpoints of verl's SFT to the URI ``default_hdfs_dir``.

    Raises (in ``save_checkpoint``) as ``tierckpt.adopt``. Cost: one additional read of the files.
    """

    def __init__(self, *args: Any, default_hdfs_dir: str | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        uri = _checked(default_hdfs_dir, "trainer.default_hdfs_dir")
        self.run = Directories(uri) if self.mode == OrchestrationMode.SPMD else _Cluster(uri)

    def save_checkpoint(self, step: int) -> None:
        directory = Path(self.default_local_dir, f"global_step_{step}")
        if self.mode == OrchestrationMode.SPMD:  # this rank writes here, and has not begun
            make_way(directory)
        super().save_checkpoint(step)
        self.run.save(str(directory))

    def _find_latest_checkpoint(self) -> str | None:
        found = self.run.restore(self.default_local_dir)
        return str(found) if found is not None else super()._find_latest_checkpoint()


def _checked(uri: str | None, key: str) -> str:
    if not uri:
        raise ConfigError(f"{key} is not set", hint=f"Say where checkpoints go: {key}=s3://bucket/run")
    return check_location(parse_uri(uri)).uri


class _Cluster:
    """Worker directories on Ray nodes, not necessarily the driver's."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def save(self, directory: str) -> None:
        """Adopt ``directory`` of every node into one checkpoint, once per shared directory.

        By copies: workers write in place, also after an earlier step is restored.
        """
        nodes, attempt = _places(partial(identity, Path(directory))), secrets.token_hex(8)
        if not nodes:
            raise ConfigError(f"{directory} is on no node", hint="Is trainer.default_local_dir removed meanwhile?")
        uri = parse_uri(self.uri).child(Path(directory).name).uri
        work = partial(adopt, directory, uri, overwrite=True, attempt=attempt)
        on_nodes({node: partial(work, ranks=(rank, len(nodes))) for rank, node in enumerate(nodes)})

    def restore(self, into: str) -> str | None:
        newest = latest(self.uri)
        if newest is None:
            return None
        on_nodes(dict.fromkeys(_places(partial(_make_place, into)), partial(_restore, self.uri, newest, into)))
        return str(Path(into) / parse_uri(newest).name)


def _places(find: Callable[[], str | None]) -> list[str]:
    nodes: dict[str, str] = {}
    for node, directory in on_nodes(dict.fromkeys(alive_nodes(), find)).items():
        if directory is not None:
            nodes.setdefault(directory, node)
    return list(nodes.values())


def _make_place(directory: str) -> str | None:
    Path(directory).mkdir(parents=True, exist_ok=True)
    status = Path(directory).stat()
    return f"{status.st_ino}-{status.st_mtime_ns}"


def _restore(run: str, uri: str, into: str) -> None:
    found = Directories(run).restore_checkpoint(parse_uri(uri), into)
    Path(get_checkpoint_tracker_filename(into)).write_text(str(step_of(found.name)))

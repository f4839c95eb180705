"""Ray: checkpoints of Ray Train are adopted, and every node of a cluster has a model before a rollout.

ray.train.report(metrics, checkpoint, checkpoint_upload_fn=upload("s3://bucket/experiment"))
directory = restore("s3://bucket/experiment", "resume")
prefetch("s3://models/llama-8b")
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import ray

from ..adoption import adopt
from ..config import Settings
from ..errors import ConfigError
from ..format.layout import parse_uri
from ..restore.prefetch import prefetch as fetch
from .directories import Directories

T = TypeVar("T")


def upload(
    uri: str | os.PathLike[str], settings: Settings | None = None, *, every_rank: bool = True, **overrides: Any
) -> Callable[[Any, str], Any]:
    """Return a ``checkpoint_upload_fn`` that adopts the local checkpoint as ``uri/NAME`` and returns at once.

    Ray names it and requires ``uri`` to be the experiment's directory in its ``storage_path``. Afterwards the local
    directory may be deleted or reused. ``every_rank``: False if only one worker reports a checkpoint; by default the
    workers wait for each other.

    Raises (in ``report``): as ``tierckpt.adopt``; ConfigError: the checkpoint is not on this node.
    """
    location, settings = parse_uri(uri), Settings.load(settings, **overrides)

    def adopted(checkpoint: Any, name: str) -> Any:
        from ray import train

        if not Path(checkpoint.path).is_dir():
            raise ConfigError(f"{checkpoint.path} is not on this node", hint="Report a local Checkpoint.from_directory")
        ranks = None if every_rank else (0, 1)
        adopt(checkpoint.path, location.child(name).uri, overwrite=True, ranks=ranks, settings=settings)
        storage = train.get_context().get_storage()
        return type(checkpoint)(f"{storage.experiment_fs_path}/{name}", storage.storage_filesystem)

    return adopted


def restore(
    uri: str | os.PathLike[str], into: str | os.PathLike[str], settings: Settings | None = None, **overrides: Any
) -> Path | None:
    """Restore the newest usable checkpoint to ``into/NAME``; return that, or None."""
    return Directories(uri, settings, **overrides).restore(into)


def prefetch(uri: str, timeout_seconds: float = 3600.0, **options: Any) -> dict[str, str]:
    """Run ``tierckpt.prefetch(uri, **options)`` on every alive node; return directories by node id.

    Raises the error of a node; ray.exceptions.GetTimeoutError.
    """

    def on_node() -> str:
        return str(fetch(uri, **options))

    return on_nodes(dict.fromkeys(alive_nodes(), on_node), timeout_seconds)


def alive_nodes() -> list[str]:
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def on_nodes(work: Mapping[str, Callable[[], T]], timeout_seconds: float = 3600.0) -> dict[str, T]:
    """Run ``work`` on each node in parallel. Raises the error of a node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0)(_call)
    running = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(call)
        for node, call in work.items()
    ]
    return dict(zip(work, ray.get(running, timeout=timeout_seconds), strict=True))


def _call(work: Callable[[], T]) -> T:
    return work()

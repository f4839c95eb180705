"""Cost of planning a save: first and second save of one structure, with stock planners and TierSavePlanner.

    python bench/plan.py [--ranks 256] [--tensors 2000] [--single 50000]

Many ranks are simulated: the first one plans a real state dict (three quarters FSDP shards, one quarter replicated) in
a process group of the ``fake`` backend, and the other local plans are derived from its plan. The coordinator then does
all its work: unpickle the gathered plans, plan, deduplicate replicated tensors (as TierStorageWriter does with any
planner), pickle the answers, and pickle the metadata, as every save must.

Seconds are CPU seconds of the working thread, which other work on the machine affects little. Every row runs in its own
process. Prints a table and writes bench/out/plan.json.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tierckpt.dcp import split
from tierckpt.dcp.planner import TierSavePlanner

OUT = Path(__file__).parent / "out" / "plan.json"
ROWS, COLUMNS = 8, 1024
LATER_SAVES = {"many": 1, "one": 5}

PLANNERS: dict[str, Callable[[], DefaultSavePlanner]] = {
    "stock": DefaultSavePlanner,
    "stock, enable_plan_caching": lambda: DefaultSavePlanner(enable_plan_caching=True),
    "TierSavePlanner": TierSavePlanner,
}


class Clock:
    """CPU seconds of this thread, by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def measured(self, phase: str, work: Callable[[], Any]) -> Any:
        begun = time.thread_time()
        result = work()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.thread_time() - begun
        return result


# --- many ranks ---------------------------------------------------------------------------------------------------


def sharded_state(rank_count: int, tensor_count: int) -> dict[str, Any]:
    """Return the state of one rank. Its memory is untouched: planning uses only shapes."""
    mesh = init_device_mesh("cpu", (rank_count,))
    state: dict[str, Any] = {"step": 1}
    for number in range(tensor_count - 1):
        if number % 4 == 3:
            state[f"replicated.{number}"] = torch.empty(1).expand(ROWS * 256, COLUMNS)
        else:
            local = torch.empty(1).expand(ROWS, COLUMNS)
            state[f"sharded.{number}"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return state


def plan_of_rank(plan: SavePlan, rank: int) -> SavePlan:
    """Return rank 0's plan as ``rank`` would have made it: with other shard offsets."""
    return replace(plan, items=[item_of_rank(item, rank) for item in plan.items])


def item_of_rank(item: WriteItem, rank: int) -> WriteItem:
    if item.type != WriteItemType.SHARD or item.tensor_data is None:
        return item
    data = item.tensor_data
    offsets = torch.Size([rank * ROWS, 0])
    chunk = ChunkStorageMetadata(offsets, data.chunk.sizes)
    return WriteItem(
        MetadataIndex(item.index.fqn, offsets), item.type, None, TensorWriteData(chunk, data.properties, data.size)
    )


def save_of_ranks(planner: DefaultSavePlanner, state: dict[str, Any], sent: list[bytes]) -> dict[str, Any]:
    """Run one save with a real rank 0 and coordinator. ``sent`` has the full plans of the other ranks.

    After a save it has what they send next: a short message if rank 0 sent no more.
    """
    clock = Clock()
    clock.measured("rank", lambda: planner.set_up_planner(state, None, True))
    local = split.keep_items(clock.measured("rank", planner.create_local_plan))
    if local.usable:
        sent[1:] = [pickle.dumps(split.keep_items(plan_of_rank(local, rank))) for rank in range(1, len(sent))]
    sent[0] = clock.measured("rank", lambda: pickle.dumps(local))
    if not local.usable and local.planner_data is None:  # stock's message is the same on every rank
        sent[1:] = sent[:1] * (len(sent) - 1)
    plans = clock.measured("gather", lambda: [pickle.loads(data) for data in sent])
    plans, metadata = clock.measured("coordinator", lambda: planner.create_global_plan(plans))
    plans = clock.measured("balance_replicated", lambda: split.balance_replicated(plans))
    answers = clock.measured("scatter", lambda: [pickle.dumps(plan) for plan in plans])
    final = clock.measured("rank", lambda: planner.finish_plan(pickle.loads(answers[0])))
    parts = [item.part for plan in plans for item in plan.items if isinstance(item, split.PartItem)]
    clock.measured("balance_replicated", lambda: split.amend(metadata, parts))
    clock.measured("metadata", lambda: pickle.dumps(metadata))
    facts = {"sent_bytes": len(sent[0]), "answer_bytes": len(answers[0]), "items_of_rank_0": len(final.items)}
    if isinstance(planner, TierSavePlanner):
        tickets = [pickle.loads(answer).planner_data for answer in answers]
        held = split.Held(())
        sent[1:] = [
            pickle.dumps(SavePlan([], held, replace(ticket, alive=frozenset()), usable=False)) for ticket in tickets[1:]
        ]
    seconds = clock.seconds
    metadata_seconds = seconds.pop("metadata")
    return {**facts, "seconds": sum(seconds.values()), "metadata_seconds": metadata_seconds, "phases": seconds}


def many_ranks(row: str, rank_count: int, tensor_count: int) -> dict[str, Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=rank_count)
    state, sent = sharded_state(rank_count, tensor_count), [b""] * rank_count
    planner = PLANNERS[row]()
    return summary([save_of_ranks(planner, state, sent) for _ in range(1 + LATER_SAVES["many"])])


# --- one rank -----------------------------------------------------------------------------------------------------


def small_tensors(count: int) -> dict[str, Any]:
    """Return a model and its Adam state, nested as ``get_state_dict`` returns them."""
    quarter = count // 4
    return {
        "model": {f"layers.{number}.weight": torch.empty(4, 3) for number in range(quarter)},
        "optimizer": {
            f"layers.{number}.weight": {
                "exp_avg": torch.empty(4, 3),
                "exp_avg_sq": torch.empty(4, 3),
                "step": torch.tensor(1.0),
            }
            for number in range(quarter)
        },
        "epoch": 1,
    }


def save_of_one(planner: DefaultSavePlanner, state: dict[str, Any]) -> dict[str, Any]:
    clock = Clock()
    clock.measured("rank", lambda: planner.set_up_planner(state, None, True))
    local = clock.measured("rank", planner.create_local_plan)
    answer: tuple[list[SavePlan], Metadata] = clock.measured("coordinator", lambda: planner.create_global_plan([local]))
    final = clock.measured("rank", lambda: planner.finish_plan(answer[0][0]))
    metadata_seconds = Clock()
    metadata_seconds.measured("metadata", lambda: pickle.dumps(answer[1]))
    return {
        "items_of_rank_0": len(final.items),
        "seconds": sum(clock.seconds.values()),
        "metadata_seconds": metadata_seconds.seconds["metadata"],
        "phases": clock.seconds,
    }


def one_rank(row: str, tensor_count: int) -> dict[str, Any]:
    state, planner = small_tensors(tensor_count), PLANNERS[row]()
    return summary([save_of_one(planner, state) for _ in range(1 + LATER_SAVES["one"])])


def summary(saves: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first save and the median of the later ones."""
    first, *later = saves
    second = sorted(later, key=lambda save: float(save["seconds"]))[len(later) // 2]
    return {
        "first": first,
        "second": second,
        "second_to_first": second["seconds"] / first["seconds"],
        "rss_bytes_max": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


# --- the table ----------------------------------------------------------------------------------------------------


def in_own_process(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--row", *arguments], stdout=subprocess.PIPE, check=True, timeout=600
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def print_table(case: str, rows: dict[str, Any]) -> None:
    print(f"\n{case}\n")
    print(
        "| planner | first save, s | second, s | second / first | a rank sends, second | metadata, s | peak RSS, GiB |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        sent = row["second"].get("sent_bytes")
        print(
            f"| {name} | {row['first']['seconds']:.2f} | {row['second']['seconds']:.3f} | {row['second_to_first']:.1%} "
            f"| {'-' if sent is None else f'{sent:,} bytes'} | {row['second']['metadata_seconds']:.2f} "
            f"| {row['rss_bytes_max'] / 2**30:.1f} |"
        )
    for name, row in rows.items():
        phases = "; ".join(
            f"{save}: " + ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in row[save]["phases"].items())
            for save in ("first", "second")
        )
        print(f"{name}: {phases}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--tensors", type=int, default=2000, help="tensors of each of these ranks")
    parser.add_argument("--single", type=int, default=50_000, help="tensors of the rank that saves alone")
    parser.add_argument("--row", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        case, row, *counts = arguments.row
        work = many_ranks if case == "many" else one_rank
        print(json.dumps(work(row, *map(int, counts))))
        return
    ranks, tensors, single = arguments.ranks, arguments.tensors, arguments.single
    cases = {
        f"{ranks} ranks x {tensors:,} tensors": ("many", str(ranks), str(tensors)),
        f"1 rank x {single:,} tensors": ("one", str(single)),
    }
    results = {}
    for title, (case, *counts) in cases.items():
        results[title] = {row: in_own_process(case, row, *counts) for row in PLANNERS}
        print_table(title, results[title])
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({**machine, "torch": torch.__version__, "cases": results}, indent=2) + "\n")
    print(f"written to {OUT.relative_to(Path.cwd()) if OUT.is_relative_to(Path.cwd()) else OUT}", file=sys.stderr)


if __name__ == "__main__":
    main()

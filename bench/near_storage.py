"""Cost of an optimizer whose state is on the SSD, compared with one in the trainer.

    python bench/near_storage.py [--parameters-m 16] [--steps 12] [--workers 2] [--directory DIR]

AdamW (fused), bfloat16 parameters and gradients. "in the trainer": float32 masters and an ordinary optimizer; a
checkpoint copies all of it (14 bytes a parameter). "near storage": another process has masters and moments. Each row
has its own process. Memory is that process's growth from before its parameters to after its steps, anonymous and
shared, without gradients and mapped files. CPU is the sum over all processes. The link counts the bytes copied from and
to the trainer's tensors. Prints the table, and writes bench/out/near_storage.json.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "out" / "near_storage.json"
MODES = ("in the trainer", "near storage")
TENSORS = 16


def memory_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the kernel
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(mode: str, given: argparse.Namespace, directory: Path) -> dict[str, Any]:
    import torch

    from tierckpt import Checkpointer, NearStorageOptimizer

    torch.set_num_threads(given.workers)
    count = int(given.parameters_m * 1e6) // TENSORS
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(8))], fused=True)  # load libraries before the measurement
    before = memory_bytes()
    weights = [torch.nn.Parameter(torch.randn(count).bfloat16()) for _ in range(TENSORS)]
    gradients = [torch.randn(count).bfloat16() for _ in range(TENSORS)]
    is_near = mode == "near storage"
    masters = [] if is_near else [torch.nn.Parameter(one.detach().float()) for one in weights]
    options: dict[str, Any] = {"lr": 1e-3, "fused": True}
    near: NearStorageOptimizer | None = None
    if is_near:
        options |= {"directory": directory / "near", "workers": given.workers}
        near = NearStorageOptimizer(weights, torch.optim.AdamW, **options)
    optimizer = near or torch.optim.AdamW(masters, **options)
    pid = near.process_id if near is not None else 0

    def spent() -> float:
        return time.process_time() + (cpu_seconds(pid) if pid else 0.0)

    times, moved, cpu = [], [], spent()
    for number in range(given.steps):
        if number == 2:  # the first steps allocate the state and touch its mapping
            cpu = spent()
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        begun, had = time.perf_counter(), near.moved_bytes if near is not None else 0
        for weight, master in zip(weights, masters, strict=False):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=False):
                weight.copy_(master)
        times.append(time.perf_counter() - begun)
        moved.append((near.moved_bytes if near is not None else 0) - had)
        for one in (*weights, *masters):
            one.grad = None
    cpu = (spent() - cpu) / (given.steps - 2)
    memory = memory_bytes() - before - 2 * count * TENSORS
    commit = 14 * count * TENSORS
    if near is not None:
        had = near.moved_bytes
        with Checkpointer(directory / "run") as checkpointer:
            begun = time.perf_counter()
            saved = checkpointer.save(1, {"model": torch.nn.ParameterList(weights), "optimizer": near})
            asked = time.perf_counter() - begun
            saved.result(300)
        commit = near.moved_bytes - had + sum(weight.nbytes for weight in weights)
        near.close()
    else:
        asked = 0.0
    total = count * TENSORS
    return {
        "step_ms": 1e3 * statistics.median(times[2:]),
        "memory_bytes_per_parameter": memory / total,
        "step_bytes_per_parameter": statistics.median(moved[2:]) / total,
        "commit_bytes_per_parameter": commit / total,
        "cpu_ms_per_step": 1e3 * cpu,
        "asked_ms": 1e3 * asked,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--parameters-m", type=float, default=16.0)
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    options.add_argument("--mode", choices=MODES)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as name:
        if given.mode:
            os.environ["TIERCKPT_LOCAL_ROOT"] = f"{name}/root"
            print(json.dumps(measure(given.mode, given, Path(name))))
            return
    rows = {}
    for mode in MODES:
        command = [sys.executable, __file__, *sys.argv[1:], "--mode", mode]
        rows[mode] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    from rich.console import Console
    from rich.table import Table

    table = Table("optimizer", "step, ms", "CPU of a step, ms", "memory of the trainer, B/parameter",
                  "on the link a step, B/parameter", "at a commit, B/parameter")  # fmt: skip
    for mode, row in rows.items():
        table.add_row(mode, f"{row['step_ms']:.0f}", f"{row['cpu_ms_per_step']:.0f}",
                      f"{row['memory_bytes_per_parameter']:.2f}", f"{row['step_bytes_per_parameter']:.3f}",
                      f"{row['commit_bytes_per_parameter']:.3f}")  # fmt: skip
    console = Console()
    console.print(f"{given.parameters_m:g} M parameters, {given.workers} threads; memory without gradients")
    console.print(table)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"rows": rows, "options": {**vars(given), "directory": "", "mode": ""}}, indent=1))


if __name__ == "__main__":
    main()

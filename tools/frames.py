"""How deep the way of a byte is: the Python stack at the system call, for a save, a load, a logged step and a prefetch.

    python tools/frames.py            prints each stack, from the call a framework makes to the system call

Real files and a real HTTP server on this machine. A way that crosses threads is the stack of the thread that calls,
the coroutines that wait for it, and the main thread; a function counts once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import tierckpt

ROOT = Path(__file__).parents[1]
FROM = {"write_data", "read_data"}
"""Where counting starts: what DCP calls, or the command line."""


class Spy:
    """Records the deepest of our stacks at each call of a function of ``owner``."""

    def __init__(self, owner: Any, name: str, *, across_threads: bool = False) -> None:
        self.owner, self.name, self.real, self.across = owner, name, getattr(owner, name), across_threads
        self.stacks: list[list[traceback.FrameSummary]] = []

    def __enter__(self) -> Spy:
        def call(*given: Any, **options: Any) -> Any:
            here = list(traceback.extract_stack())[:-1]
            if self.across:
                here = [*main_thread(), *waiting_coroutines(), *here]
            self.stacks.append(here)
            return self.real(*given, **options)

        setattr(self.owner, self.name, call)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self.owner, self.name, self.real)


def main_thread() -> list[traceback.FrameSummary]:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return list(traceback.extract_stack(frame))


def waiting_coroutines() -> list[traceback.FrameSummary]:
    """The frames of the coroutines that have begun and not ended, outermost first in each task."""
    found = []
    for task in [thing for thing in gc.get_objects() if isinstance(thing, asyncio.Task) and not thing.done()]:
        coroutine: Any = task.get_coro()
        while (frame := getattr(coroutine, "cr_frame", None)) is not None:
            found.append(traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            coroutine = coroutine.cr_await
    return found


def ours(stack: list[traceback.FrameSummary]) -> list[str]:
    """The frames of this project, outermost first, from the entry point on where it is in the same thread."""
    seen = {(frame.filename, frame.name): frame for frame in stack if str(ROOT / "tierckpt") in frame.filename}
    frames = list(seen.values())
    names = [frame.name for frame in frames]
    start = next((index for index, name in enumerate(names) if name in FROM), 0)
    return [f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno} {frame.name}" for frame in frames[start:]]


def show(title: str, call: str, stacks: list[list[traceback.FrameSummary]]) -> None:
    deepest = max((ours(stack) for stack in stacks), key=len, default=[])
    print(f"\n{title}: {len(deepest)} frames to {call}")
    for line in deepest:
        print(f"  {line}")


def traced(
    owner: Any, name: str, work: Callable[[], Any], *, across_threads: bool = False
) -> list[list[traceback.FrameSummary]]:
    with Spy(owner, name, across_threads=across_threads) as spy:
        work()
    return spy.stacks


def show_log(folder: str) -> None:
    """A gradient, from the hook of its optimizer to the log on disk."""
    from tierckpt.replay.link import Link, TensorCopy
    from tierckpt.replay.log_writer import LogWriter

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    spies = {
        "before the update": Spy(TensorCopy, "__init__"),
        "after the update": Spy(Link, "update_ends"),
        "Checkpointer.step": Spy(LogWriter, "put"),
        "the thread of the log": Spy(os, "pwrite"),
    }
    every_step = tierckpt.EveryStep(gradient_log=True)
    with contextlib.ExitStack() as stack, tierckpt.Checkpointer(f"{folder}/log", every_step=every_step) as checkpointer:
        for spy in spies.values():
            stack.enter_context(spy)
        for step in range(1, 5):
            model(torch.rand(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step(step, {"model": model, "optimizer": optimizer})
    spies["the thread of the log"].stacks = [
        stack
        for stack in spies["the thread of the log"].stacks
        if {"_work", "_append"} <= {frame.name for frame in stack}
        and "_begin_segment" not in {frame.name for frame in stack}
    ]
    for name, spy in spies.items():
        show(f"gradient log, {name}", spy.name, spy.stacks)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(TIERCKPT_LOCAL_ROOT=f"{folder}/local", TIERCKPT_MOVER="inline")
        uri, state = f"{folder}/shared/run/step-1", {"w": torch.rand(4 << 20)}

        def save() -> None:
            dcp.save(state, storage_writer=tierckpt.TierStorageWriter(uri), no_dist=True)

        def load() -> None:
            dcp.load(dict(state), storage_reader=tierckpt.TierStorageReader(uri), no_dist=True)

        show("write_data", "pwrite", traced(os, "pwrite", save))
        show("read_data", "preadv", traced(os, "preadv", load))
        show_log(folder)
        sys.path.insert(0, str(ROOT))
        from tests.services import moto_server

        with moto_server() as server, server.bucket() as bucket:
            os.environ.update(server.environment())
            model = Path(folder, "model.bin")
            model.write_bytes(os.urandom(16 << 20))
            import fsspec

            files, name = fsspec.filesystem("tierckpt"), f"tierckpt://s3/{bucket}/model/model.bin"
            files.put_file(str(model), name)
            files.wait(name)

            def prefetch() -> None:
                from tierckpt.cli.ui.app import run

                with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
                    run(["prefetch", f"s3://{bucket}/model", "--to", f"{folder}/here", "--json"])

            show("tierckpt prefetch", "recv_into", traced(socket.socket, "recv_into", prefetch, across_threads=True))


if __name__ == "__main__":
    main()

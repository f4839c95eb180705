"""The main use of tierckpt, end to end, on this machine: ``make demo``, or ``python examples/demo/run.py``.

A small GPT trains with FSDP2 on two ranks and saves to S3 through the local tier. All ranks are killed and the node's
disk is lost. The job resumes from S3 and equals an uninterrupted run bit for bit. Plain PyTorch reads the checkpoint. A
second node fetches the exported weights and writes a line of text. A job that logs its steps is killed between two
saves and loses at most one step.

Code checks every sentence with a tick; the exit code is 0 only if all are true. S3 is a moto server started here, or
the server at ``TIERCKPT_DEMO_S3_ENDPOINT`` (with ``AWS_ACCESS_KEY_ID`` and ``AWS_SECRET_ACCESS_KEY``), such as the
MinIO of ``docker compose up``. All files are under ``.demo/``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import DemoFailed, Processes, follow, free_port, is_running, kill_tree, wait_for_port
from rich.console import Console
from rich.markup import escape
from rich.table import Table

HERE = Path(__file__).resolve().parent
WORK = HERE.parents[1] / ".demo"
STEPS, SAVE_EVERY = 60, 10
KILL_AFTER_SAVE_OF = 40
KILL_AFTER_STEP = 47
TRAINING_TIMEOUT_SECONDS = 240.0

Event = dict[str, Any]


@dataclass
class Run:
    """Results of one run of the training job."""

    events: list[Event] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def steps(self) -> dict[int, Event]:
        """Return each step's event, with its loss in hexadecimal."""
        return {event["step"]: event for event in self.of("step")}

    @property
    def saved_steps(self) -> list[int]:
        return [event["step"] for event in self.of("save")]

    @property
    def resumed_from(self) -> int | None:
        return self.of("start")[0]["resumed_from"]


class Demo:
    def __init__(self, console: Console, processes: Processes) -> None:
        self.console = console
        self.processes = processes
        self.claims = 0
        self.bucket = f"tierckpt-demo-{os.getpid()}-{int(time.time())}"
        self.environment = _clean_environment()

    # Printing and checking

    def stage(self, number: int, title: str) -> None:
        self.console.print(f"\n[bold cyan]{number}[/]  [bold]{title}[/]")

    def note(self, text: str) -> None:
        self.console.print(f"   [dim]{escape(text)}[/]", highlight=False)

    def claim(self, text: str, holds: bool, otherwise: str = "") -> None:
        if not holds:
            raise DemoFailed(f"not true: {text}" + (f" ({otherwise})" if otherwise else ""))
        self.claims += 1
        self.console.print(f"   [green]✓[/] {escape(text)}", highlight=False)

    # The job, one method for each stage

    def start_s3(self) -> None:
        self.stage(1, "Shared storage")
        endpoint = os.environ.get("TIERCKPT_DEMO_S3_ENDPOINT") or self._start_moto()
        self.environment["AWS_ENDPOINT_URL"] = endpoint
        self._s3().mkdir(self.bucket)
        self.claim(f"S3 answers at {endpoint}, bucket {self.bucket} is new", self._s3().ls(self.bucket) == [])

    def train_uninterrupted(self) -> Run:
        self.stage(2, f"The reference: {STEPS} steps without interruption, a save every {SAVE_EVERY}")
        run = self._train("reference", self._uri("reference"), node="node-reference")
        self.claim(f"{STEPS} losses are recorded", sorted(run.steps) == list(range(1, STEPS + 1)))
        first, last = _loss(run.steps[1]), _loss(run.steps[STEPS])
        self.claim(f"it learns: loss {first:.3f} at step 1, {last:.3f} at step {STEPS}", last < first - 0.5)
        return run

    def train_and_kill(self, reference: Run) -> Run:
        self.stage(3, f"The same job again, killed with SIGKILL as the save of step {KILL_AFTER_SAVE_OF} is in flight")
        run, started = Run(), time.monotonic()
        job, events = self._start_training("killed", self._uri("run"), node="node-a")
        for event in self._follow("killed", job, events, kill_at=KILL_AFTER_SAVE_OF):
            run.events.append(event)
        if job.poll() is not None:
            self.processes.check_exit("killed", job)
        ranks = kill_tree(job)
        self.claim(
            f"all processes of the job are dead after {time.monotonic() - started:.0f} s (signal {-job.returncode})",
            len(ranks) >= 2 and job.returncode == -signal.SIGKILL and not any(map(is_running, ranks)),
            f"{len(ranks)} ranks, exit code {job.returncode}",
        )
        same = all(reference.steps[step] == event for step, event in run.steps.items())
        self.claim(f"up to step {max(run.steps)} it equals the reference, bit for bit", same)
        return run

    def lose_the_node(self) -> int:
        self.stage(4, "The node is lost, with its SSD")
        local = WORK / "node-a"
        files = [path for path in local.rglob("*") if path.is_file()]
        size_bytes = sum(path.stat().st_size for path in files)
        self.claim(f"the local tier held {len(files)} files, {_mb(size_bytes)}", size_bytes > 0)
        shutil.rmtree(local)
        self.claim("they are deleted", not local.exists())
        committed = self._committed_steps("run")
        newest = max(committed, default=0)
        self.claim(f"S3 has the steps {committed}, so the newest is {newest}", newest >= SAVE_EVERY)
        fate = "had made it" if KILL_AFTER_SAVE_OF in committed else "was cut off, and S3 does not list it"
        self.note(f"the save of step {KILL_AFTER_SAVE_OF} {fate}")
        return newest

    def resume(self, newest: int) -> Run:
        self.stage(5, "The job starts on another node with only the URI")
        run = self._train("resumed", self._uri("run"), node="node-b")
        self.claim(
            f"it resumed from step {newest}, the newest that S3 has committed",
            run.resumed_from == newest,
            f"it resumed from {run.resumed_from}",
        )
        self.claim(f"and ran on to step {STEPS}", sorted(run.steps) == list(range(newest + 1, STEPS + 1)))
        return run

    def compare_losses(self, reference: Run, resumed: Run) -> None:
        self.stage(6, "The resumed run equals the uninterrupted one, bit for bit")
        for step in sorted({min(resumed.steps), STEPS}):
            ours, theirs = resumed.steps[step]["loss"], reference.steps[step]["loss"]
            self.note(f"step {step}: {ours} resumed, {theirs} uninterrupted")
        different = [step for step, event in resumed.steps.items() if reference.steps[step] != event]
        text = f"all {len(resumed.steps)} losses after the resume equal those of the uninterrupted run, bit for bit"
        self.claim(text, not different, f"steps {different} differ")
        weights = resumed.summary["weights"]
        same = bool(weights) and weights == reference.summary["weights"]
        self.claim(f"and so do all {len(weights)} weights at step {STEPS}", same)

    def load_with_stock_pytorch(self, resumed: Run) -> None:
        self.stage(7, "Plain PyTorch reads it, in a process where tierckpt cannot be imported")
        stock, ours = (self._read(f"run/step-{STEPS}", reader) for reader in ("stock", "tierckpt"))
        tensors = stock["tensors"]
        self.claim(f"FsspecReader read {len(tensors)} tensors, {len(stock['others'])} other items", len(tensors) > 100)
        self.claim("TierStorageReader reads the same, bit for bit", stock == ours)
        reference = self._read(f"reference/step-{STEPS}", "stock")["tensors"]
        self.claim("and the reference run's checkpoint has the same tensors, bit for bit", reference == tensors)
        live = {f"model.{name}": digest for name, digest in resumed.summary["weights"].items()}
        self.claim("and equals the memory of the ranks", live.items() <= tensors.items())

    def serve_on_another_node(self, resumed: Run) -> None:
        self.stage(8, "The result is exported, prefetched onto a second node, and used")
        uri, served = self._uri(f"run/step-{STEPS}"), WORK / "node-c" / "model"
        self._tierckpt("verify", uri, "--read-data", node="node-b")
        self.claim(f"tierckpt verify --read-data accepts step {STEPS}", True)
        exported = WORK / "export"
        self._tierckpt("export", uri, "--only", "model", "--to", str(exported), node="node-b")
        (exported / "config.json").write_text(json.dumps(resumed.summary["config"]))
        self._s3().put(f"{exported}/", f"{self.bucket}/models/tiny-gpt/", recursive=True)
        self._tierckpt("prefetch", self._uri("models/tiny-gpt"), "--to", str(served), node="node-c")
        names = sorted(path.name for path in exported.iterdir())
        same = all((served / name).read_bytes() == (exported / name).read_bytes() for name in names)
        self.claim(f"tierckpt prefetch brought {', '.join(names)} to the second node", same)
        out = WORK / "generated.json"
        self._python("generate", HERE / "generate.py", served, "--out", out, node="node-c")
        generated = json.loads(out.read_text())
        same = generated["weights"] == resumed.summary["weights"]
        self.claim("its weights equal the trained model, bit for bit", same)
        self.claim(f"it writes: {generated['line']!r}", len(generated["line"]) > 20)

    def lose_no_step(self, reference: Run) -> None:
        self.stage(9, f"The job logs its steps, and is killed after step {KILL_AFTER_STEP}, between two saves")
        job, events = self._start_training("logged", self._uri("logged"), node="node-d", logs_steps=True)
        run = Run(list(self._follow("logged", job, events, kill_at=KILL_AFTER_STEP, kind="step")))
        if job.poll() is not None:
            self.processes.check_exit("logged", job)
        kill_tree(job)
        run.events = [json.loads(line) for line in events.read_text().splitlines()]
        resumed = self._train("logged-resumed", self._uri("logged"), node="node-d", logs_steps=True)
        last, at = max(run.steps), resumed.resumed_from or 0
        self.claim(
            f"step {last} had ended, step {max(run.saved_steps)} was saved, and it resumed from step {at}",
            last - 1 <= at <= last + 1,
        )
        different = [step for step, event in resumed.steps.items() if reference.steps[step] != event]
        text = f"all {len(resumed.steps)} losses after that equal those of the uninterrupted run, bit for bit"
        self.claim(text, not different, f"steps {different} differ")
        self.claim("and so do all weights", resumed.summary["weights"] == reference.summary["weights"])
        self._tierckpt("report", self._uri("logged"), node="node-d")

    def print_table(self, reference: Run, resumed: Run) -> None:
        columns = ("run", "step", "bytes", "s blocked", "s to local commit", "s to shared commit", "s to restore")
        table = Table(*columns, title="What it cost", title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        for name, run in (("reference", reference), ("resumed", resumed)):
            if run.resumed_from is not None:
                table.add_row(name, str(run.resumed_from), "", "", "", "", _seconds(run.summary["restore_seconds"]))
            for save in run.summary["saves"]:
                seconds = (save[f"{column}_seconds"] for column in ("blocked", "local_commit", "shared_commit"))
                table.add_row(name, str(save["step"]), f"{save['size_bytes']:,}", *map(_seconds, seconds))
        self.console.print()
        self.console.print(table)
        saves = reference.summary["saves"] + resumed.summary["saves"]
        numbers = [value for save in saves for value in save.values()] + [resumed.summary["restore_seconds"]]
        expected = [*range(SAVE_EVERY, STEPS + 1, SAVE_EVERY), *sorted(set(resumed.steps) & set(reference.saved_steps))]
        self.claim(
            f"all {len(expected)} saves are committed on both tiers, and measured",
            [save["step"] for save in saves] == expected and all(isinstance(number, int | float) for number in numbers),
        )

    # Parts

    def _uri(self, path: str) -> str:
        return f"s3://{self.bucket}/{path}"

    def _on(self, node: str) -> dict[str, str]:
        """Return the environment of a process on ``node``, simulated by a separate local root."""
        return {**self.environment, "TIERCKPT_LOCAL_ROOT": str(WORK / node)}

    def _start_moto(self) -> str:
        for _ in range(3):  # another process may take the free port before moto binds it
            port = free_port()
            command = (sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port))
            server = self.processes.start("moto", *command, environment=self.environment)
            if wait_for_port(port, server, timeout_seconds=60):
                return f"http://127.0.0.1:{port}"
        raise DemoFailed(f"the moto S3 server did not start{self.processes.tail('moto')}")

    def _s3(self) -> Any:
        import s3fs

        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL")
        key, secret, endpoint = (self.environment[name] for name in names)
        return s3fs.S3FileSystem(key=key, secret=secret, endpoint_url=endpoint, use_listings_cache=False)

    def remove_bucket(self) -> None:
        """Remove the bucket from a server that is not ours; moto keeps nothing."""
        ours_to_leave_clean = os.environ.get("TIERCKPT_DEMO_S3_ENDPOINT") and "AWS_ENDPOINT_URL" in self.environment
        if ours_to_leave_clean and self._s3().exists(self.bucket):
            self._s3().rm(self.bucket, recursive=True)

    def _start_training(self, name: str, uri: str, node: str, *, logs_steps: bool = False) -> tuple[Any, Path]:
        events, summary = WORK / f"{name}.events.jsonl", WORK / f"{name}.summary.json"
        launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
        script = (HERE / "train.py", uri, "--steps", str(STEPS), "--save-every", str(SAVE_EVERY))
        outputs = ("--events", events, "--summary", summary, *(("--gradient-log",) if logs_steps else ()))
        command = (*launcher, "--nproc-per-node", "2", *script, *outputs)
        return self.processes.start(name, *command, environment=self._on(node)), events

    def _train(self, name: str, uri: str, node: str, *, logs_steps: bool = False) -> Run:
        job, events = self._start_training(name, uri, node, logs_steps=logs_steps)
        run = Run(list(self._follow(name, job, events)))
        job.wait(10)
        self.processes.check_exit(name, job)
        run.summary = json.loads((WORK / f"{name}.summary.json").read_text())
        return run

    def _follow(
        self, name: str, job: Any, events: Path, kill_at: int | None = None, kind: str = "save"
    ) -> Iterator[Event]:
        def at_kill(event: Event) -> bool:
            return event["event"] == kind and event["step"] == kill_at

        loss = 0.0
        for event in follow(events, job, until=at_kill, timeout_seconds=TRAINING_TIMEOUT_SECONDS):
            yield event
            if event["event"] == "start":
                origin = event["resumed_from"]
                self.note("starts from nothing" if origin is None else f"resumes from step {origin}")
            elif event["event"] == "step":
                loss = _loss(event)
            elif not at_kill(event):
                self.note(f"step {event['step']:>3}  loss {loss:.4f}  save started")

    def _committed_steps(self, path: str) -> list[int]:
        listing = json.loads(self._tierckpt("ls", self._uri(path), "--json", node="node-b"))
        return sorted(entry["step"] for entry in listing["checkpoints"] if entry["shared"] == "committed")

    def _tierckpt(self, verb: str, *arguments: str, node: str) -> str:
        self.note(f"$ tierckpt {verb} {' '.join(arguments)}")
        command = (sys.executable, "-m", "tierckpt.cli", verb, *arguments)
        return self.processes.run(f"tierckpt-{verb}", *command, environment=self._on(node))

    def _python(self, name: str, *command: str | Path, node: str) -> None:
        self.processes.run(name, sys.executable, *command, environment=self._on(node))

    def _read(self, path: str, reader: str) -> dict[str, dict[str, str]]:
        out = WORK / f"{path.replace('/', '-')}.{reader}.json"
        script = (HERE / "load_checkpoint.py", self._uri(path), "--reader", reader, "--out", out)
        self._python(f"load-{reader}", *script, node="node-reader")
        return json.loads(out.read_text())


def _clean_environment() -> dict[str, str]:
    """Return this environment without the user's settings that would change the demo."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TIERCKPT_", "AWS_"))}
    given = os.environ if os.environ.get("TIERCKPT_DEMO_S3_ENDPOINT") else {}
    return (
        kept
        | {
            "AWS_ACCESS_KEY_ID": given.get("AWS_ACCESS_KEY_ID", "demo"),
            "AWS_SECRET_ACCESS_KEY": given.get("AWS_SECRET_ACCESS_KEY", "demo-secret"),
            "AWS_REGION": given.get("AWS_REGION", "us-east-1"),
            "AWS_DEFAULT_REGION": given.get("AWS_REGION", "us-east-1"),
            "NO_PROXY": "127.0.0.1,localhost",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})
    )  # a host name may not resolve


def _loss(event: Event) -> float:
    return float.fromhex(event["loss"])


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def perform(demo: Demo) -> None:
    demo.start_s3()
    reference = demo.train_uninterrupted()
    demo.train_and_kill(reference)
    newest = demo.lose_the_node()
    resumed = demo.resume(newest)
    demo.compare_losses(reference, resumed)
    demo.load_with_stock_pytorch(resumed)
    demo.serve_on_another_node(resumed)
    demo.lose_no_step(reference)
    demo.print_table(reference, resumed)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # lets the with blocks clean up
    console, started = Console(soft_wrap=True), time.monotonic()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    with Processes(logs=WORK) as processes:
        demo = Demo(console, processes)
        try:
            perform(demo)
        except DemoFailed as error:
            console.print(f"\n[bold red]✗[/] {escape(str(error))}", highlight=False)
            return 1
        except KeyboardInterrupt:
            console.print("\ninterrupted")
            return 128 + signal.SIGINT
        finally:
            demo.remove_bucket()
    seconds = time.monotonic() - started
    console.print(f"\n[bold green]All {demo.claims} claims hold[/] in {seconds:.0f} s. Files: {WORK}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

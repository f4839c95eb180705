"""A long run under random faults: ``python -m tests.fault.soak [--seconds 3600]``. ``make soak`` runs an hour.

Two trainers save to S3 through a proxy that breaks answers in all its ways. One of them and its agent are killed again
and again. A restore always gives the bytes of the step that it names, no acknowledged save is lost, and the memory,
descriptors and threads of the other trainer do not grow: the medians of the second and last third are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fault import runner, soak_scenarios
from tests.fault.runner import Job
from tests.servers.faultproxy import FaultProxy, Kind, Plan
from tests.services import moto_server
from tierckpt.config import Settings
from tierckpt.errors import TierckptError
from tierckpt.ipc.agent_client import AgentClient

SHARE = 0.05
KIND_SECONDS = 20.0
KILL_SECONDS = (10.0, 40.0)
GROWTH_MAX = 1.05
SPARE = {"threads": 8}
"""The store client's threads come when requests do and go when they have been idle."""
DEADLINE_SECONDS = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fault.soak", description="hours of saves under random faults")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="tierckpt-soak-"))
    try:
        return soak(folder, options.seconds, random.Random(options.seed))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def soak(folder: Path, seconds: float, chance: random.Random) -> int:
    fired: Counter[str] = Counter()
    kills: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(moto_server())
        bucket = stack.enter_context(server.bucket())
        proxy = FaultProxy(server.endpoint)
        endpoint = stack.enter_context(proxy.running())
        os.environ.update(server.environment() | {"AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"})
        stack.callback(runner.kill_all)

        def start(name: str, left: float, **settings: Any) -> Job:
            os.environ["TIERCKPT_LOCAL_ROOT"] = str(folder / f"{name}-local")
            return runner.start(
                soak_scenarios.train, folder, uri=f"s3://{bucket}/run", name=name, seconds=left, **settings
            )

        agent = {"mover": "agent", "idle_seconds": 5.0}
        begun = time.monotonic()
        steady = start("steady", seconds, mover="inline")
        victim = start("victim", seconds, **agent)
        kind_at = kill_at = begun
        while (now := time.monotonic()) < begun + seconds:
            if now >= kind_at:
                fired.update({plan.kind: plan.fired for plan in proxy.plans.values()})
                proxy.plans[bucket] = Plan(chance.choice(list(Kind)), SHARE, chance.randrange(1 << 30))
                kind_at = now + KIND_SECONDS
                _say(folder, now - begun, seconds, fired, kills)
            if now >= kill_at:
                kill_at = now + chance.uniform(*KILL_SECONDS)
                if chance.random() < 0.5:
                    kills["agent"] += _kill_agent(folder / "victim-local")
                if chance.random() < 0.8:
                    victim.kill()
                    kills["trainer"] += 1
                    victim = start("victim", max(5.0, begun + seconds - now), **agent)
            time.sleep(0.2)
        fired.update({plan.kind: plan.fired for plan in proxy.plans.values()})
        proxy.plans.clear()
        codes = steady.codes(DEADLINE_SECONDS) + victim.codes(DEADLINE_SECONDS)
        for job in (steady, victim):
            job.kill()
        output = steady.output()[-3000:]
    return report(folder, codes, fired, kills, output)


def _kill_agent(local_root: Path) -> bool:
    contact = AgentClient(Settings.load(local_root=local_root, mover="agent"))
    try:
        os.kill(contact.ask({"op": "status"}, start=False)["pid"], 9)
    except (TierckptError, OSError):
        return False  # there is none just now
    finally:
        contact.close()
    return True


def _lines(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _say(folder: Path, done: float, seconds: float, fired: Counter[str], kills: Counter[str]) -> None:
    steps = {name: sum("step" in line for line in _lines(folder, name)) for name in ("steady", "victim")}
    print(f"{done:6.0f} of {seconds:.0f} s: steps {steps}, faults {fired.total()}, kills {dict(kills)}", flush=True)


def report(folder: Path, codes: list[int | None], fired: Counter[str], kills: Counter[str], output: str) -> int:
    problems = [] if codes == [0, 0] else [f"the trainers ended with {codes}\n{output}"]
    for name in ("steady", "victim"):
        lines = _lines(folder, name)
        problems += [f"{name}: {line}" for line in lines if not line["good"]]
        before = 0
        for line in lines:
            if "restored" in line and (line["restored"] or 0) < before:
                problems.append(f"{name}: step {before} was acknowledged, and {line['restored']} restored")
            before = line.get("step", before) if not line.get("told") else before
        told = Counter(line["told"] for line in lines if line.get("told"))
        print(f"{name}: {sum('step' in line for line in lines)} saves, told {dict(told)}")
    steps = [line for line in _lines(folder, "steady") if "step" in line]
    third = len(steps) // 3
    for what in ("resident_bytes", "files", "threads"):
        # The first third fills pools and allocators.
        first = statistics.median(line[what] for line in steps[third:-third])
        last = statistics.median(line[what] for line in steps[-third:])
        print(f"{what}: {first:.0f} in the second third, {last:.0f} in the last")
        if last > GROWTH_MAX * first + SPARE.get(what, 0):
            problems.append(f"{what} grew from {first:.0f} to {last:.0f}")
    tenth = max(1, len(steps) // 10)
    print("resident MiB over time:", [line["resident_bytes"] >> 20 for line in steps[::tenth]])
    print("threads:", steps[third]["threads_by_name"], "then", steps[-1]["threads_by_name"])
    print(f"faults that fired: {fired.total()} {dict(fired)}; kills {dict(kills)}")
    if not fired.total() or not kills["trainer"]:
        problems.append("nothing went wrong, so nothing was shown")
    print("\n".join(problems) or "nothing torn, nothing lost, nothing grew")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

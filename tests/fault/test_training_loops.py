"""Random training loops with a gradient log: a restore has the bits of training, or reports why it has fewer steps.

The seed of a loop draws its modules, optimizers, schedules, gradients, averages of weights, and edits of everything
that a log covers, with and without a trace in version counters. ``train_and_kill`` trains one and keeps the local root
as a kill leaves it; ``check`` restores that into new objects and compares bits. ``train_for_ever`` trains until killed.

``TIERCKPT_TEST_TRAINING_LOOPS`` loops from seed ``TIERCKPT_TEST_SEED``; in each hundred, a process is killed.
"""

from __future__ import annotations

import ctypes
import logging
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import nn

import tierckpt
from tests.fault.runner import start
from tests.services import ENVIRONMENT
from tierckpt.errors import StateMismatchError
from tierckpt.replay import checksum
from tierckpt.training.codec.attachment import Attachments

KINDS: list[tuple[type[torch.optim.Optimizer], dict[str, Any], bool]] = [
    (torch.optim.AdamW, {"lr": 0.01}, True),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}, True),
    (torch.optim.SGD, {"lr": 0.05}, True),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, True),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}, True),
    (torch.optim.Adagrad, {"lr": 0.05}, True),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}, False),
    (torch.optim.NAdam, {"lr": 0.01}, False),
    (torch.optim.RAdam, {"lr": 0.01}, False),
    (torch.optim.Adamax, {"lr": 0.01}, False),
    (torch.optim.Adadelta, {"lr": 0.5}, False),
]


class Loop:
    """The objects and the steps of a training loop, all drawn from ``seed``."""

    def __init__(self, seed: int, *, has_group: bool = False) -> None:
        chosen = self.chosen = random.Random(seed)
        torch.manual_seed(seed)
        width = chosen.choice((5, 16, 80))
        self.dtype = chosen.choice((torch.float32, torch.float32, torch.bfloat16, torch.float64))
        norm = [nn.BatchNorm1d(width)] if chosen.random() < 0.4 else []
        self.model = nn.ModuleDict(
            {
                "body": nn.Sequential(nn.Linear(12, width), *norm, nn.Tanh(), nn.Linear(width, width)),
                "head": nn.Linear(width, 4),
                "frozen": nn.Linear(4, 24).requires_grad_(False),
                "extra": nn.Linear(24, 3),
            }
        ).to(self.dtype)
        body, head = ([*self.model[name].parameters()] for name in ("body", "head"))
        is_split = chosen.random() < 0.3
        self.optimizers = [self.optimizer(body if is_split else body + head)]
        if is_split:
            self.optimizers.append(self.optimizer(head))
        self.state: dict[str, Any] = {"model": self.model, "step": 0}
        self.state |= {f"optimizer{number}": one for number, one in enumerate(self.optimizers)}
        self.average = None
        if chosen.random() < 0.5:
            self.average = nn.Linear(width, 4).to(self.dtype).requires_grad_(chosen.random() < 0.5)
            self.state["average"] = self.average
        self.schedules: list[Any] = []
        if chosen.random() < 0.5:
            made = (
                lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.97),
                lambda one: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(one, 5),
                lambda one: torch.optim.lr_scheduler.LinearLR(one, 0.2, total_iters=6),
            )
            self.schedules = [chosen.choice(made)(one) for one in self.optimizers]
            self.state |= {f"schedule{number}": one for number, one in enumerate(self.schedules)}
        trainable = self.dtype is torch.float32
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if trainable and chosen.random() < 0.2 else None
        if self.scaler is not None:
            self.state["scaler"] = self.scaler
        self.clip = chosen.choice((None, None, "norm", "value"))
        self.micro = chosen.choice((1, 1, 2, 3))
        self.every = chosen.choice((1, 1, 1, 2))  # steps of training for an update
        self.clears = chosen.choice(("none", "none", "zero", "data", "never"))
        self.averages = chosen.choice(("data", "in place", "replaced", "lerp", "one element"))
        self.takes_turns = is_split and chosen.random() < 0.3
        self.has_closure = self.scaler is None and chosen.random() < 0.1
        self.foreign = self.optimizer(body) if chosen.random() < 0.5 else torch.optim.SGD(body, lr=0.1, fused=True)
        if has_group:  # schedules are of the groups that were there
            self.add_group()
        self.updates = 0
        for one in self.optimizers:
            one.register_step_post_hook(self.count)
        self.other = torch.optim.SGD(self.model["frozen"].parameters(), lr=0.1, fused=chosen.random() < 0.5)

    def count(self, *_: object) -> None:
        self.updates += 1

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        kind, options, has_fused = self.chosen.choice(KINDS)
        ways: list[dict[str, Any]] = [{}, {"foreach": True}, {"foreach": False}]
        if has_fused:
            ways += [{"fused": True}] * 3
        return kind(parameters, **options, **self.chosen.choice(ways))

    def add_group(self) -> None:
        self.optimizers[0].add_param_group({"params": [*self.model["extra"].parameters()], "lr": 0.003})

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        out = self.model["head"](self.model["body"](inputs))
        loss: torch.Tensor = out.square().mean() + self.model["extra"](self.model["frozen"](out)).square().mean()
        return loss.float()

    def train(self, compiled: Callable[[], Any] | None = None) -> None:
        """Make a step, with random data of its number, and no edit."""
        self.state["step"] += 1
        number = self.state["step"]
        if self.clears == "none":
            self.clear()
        drawn = torch.Generator().manual_seed(number)
        for _ in range(self.micro):
            loss = self.loss(torch.randn(6, 12, generator=drawn).to(self.dtype))
            if self.scaler is not None:
                loss = self.scaler.scale(loss * (torch.inf if number % 7 == 3 else 1.0))
            loss.backward()  # type: ignore[no-untyped-call]
        if number % self.every == 0:
            self.update(number, compiled)
        if self.average is not None:
            self.follow(self.average)
        if self.clears in ("zero", "data") and number % self.every == 0:
            self.clear()

    def update(self, number: int, compiled: Callable[[], Any] | None) -> None:
        parameters = [one for one in self.model.parameters() if one.grad is not None]
        if self.clip == "norm" and self.scaler is None:
            nn.utils.clip_grad_norm_(parameters, 0.5)
        if self.clip == "value" and self.scaler is None:
            nn.utils.clip_grad_value_(parameters, 0.1)
        stepped = self.optimizers[number % 2 :][:1] if self.takes_turns else self.optimizers
        for one in stepped:
            if self.scaler is not None:
                self.scaler.step(one)
            elif compiled is not None and one is self.optimizers[0]:
                compiled()
            elif self.has_closure:
                one.step(lambda: 0.0)
            else:
                one.step()
        if self.scaler is not None:
            self.scaler.update()
        for schedule in self.schedules:
            schedule.step()

    def clear(self) -> None:
        for one in self.model.parameters():
            if self.clears == "data" and one.grad is not None:
                one.grad.data.zero_()
            elif self.clears == "zero" and one.grad is not None:
                one.grad.zero_()
            elif self.clears == "none":
                one.grad = None

    def follow(self, average: nn.Linear) -> None:
        """An average of the head's weights, written as loops write it."""
        with torch.no_grad():
            for mean, one in zip(average.parameters(), self.model["head"].parameters(), strict=True):
                if self.averages == "data":
                    mean.data.mul_(0.9).add_(one.data, alpha=0.1)
                elif self.averages == "in place":
                    mean.mul_(0.9).add_(one, alpha=0.1)
                elif self.averages == "lerp":
                    mean.lerp_(one, 0.1)
                elif self.averages == "replaced":
                    mean.data = mean.data * 0.9 + one.data * 0.1
                else:
                    mean.data.view(-1)[1] += one.data.view(-1)[0]

    def digest(self) -> str:
        """Of all that a checkpoint has of this loop."""
        found = xxhash.xxh3_64()
        tensors = [self.model[name].state_dict() for name in self.model]
        tensors += [self.average.state_dict()] if self.average is not None else []
        for one in (value for named in tensors for value in named.values()):
            found.update(bits(one))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                found.update(repr(sorted((key, plain(value)) for key, value in options.items())).encode())
                for parameter in group["params"]:
                    for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                        found.update(key.encode() + (bits(value) if isinstance(value, torch.Tensor) else b"%r" % value))
        others = [*self.schedules, *([self.scaler] if self.scaler is not None else [])]
        found.update(repr([(plain(one.state_dict())) for one in others] + [self.state["step"]]).encode())
        return str(found.hexdigest())


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().view(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return sorted((str(key), plain(one)) for key, one in value.items())
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value


# --- edits of a loop between its steps ------------------------------------------------------------------------------


def stepped(loop: Loop) -> nn.Parameter:
    return loop.chosen.choice(loop.optimizers[-1].param_groups[0]["params"])  # type: ignore[no-any-return]


def moments(loop: Loop) -> tuple[dict[str, Any], str] | None:
    """A tensor of an optimizer's state, and where it is."""
    found = [
        (state, name)
        for one in loop.optimizers
        for state in one.state.values()
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    ]
    return loop.chosen.choice(found) if found else None


def element(loop: Loop, tensor: torch.Tensor) -> None:
    tensor.view(-1)[loop.chosen.randrange(tensor.numel())] += 0.5


def edit_traced(loop: Loop) -> None:
    with torch.no_grad():
        one = stepped(loop)
        one.copy_(one * 1.01)


def edit_numpy(loop: Loop) -> None:
    one = stepped(loop)
    if one.dtype is torch.bfloat16:
        one.detach().view(torch.int16).numpy().reshape(-1)[0] ^= 1
    else:
        one.detach().numpy().reshape(-1)[0] += 0.5


def edit_storage(loop: Loop) -> None:
    """As a kernel of an extension writes."""
    ctypes.c_uint8.from_address(stepped(loop).data_ptr() + 1).value ^= 1


def replace_data(loop: Loop) -> None:
    one = stepped(loop)
    one.data = one.data * 1.5


def step_other(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer that the state does not have."""
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad = torch.full_like(one, 0.5)
    optimizer.step()
    optimizer.zero_grad()


def edit_average(loop: Loop) -> None:
    if loop.average is not None:
        element(loop, loop.average.weight.data)


def edit_buffer(loop: Loop) -> None:
    for one in loop.model.buffers():
        element(loop, one.data) if one.is_floating_point() else one.data.add_(1)


def zero_data(tensor: torch.Tensor) -> torch.Tensor:
    tensor.data.zero_()
    return tensor


def edit_moment(loop: Loop, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
    if found := moments(loop):
        found[0][found[1]] = edit(found[0][found[1]])


def drop_state(loop: Loop) -> None:
    loop.optimizers[0].state.clear()
    if isinstance(loop.optimizers[0], torch.optim.Adagrad):  # its constructor makes its state
        loop.optimizers[0].__init__(loop.optimizers[0].param_groups)  # type: ignore[misc]


def change_options(loop: Loop) -> None:
    for group in loop.optimizers[0].param_groups:
        group["lr"] *= 0.5
        group["weight_decay"] = group.get("weight_decay", 0.0) + 0.01


def freeze(loop: Loop) -> None:
    """Or thaw: with no gradient the optimizer leaves it as it is."""
    one = loop.model.get_parameter("body.0.weight")
    one.requires_grad_(not one.requires_grad)
    one.grad = None


def replace_parameter(loop: Loop) -> None:
    old = forget_parameter(loop)
    new = loop.model.get_parameter("head.weight")
    for optimizer in loop.optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new if one is old else one for one in group["params"]]
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


def forget_parameter(loop: Loop) -> nn.Parameter:
    """Give the module another parameter, which the optimizer does not know. Returns the old one."""
    old = loop.model.get_parameter("head.weight")
    loop.model["head"].weight = nn.Parameter(old.detach() * 1.1)
    return old


def quiet(_: object) -> None:
    """A hook returns nothing."""


def hook_edit(loop: Loop) -> None:
    """A hook of the optimizer edits a parameter from now on."""
    one = stepped(loop)
    loop.optimizers[0].register_step_post_hook(lambda *_: quiet(one.data.mul_(0.999)))


def hook_before(loop: Loop) -> None:
    one = stepped(loop)
    loop.optimizers[0].register_step_pre_hook(lambda *_: quiet(one.data.add_(0.001)))


def hook_gradient(loop: Loop) -> None:
    one = stepped(loop)
    if one.requires_grad:
        one.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]


def update_unhooked(loop: Loop) -> None:
    """The step itself, past hooks: as a step that is part of the backward pass."""
    update: Any = type(loop.optimizers[0]).step
    getattr(update, "__wrapped__", update)(loop.optimizers[0])


def add_group(loop: Loop) -> None:
    restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts  # takes no other groups
    if len(loop.optimizers[0].param_groups) == 1 and not any(isinstance(one, restarts) for one in loop.schedules):
        loop.add_group()


EVENTS: dict[str, Callable[[Loop], object]] = {
    "edit_data": lambda loop: stepped(loop).data.mul_(1.01),
    "edit_element": lambda loop: element(loop, stepped(loop).data),
    "edit_traced": edit_traced,
    "edit_numpy": edit_numpy,
    "edit_storage": edit_storage,
    "replace_data": replace_data,
    "step_foreign": lambda loop: step_other(loop.foreign),  # over the same parameters
    "step_frozen": lambda loop: step_other(loop.other),  # over parameters that no optimizer of the state has
    "edit_frozen": lambda loop: element(loop, loop.model["frozen"].get_parameter("weight").data),
    "edit_average": edit_average,
    "edit_buffer": edit_buffer,
    "zero_moment": lambda loop: edit_moment(loop, torch.Tensor.zero_),
    "zero_moment_data": lambda loop: edit_moment(loop, zero_data),
    "replace_moment": lambda loop: edit_moment(loop, torch.zeros_like),
    "drop_state": drop_state,
    "load_optimizer": lambda loop: loop.optimizers[0].load_state_dict(loop.optimizers[0].state_dict()),
    "load_model": lambda loop: loop.model.load_state_dict({n: one * 1 for n, one in loop.model.state_dict().items()}),
    "change_options": change_options,
    "freeze": freeze,
    "replace_parameter": replace_parameter,
    "forget_parameter": forget_parameter,
    "hook_edit": hook_edit,
    "hook_before": hook_before,
    "hook_gradient": hook_gradient,
    "update_twice": lambda loop: loop.optimizers[0].step(),
    "update_unhooked": update_unhooked,
    "add_group": add_group,
}


# --- one loop ---------------------------------------------------------------------------------------------------------


class Log(logging.Handler):
    """What tierckpt says."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def ends(self) -> list[str]:
        """The reasons for which logs ended in training."""
        return [line.partition("until the next checkpoint: ")[2] for line in self.lines if "is logged until" in line]


@contextmanager
def heard() -> Iterator[Log]:
    log, ours = Log(), logging.getLogger("tierckpt")
    ours.addHandler(log)
    try:
        yield log
    finally:
        ours.removeHandler(log)


@contextmanager
def looking(*, always: bool) -> Iterator[None]:
    """Look at each step on the thread that trains, or at none: then the digest of a frame has to do."""
    before = checksum.CHECK_SHARE, checksum.FREE_SECONDS
    checksum.CHECK_SHARE, checksum.FREE_SECONDS = (1e9, 1.0) if always else (0.0, -1.0)
    try:
        yield
    finally:
        checksum.CHECK_SHARE, checksum.FREE_SECONDS = before


class Run:
    """A loop that is trained, killed and restored. ``fired``: how often each event happened."""

    def __init__(self, seed: int, root: Path) -> None:
        self.seed, self.root = seed, root
        chosen = self.chosen = random.Random(f"run {seed}")
        self.steps = chosen.randrange(3, 14)
        self.asked = chosen.choice((True, True, True, "3 steps", "20 ms"))
        self.interval = chosen.choice((1000, 1000, 4, 7))
        self.always_looks = chosen.random() < 0.5
        self.is_compiled = chosen.random() < 0.01
        self.events: dict[int, list[tuple[str, str]]] = {}
        names = chosen.sample([*EVENTS], chosen.choice((0, 1, 1, 2, 3)))
        for name in names:
            at = chosen.randrange(2, self.steps + 1)
            often = range(at, self.steps + 1) if chosen.random() < 0.2 else [at]
            where = chosen.choice(("before", "after"))
            for step in often:
                self.events.setdefault(step, []).append((name, where))
        self.fired: Counter[str] = Counter()
        self.digests: dict[int, str] = {}
        self.updated: list[int] = []

    def checkpointer(self) -> tierckpt.Checkpointer:
        return tierckpt.Checkpointer(
            f"file://{self.root}/shared/run", local_root=self.root / "local",
            every_step=tierckpt.EveryStep(gradient_log=self.asked), interval=self.interval, drain=False, mover="inline",
        )  # fmt: skip

    def train(self, loop: Loop, checkpointer: tierckpt.Checkpointer, tell: Callable[[int, str], None]) -> None:
        compiled = torch.compile(loop.optimizers[0].step, backend="eager") if self.is_compiled else None
        for number in range(1, self.steps + 1):
            self.fire(loop, number, "before")
            updates = loop.updates
            loop.train(compiled)
            self.fire(loop, number, "after")
            self.digests[number] = loop.digest()
            tell(number, self.digests[number])
            try:
                saved = checkpointer.step(number, loop.state)
            except StateMismatchError:  # a parameter of no module: the checkpoint that follows the log is refused
                assert self.fired.keys() & {"forget_parameter, before", "forget_parameter, after"}
                self.fired["refused"] += 1
                return
            if saved is not None:
                saved.result(60)
            if loop.updates > updates:  # not where a scaler skips it
                self.updated.append(number)

    def fire(self, loop: Loop, number: int, where: str) -> None:
        for name, at in self.events.get(number, ()):
            if at == where:
                EVENTS[name](loop)
                self.fired[f"{name}, {where}"] += 1

    def restored(self) -> tuple[int | None, Loop]:
        """What new objects have after a restore. Built as the code of the job builds them, before or after a change."""
        had_group = any(name.startswith("add_group") for name in self.fired)
        for has_group in (True, False) if had_group else (False,):
            loop = Loop(self.seed, has_group=has_group)
            with suppress(StateMismatchError), self.checkpointer() as checkpointer:
                return checkpointer.restore(loop.state), loop
        raise AssertionError("the state of the run fits neither of its structures")


def train_and_kill(run: Run, *, tell: Callable[[int, str], None] = lambda number, digest: None) -> Log:
    """Train, and leave the root as a process that is killed after the last step leaves it."""
    image = run.root / "image"
    with heard() as log, looking(always=run.always_looks):
        with suppress(KeyboardInterrupt), run.checkpointer() as checkpointer:
            run.train(Loop(run.seed), checkpointer, tell)
            shutil.copytree(run.root / "local", image, symlinks=True, ignore_dangling_symlinks=True)
            raise KeyboardInterrupt
        shutil.rmtree(run.root / "local")
        image.rename(run.root / "local")
    return log


def check(run: Run, trained: Log) -> tuple[str, Log]:
    """Restore, and return the problem, or ''."""
    with heard() as said:
        step, loop = run.restored()
    if step is None:
        return "no step can be restored", said
    if loop.digest() != run.digests[step]:
        return f"step {step} of {run.steps} has other bits than in training had: {trained.ends()}", said
    lag = 3 if run.asked == "3 steps" else 1
    durable = ([1, *run.updated[:-lag]])[-1] if run.asked != "20 ms" else 1
    if step < durable and not (any(trained.ends()) or any("which ends there" in line for line in said.lines)):
        return f"step {durable} was durable, step {step} is restored, and nothing says why: {said.lines}", said
    if not all(trained.ends()):
        return "a log ended without a reason", said
    return "", said


def train_for_ever(folder: Path, root: str, seed: int) -> None:
    """Train loop ``seed`` below ``root``, and print the digest of each step."""
    run = Run(seed, Path(root))
    run.steps = 10**6
    with looking(always=run.always_looks):
        run.train(Loop(run.seed), run.checkpointer(), lambda number, digest: print(number, digest, flush=True))


# --- the tests --------------------------------------------------------------------------------------------------------

LOOPS = int(ENVIRONMENT.get("TIERCKPT_TEST_TRAINING_LOOPS", "40"))
SEED = int(ENVIRONMENT.get("TIERCKPT_TEST_SEED", "0"))

pytestmark = pytest.mark.timeout(600 + 10 * LOOPS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_restored_loop_equals_training_or_reports_why_not(tmp_path: Path) -> None:
    wrong, fired, ended = dict[int, str](), Counter[str](), Counter[str]()
    for seed in range(SEED, SEED + LOOPS):
        run = Run(seed, tmp_path / str(seed))
        trained = train_and_kill(run)
        reason, log = check(run, trained)
        if reason:
            wrong[seed] = f"{reason} ({dict(run.fired)})"
        fired += run.fired
        ended.update(one.partition(",")[0][:60] for one in trained.ends())
        ended["at the restore"] += any("which ends there" in line for line in log.lines)
    print(f"{LOOPS} loops from seed {SEED}; logs that ended: {dict(ended)}; events: {dict(fired)}")
    assert not wrong
    assert LOOPS < 500 or {name.partition(",")[0] for name in fired} >= set(EVENTS), "an event kind never occurred"


@pytest.mark.parametrize("event", ["edit_element", "edit_storage", "zero_moment_data", "edit_frozen"])
@pytest.mark.parametrize("is_on", [True, False], ids=["no bug", "without digests"])
def test_control_log_without_digests_is_found(
    event: str, is_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without frame digests a wrong state is restored."""
    if not is_on:
        monkeypatch.setattr(checksum, "frame_digest", lambda seen, others: "")
        monkeypatch.setattr(Attachments, "check", lambda *_: checksum.no_check)
    run = Run(7, tmp_path)
    run.steps, run.asked, run.interval, run.always_looks, run.is_compiled = 7, True, 1000, False, False
    run.events = {4: [(event, "after")]}
    trained = train_and_kill(run)
    reason, _ = check(run, trained)
    assert sum(run.fired.values()) == 1
    assert ("other bits" in reason) is not is_on


def test_killed_process_leaves_a_log_equal_to_training(tmp_path: Path) -> None:
    chosen = random.Random(SEED)
    for number in range(max(1, LOOPS // 100)):
        run = Run(SEED + 100_000 + number, tmp_path / str(number))
        child = start(train_for_ever, run.root / "job", root=str(run.root), seed=run.seed)
        steps = chosen.randrange(3, 12)
        child.until(lambda: len(child.lines()) >= steps, f"{steps} steps")  # noqa: B023
        time.sleep(chosen.uniform(0.0, 0.03))
        child.kill()
        run.digests = {int(step): digest for step, digest in map(str.split, child.lines())}
        run.steps = max(run.digests)
        for step in range(1, run.steps + 1):
            run.fired.update(f"{name}, {where}" for name, where in run.events.get(step, ()))
        reason, log = check(run, Log())
        assert not reason, (run.seed, run.events, reason, log.lines)

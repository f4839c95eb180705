"""Training scripts as users of a framework write them, with tierckpt in at most three lines. One process.

    python -m tests.compat.adapter_drivers FRAMEWORK RUN_URI FOLDER LOG KILL_AT

Six saves, one every two steps; logs each step's loss, and at the end a digest of the weights. The process kills itself
right after the save of step ``KILL_AT`` (0: never). Data are shuffled and the model has dropout: a random state that a
resume loses shows.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS, SAVE_EVERY = 12, 2


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(8, generator=generator), "labels": torch.randn(1, generator=generator)}
        for _ in range(STEPS * 4)
    ]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layers(x)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


class Log:
    def __init__(self, path: Path, kill_at: int) -> None:
        self.path, self.kill_at = path, kill_at

    def write(self, **note: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(note) + "\n")

    def saved(self, step: int) -> None:
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self, model: nn.Module) -> None:
        digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values()))
        self.write(weights=digest.hexdigest())


def train_transformers(uri: str, folder: Path, log: Log) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from tierckpt.integrations.transformers import TierCallback

    class Noted(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                log.write(step=state.global_step, loss=repr(logs["loss"]))

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            log.saved(state.global_step)

    args = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        save_steps=SAVE_EVERY,
        save_total_limit=1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
    )
    model = Model()
    callback = TierCallback(uri)
    trainer = Trainer(model, args, train_dataset=data(), callbacks=[callback, Noted()])
    resumed = callback.resume(args.output_dir)
    log.write(resumed=int(resumed.rpartition("-")[2]) if resumed else None)
    trainer.train(resume_from_checkpoint=resumed)
    log.end(model)


def train_lightning(uri: str, folder: Path, log: Log) -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    from tierckpt.integrations.lightning import TierCheckpointIO, newest

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            # Lightning begins an epoch's loader again when it resumes within one, whatever saved: so the step chooses.
            loss = self.model(**batches[self.global_step])["loss"]
            log.write(step=self.global_step + 1, loss=repr(loss.item()))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["rng"] = torch.get_rng_state()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.rng = checkpoint["rng"]
            log.write(resumed=checkpoint["global_step"])

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            if (rng := self.__dict__.pop("rng", None)) is not None:
                torch.set_rng_state(rng)

    class Noted(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step % SAVE_EVERY == 0 and log.kill_at:
                log.saved(trainer.global_step - SAVE_EVERY)  # it saves after this hook: the save before is whole

    seed_everything(3, verbose=False)
    batches = [*DataLoader(data(), batch_size=4)]  # type: ignore[arg-type]
    scheme, _, rest = uri.partition("://")
    module = Module()
    checkpoints = ModelCheckpoint(
        dirpath=f"tierckpt://{scheme}/{rest}" if rest else f"tierckpt://file{uri}",
        filename="{step}",
        every_n_train_steps=SAVE_EVERY,
        save_top_k=1,
        monitor="step",
        mode="max",
        save_last=True,
    )
    trainer = Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        plugins=[TierCheckpointIO()],
        callbacks=[checkpoints, Noted()],
    )
    trainer.fit(module, DataLoader(data(), batch_size=4), ckpt_path=newest(checkpoints.dirpath))  # type: ignore[arg-type]
    log.end(module.model)


def train_accelerate(uri: str, folder: Path, log: Log) -> None:
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader

    from tierckpt.integrations.accelerate import TierState

    set_seed(3)
    accelerator = Accelerator(cpu=True, project_dir=str(folder / "out"))
    plain = Model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    loader = DataLoader(data(), batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(plain, optimizer, loader)
    batches = [*loader]  # before the random states come back: an iterator that begins draws from them
    run = TierState(accelerator, uri)
    done = run.load() or 0
    log.write(resumed=done or None)
    for batch in batches[done:]:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        log.write(step=done, loss=repr(loss.item()))
        if done % SAVE_EVERY == 0:
            run.save(f"step-{done}")
            log.saved(done)
    log.end(accelerator.unwrap_model(model))


def train_deepspeed(uri: str, folder: Path, log: Log) -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import deepspeed
    from torch.utils.data import DataLoader

    from tierckpt.integrations.deepspeed import TierCheckpointEngine

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    plain = Model()
    batches = [*DataLoader(data(), batch_size=4)]  # type: ignore[arg-type]
    engine, *_ = deepspeed.initialize(
        model=plain,
        optimizer=torch.optim.AdamW(plain.parameters(), lr=1e-2),
        config={"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4},
        dist_init_required=False,
    )
    out = str(folder / "out")
    engine.checkpoint_engine = TierCheckpointEngine(uri)
    tag = engine.checkpoint_engine.restore(out)
    torch.manual_seed(3)
    if tag is not None:
        _, client = engine.load_checkpoint(out, tag=tag)
        torch.set_rng_state(client["rng"])
    log.write(resumed=engine.global_steps or None)
    for batch in batches[engine.global_steps :]:
        loss = engine(**batch)["loss"]
        engine.backward(loss)
        engine.step()
        log.write(step=engine.global_steps, loss=repr(loss.item()))
        if engine.global_steps % SAVE_EVERY == 0:
            engine.save_checkpoint(out, client_state={"rng": torch.get_rng_state()})
            log.saved(engine.global_steps)
    log.end(plain)


if __name__ == "__main__":
    framework, run_uri, place, notes, kill_at = sys.argv[1:]
    torch.set_num_threads(1)
    globals()[f"train_{framework}"](run_uri, Path(place), Log(Path(notes), int(kill_at)))

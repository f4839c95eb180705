"""Training scripts as users of a framework write them, with tierckpt in at most three lines. One process is one rank.

    python -m tests.compat.adapter_drivers FRAMEWORK RUN_URI FOLDER LOG KILL_AT

Six saves, one every two steps; logs each step's loss, and at the end a digest of the weights. Rank 0 kills itself
right after the save of step ``KILL_AT`` (0: never), and the others stop there, to be killed. Data are shuffled and the
model has dropout: a random state that a resume loses shows.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS, SAVE_EVERY = 12, 2
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(8, generator=generator), "labels": torch.randn(1, generator=generator)}
        for _ in range(STEPS * 4 * RANKS)
    ]


def my_batches() -> list[dict[str, torch.Tensor]]:
    from torch.utils.data import DataLoader

    return [*DataLoader(data(), batch_size=4)][RANK::RANKS]  # type: ignore[arg-type]


def process_group() -> None:
    if RANKS > 1:
        torch.distributed.init_process_group("gloo")
    else:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


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
        if RANK:
            return
        with self.path.open("a") as file:
            file.write(json.dumps(note) + "\n")

    def saved(self, step: int) -> None:
        if step == self.kill_at:
            while RANK:
                time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self, model: nn.Module) -> None:
        values = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.state_dict().values()]
        self.write(weights=hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest())


def tierckpt_url(uri: str) -> str:
    scheme, _, rest = uri.partition("://")
    return f"tierckpt://{scheme}/{rest}" if rest else f"tierckpt://file{uri}"


def training_arguments(out: Path, **options: Any) -> Any:
    from transformers import TrainingArguments

    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    return TrainingArguments(output_dir=str(out), per_device_train_batch_size=4, **quiet, **options)


def train_transformers(uri: str, folder: Path, log: Log) -> None:
    from transformers import Trainer, TrainerCallback

    from tierckpt.integrations.transformers import TierCallback

    class Noted(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                log.write(step=state.global_step, loss=repr(logs["loss"]))

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            log.saved(state.global_step)

    args = training_arguments(
        folder / "out", max_steps=STEPS, save_steps=SAVE_EVERY, save_total_limit=1, logging_steps=1, seed=3
    )
    model = Model()
    callback = TierCallback(uri)
    trainer = Trainer(model, args, train_dataset=data(), callbacks=[callback, Noted()])
    resumed = callback.resume(args.output_dir)
    log.write(resumed=int(resumed.rpartition("-")[2]) if resumed else None)
    trainer.train(resume_from_checkpoint=resumed)
    log.end(model)


def train_lightning(uri: str, folder: Path, log: Log) -> None:
    from tierckpt.integrations.lightning import TierCheckpointIO

    train_in_lightning(tierckpt_url(uri), folder, log, plugins=[TierCheckpointIO()], save_last=True)


def train_lightning_sharded(uri: str, folder: Path, log: Log) -> None:
    """FSDP2, which Lightning calls the model-parallel strategy."""
    from tierckpt.integrations.lightning_sharded import TierModelParallelStrategy

    strategy = TierModelParallelStrategy(uri, data_parallel_size=RANKS, tensor_parallel_size=1)
    train_in_lightning(str(folder / "out"), folder, log, strategy=strategy, save_last=True)


def lightning_trainer(**options: Any) -> Any:
    from lightning.pytorch import Trainer

    return Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, **options)


def train_in_lightning(dirpath: str, folder: Path, log: Log, save_last: bool = False, **options: Any) -> None:
    from lightning.pytorch import Callback, LightningModule, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader

    from tierckpt.integrations.lightning import newest

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def configure_model(self) -> None:
            if "strategy" in options:
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

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
    batches = my_batches()
    module = Module()
    checkpoints = ModelCheckpoint(
        dirpath=dirpath,
        filename="{step}",
        every_n_train_steps=SAVE_EVERY,
        save_top_k=1,
        monitor="step",
        mode="max",
        save_last=save_last,
    )
    trainer = lightning_trainer(
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=RANKS // int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_steps=STEPS,
        default_root_dir=folder,
        callbacks=[checkpoints, Noted()],
        **options,
    )
    trainer.fit(module, DataLoader(data(), batch_size=4), ckpt_path=newest(dirpath))  # type: ignore[arg-type]
    log.end(module.model)


def train_accelerate(uri: str, folder: Path, log: Log) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration, set_seed
    from torch.utils.data import DataLoader

    from tierckpt.integrations.accelerate import TierState

    set_seed(3)
    named = ProjectConfiguration(str(folder / "out"), automatic_checkpoint_naming=RANKS > 1, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=named)
    plain = Model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    loader = DataLoader(data(), batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(plain, optimizer, loader)
    batches = [*loader]  # before the random states come back: an iterator that begins draws from them
    run = TierState(accelerator, uri)
    found = run.load()
    done = 0 if found is None else SAVE_EVERY * (found + 1) if RANKS > 1 else found
    log.write(resumed=done or None)
    for batch in batches[done:]:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        log.write(step=done, loss=repr(loss.item()))
        if done % SAVE_EVERY == 0:
            run.save(None if RANKS > 1 else f"step-{done}")
            log.saved(done)
    log.end(accelerator.unwrap_model(model))


def train_deepspeed(uri: str, folder: Path, log: Log) -> None:
    if RANKS == 1:
        os.environ |= ALONE
    import deepspeed

    from tierckpt.integrations.deepspeed import TierCheckpointEngine

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would compile that here, for minutes
    process_group()
    plain = Model()
    batches = my_batches()
    engine, *_ = deepspeed.initialize(
        model=plain,
        optimizer=torch.optim.AdamW(plain.parameters(), lr=1e-2),
        config={"train_batch_size": 4 * RANKS, "train_micro_batch_size_per_gpu": 4},
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
    engine.save_16bit_model(str(folder / "export"))
    log.end(plain)


def train_torchtitan(uri: str, folder: Path, log: Log) -> None:
    """torchtitan's own manager, with tierckpt's folder only."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.checkpointer.dcp import CheckpointManager

    class Optimizers:
        def state_dict(self) -> dict[str, Any]:
            return get_optimizer_state_dict(model, optimizer)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            set_optimizer_state_dict(model, optimizer, state)

    class Trained:
        step = 0

        def state_dict(self) -> dict[str, Any]:
            return {"step": self.step, "rng": torch.get_rng_state()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.step = state["step"]
            torch.set_rng_state(state["rng"])

    process_group()
    batches = my_batches()
    model, trained = Model(), Trained()
    if RANKS > 1:
        fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = CheckpointManager(
        CheckpointManager.Config(enable=True, folder=tierckpt_url(uri), interval=SAVE_EVERY, keep_latest_k=2),
        dataloader=None,
        model_parts=[model],
        optimizers=Optimizers(),
        lr_schedulers=torch.optim.lr_scheduler.ConstantLR(optimizer),
        states={"train_state": trained},
        sd_adapter=None,
        base_folder=str(folder),
    )
    torch.manual_seed(3)
    manager.load()
    log.write(resumed=trained.step or None)
    for batch in batches[trained.step :]:
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained.step += 1
        log.write(step=trained.step, loss=repr(loss.item()))
        if manager.save(trained.step):
            log.saved(trained.step)
    manager.close()
    log.end(model)


def tiny_model(folder: Path) -> Path:
    """A causal model with a tokenizer and a chat template, as verl wants them, and conversations to train it on."""
    import pandas
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<end>", *(f"w{number}" for number in range(62))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = "{% for message in messages %}{{ message.content }} <end> {% endfor %}"
    fast.save_pretrained(folder)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **shape)).save_pretrained(folder)
    said = [[f"w{(row * step) % 62}" for step in range(1, 9)] for row in range(1, STEPS * 2 + 1)]
    rows = [
        [{"role": "user", "content": " ".join(one[:4])}, {"role": "assistant", "content": " ".join(one[4:])}]
        for one in said
    ]
    pandas.DataFrame({"messages": rows}).to_parquet(folder / "train.parquet")
    return folder


def verl_on_cpu() -> None:
    """A platform for verl, which has none without an accelerator. Runs before other imports of verl."""
    from verl.plugin.platform import platform_cuda, platform_manager

    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "empty_cache"):
        setattr(torch.cpu, name, lambda: 0)

    class PlatformCPU(platform_cuda.PlatformCUDA):  # type: ignore[misc]
        device_name, device_module = "cpu", torch.cpu

        def current_device(self) -> str:
            return "cpu"

        def set_device(self, device_index: int) -> None: ...

        def empty_cache(self) -> None: ...

        def communication_backend_name(self) -> str:
            return "gloo"

    platform_manager.set_platform(PlatformCPU())


def train_verl(uri: str, folder: Path, log: Log) -> None:
    """verl's own trainer of SFT, on CPU. No dropout: its resume draws from the random state it has just restored."""
    os.environ |= ALONE
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # the engine that is registered for it runs on any device
    verl_on_cpu()
    import verl.trainer.sft_trainer as sft
    from hydra import compose, initialize_config_module

    from tierckpt.integrations.verl import TierCheckpointHandler

    class Noted(TierCheckpointHandler):
        def save_checkpoint(self, step: int) -> None:
            super().save_checkpoint(step)
            log.saved(step)

        def load_checkpoint(self) -> int:
            step: int = super().load_checkpoint()
            log.write(resumed=step or None)
            return step

    class Tracking:
        def __init__(self, **_: Any) -> None: ...

        def log(self, data: dict[str, Any], step: int) -> None:
            if "train/loss" in data:
                log.write(step=step, loss=repr(data["train/loss"]))

    sft.Tracking, sft.CheckpointHandler = Tracking, Noted
    model = tiny_model(folder / "model")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "sft_trainer_engine",
            (
                f"model.path={model} data.train_files={model}/train.parquet data.train_batch_size=2 data.num_workers=0 "
                "data.ignore_input_ids_mismatch=True model.use_remove_padding=False data.use_dynamic_bsz=False "
                "data.micro_batch_size_per_gpu=2 +model.override_config.attn_implementation=eager "
                f"trainer.default_local_dir={folder}/out trainer.default_hdfs_dir={uri} trainer.save_freq={SAVE_EVERY} "
                "trainer.max_ckpt_to_keep=1 trainer.total_epochs=1 engine.strategy=fsdp2 engine.dtype=float32 "
                "trainer.device=cpu"
            ).split(),
        )
    trainer = sft.SFTTrainer(config)
    trainer.fit()
    log.end(trainer.engine.module)


if __name__ == "__main__":
    framework, run_uri, place, notes, kill_at = sys.argv[1:]
    torch.set_num_threads(1)
    globals()[f"train_{framework}"](run_uri, Path(place), Log(Path(notes), int(kill_at)))

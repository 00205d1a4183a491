"""A real training with growths, to be run as a process of its own or as several under torchrun.

    python tests/training.py {accelerate,trainer} OUTPUT [--resume CHECKPOINT] [--die-at STEP]

12 optimizer steps of 2 x 8 rows over all processes, growths after steps 4 and 8, clipping, warm-up and decay. A
checkpoint is written after every second step. Rank 0 leaves `losses.json`; every rank leaves `weights-RANK.pt`, and
`optimizer-RANK.pt`.
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedType, FullyShardedDataParallelPlugin
from families import build, tokens
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
)

from hf_growattn import Grower, GrowthCallback, GrowthConfig, load_growth, patch_model, save_growth
from hf_growattn.growable.growths import is_grown

STEPS, GROWTHS, ACCUMULATION, BATCH, GROWTH_BATCHES = 12, (4, 8), 2, 8, 3
CONFIG = GrowthConfig(qk_dims=2, v_dims=2)


class Rows(Dataset):
    """Sequences in which each token has one successor."""

    def __init__(self, count: int):
        self.ids = tokens(count, 17)
        for position in range(1, 17):
            self.ids[:, position] = 2 + 5 * self.ids[:, position - 1] % 95

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, row: int) -> dict:
        return {"input_ids": self.ids[row], "labels": self.ids[row]}


def honour_fsdp_on_cpus() -> None:
    """accelerate shards on accelerators only; all that it then does runs on CPUs, too."""
    begin = AcceleratorState.__init__

    def as_on_gpus(self, *arguments, fsdp_plugin=None, **others):
        begin(self, *arguments, fsdp_plugin=fsdp_plugin, **others)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = as_on_gpus


def sums_for_gloo(model) -> None:
    """Let FSDP2 sum, then divide: gloo of torch 2.8 only sums where it is asked for a mean."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def keep_by_word() -> None:
    """Let `Grower.grow`, which a `GrowthCallback` calls, keep what it finds: so few batches prove nothing."""
    Grower.grow = lambda grower, batches: grower.find(batches).keep()


class _Sums(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        sums_for_gloo(model)


def with_accelerate(output: Path, resume: Path | None, die_at: int | None, dtype=torch.float32, fsdp=None):
    """A loop of one's own, as accelerate's manual has it; `fsdp` is how its FSDP2 plugin saves."""
    plugin = fsdp and FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type=fsdp,
        reshard_after_forward=True,
        activation_checkpointing=True,
        cpu_ram_efficient_loading=True,
    )
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATION,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        fsdp_plugin=plugin,
    )
    model = patch_model(build("llama-2", dtype=dtype)).train()
    if resume is not None and fsdp:  # where shards are loaded, the widths must be there
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(resume), dtype=dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, STEPS)
    rows = Rows(STEPS * ACCUMULATION * BATCH + len(GROWTHS) * GROWTH_BATCHES * BATCH)
    loader = DataLoader(rows, batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    sums_for_gloo(model)
    accelerator.register_for_checkpointing(
        scheduler
    )  # one scheduler step for each optimizer step, on any number of ranks
    grower = Grower(model, CONFIG, optimizer)
    losses, start = {}, 0
    if resume is not None:
        if (resume / "growth").is_dir():  # the optimizer was made without new dims
            load_growth(model, resume / "growth", optimizer, strict=False)
        accelerator.load_state(resume)
        start = int(resume.name.split("-")[1])
    batches = list(loader)
    for step in range(start, STEPS):
        loss_of_step = torch.zeros((), dtype=dtype)
        for micro in range(ACCUMULATION):
            with accelerator.accumulate(model):
                loss = model(**batches[step * ACCUMULATION + micro]).loss
                loss_of_step += loss.detach() / ACCUMULATION
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        losses[step + 1] = accelerator.reduce(loss_of_step, "mean").item()
        if step + 1 in GROWTHS:
            first = STEPS * ACCUMULATION + GROWTHS.index(step + 1) * GROWTH_BATCHES
            assert grower.find(batches[first : first + GROWTH_BATCHES]).keep().kept
        if (step + 1) % 2 == 0:
            accelerator.save_state(output / f"checkpoint-{step + 1}")
            if not fsdp and is_grown(model) and accelerator.is_main_process:
                save_growth(model, output / f"checkpoint-{step + 1}" / "growth")
            if fsdp and accelerator.is_main_process:
                model.config.save_pretrained(output / f"checkpoint-{step + 1}")
        if step + 1 == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
    return losses, accelerator.unwrap_model(model), optimizer.optimizer


class _Die(TrainerCallback):
    def __init__(self, step: int | None):
        self.step = step

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def with_trainer(output: Path, resume: Path | None, die_at: int | None, dtype=torch.float32, fsdp=None):
    """transformers' Trainer, with dropout off and its own order of the data; `fsdp` is how it saves under FSDP2."""
    keep_by_word()
    world = int(os.environ.get("WORLD_SIZE", 1))
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // world,
        gradient_accumulation_steps=ACCUMULATION,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **({"fsdp": True, "fsdp_config": {"state_dict_type": fsdp}} if fsdp else {}),
    )
    trainer = Trainer(
        patch_model(build("llama-2", dtype=dtype)),
        arguments,
        train_dataset=Rows(128),
        callbacks=[_Die(die_at), _Sums()],
    )
    # No more batches than are trained on between a checkpoint before a growth and the growth: resumed runs see those.
    trainer.add_callback(GrowthCallback(trainer, CONFIG, steps=GROWTHS, batches=GROWTH_BATCHES))
    trainer.train(resume_from_checkpoint=resume and str(resume))
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return losses, trainer.model, trainer.optimizer.optimizer


def main() -> None:
    """Read the command line, train, and leave what tests compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loop", choices=("accelerate", "trainer"))
    parser.add_argument("output", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--die-at", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train = {"accelerate": with_accelerate, "trainer": with_trainer}[arguments.loop]
    losses, model, optimizer = train(arguments.output, arguments.resume, arguments.die_at)
    rank = int(os.environ.get("RANK", 0))
    torch.save(dict(model.named_parameters()), arguments.output / f"weights-{rank}.pt")
    torch.save(optimizer.state_dict(), arguments.output / f"optimizer-{rank}.pt")
    if rank == 0:
        (arguments.output / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()

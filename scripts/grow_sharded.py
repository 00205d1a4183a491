"""Train a causal language model sharded over several processes (FSDP2), and grow its attention on the way.

    torchrun --nproc_per_node 8 scripts/grow_sharded.py --model my/llama --dataset my_text.txt --output out

Growth needs every weight whole. So at step `--grow-at` the weights and the optimizer state are gathered, the first
process grows them un-sharded and saves both as `out/grown`, and all processes load that checkpoint, shard it, and go on
with the same optimizer state and schedule. The end is saved as `out/trained`. Each folder is written whole or not at
all. The first process's device must hold the whole model, its gradients and its optimizer state.
"""

import argparse
import gc
import os
import shutil
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from texts import blocks_of, load_texts
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup
from transformers import logging as transformers_logging

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.measure.ranks import alone

OPTIMIZER_FILE = "optimizer.pt"


class Training:
    """A sharded model, its optimizer and its schedule, on every process, from a checkpoint.

    Args:
        checkpoint: a path or Hub id; with `step`, a folder that `save` wrote.
        step: how many steps have been taken.
        arguments: the command line.
    """

    def __init__(self, checkpoint, step: int, arguments: argparse.Namespace):
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint).train()
        mesh = init_device_mesh(device().type, (dist.get_world_size(),))
        layers = [m for m in self.model.modules() if type(m).__name__ in self.model._no_split_modules]
        for module in (*layers, self.model):
            # Sums, then divides: gloo of torch 2.8 only sums where it is asked for a mean.
            fully_shard(module, mesh=mesh).set_force_sum_reduction_for_comms(True)
        self.optimizer = new_optimizer(self.model, arguments)
        if step:
            state = torch.load(Path(checkpoint) / OPTIMIZER_FILE, weights_only=True, mmap=True)
            full = StateDictOptions(full_state_dict=True)
            set_optimizer_state_dict(self.model, self.optimizer, state, options=full)
        self.scheduler = get_cosine_schedule_with_warmup(
            self.optimizer, arguments.steps // 20, arguments.steps, last_epoch=step - 1
        )

    def step(self, batch: torch.Tensor) -> float:
        """Train on this process's rows, (rows, tokens), and return the mean loss of all processes."""
        batch = batch.to(device())
        loss = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean.item()

    def gather(self) -> tuple[dict, dict]:
        """Return the full weights and the full optimizer state, on the first process's CPU; empty elsewhere."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_state_dict(self.model, self.optimizer, options=options)


def device() -> torch.device:
    """This process's GPU, or the CPU."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")


def new_optimizer(model, arguments: argparse.Namespace) -> torch.optim.Optimizer:
    """The optimizer, the same for the sharded model and the whole one."""
    # The schedule notes `initial_lr` in each group; loading into a sharded optimizer takes only entries that it has.
    group = {"params": list(model.parameters()), "initial_lr": arguments.learning_rate}
    return torch.optim.AdamW([group], lr=arguments.learning_rate, weight_decay=0.01)


def unsharded(checkpoint, gathered: tuple[dict, dict], arguments: argparse.Namespace):
    """Build the whole model and its optimizer from what `Training.gather` returned, on this process alone."""
    model = patch_model(AutoModelForCausalLM.from_pretrained(checkpoint)).to(device())
    optimizer = new_optimizer(model, arguments)
    weights, state = gathered
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return model, optimizer


def save(model, optimizer, tokenizer, target: Path) -> None:
    """Save model, tokenizer and optimizer state, by parameter name, as a new folder, whole or not at all."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    torch.save(get_optimizer_state_dict(model, optimizer), partial / OPTIMIZER_FILE)
    os.rename(partial, target)


def train(arguments: argparse.Namespace) -> None:
    """Train, grow and save; every process runs this."""
    rank, processes, grown = dist.get_rank(), dist.get_world_size(), arguments.output / "grown"
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    blocks = blocks_of(load_texts(arguments.dataset), tokenizer, arguments.block_size)
    torch.manual_seed(arguments.seed)
    order = torch.randint(len(blocks), (arguments.steps, processes, arguments.batch_size))
    fresh = torch.randint(len(blocks), (arguments.growth_batches, arguments.batch_size))
    torch.manual_seed(arguments.seed + rank)  # dropout of its own for every process
    checkpoint = arguments.model
    training = Training(checkpoint, 0, arguments)
    for step in range(arguments.steps):
        if step == arguments.grow_at:
            gathered = training.gather()
            del training
            gc.collect()  # FSDP's hooks hold the model in a cycle, and growth may need its memory
            if rank == 0:
                model, optimizer = unsharded(checkpoint, gathered, arguments)
                config = GrowthConfig(budget=arguments.budget, seed=arguments.seed)
                with alone():  # the others wait at the barrier
                    print(Grower(model, config, optimizer).grow([blocks[rows].to(device()) for rows in fresh]))
                save(model, optimizer, tokenizer, grown)
                del model, optimizer, gathered
            dist.barrier()
            checkpoint = grown
            training = Training(checkpoint, step, arguments)
        loss = training.step(blocks[order[step, rank]])
        if rank == 0 and (step % 10 == 0 or step + 1 == arguments.steps):
            print(f"Step {step}: loss {loss:.4f}, learning rate {training.scheduler.get_last_lr()[0]:.2e}.", flush=True)
    gathered = training.gather()
    if rank == 0:
        save(*unsharded(checkpoint, gathered, arguments), tokenizer, arguments.output / "trained")
    dist.barrier()


def main() -> None:
    """Read the command line, join the other processes and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="path or Hub id of a Llama- or GPT-2-style causal LM")
    parser.add_argument("--dataset", required=True, help="text file, folder of text files, or Hub id")
    parser.add_argument("--output", type=Path, required=True, help="folder for the checkpoints, which all nodes see")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--grow-at", type=int, default=200, help="steps to take before the growth")
    parser.add_argument("--batch-size", type=int, default=8, help="rows of one process")
    parser.add_argument("--block-size", type=int, default=128, help="tokens in one row of a batch")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--budget", type=float, default=0.02, help="weights to add at most, as a share of the model's")
    parser.add_argument("--growth-batches", type=int, default=16, help="training batches to measure and grow on")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if not 0 < arguments.grow_at < arguments.steps:
        parser.error("--grow-at must lie between 0 and --steps.")
    if any((arguments.output / name).exists() for name in ("grown", "trained")):
        parser.error(f"{arguments.output} holds a former run; name another --output.")
    transformers_logging.disable_progress_bar()
    if device().type == "cuda":
        torch.cuda.set_device(device())
    # The others wait while the first process grows, longer than the usual timeout.
    dist.init_process_group("nccl" if device().type == "cuda" else "gloo", timeout=timedelta(hours=12))
    try:
        train(arguments)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

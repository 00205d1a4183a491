"""One run of `large.py`, by torchrun: a growth of a model that FSDP2 shards; rank 0 prints what each rank measured.

torchrun --nproc_per_node 2 scripts/bench/large_run.py '{"width": 256, ...}'
"""

import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from growth_cost_run import random_llama
from memory import forget_peak, peak
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from hf_growattn import Grower, GrowthConfig, patch_model


def measure(
    model: str | None, width: int, batches: int, rows: int, tokens: int, budget: float, memory: bool, **_
) -> dict:
    """Bytes of this rank's share of weights and states, and either its peak beside them or the seconds of a growth."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="float32") if model else random_llama(width, tokens)
    grown = patch_model(loaded)
    for module in (*grown.model.layers, grown):
        fully_shard(module).set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(grown.parameters(), lr=0.0)
    ids = torch.randint(4096, (batches * rows, tokens), generator=torch.Generator().manual_seed(0))
    mine = [{"input_ids": part, "labels": part} for part in ids.split(rows)][dist.get_rank() :: dist.get_world_size()]

    def step() -> None:
        grown(**mine[0]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    share = 3 * sum(parameter.to_local().nbytes for parameter in grown.parameters())
    grower = Grower(grown, GrowthConfig(budget=budget), optimizer)
    if memory:
        return {"share": share, "step": peak_beside(step), "growth": peak_beside(lambda: grower.grow(mine))}
    start = time.perf_counter()
    step()
    of_step = time.perf_counter() - start
    report = grower.grow(mine)
    return {"step": of_step, "growth": time.perf_counter() - start - of_step, "loss": report.loss_after}


def peak_beside(action: Callable) -> int:
    """The most bytes that this process takes during a call, beside those from before it; of other threads, too."""
    forget_peak()
    before = peak()
    action()
    return peak() - before


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, measure(**json.loads(sys.argv[1])))
    if dist.get_rank() == 0:
        print(json.dumps({"of_ranks": everywhere}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may hold tensors still, which aborts an interpreter on its way out

"""One run of `large.py`, by torchrun: a growth of a model that FSDP2 shards; rank 0 prints what each rank measured.

torchrun --nproc_per_node 2 scripts/bench/large_run.py '{"width": 256, ...}'
"""

import json
import sys
import time

import torch
import torch.distributed as dist
from growth_cost_run import random_llama
from memory import peak_of_tensors
from torch.distributed.fsdp import fully_shard

from hf_growattn import Grower, GrowthConfig, patch_model


def measure(width: int, batches: int, rows: int, tokens: int, budget: float, memory: bool, **_) -> dict:
    """Bytes of this rank's share of weights and states, and either its peak beside them or the seconds of a growth."""
    model = patch_model(random_llama(width, tokens))
    for module in (*model.model.layers, model):
        fully_shard(module).set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    ids = torch.randint(4096, (batches * rows, tokens), generator=torch.Generator().manual_seed(0))
    mine = [{"input_ids": part, "labels": part} for part in ids.split(rows)][dist.get_rank() :: dist.get_world_size()]

    def step() -> None:
        model(**mine[0]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    share = 3 * sum(parameter.to_local().nbytes for parameter in model.parameters())
    grower = Grower(model, GrowthConfig(budget=budget), optimizer)
    if memory:
        return {"share": share, "step": peak_of_tensors(step), "growth": peak_of_tensors(lambda: grower.grow(mine))}
    start = time.perf_counter()
    step()
    of_step = time.perf_counter() - start
    report = grower.grow(mine)
    return {"step": of_step, "growth": time.perf_counter() - start - of_step, "loss": report.loss_after}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, measure(**json.loads(sys.argv[1])))
    if dist.get_rank() == 0:
        print(json.dumps({"of_ranks": everywhere}))
    dist.destroy_process_group()

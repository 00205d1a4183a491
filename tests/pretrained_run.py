"""Growth of pretrained weights in fp32 under FSDP2 ends as under DistributedDataParallel. Run by torchrun.py."""

from pathlib import Path

import torch
import torch.distributed as dist
from conftest import LONG, real_batches, real_model
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchrun import report

from hf_growattn import Grower, GrowthConfig, patch_model

CONFIGS = [GrowthConfig(budget=0.05)] + ([GrowthConfig(qk_dims=2, v_dims=2)] if LONG else [])
BATCHES = 19


def mean(loss: torch.Tensor) -> float:
    whole = loss.detach().double()
    dist.all_reduce(whole)
    return whole.item() / dist.get_world_size()


def losses_of(model, config: GrowthConfig, batches: list[torch.Tensor]) -> list[float]:
    """Those of three steps, a growth and ten steps."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-4), []

    def train(some: list[torch.Tensor]) -> None:
        for ids in some:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean(loss))

    train(batches[:3])
    report = Grower(model, config, optimizer).find(batches[3:9]).keep()
    assert report.kept
    losses.extend([report.loss_before, report.loss_before - report.fall])
    train(batches[9:])
    return losses


def apart(one: list[float], other: list[float]) -> float:
    """By what part losses differ at most; an fp32 near 4 has steps of 1e-7 of it."""
    return max(abs(a - b) / a for a, b in zip(one, other, strict=True))


def fully_sharded(config: GrowthConfig) -> None:
    """Against DistributedDataParallel."""
    ranks, rank, ends = dist.get_world_size(), dist.get_rank(), []
    for sharded in (False, True):
        model = patch_model(real_model()).train()
        for module in (*model.model.layers, model) if sharded else ():
            fully_shard(module).set_force_sum_reduction_for_comms(True)
        wrapped = model if sharded else DistributedDataParallel(model)
        ends.append(losses_of(wrapped, config, real_batches(ranks * BATCHES, size=2, tokens=32)[rank::ranks]))
    assert apart(*ends) < 1e-6, ends


def main(folder: Path) -> None:
    for config in CONFIGS:
        fully_sharded(config)
    report("pretrained_ends_equal")

"""Growth in a model that `fully_shard` holds in shards. Each rank checks for itself.

Run by torchrun.py. The first run leaves checkpoints that a later one, on another number of ranks, resumes.
"""

import copy
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from families import build, lm_batches, same, slow_4bit
from packaging.version import Version
from peft import PeftModel, get_peft_model
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchrun import report
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_growattn import GrowAttnConfig, Grower, GrowthConfig, initialize_growattn_weights, patch_model

FIXED = GrowthConfig(qk_dims=2, v_dims=2)


def mine(count, seed=11):
    """This rank's part of `count` batches for each rank."""
    return lm_batches(dist.get_world_size() * count, seed)[dist.get_rank() :: dist.get_world_size()]


def sharded(model, **options):
    layers = model.model.layers if hasattr(model, "model") else model.transformer.h
    for module in (*layers, model):
        # Sums, then divides: gloo of torch 2.8 only sums where it is asked for a mean.
        fully_shard(module, **options).set_force_sum_reduction_for_comms(True)
    return model


def prepared(kind, variant="llama-2", dtype=torch.float32, **options):
    model = patch_model(build(variant, dtype=dtype)).train()
    model = DistributedDataParallel(model) if kind == "ddp" else sharded(model, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def mean(number):
    whole = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(whole)
    return whole.item() / dist.get_world_size()


def train(model, optimizer, steps, seed=31, scheduler=None):
    losses = []
    for batch in mine(steps, seed):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        losses.append(mean(loss.item()))
    return losses


def equal_to_ddp(folder: Path):
    """Losses before, at and after the growth: in fp64 to the rounding, in fp32 to 1e-6.

    On 4 ranks sums round in another order. Weights that differ by 1e-7 give directions that differ by 1e-5, on one
    process, too: in fp32 the model then grows before it trains.
    """
    budget, before = GrowthConfig(budget=0.1), 3 if dist.get_world_size() == 2 else 0
    cases = [("gpt2-2", budget, torch.float64, 3, 1e-12), ("llama-2", FIXED, torch.float32, before, 1e-6)]
    for variant, config, dtype, steps, tolerance in cases:
        ends = []
        for kind in ("ddp", "fsdp2"):
            torch.manual_seed(dist.get_rank())  # GPT-2 drops out
            model, optimizer = prepared(kind, variant, dtype)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
            losses = train(model, optimizer, steps, scheduler=schedule)
            share = mine(3)[: 1 if dist.get_rank() else 3]  # the others have fewer batches
            report = Grower(model, config, optimizer).find(share).keep()
            assert report.kept
            if kind == "fsdp2":
                assert all(hasattr(parameter, "placements") for parameter in model.parameters())
            losses += [report.loss_before, report.fall, report.error]
            losses += train(model, optimizer, 10, seed=50, scheduler=schedule)
            ends.append((losses, [layer.width for layer in report.layers]))
        (theirs, widths), (ours, same) = ends
        assert widths == same, (widths, same)
        worst = max(abs(a - b) / a for a, b in zip(theirs, ours))
        assert worst < tolerance, (variant, dtype, worst)


def a_rank_without_batches(folder: Path):
    model, optimizer = prepared("fsdp2")
    report = Grower(model, FIXED, optimizer).find(mine(4) if dist.get_rank() else []).keep()
    assert report.kept
    train(model, optimizer, 2)


def fingerprint(model, optimizer):
    """All weights and optimizer states, whole, with the widths and the identities of what holds them."""
    state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return copy.deepcopy(state), [*map(id, model.parameters())]


def a_failure_on_one_rank_is_one_on_all(folder: Path):
    """A loss that is not finite on one rank leaves the model as it was, and training goes on."""
    model, optimizer = prepared("fsdp2")
    unbroken = train(model, optimizer, 2), train(model, optimizer, 2)
    model, optimizer = prepared("fsdp2")
    assert train(model, optimizer, 2) == unbroken[0]
    before, batches = fingerprint(model, optimizer), mine(3)
    if dist.get_rank() == 1:
        batches[2] = {**batches[2], "labels": torch.full_like(batches[2]["labels"], -100)}
    expected = "loss of batch" if dist.get_rank() == 1 else "another process"
    with pytest.raises((ValueError, RuntimeError), match=expected):
        Grower(model, FIXED, optimizer).find(batches).keep()
    assert same(fingerprint(model, optimizer), before)
    assert train(model, optimizer, 2) == unbroken[1]
    assert Grower(model, FIXED).find(mine(3)).keep().kept


def what_people_combine(folder: Path):
    """bf16 with a rounded output, activation checkpointing, gradients accumulated, an evaluation before the growth."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.bfloat16)
    falls = []
    for options in ({}, {"mp_policy": policy}):
        model, optimizer = prepared("fsdp2", **options)
        model.gradient_checkpointing_enable()
        with torch.no_grad():
            model(**mine(1)[0])  # leaves the outermost parameters whole
        hooks = len(model._forward_hooks)
        report = Grower(model, FIXED, optimizer).find(mine(3)).keep()
        falls.append(report.fall)
        assert len(model._forward_hooks) == hooks
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            loss = model(**mine(2, seed=31)[last], use_cache=False).loss
            loss.backward()
        assert loss.dtype == (torch.bfloat16 if options else torch.float32)  # the policy is back
        optimizer.step()
    assert falls[1] > 0.9 * falls[0], falls  # a loss rounded to bf16 loses 29 %


def frozen_and_refused(folder: Path):
    """A frozen base grows as it is; old weights that move are refused."""
    model, _ = prepared("fsdp2")
    model.requires_grad_(False)
    assert Grower(model, FIXED).find(mine(3)).keep().kept
    assert [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and ".extra." not in name
    ] == []
    model, _ = prepared("fsdp2")
    with pytest.raises(ValueError, match="update_existing"):
        Grower(model, GrowthConfig(qk_dims=2, update_existing=True)).find(mine(3))


def saved_and_resumed(folder: Path):
    """A distributed checkpoint, which another number of ranks resumes, and an ordinary one."""
    if not (folder / "loss.pt").exists():
        model, optimizer = prepared("fsdp2")
        train(model, optimizer, 2)
        assert Grower(model, FIXED, optimizer).find(mine(3)).keep().kept
        train(model, optimizer, 2)
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            model.save_pretrained(folder / "ordinary", state_dict=whole)
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        dcp.save(states, checkpoint_id=folder / "distributed")
        losses = [model(**batch, use_cache=False).loss.item() for batch in lm_batches(2, seed=9)]
        if dist.get_rank() == 0:
            torch.save({"losses": losses, "optimizer": fingerprint_of_states(optimizer)}, folder / "loss.pt")
        else:
            fingerprint_of_states(optimizer)
    dist.barrier()
    noted = torch.load(folder / "loss.pt", weights_only=True)
    ordinary = AutoModelForCausalLM.from_pretrained(folder / "ordinary")
    assert ordinary.config.auto_map and (folder / "ordinary" / "growattn" / "modeling.py").is_file()
    config = copy.deepcopy(ordinary.config)
    resumed = sharded(AutoModelForCausalLM.from_config(config))
    optimizer = torch.optim.AdamW(resumed.parameters(), lr=1e-3)
    states = dict(zip(("model", "optimizer"), get_state_dict(resumed, optimizer)))
    dcp.load(states, checkpoint_id=folder / "distributed")
    set_state_dict(resumed, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    for model in (ordinary, resumed):
        losses = [model.train()(**batch, use_cache=False).loss.item() for batch in lm_batches(2, seed=9)]
        assert losses == noted["losses"], (losses, noted["losses"])
    assert same(fingerprint_of_states(optimizer), noted["optimizer"])
    assert Grower(resumed, FIXED, optimizer).find(mine(3)).keep().kept  # and it goes on growing
    train(resumed, optimizer, 2)


def adapters(kind, load):
    """Losses of a few steps with an adapter of new dims, started and then sharded; the model at the end."""
    torch.manual_seed(0)
    model = get_peft_model(load(), GrowAttnConfig(budget=0.05)).train()
    assert initialize_growattn_weights(model, mine(3)).kept
    if kind == "fsdp2":
        for module in (*model.get_base_model().model.layers, model):
            fully_shard(module).set_force_sum_reduction_for_comms(True)
        assert all(hasattr(parameter, "placements") for parameter in model.parameters())
    wrapped = model if kind == "fsdp2" else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-3)
    return train(wrapped, optimizer, 4), model


def new_dims_as_an_adapter(folder: Path):
    """The peft method trains as under DDP, also beside 4-bit weights; its adapter is saved and loads."""
    if dist.get_rank() == 0:
        build("llama-2").save_pretrained(folder / "stock")
    dist.barrier()
    cases = [partial(build, "llama-2")]
    if find_spec("bitsandbytes") and Version(version("bitsandbytes")) >= Version("0.50"):  # knows of no shards before
        slow_4bit(pytest.MonkeyPatch())
        storage = dict(bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.float32)  # as peft's guide to QLoRA
        quantized = BitsAndBytesConfig(load_in_4bit=True, **storage)
        cases += [partial(AutoModelForCausalLM.from_pretrained, folder / "stock", quantization_config=quantized)]
    for load in cases:
        (theirs, _), (ours, model) = (adapters(kind, load) for kind in ("ddp", "fsdp2"))
        assert max(abs(a - b) for a, b in zip(theirs, ours)) < 1e-6  # fp32; equal to the bit where it was tried
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            model.save_pretrained(folder / "adapter", state_dict=whole)
        dist.barrier()
        (batch,) = lm_batches(1, seed=9)
        again = PeftModel.from_pretrained(load(), folder / "adapter").train()
        assert again(**batch, use_cache=False).loss == model(**batch, use_cache=False).loss
        with pytest.raises(ValueError, match="needs every weight whole"):
            initialize_growattn_weights(model, mine(3))
        dist.barrier()


def fingerprint_of_states(optimizer):
    return [optimizer.state[p]["exp_avg_sq"].full_tensor() for group in optimizer.param_groups for p in group["params"]]


CHECKS = [equal_to_ddp, a_rank_without_batches, a_failure_on_one_rank_is_one_on_all, what_people_combine]
CHECKS += [frozen_and_refused, new_dims_as_an_adapter]


def main(folder: Path) -> None:
    chosen = {1: [], 2: CHECKS, 4: [equal_to_ddp]}[dist.get_world_size()]
    for check in (saved_and_resumed, *chosen):
        check(folder)
        report(check.__name__)

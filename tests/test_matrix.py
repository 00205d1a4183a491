"""Training goes on through a growth, whatever it is made of: every choice occurs in a row."""

import contextlib
import math

import pytest
import torch
from families import build, lm_batches
from optimizers import OPTIMIZERS, SCHEDULERS, step_scheduler

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.growable.attention import attentions

ROWS = [  # optimizer, scheduler, where the precision is low, variant, activation checkpointing, torch.compile
    ("adamw-fused", "cosine", "nowhere", "llama-2", False, True),
    ("nadam", "one-cycle", "model", "gpt2-2", True, False),
    ("sgd-momentum", "plateau", "step", "llama-2", True, False),
    ("adafactor-torch", "annealing", "weights", "gpt2-2", False, False),
    ("adafactor-transformers", "sequential", "model", "gpt2-2", True, True),
    *([("muon", "constant-warmup", "step", "llama-2", False, False)] if "muon" in OPTIMIZERS else []),
]


@pytest.mark.parametrize("optimizer, scheduler, low, variant, checkpointing, compiled", ROWS)
def test_training_goes_on_through_a_growth(optimizer, scheduler, low, variant, checkpointing, compiled):
    model = patch_model(build(variant, dtype=torch.bfloat16 if low == "weights" else torch.float32)).train()
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if compiled:
        model.compile(backend="eager")
    optimizers = OPTIMIZERS[optimizer](model.parameters(), lr=1e-2)  # what bf16 weights still notice
    schedulers = [SCHEDULERS[scheduler](each) for each in optimizers]

    def autocast(where):
        return torch.autocast("cpu", torch.bfloat16) if low == where else contextlib.nullcontext()

    def train(after=lambda: None):
        """Train three steps, with `after` in the last one's autocast region."""
        for number, batch in enumerate(lm_batches(3)):
            with autocast("step"):  # anew for each step: a region keeps its casts of the weights
                with autocast("model"):
                    loss = model(**batch).loss
                loss.backward()
                for each, schedule in zip(optimizers, schedulers):
                    each.step()
                    each.zero_grad()
                    step_scheduler(schedule, loss.item())
                assert math.isfinite(loss.item())
                if number == 2:
                    after()

    def grow():
        config = GrowthConfig(qk_dims=4, v_dims=4, layers=[0])
        assert Grower(model, config, optimizers).find(lm_batches(3)).keep().kept

    train(after=grow)
    layer = attentions(model)[0]
    before = [parameter.detach().clone() for parameter in layer.module.parameters()]
    train()
    for parameter, former in zip(layer.module.parameters(), before):
        assert parameter.isfinite().all() and not torch.equal(parameter, former)
    held = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) and set(held) == set(model.parameters())
    assert set().union(*(each.state for each in optimizers)) == set(held)
    torch.compiler.reset()

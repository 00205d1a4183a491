"""Training goes on through a growth, whatever it is made of: every choice occurs in a row.

With GROWATTN_LONG=1, (nearly) every pair of choices occurs in a row.
"""

import contextlib
import itertools
import math

import pytest
import torch
from conftest import LONG
from families import build, lm_batches
from optimizers import OPTIMIZERS, SCHEDULERS, step_scheduler

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.growable.attention import attentions

LR = 1e-2  # what bf16 weights still notice
CHOICES = {
    "optimizer": [
        name
        for name in ("adamw-fused", "nadam", "sgd-momentum", "adafactor-torch", "adafactor-transformers", "muon")
        if name in OPTIMIZERS
    ],
    "scheduler": list(SCHEDULERS),
    "precision": ["fp32", "autocast of the model", "autocast of the step", "bf16"],
    "variant": ["llama-2", "gpt2-2"],
    "checkpointing": [False, True],
    "compiled": [False, True],
}


def covering_rows():
    """Rows, one at a time the one with the most choices, or pairs of choices, that no row before it has.

    Compiling takes many seconds, so of its pairs only those with the family and with checkpointing are asked for.
    """
    compiled = (len(CHOICES) - 1, True)
    paired_with_compiled = (list(CHOICES).index("variant"), list(CHOICES).index("checkpointing"))

    def covered(row):
        if not LONG:
            return {*enumerate(row)}
        every = itertools.combinations(enumerate(row), 2)
        return {(one, other) for one, other in every if other != compiled or one[0] in paired_with_compiled}

    products = {row: covered(row) for row in itertools.product(*CHOICES.values())}
    missing, rows = set().union(*products.values()), []
    while missing:
        rows.append(max(products, key=lambda row: len(products[row] & missing)))
        missing -= products[rows[-1]]
    return rows


@pytest.fixture(autouse=True)
def _fresh_compiler():
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(tuple(CHOICES), covering_rows())
def test_training_goes_on_through_a_growth(optimizer, scheduler, precision, variant, checkpointing, compiled):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = patch_model(build(variant, dtype=dtype)).train()
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if compiled:
        model.compile(backend="eager")
    optimizers = OPTIMIZERS[optimizer](model.parameters(), lr=LR)
    schedulers = [SCHEDULERS[scheduler](each) for each in optimizers]

    def autocast(where):
        if precision == f"autocast of the {where}":
            return torch.autocast("cpu", torch.bfloat16)
        return contextlib.nullcontext()

    def train(batches, after=lambda: None):
        """Train a step for each batch, with `after` in the last one's autocast region."""
        for batch in batches:
            with autocast("step"):  # anew for each step: a region keeps its casts of the weights
                with autocast("model"):
                    loss = model(**batch).loss
                loss.backward()
                for each in optimizers:
                    each.step()
                    each.zero_grad()
                for each in schedulers:
                    step_scheduler(each, loss.item())
                assert math.isfinite(loss.item())
                if batch is batches[-1]:
                    after()

    def grow():
        report = Grower(model, GrowthConfig(qk_dims=4, v_dims=4, layers=[0]), optimizers).find(lm_batches(3)).keep()
        assert report.kept

    train(lm_batches(3), after=grow)
    layer = attentions(model)[0]
    before = [parameter.detach().clone() for parameter in layer.module.parameters()]
    train(lm_batches(3))
    for parameter, former in zip(layer.module.parameters(), before):
        assert parameter.isfinite().all() and not torch.equal(parameter, former)
    held = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) and set(held) == set(model.parameters())
    assert set().union(*(each.state for each in optimizers)) == set(held)

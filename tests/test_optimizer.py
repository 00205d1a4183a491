"""State that is carried through a growth."""

import pytest
import torch
from families import build, lm_batches

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.modeling import attentions


def trained(variant, make, steps=3):
    model = patch_model(build(variant))
    optimizer = make(model.parameters())
    for batch in lm_batches(steps):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("variant, name, axis", [("llama-5-bias", "q_proj", 0), ("gpt2-2", "c_attn", 1)])
def test_state_stays_with_the_old_entries(variant, name, axis):
    model, optimizer = trained(variant, lambda p: torch.optim.AdamW(p, lr=1e-3))
    layer = attentions(model)[0]
    old = {key: torch.as_tensor(v).clone() for key, v in optimizer.state[getattr(layer, name).weight].items()}
    Grower(model, GrowthConfig(qk_dims=4), optimizer).grow(lm_batches())
    new = optimizer.state[getattr(layer, name).weight]

    def blocks(tensor):  # the query heads, each [old | new]
        return tensor.narrow(axis, 0, 4 * 20).unflatten(axis, (4, 20))

    def old_blocks(tensor):
        return tensor.narrow(axis, 0, 4 * 16).unflatten(axis, (4, 16))

    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(blocks(new[key]).narrow(axis + 1, 0, 16), old_blocks(old[key]))
    assert not blocks(new["exp_avg"]).narrow(axis + 1, 16, 4).any()
    mean = old["exp_avg_sq"].mean(dim=axis)
    torch.testing.assert_close(blocks(new["exp_avg_sq"]).select(axis, 1).select(axis, 17), mean)
    assert new["step"] == old["step"] == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=1e-3),
        lambda p: torch.optim.RMSprop(p, lr=1e-3),
    ],
)
def test_optimizers_step_on_and_move_old_and_new_columns(make):
    model, optimizer = trained("llama-2", make)
    Grower(model, GrowthConfig(qk_dims=4), optimizer).grow(lm_batches())
    weight = attentions(model)[0].weight("query")
    before = weight.clone()
    model(**lm_batches()[0]).loss.backward()
    optimizer.step()
    moved = (weight - before).abs()
    assert moved[:, :16].max() > 0 and moved[:, 16:].max() > 0
    assert set(optimizer.state) <= set(model.parameters())


def test_first_updates_of_new_columns_are_no_larger_than_the_old_ones():
    model, optimizer = trained("llama-2", lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.0), steps=20)
    Grower(model, GrowthConfig(qk_dims=4), optimizer).grow(lm_batches())
    weight = attentions(model)[0].weight("query")
    for batch in lm_batches(3):
        before = weight.clone()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        moved = (weight - before).abs()
        assert moved[:, 16:].max() <= 1.5 * max(moved[:, :16].max(), 1e-3)


def test_a_state_that_cannot_be_carried_is_refused_before_anything_changes():
    model, optimizer = trained("llama-2", lambda p: torch.optim.Adafactor(p, lr=1e-3))
    parameters = list(model.parameters())
    with pytest.raises(ValueError, match="Adafactor keeps"):
        Grower(model, GrowthConfig(qk_dims=4), optimizer).grow(lm_batches())
    assert all(p is q for p, q in zip(model.parameters(), parameters))

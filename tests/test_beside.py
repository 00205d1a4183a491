"""New dims beside the weights compute what they do once they are kept, and leave no trace when they are dropped."""

import pytest
import torch
from families import VARIANTS, build, lm_batches, padded, tokens
from hf_growattn.measure.extension import ExtraDims, set_extension

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.grow.trial import Trial
from hf_growattn.growable.models import attentions


def new_dims(attention, qk_dims: int, v_dims: int) -> ExtraDims:
    """Random ones, large enough to change what the module computes."""
    new, dims = ExtraDims(), {"query": qk_dims, "key": qk_dims, "value": v_dims, "output": v_dims}
    for role, count in dims.items():
        weight, bias = attention.weight_of(role), attention.bias_of(role)
        new.weights[role] = torch.randn(len(weight), count, weight.shape[-1]) * 0.3
        new.biases[role] = None if bias is None else torch.randn(len(weight), count) * 0.3
    return new


@pytest.mark.parametrize(
    "variant, qk_dims, v_dims",
    [*((variant, 2, 5) for variant in VARIANTS), ("llama-5-bias", 3, 0), ("llama-5-bias", 0, 2), ("gpt2-2", 3, 0)],
)
@torch.no_grad()
def test_kept_dims_compute_what_they_did_beside_the_weights(variant, qk_dims, v_dims):
    model, batch = patch_model(build(variant)), padded()
    kept = batch["attention_mask"].bool()
    before, weights = model(**batch).logits, dict(model.named_parameters())
    values = {name: weight.clone() for name, weight in weights.items()}
    found = {attention: new_dims(attention, qk_dims, v_dims) for attention in attentions(model)}
    for attention, new in found.items():
        set_extension(attention, new)
    beside, drafted = model(**batch).logits, model.generate(tokens(), max_new_tokens=4, do_sample=False)
    assert (beside - before)[kept].abs().max() > 0.01
    after = dict(model.named_parameters())
    assert all(after[name] is weight and torch.equal(weight, values[name]) for name, weight in weights.items())
    assert after.keys() == weights.keys()
    for attention in found:
        set_extension(attention, None)
    assert torch.equal(model(**batch).logits, before)
    for attention, new in found.items():
        new.write_into(attention)
    model.sync_config()
    # fp32, sums of other orders; weights are wide here, and so are the logits.
    size = beside[kept].abs().max().item()
    torch.testing.assert_close(model(**batch).logits[kept], beside[kept], rtol=1e-4, atol=1e-5 * size)
    assert torch.equal(model.generate(tokens(), max_new_tokens=4, do_sample=False), drafted)


@pytest.mark.parametrize("variant", ["llama-5-bias", "gpt2-2"])
def test_a_search_reads_the_weights_and_writes_none(variant, monkeypatch):
    model = patch_model(build(variant))
    weights = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
    taken = []

    def set_steps(trial, steps, half=None, original=Trial.set_steps):
        original(trial, steps, half)
        live = dict(model.named_parameters())
        assert live.keys() == weights.keys()
        assert all(
            live[name] is parameter and torch.equal(parameter, was) for name, (parameter, was) in weights.items()
        )
        taken.append(any(steps))

    monkeypatch.setattr(Trial, "set_steps", set_steps)
    assert Grower(model, GrowthConfig(budget=0.05)).grow(lm_batches(6)).applied
    assert sum(taken) > 10


def test_dims_that_cannot_be_written_leave_the_weights_as_they_were():
    attention = attentions(patch_model(build("llama-2")))[0]
    weights = dict(attention.named_parameters())
    new = new_dims(attention, 2, 2)
    new.weights["value"] = new.weights["value"][..., 1:]
    with pytest.raises(RuntimeError):
        new.write_into(attention)
    assert (attention.width_of("query"), attention.width_of("value")) == (16, 16)
    assert all(dict(attention.named_parameters())[name] is weight for name, weight in weights.items())

"""Growth under mixed and low precision, activation checkpointing and torch.compile."""

import pytest
import torch
from compared import directions_from_products, sketched
from families import add_dims, build, lm_batches

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.measure.directions import KindProbe, Probe

CONFIG = GrowthConfig(qk_dims=4, v_dims=4)
FAMILIES = ["llama-2", "gpt2-2"]


def train(model, optimizer, context, scaler, steps=3):
    """Train as torch's manual has it, and return the losses."""
    losses = []
    for batch in lm_batches(steps):
        with context():
            loss = model(**batch, use_cache=False).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def autocast(dtype):
    return lambda: torch.autocast("cpu", dtype)


@pytest.mark.parametrize("variant", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_growth_inside_the_users_autocast_is_that_of_an_autocast_forward(variant, dtype):
    """Only the model runs in low precision: statistics and solving see what they would outside."""
    inside, around = patch_model(build(variant)), patch_model(build(variant))
    around.forward = autocast(dtype)()(around.forward)  # as accelerate does
    with torch.autocast("cpu", dtype):
        one = Grower(inside, CONFIG).find(lm_batches()).keep()
    other = Grower(around, CONFIG).find(lm_batches()).keep()
    assert one.kept and "forward" not in vars(inside) and "forward" in vars(around)
    assert one == other
    assert {found.bottleneck.precision for found in sketched(around, lm_batches(), 4)} == {dtype}
    for name, parameter in inside.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, around.get_parameter(name)), name


def test_probes_are_not_rounded_by_an_autocast():
    shape, inputs = attentions(patch_model(build("llama-2")))[0].shape, torch.randn(2, 5, 48)
    probes = torch.randn(shape.num_key_value_heads, 48, 3), torch.randn(shape.num_heads, 48, 2)
    probe = Probe(shape, KindProbe(*probes), KindProbe(*probes))
    expected = probe.in_projection(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, probe.in_projection(inputs), expected))


@pytest.mark.parametrize("variant", FAMILIES)
def test_bf16_weights_are_measured_in_fp32(variant):
    model = patch_model(build(variant, dtype=torch.bfloat16))
    found = [sketched(each, lm_batches(), 4) for each in (patch_model(build(variant)), model)]
    for one, other in zip(*found):
        assert other.in_sample.dtype == torch.float32
        assert other.in_sample.sum().item() == pytest.approx(one.in_sample.sum().item(), rel=0.1)  # weights of 8 bits
    assert Grower(model, CONFIG).find(lm_batches()).keep().kept
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("variant", FAMILIES)
def test_fp16_with_a_gradient_scaler(variant):
    """The scaler goes on from the scale it had."""
    model = patch_model(build(variant)).train()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu")
    train(model, optimizer, autocast(torch.float16), scaler)
    scale = scaler.get_scale()
    with torch.autocast("cpu", torch.float16):
        model(**lm_batches(1)[0])  # the region keeps its casts of the weights
        report = Grower(model, CONFIG, optimizer).find(lm_batches()).keep()
    assert report.kept and scaler.get_scale() == scale
    assert all(map(torch.isfinite, torch.tensor(train(model, optimizer, autocast(torch.float16), scaler))))
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("divisor", [1e6, 1e-3])
def test_gradients_that_fp16_would_lose_or_that_overflow_are_measured(divisor):
    """A loss whose gradients leave the range of fp16 has the directions of the loss itself."""
    batches = [{**batch, "num_items_in_batch": torch.tensor(divisor)} for batch in lm_batches()]
    with torch.autocast("cpu", torch.float16):
        half = Grower(patch_model(build("llama-2")), CONFIG).find(batches).keep()
    full = Grower(patch_model(build("llama-2")), CONFIG).find(batches).keep()
    for one, other in zip(full.layers, half.layers):
        assert other.gain == pytest.approx(one.gain, rel=0.05)
    assert divisor < 1 or full.layers[0].gain < 1e-4


def test_inputs_that_nearly_depend_on_each_other_give_no_direction_of_rounding():
    matrix, clean = torch.randn(1, 12, 20), torch.randn(1, 20, 3)
    twice = torch.cat((clean, clean + 1e-6 * torch.randn_like(clean)), -1)
    noise = 1e-6 * torch.randn(1, 12, 6)  # as passes in fp32 leave
    _, expected, *_ = directions_from_products(clean, matrix @ clean, 3)
    _, found, *_ = directions_from_products(twice, matrix @ twice + noise, 6)
    torch.testing.assert_close(found[..., :3], expected, rtol=1e-3, atol=1e-3)
    assert (found[..., 3:] < 1e-3 * expected[..., :1]).all()


def test_new_dims_of_another_precision_read_both_inputs():
    """As beside quantized weights: new dims are fp32 there, and what comes in is not; the two inputs are apart."""
    part = add_dims(attentions(patch_model(build("llama-5-bias")))[0], 2, 3)
    torch.nn.init.normal_(part.in_projection.bias)
    inputs, source = torch.randn(2, 1, 5, 48).bfloat16()
    for found, expected in zip(part.in_projection(inputs, source), part.in_projection(inputs.float(), source.float())):
        assert torch.equal(found, expected)
    expected = part.in_projection(inputs)[0], *part.in_projection(source)[1:]
    for one, other in zip(part.in_projection(inputs, source), expected):
        torch.testing.assert_close(one, other)

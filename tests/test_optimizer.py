"""State that is carried through a growth."""

import copy
import itertools

import pytest
import torch
from compared import ComparedGrower
from families import build, lm_batches
from optimizers import BOUNDED, LR, OPTIMIZERS, SCALED, SCHEDULERS, step_scheduler
from torch import nn

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.grow.optimizer import check_optimizers, follow_resized
from hf_growattn.growable.models import attentions

ROLES = ("query", "key", "value", "output")


def step(model, optimizers, batch):
    model(**batch).loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def trained(variant, make, steps=3):
    model = patch_model(build(variant))
    optimizers = make(model.parameters())
    for batch in lm_batches(steps):
        step(model, optimizers, batch)
    return model, optimizers


def on_alternate_families(names):
    """Each optimizer with one family: Llama's projections grow along their first axis, GPT-2's along their second."""
    return [*zip(names, itertools.cycle(["llama-2", "gpt2-2"]))]


def states(optimizers):
    return {p: state for optimizer in optimizers for p, state in optimizer.state.items()}


def same(one, other):
    """Equal, tensor by tensor and type by type."""
    if torch.is_tensor(one):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("variant, name, axis", [("llama-5-bias", "q_proj", 0), ("gpt2-2", "c_attn", 1)])
def test_state_stays_with_the_old_entries(variant, name, axis):
    model, (optimizer,) = trained(variant, OPTIMIZERS["adamw"])
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
    assert new["step"] == old["step"] == 3


@pytest.mark.parametrize(
    "variant, name, axis", [("llama-2", "v_proj", 0), ("llama-2", "o_proj", 1), ("gpt2-2", "c_attn", 1)]
)
def test_new_second_moments_are_as_much_larger_than_the_old_ones_as_their_gradients(variant, name, axis):
    model, (optimizer,) = trained(variant, OPTIMIZERS["adamw-amsgrad"])
    parameter, batches = getattr(attentions(model)[0], name).weight, lm_batches()
    old, rest = dict(optimizer.state[parameter]), 1 - axis
    model(**batches[0]).loss.backward()  # gradients that wait for the next step stay
    waiting = parameter.grad.sum(rest)
    Grower(model, GrowthConfig(qk_dims=4, v_dims=4), optimizer).grow(batches)
    parameter = getattr(attentions(model)[0], name).weight
    columns = parameter.grad.sum(rest)
    carried = columns != 0
    torch.testing.assert_close(columns[carried], waiting)
    squares = []
    for batch in batches:
        model.zero_grad()
        model(**batch).loss.backward()
        squares.append(parameter.grad.square().sum(rest))
    squares = torch.stack(squares)
    steepness = (squares.amax(0) / squares[:, carried].mean()).clamp_min(1)[~carried]
    assert steepness.max() > 2 or name == "o_proj"
    for key in ("exp_avg_sq", "max_exp_avg_sq"):
        means = old[key].mean(axis) * steepness.unsqueeze(1)
        torch.testing.assert_close(optimizer.state[parameter][key].movedim(axis, 0)[~carried], means, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    "kind, names",
    [
        ("adafactor-torch", ("row_var", "col_var")),
        ("adafactor-transformers", ("exp_avg_sq_row", "exp_avg_sq_col")),
    ],
)
@pytest.mark.parametrize("variant, module, axis", [("llama-2", "q_proj", 0), ("llama-2", "o_proj", 1)])
def test_a_factored_state_follows_its_axis_and_no_other(kind, names, variant, module, axis):
    model, (optimizer,) = trained(variant, OPTIMIZERS[kind])
    projection = getattr(attentions(model)[0], module)
    old = dict(optimizer.state[projection.weight])
    Grower(model, GrowthConfig(qk_dims=4, v_dims=4), optimizer).grow(lm_batches())
    new = optimizer.state[projection.weight]
    assert torch.equal(new[names[1 - axis]], old[names[1 - axis]])  # a mean over the axis that grew
    before, after = old[names[axis]], new[names[axis]]
    assert after.dim() == before.dim()
    assert torch.equal(after.view(4, 20)[:, :16], before.view(4, 16))
    assert (after.view(4, 20)[:, 16:] > 0.999 * before.mean()).all()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_carried_state_steps_on_and_is_saved_and_loaded(name):
    model, optimizers = trained("gpt2-2", OPTIMIZERS[name], steps=2)
    ComparedGrower(model, GrowthConfig(qk_dims=4, v_dims=2, layers=[0]), optimizers).grow(lm_batches(2))
    weights = [attentions(model)[0].weight_of(role) for role in ROLES]
    before = [weight.clone() for weight in weights]
    for batch in lm_batches(2):
        step(model, optimizers, batch)
    for weight, old in zip(weights, before):
        moved = (weight - old).abs()
        assert moved[:, :16].max() > 0 and moved[:, 16:].max() > 0
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) and set(held) == set(model.parameters())
    assert set(states(optimizers)) <= set(held)

    fresh = OPTIMIZERS[name](model.parameters())
    for optimizer, other in zip(optimizers, fresh):
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert same(other.state_dict(), optimizer.state_dict())
    step(model, fresh, lm_batches()[1])


def largest_updates(model, update, size=torch.abs):
    """By role, the largest changes of the old and of the new columns of the first layer's weights by an update."""
    weights = {role: attentions(model)[0].weight_of(role) for role in ROLES}
    before = {role: weight.clone() for role, weight in weights.items()}
    update()
    moved = {role: size(weight - before[role]) for role, weight in weights.items()}
    return {role: (m[:, :16].max(), m[:, 16:].max()) for role, m in moved.items() if m.shape[1] > 16}


@pytest.mark.parametrize("name, variant", on_alternate_families(BOUNDED | SCALED))
def test_first_updates_of_new_columns_are_no_larger_than_the_old_ones(name, variant):
    # Old entries themselves move by up to 3 times the learning rate under NAdam, and 8 times under Adafactor. Muon
    # gives every update singular values of about 1, so what its learning rate bounds is the norm of a column.
    own_measure = name == "nadam" or name.startswith("adafactor")
    size = (lambda moved: moved.norm(dim=-1)) if name == "muon" else torch.abs
    model, optimizers = trained(variant, OPTIMIZERS[name], steps=20)
    Grower(model, GrowthConfig(qk_dims=4, v_dims=4), optimizers).grow(lm_batches(8, seed=50))
    for batch in lm_batches(5, seed=81):
        updates = largest_updates(model, lambda: step(model, optimizers, batch), size)  # noqa: B023
        assert set(updates) == set(ROLES)
        assert all(new <= 1.5 * (old if own_measure else LR) for old, new in updates.values())


@pytest.mark.parametrize(
    "name, variant", on_alternate_families(OPTIMIZERS)
)  # SGD's updates are as large as the gradients, so this is all it can promise
def test_gradients_of_equal_size_move_new_columns_no_more_than_old_ones(name, variant):
    model = patch_model(build(variant))
    optimizers = OPTIMIZERS[name](model.parameters())

    def update():
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        for optimizer in optimizers:
            optimizer.step()

    for _ in range(20):
        update()
    ComparedGrower(model, GrowthConfig(qk_dims=4, v_dims=4), optimizers).grow(lm_batches(2))
    for _ in range(5):
        updates = largest_updates(model, update)
        assert set(updates) == set(ROLES)
        assert all(0 < new <= 1.5 * old for old, new in updates.values())


def learning_rates(name, grow_at=None):
    model = patch_model(build("llama-2"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler, groups = SCHEDULERS[name](optimizer), []
    for index in range(10):
        if index == grow_at:
            Grower(model, GrowthConfig(qk_dims=4, layers=[0]), optimizer).grow(lm_batches(2))
            assert attentions(model)[0].qk_head_dim == 20
        optimizer.step()
        step_scheduler(scheduler, loss=max(1.0, 5.0 - index))
        groups += [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return groups


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on_with_the_learning_rates_they_would_have_had(name):
    expected = learning_rates(name)
    assert len({group["lr"] for group in expected}) > 1
    assert learning_rates(name, grow_at=3) == expected


class _Optimizer(torch.optim.Optimizer):
    """Plain descent, with whatever state `make_state` gives a parameter."""

    def __init__(self, parameters, make_state):
        super().__init__(parameters, {"lr": LR})
        self.make_state = make_state

    @torch.no_grad()
    def step(self):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if not self.state[parameter]:
                self.state[parameter].update(self.make_state(parameter))
            parameter.sub_(parameter.grad, alpha=LR)


def refused(model, optimizer, match):
    parameters, state = list(model.parameters()), {p: dict(s) for p, s in optimizer.state.items()}
    versions = [value._version for entries in state.values() for value in entries.values() if torch.is_tensor(value)]
    with pytest.raises(ValueError, match=match):
        Grower(model, GrowthConfig(qk_dims=4, layers=[1]), optimizer).grow(lm_batches())
    assert all(p is q for p, q in zip(model.parameters(), parameters))
    assert [p for group in optimizer.param_groups for p in group["params"]] == parameters
    assert all(optimizer.state[p][key] is value for p, entries in state.items() for key, value in entries.items())
    now = [value._version for entries in state.values() for value in entries.values() if torch.is_tensor(value)]
    assert now == versions  # nothing was written in place


def only_of_the_embeddings(value):
    """A state of one parameter, which does not grow."""
    return lambda p: {"extra": value(p)} if p.shape == (97, 48) else {}


@pytest.mark.parametrize(
    "make_state, match",
    [
        (lambda p: {"state1": torch.zeros_like(p, dtype=torch.uint8)}, "'state1' of .* as torch.uint8"),
        (
            only_of_the_embeddings(lambda p: p.detach().flatten().clone()),
            r"'extra' of a parameter .* in shape \(4656,\)",
        ),
        (only_of_the_embeddings(lambda p: [torch.eye(97), torch.eye(48)]), "'extra' of .* as a list of tensors"),
        (lambda p: {"exp_avg": torch.zeros_like(p).as_subclass(type("Packed", (torch.Tensor,), {}))}, "as a Packed"),
        (lambda p: {"exp_avg_sq_row": torch.zeros(p.shape[-1] + 7)}, "'exp_avg_sq_row' of .* in shape"),
    ],
)
def test_a_state_that_cannot_be_carried_is_refused_before_anything_changes(make_state, match):
    model, (optimizer,) = trained("llama-2", lambda p: [_Optimizer(p, make_state)], steps=1)
    refused(model, optimizer, match)


def test_a_sharded_state_is_refused():
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    model, (optimizer,) = trained("llama-2", OPTIMIZERS["adamw"], steps=1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        state = optimizer.state[attentions(model)[1].q_proj.weight]
        state["exp_avg"] = distribute_tensor(state["exp_avg"], init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match=r"q_proj.weight of layer 1 sharded otherwise.*after fully_shard"):
            Grower(model, GrowthConfig(qk_dims=4), optimizer).grow(lm_batches())
    finally:
        torch.distributed.destroy_process_group()


def test_lbfgs_is_refused_once_it_has_a_history_and_followed_before():
    model, batch = patch_model(build("llama-2")), lm_batches()[0]
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        return loss

    Grower(model, GrowthConfig(qk_dims=4), optimizer).grow(lm_batches())
    weight = attentions(model)[0].weight_of("query")
    before = weight.clone()
    optimizer.step(closure)
    assert (weight != before)[:, 16:].any()
    refused(model, optimizer, "LBFGS keeps .* of a parameter of shape")


def test_every_parameter_to_grow_must_be_held_by_one_of_the_optimizers():
    model = patch_model(build("llama-2"))
    halves = [torch.optim.AdamW(list(model.parameters())[i::2], lr=LR) for i in (0, 1)]
    with pytest.raises(ValueError, match=r"does not hold .* pass all optimizers"):
        Grower(model, GrowthConfig(qk_dims=4), halves[0]).grow(lm_batches())
    assert Grower(model, GrowthConfig(qk_dims=4), tuple(halves)).grow(lm_batches()).applied
    assert {p for o in halves for g in o.param_groups for p in g["params"]} == set(model.parameters())
    check_optimizers([], {"any": nn.Parameter(torch.zeros(1))})  # nothing to carry, nothing to refuse


def test_optimizers_prepared_by_accelerate_are_carried():
    from accelerate import Accelerator

    model, accelerator = patch_model(build("llama-2")), Accelerator(cpu=True)
    prepared = [accelerator.prepare(optimizer) for optimizer in OPTIMIZERS["adamw"](model.parameters())]
    step(model, prepared, lm_batches()[0])
    Grower(model, GrowthConfig(qk_dims=4), prepared, accelerator).grow(lm_batches())
    assert set(prepared[0].optimizer.state) == set(model.parameters())


@pytest.mark.parametrize("name", ["adamw", "adafactor-torch", "adafactor-transformers", "sgd"])
def test_stale_parameters_are_followed_to_the_live_ones(name):
    other, stale, between, live = (nn.Parameter(torch.randn(size, 3)) for size in (4, 4, 5, 6))
    (optimizer,) = OPTIMIZERS[name]([stale, other])
    for parameter in (stale, other, live):
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    (donor,) = OPTIMIZERS[name]([live])
    donor.step()
    kept = dict(optimizer.state.get(other, {}))
    assert not follow_resized([optimizer])
    stale._grown_into, between._grown_into = between, live
    assert follow_resized([optimizer])
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(live), id(other)]
    assert live not in optimizer.state or name == "sgd"  # its state was of the old shape
    assert stale not in optimizer.state and optimizer.state.get(other, {}) == kept
    assert not follow_resized([optimizer])
    optimizer.step()

    (loaded,) = OPTIMIZERS[name]([stale, other])  # its state is loaded before the model's
    loaded.state[stale] = state = dict(donor.state.get(live, {}))
    assert follow_resized([optimizer, loaded]) and stale not in loaded.state
    assert loaded.state[live] is not None and all(loaded.state[live][key] is value for key, value in state.items())
    assert len(loaded.state[live]) == len(state)

"""Optimizers train new dims: they join an existing group with a fresh state, and nothing else changes."""

import copy
import warnings

import pytest
import torch
from families import build, lm_batches, same
from transformers.optimization import Adafactor

from hf_growattn import Grower, GrowthConfig, load_growth, patch_model, save_growth, unpatch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import extra_parameters, set_dims

LR = 1e-3
CONFIG = GrowthConfig(qk_dims=4, v_dims=2)


def _one(cls, **options):
    return lambda parameters, lr=LR: [cls(parameters, **{"lr": lr, **options})]


def _muon_and_adamw(parameters, lr=LR):
    parameters = list(parameters)
    matrices, rest = ([p for p in parameters if (p.dim() == 2) is two] for two in (True, False))
    return [torch.optim.Muon(matrices, lr=lr, weight_decay=0.0), torch.optim.AdamW(rest, lr=lr, weight_decay=0.0)]


OPTIMIZERS = {
    "adam": _one(torch.optim.Adam),
    "adamw": _one(torch.optim.AdamW, weight_decay=0.0, foreach=False),
    "adamw-foreach": _one(torch.optim.AdamW, weight_decay=0.0, foreach=True),
    "adamw-fused": _one(torch.optim.AdamW, weight_decay=0.0, fused=True),
    "adamw-amsgrad": _one(torch.optim.AdamW, weight_decay=0.0, foreach=False, amsgrad=True),
    "nadam": _one(torch.optim.NAdam),
    "adafactor-torch": _one(torch.optim.Adafactor),
    "adafactor-transformers": _one(Adafactor, relative_step=False),
    "sgd-momentum": _one(torch.optim.SGD, momentum=0.9, nesterov=True),
    "rmsprop": _one(torch.optim.RMSprop, momentum=0.9, centered=True),
    "adagrad": _one(torch.optim.Adagrad),  # whose state is there before a step
    "asgd": _one(torch.optim.ASGD),
} | ({"muon": _muon_and_adamw} if hasattr(torch.optim, "Muon") else {})  # from torch 2.9 on


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


def parameters_of(optimizers):
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def states(optimizers):
    return {p: dict(state) for optimizer in optimizers for p, state in optimizer.state.items()}


def grouped(model, **kinds):
    """An optimizer with a group for each kind of parameters, by a word in their names; the last takes the others."""
    groups = {kind: [] for kind in kinds}
    for name, parameter in model.named_parameters():
        groups[next(kind for kind, word in kinds.items() if word in name)].append(parameter)
    return torch.optim.AdamW([{"params": found, "kind": kind} for kind, found in groups.items()], lr=1e-3)


@pytest.mark.parametrize(
    "kinds",
    [
        {"embeddings": "embed_tokens"},
        {"others": "lm_head", "first layer": "layers.0.", "second layer": "layers.1."},  # as layer-wise decay has them
        {"mlp": "mlp", "attention": "self_attn"},
    ],
    ids=["embeddings apart", "by layer", "attention apart"],
)
def test_new_dims_join_the_group_that_trains_what_is_around_them(kinds):
    model = patch_model(build("llama-2"))
    optimizer = grouped(model, **kinds, rest="")
    report = Grower(model, CONFIG, optimizer).find(lm_batches(2)).keep()
    assert report.kept
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for name in (names[parameter] for parameter in group["params"] if ".extra." in names[parameter]):
            own = name.partition("extra.")[0] + "q_proj.weight"
            assert any(names[parameter] == own for parameter in group["params"])
    held_by_names = {names[parameter] for group in optimizer.param_groups for parameter in group["params"]}
    assert held_by_names == set(names.values())


def test_names_in_the_groups_follow():
    model = patch_model(build("llama-2"))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    Grower(model, CONFIG, optimizer).find(lm_batches(2)).keep()
    for _ in range(2):
        names = dict(model.named_parameters())
        (group,) = optimizer.param_groups
        assert [names[name] for name in group["param_names"]] == group["params"]
        step(model, [optimizer], lm_batches()[0])
        set_dims(model, {}, [optimizer])
        assert optimizer.state.keys() == {*model.parameters()}
    assert not any(".extra." in name for name in group["param_names"]) and len(group["params"]) == len(names)


def test_what_was_dropped_is_not_stepped_any_more():
    model = patch_model(build("llama-2"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    assert Grower(model, CONFIG, optimizer).find(lm_batches(2)).keep().kept
    dropped = extra_parameters(model)
    before = [parameter.detach().clone() for parameter in dropped]
    unpatch_model(model, drop_growth=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, [optimizer], lm_batches()[0])
    assert all(map(torch.equal, dropped, before)) and not any(parameter in optimizer.state for parameter in dropped)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_old_states_stay_and_new_dims_train_and_all_is_saved_and_loaded(name):
    model, optimizers = trained("gpt2-2", OPTIMIZERS[name], steps=2)
    old = states(optimizers)
    before = {key: copy.deepcopy(state) for key, state in old.items()}
    Grower(model, GrowthConfig(qk_dims=4, v_dims=2, layers=[0]), optimizers).find(lm_batches(2)).keep()
    new = extra_parameters(model)
    assert len(new) == 3 and states(optimizers) == old  # the very same objects
    assert all(same(old[key], before[key]) for key in old)
    assert sorted(map(id, parameters_of(optimizers))) == sorted(map(id, model.parameters()))
    weights = [p.detach().clone() for p in model.parameters()]
    for batch in lm_batches(2):
        step(model, optimizers, batch)
    assert all(not torch.equal(p, former) for p, former in zip(model.parameters(), weights))

    fresh = OPTIMIZERS[name](model.parameters())
    for optimizer, other in zip(optimizers, fresh):
        if [*map(id, parameters_of([optimizer]))] == [*map(id, parameters_of([other]))]:
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            assert same(other.state_dict(), optimizer.state_dict())
    step(model, fresh, lm_batches()[1])


@pytest.mark.parametrize("variant", ["llama-5-bias", "gpt2-2"])
def test_new_dims_join_a_group_of_their_kind_in_the_order_of_the_model(variant):
    model = patch_model(build(variant))
    groups = {True: [p for p in model.parameters() if p.dim() > 1], False: []}
    groups[False] = [p for p in model.parameters() if p.dim() == 1]
    given = [{"params": list(groups[True]), "weight_decay": 0.1}, {"params": list(groups[False]), "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(given, lr=LR)
    Grower(model, CONFIG, optimizer).find(lm_batches()).keep()
    for group, wide in zip(optimizer.param_groups, (True, False)):
        assert [*map(id, group["params"])] == [id(p) for p in model.parameters() if (p.dim() > 1) is wide]


@pytest.mark.parametrize("decays", [(0.1, 0.0), (0.0, 0.1)])
def test_an_empty_group_is_taken_where_no_group_is_alike(decays):
    model = patch_model(build("llama-2")).requires_grad_(False)
    norms = [p.requires_grad_() for name, p in model.named_parameters() if "norm" in name]
    groups = [{"params": own, "weight_decay": decay} for own, decay in zip((norms, []), decays)]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    Grower(model, CONFIG, optimizer).find(lm_batches()).keep()
    assert {*optimizer.param_groups[1]["params"]} == {*extra_parameters(model)}
    assert {*optimizer.param_groups[0]["params"]} == {*norms}


@pytest.mark.parametrize("decays", [(0.1, 0.0), (0.0, 0.1)])
def test_of_two_groups_as_near_the_one_without_weight_decay_is_taken(decays):
    model = patch_model(build("llama-2"))
    names = {"q_proj", "k_proj"}, {"v_proj", "o_proj"}
    groups = [
        {"params": [getattr(a.module, name).weight for a in attentions(model) for name in own], "weight_decay": decay}
        for own, decay in zip(names, decays)
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    Grower(model, CONFIG, optimizer).find(lm_batches()).keep()
    kept = optimizer.param_groups[decays.index(0.0)]["params"]
    assert extra_parameters(model) and {*extra_parameters(model)} <= {*kept}


def test_lbfgs_grows_before_its_first_step_alone(tmp_path):
    model, batch = patch_model(build("llama-2")), lm_batches()[0]
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        return loss

    Grower(model, CONFIG, optimizer).find(lm_batches()).keep()
    kept = extra_parameters(model)
    before = [p.detach().clone() for p in kept]
    optimizer.step(closure)
    assert all(not torch.equal(p, former) for p, former in zip(kept, before))
    with pytest.raises(ValueError, match="make a new LBFGS afterwards"):  # it keeps directions of all parameters
        Grower(model, CONFIG, optimizer).find(lm_batches()).keep()
    other = patch_model(build("llama-2"))
    assert Grower(other, CONFIG).find(lm_batches()).keep().kept and Grower(other, CONFIG).find(lm_batches()).keep().kept
    save_growth(other, tmp_path)
    with pytest.raises(ValueError, match="make a new LBFGS afterwards"):
        load_growth(model, tmp_path, optimizer)
    assert all(map(torch.Tensor.is_set_to, extra_parameters(model), kept))


def test_an_optimizer_that_was_not_passed_is_told_of_once():
    model, other = patch_model(build("llama-2")), build("llama-2")
    optimizer, elsewhere = (torch.optim.AdamW(each.parameters(), lr=LR) for each in (model, other))
    assert Grower(model, CONFIG).find(lm_batches()).keep().kept
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(other, [elsewhere], lm_batches()[0])
    with pytest.warns(UserWarning, match=r"AdamW steps without the new dims.*Grower\(model, config, optimizer"):
        step(model, [optimizer], lm_batches()[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, [optimizer], lm_batches()[0])
        assert Grower(model, CONFIG, optimizer).find(lm_batches()).keep().kept  # one that was passed
        step(model, [optimizer], lm_batches()[0])
    with pytest.warns(UserWarning, match="AdamW steps without the new dims"):  # at once, since it has stepped
        assert Grower(model, CONFIG).find(lm_batches()).keep().kept
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one is made afterwards
        step(model, [torch.optim.AdamW(model.parameters(), lr=LR)], lm_batches()[0])
        frozen = patch_model(build("llama-2"))
        optimizer = torch.optim.AdamW(frozen.parameters(), lr=LR)
        assert Grower(frozen, CONFIG).find(lm_batches()).keep().kept
        for parameter in extra_parameters(frozen):
            parameter.requires_grad_(False)
        step(frozen, [optimizer], lm_batches()[0])

"""A frozen base that grows: the new dims train alone, and old entries stay to the bit, whatever the optimizer."""

import copy

import pytest
import torch
from families import build, lm_batches, new_entries
from optimizers import OPTIMIZERS, SCHEDULERS, step_scheduler
from test_trainer import trainer
from transformers import AutoModelForCausalLM

from hf_growattn import Grower, GrowthCallback, GrowthConfig, freeze_old_dims, patch_model, trim_model
from hf_growattn.growable.models import attentions

CONFIG = GrowthConfig(qk_dims=2, v_dims=1, oversampling=4)


def frozen(variant="llama-5-bias"):
    """A frozen model whose head and norms train, and copies of what its attention begins with."""
    model = patch_model(build(variant)).train().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "ln_" in name or "lm_head" in name)
    return model, {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}


def assert_frozen(model, before):
    """What was frozen is as it was, to the bit."""
    masks, parameters = new_entries(model), dict(model.named_parameters())
    for name, values in before.items():
        old = parameters[name][~masks[parameters[name]]] if parameters[name] in masks else parameters[name]
        assert torch.equal(old.flatten(), values.flatten()), name


def train(model, optimizers, batches, schedulers=()):
    for batch in batches:
        for half in (0, 1):  # accumulated
            rows = {key: value[half::2] for key, value in batch.items()}
            loss = model(**rows).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            step_scheduler(scheduler, loss.item())


@pytest.mark.parametrize(
    "name, held",
    [
        ("adamw", True),
        ("adamw", False),
        ("sgd-momentum", True),
        ("adafactor-torch", False),
        ("adafactor-transformers", True),
        ("asgd", False),
    ],
)
def test_old_entries_stay_and_new_ones_train(name, held):
    model, before = frozen()
    given = (p for p in model.parameters() if held or p.requires_grad)
    optimizers = OPTIMIZERS[name](given)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["weight_decay"] = 0.1
    train(model, optimizers, lm_batches(1))
    for config in (CONFIG, GrowthConfig(budget=0.05, oversampling=4)):
        assert Grower(model, config, optimizers).grow(lm_batches()).applied
        grown = {parameter: parameter.detach()[mask] for parameter, mask in new_entries(model).items()}
        train(model, optimizers, lm_batches(3, seed=5))
        assert all(not torch.equal(p[mask], grown[p]) for p, mask in new_entries(model).items())
        assert_frozen(model, before)
    ours = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    assert ours >= {id(p) for p in model.parameters() if p.requires_grad}
    assert trim_model(model, lm_batches(), 0.05, optimizers).removed_parameters
    train(model, optimizers, lm_batches(2, seed=6))
    assert_frozen(model, before)


@pytest.mark.parametrize("name", ["one-cycle", "sequential"])
def test_schedulers_go_on_and_a_group_without_decay_is_taken(name):
    model, before = frozen("gpt2-2")
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained, "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = SCHEDULERS[name](optimizer)
    train(model, [optimizer], lm_batches(1), [scheduler])
    assert Grower(model, CONFIG, optimizer).grow(lm_batches()).applied
    train(model, [optimizer], lm_batches(3), [scheduler])
    assert_frozen(model, before)
    assert len(optimizer.param_groups) == 2 and len(optimizer.param_groups[1]["params"])


def test_an_optimizer_made_afterwards_trains_the_new_dims_alone():
    model = patch_model(build("llama-2")).requires_grad_(False)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    assert Grower(model, CONFIG).grow(lm_batches()).applied
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert set(trained) == set(new_entries(model))
    train(model, [torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.5)], lm_batches(2))
    assert_frozen(model, before)
    for parameter in new_entries(model):
        assert parameter.grad is None
    model(**lm_batches(1)[0]).loss.backward()
    for parameter, mask in new_entries(model).items():
        assert parameter.grad[mask].any() and not parameter.grad[~mask].any()


def test_frozen_old_dims_can_follow_nothing():
    """What growth finds beside them is what `old_dims_train=False` finds; True overrides."""
    found = {}
    for said in (None, False, True):
        model, _ = frozen()
        config = GrowthConfig(qk_dims=2, v_dims=1, oversampling=4, old_dims_train=said)
        found[said] = [layer.validated for layer in Grower(model, config).measure(lm_batches()).layers]
    assert found[None] == found[False] != found[True]
    attentions(model)[1].q_proj.requires_grad_(True)
    some = [layer.validated for layer in Grower(model, CONFIG).measure(lm_batches()).layers]
    same = [one == other for one, other in zip(some, found[True])]
    assert same == [(layer, kind) == (1, 0) for layer in range(len(attentions(model))) for kind in range(2)]


def test_old_dims_may_train_again_and_a_loaded_model_may_freeze_them(tmp_path):
    model, before = frozen()
    assert Grower(model, CONFIG).grow(lm_batches()).applied
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).requires_grad_(False)
    freeze_old_dims(loaded)
    train(loaded, [torch.optim.AdamW([p for p in loaded.parameters() if p.requires_grad])], lm_batches(2))
    assert_frozen(loaded, before)
    freeze_old_dims(loaded, False)
    train(loaded, [torch.optim.AdamW([p for p in loaded.parameters() if p.requires_grad])], lm_batches(1))
    with pytest.raises(AssertionError):
        assert_frozen(loaded, before)


def test_states_of_model_and_optimizer_load_across_a_growth():
    def run():
        model, before = frozen()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        return model, before, optimizer, Grower(model, CONFIG, optimizer)

    model, before, optimizer, grower = run()
    train(model, [optimizer], lm_batches(1))
    assert grower.grow(lm_batches()).applied
    train(model, [optimizer], lm_batches(1, seed=5))
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, [optimizer], lm_batches(2, seed=6))
    again, _, later, _ = run()
    again.load_state_dict(states[0])
    later.load_state_dict(states[1])
    train(again, [later], lm_batches(2, seed=6))
    assert_frozen(again, before)
    for (name, one), other in zip(model.named_parameters(), again.parameters()):
        assert torch.equal(one, other), name


def test_trainer_grows_a_frozen_base_and_resumes(tmp_path):
    losses = []
    for resumed in (None, str(tmp_path / "checkpoint-4")):
        model, before = frozen()
        growth = GrowthCallback(CONFIG, steps=[2], batches=4)
        options = dict(save_strategy="steps", save_steps=4, weight_decay=0.1, lr_scheduler_type="cosine")
        run = trainer(tmp_path, growth, model=model, **options)
        run.train(resume_from_checkpoint=resumed)
        losses.append([entry["loss"] for entry in run.state.log_history if "loss" in entry])
        assert_frozen(model, before)
        assert new_entries(model)
    assert losses[0] == losses[1]

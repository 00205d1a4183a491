"""Trainings that are cut off, resumed or begun again keep what grew, before them too, and say early what cannot be."""

import warnings
from functools import partialmethod

import pytest
import torch
from families import build, lm_batches, tokens
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_trainer import CONFIG, grown_at, trainer
from training import Rows
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback

from hf_growattn import Grower, GrowthConfig, load_growth, patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import dims_of, extra_parameters
from hf_growattn.training.callback import set_saved_dims

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # of peft
SAVING = {"save_strategy": "steps", "save_steps": 2}
LORA = {"r": 2, "init_lora_weights": False, "target_modules": ["q_proj", "o_proj"]}


def adapted(model, **options):
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(**LORA | options))


@pytest.fixture
def grown_base(tmp_path):
    """A folder of a model that grew."""
    model = patch_model(build("llama-2"))
    assert Grower(model, CONFIG).find(lm_batches(2)).keep().kept
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("how", ["resumed from before", "best before"])
def test_lora_on_a_grown_base_keeps_what_the_base_grew_before(how, grown_base, tmp_path, kept_by_word):
    growth, options = dict(steps=[4]), dict(SAVING)
    if how == "best before":
        options |= dict(load_best_model_at_end=True, eval_strategy="steps", eval_steps=2, learning_rate=1e-3)
    run = trainer(tmp_path / "run", growth, adapted(AutoModelForCausalLM.from_pretrained(grown_base)), **options)
    before = [parameter.detach().clone() for parameter in extra_parameters(run.model)]
    run.train()
    if how == "best before":
        run.state.best_model_checkpoint = str(tmp_path / "run" / "checkpoint-2")
        run.callback_handler.on_train_end(run.args, run.state, run.control)
        kept = run.model
    else:
        assert grown_at(run.state) == [4]
        again = trainer(tmp_path / "run", growth, adapted(AutoModelForCausalLM.from_pretrained(grown_base)), **SAVING)
        again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
        kept = again.model
        assert {name for parts in dims_of(kept).values() for name in parts} == {"growth_1", "growth_2"}
    named = dict(kept.named_parameters())
    found = [named[name] for name in named if ".growths.growth_1." in name]
    assert len(found) == len(before)
    for one, other in zip(found, before):
        torch.testing.assert_close(one, other, rtol=0, atol=0)  # LoRA froze them


def test_dims_that_were_not_loaded_are_missed_before_training(tmp_path, kept_by_word):
    """As where a trainer has its own way to load a checkpoint."""
    options, checkpoint = dict(SAVING, save_only_model=True), str(tmp_path / "checkpoint-4")
    trainer(tmp_path, dict(steps=[2]), adapted(patch_model(build("llama-2"))), **options).train()
    again = trainer(tmp_path, dict(steps=[2]), adapted(patch_model(build("llama-2"))), **options)
    load, again._load_from_checkpoint = again._load_from_checkpoint, lambda *args, **kwargs: None
    with pytest.raises(
        ValueError, match=r"had grown when it was saved.*load_growth\(model, checkpoint \+ \"/growth\"\)"
    ):
        again.train(resume_from_checkpoint=checkpoint)
    again._load_from_checkpoint = load
    again.train(resume_from_checkpoint=checkpoint)
    assert again.state.global_step == 6 and len(dims_of(again.model)["0"]) == 1


def test_a_checkpoint_in_several_files_is_resumed_with_its_dims(tmp_path, monkeypatch, kept_by_word):
    """transformers loads them one by one, and would leave out what the model has no place for."""
    save = PreTrainedModel.save_pretrained
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", partialmethod(save, max_shard_size="20kB"))
    run, again = (trainer(tmp_path, dict(steps=[2]), **SAVING) for _ in range(2))
    run.train()
    assert dims_of(run.model) and (tmp_path / "checkpoint-4" / "model.safetensors.index.json").is_file()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    ours, theirs = (dict(one.model.named_parameters()) for one in (again, run))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_growth_that_waits_comes_in_the_resumed_run(tmp_path, kept_by_word):
    """It was due at step 2, before the checkpoint, and neither run has seen enough batches by then."""
    run, again = (trainer(tmp_path, dict(steps=[2], batches=3), **SAVING) for _ in range(2))
    run.add_callback(Fails(2, "on_save"))
    with pytest.warns(UserWarning, match="due at step 2"), pytest.raises(KeyboardInterrupt):
        run.train()
    with pytest.warns(UserWarning, match="due at step 3"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert grown_at(again.state) == [5]


class Fails(TrainerCallback):
    """Ends the first training after a step, as a lack of memory does."""

    def __init__(self, at: int, event: str = "on_step_end"):
        self.at = at
        setattr(self, event, self.fail)

    def fail(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            self.at = 0
            raise KeyboardInterrupt


@pytest.mark.parametrize("when", [{}, {"steps": [2, 5]}])
def test_a_training_that_is_begun_again_does_not_grow_again(when, tmp_path, kept_by_word):
    run = trainer(tmp_path, when)
    run.add_callback(Fails(4))
    with pytest.raises(KeyboardInterrupt):
        run.train()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="GrowthCallback never fired")
        run.train()
    reports = run.growth.reports
    assert len(reports) == (2 if "steps" in when else 1)
    assert len(reports) == len({name for parts in dims_of(run.model).values() for name in parts})


def test_a_reference_that_is_mixed_with_the_model_is_refused(tmp_path):
    run = trainer(tmp_path, {})
    run.args.sync_ref_model = True  # of TRL's DPO
    with pytest.raises(ValueError, match="sync_ref_model=True"):
        run.train()


def test_batches_without_a_label_that_counts_are_passed_over(tmp_path, monkeypatch):
    """Such rows have no loss of their own; where steps accumulate, training goes on with the others."""
    given, find = [], Grower.find
    monkeypatch.setattr(Grower, "find", lambda self, batches: (given.extend(batches), find(self, batches))[1])

    class Masked(Rows):
        def __getitem__(self, row):
            found = super().__getitem__(row)
            return found if row % 3 else {**found, "labels": torch.full_like(found["labels"], -100)}

    options = dict(per_device_train_batch_size=1, gradient_accumulation_steps=4)
    run = trainer(tmp_path, dict(batches=6), data=Masked(24), **options)
    run.train()
    assert grown_at(run.state) == [3] and len(given) == 6
    assert all((batch["labels"] != -100).any() for batch in given)


def test_a_push_amid_training_takes_folders_of_the_checkpoint_along(tmp_path, kept_by_word):
    run = trainer(tmp_path, dict(steps=[2]), **SAVING)
    run.train()
    run.callback_handler.on_push_begin(run.args, run.state, run.control)
    assert (tmp_path / "growattn" / "modeling.py").is_file()


def test_a_growth_is_loaded_from_the_checkpoint_of_adapters(tmp_path, grown_base):
    """Also that of a base which had grown before the training."""
    model = adapted(AutoModelForCausalLM.from_pretrained(grown_base))
    trainer(tmp_path / "run", dict(config=GrowthConfig(qk_dims=1), steps=[5]), model, **SAVING).train()
    fresh = patch_model(build("llama-2"))
    load_growth(fresh, tmp_path / "run" / "checkpoint-2" / "growth")
    assert dims_of(fresh) == dims_of(AutoModelForCausalLM.from_pretrained(grown_base))
    assert load_file(tmp_path / "run" / "checkpoint-2" / "growth" / "growth.safetensors")
    assert torch.isfinite(fresh(tokens()).logits).all() and attentions(fresh)[0].growths


def test_a_checkpoint_of_adapters_from_before_any_growth_takes_new_dims_off(tmp_path, kept_by_word):
    growth = dict(config=GrowthConfig(qk_dims=1), steps=[3])
    run = trainer(tmp_path, growth, adapted(patch_model(build("llama-2"))), **SAVING)
    run.train()
    assert extra_parameters(run.model)
    set_saved_dims(run.model, tmp_path / "checkpoint-2")
    assert not extra_parameters(run.model) and not attentions(run.model)[0].growths

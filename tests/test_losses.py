"""What training computes: loss values of stock and patched models through the options of Trainer and TRL."""

import copy

import pytest
from families import build, lm_batches, word_tokenizer
from test_user_loss import Uneven, preferring
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_growattn import Grower, GrowthConfig, patch_model, unpatch_model
from hf_growattn.growable.growths import origin_of


def own_loss(outputs, labels, num_items_in_batch=None):
    """A loss of the user's own: the margin of the wrong tokens over the right one."""
    logits, targets = outputs.logits[:, :-1], labels[:, 1:]
    right = logits.gather(-1, targets.clamp_min(0)[..., None])
    margins = (1 + logits - right).clamp_min(0).mean(-1)[targets != -100]
    return margins.sum() / (num_items_in_batch or len(margins))


OPTIONS = {
    "plain": {},
    "smoothing and accumulation": dict(label_smoothing_factor=0.1, gradient_accumulation_steps=3),
    "noisy embeddings": dict(neftune_noise_alpha=5.0),
    "packing and smoothing": dict(data_collator=DataCollatorWithFlattening(), label_smoothing_factor=0.1),
    "own loss": dict(compute_loss_func=own_loss, gradient_accumulation_steps=2),
}


def losses(model, folder, data_collator=None, compute_loss_func=None, **options) -> list[float]:
    """The losses of three steps, and of an evaluation after them."""
    set_seed(0)
    defaults = dict(max_steps=3, learning_rate=1e-2, per_device_train_batch_size=4, logging_steps=1)
    quiet = dict(use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no")
    trainer = Trainer(
        model,
        TrainingArguments(output_dir=str(folder), **(defaults | quiet | options)),
        train_dataset=Uneven(36),
        eval_dataset=Uneven(8),
        data_collator=data_collator,
        compute_loss_func=compute_loss_func,
    )
    trainer.train()
    trained = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*trained, trainer.evaluate()["eval_loss"]]


@pytest.mark.parametrize(
    "variant, options", [*(("llama-2", name) for name in OPTIONS), ("gpt2-2", "packing and smoothing")]
)
def test_patched_trains_on_the_losses_of_stock(tmp_path, variant, options):
    options = OPTIONS[options]
    stock = losses(build(variant), tmp_path, **options)
    assert losses(patch_model(build(variant)), tmp_path, **options) == stock


def first_loss(trainer) -> float:
    trainer.train()
    return trainer.state.log_history[0]["loss"]


def grown_in_memory(folder):
    """A model that was loaded from a folder with its tokenizer, and has grown since."""
    build("llama-2").save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    model = patch_model(AutoModelForCausalLM.from_pretrained(folder))
    assert Grower(model, GrowthConfig(qk_dims=2, v_dims=2)).find(lm_batches()).keep().kept
    return model


def test_no_other_model_becomes_the_reference_of_one_that_grew(tmp_path):
    model = grown_in_memory(tmp_path / "stock")
    with pytest.raises(OSError, match="Repo id must"):  # of transformers: no checkpoint has an empty name
        preferring(tmp_path, model)
    options = dict(max_steps=1, logging_steps=1)
    trainer = preferring(tmp_path, model, copy.deepcopy(model), **options)
    assert first_loss(trainer) == pytest.approx(0.6931, abs=1e-4)  # the policy begins at its reference
    model.save_pretrained(tmp_path / "grown")
    trainer = preferring(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path / "grown"), **options)
    assert type(trainer.ref_model) is type(model) and first_loss(trainer) == pytest.approx(0.6931, abs=1e-4)


def test_a_model_that_grew_is_not_taken_for_its_checkpoint(tmp_path):
    model = grown_in_memory(tmp_path / "stock")
    assert model.name_or_path == model.config.name_or_path == ""
    with pytest.raises(OSError, match="Repo id must"):
        AutoTokenizer.from_pretrained(model.config.name_or_path)
    assert origin_of(model) == origin_of(copy.deepcopy(model)) == str(tmp_path / "stock")
    Grower(model, GrowthConfig(qk_dims=1)).find(lm_batches()).keep()
    assert origin_of(model) == str(tmp_path / "stock")
    stock = unpatch_model(copy.deepcopy(model), drop_growth=True)
    assert stock.name_or_path == stock.config.name_or_path == str(tmp_path / "stock")
    model.save_pretrained(tmp_path / "grown")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "grown").config.name_or_path == str(tmp_path / "grown")
    Grower(patched := patch_model(build("llama-2")), GrowthConfig(qk_dims=1)).measure(lm_batches())
    assert patched.config.name_or_path == ""

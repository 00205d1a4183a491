"""Rough input, each refused in one line that names the fix: budgets, limits, tokens, names, secrets."""

import pytest
import torch
from families import HEADS, VOCABULARY, add_dims, build, lm_batches, tokens
from test_bad_input import refused
from test_cli import call
from transformers import Trainer, TrainingArguments

from hf_growattn import Grower, GrowthCallback, GrowthConfig, patch_model
from hf_growattn.growable.attention import attentions

DIM = 6 * 48  # weights that one more dim of patterns or messages adds to a layer of "llama-2"


# Budgets


def test_a_grower_refuses_a_budget_that_buys_nothing():
    assert Grower(patch_model(build("llama-2")), GrowthConfig(budget=DIM)).measure(lm_batches(4)).layers
    refused(patch_model(build("llama-2")), lm_batches(4), "287 weights buy nothing", GrowthConfig(budget=DIM - 1))
    refused(patch_model(build("llama-2")), lm_batches(4), "46 weights buy nothing", GrowthConfig(budget=0.001))


def test_a_callback_refuses_a_budget_that_buys_nothing_before_it_trains(tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in tokens(8)]
    options = dict(output_dir=str(tmp_path), max_steps=4, use_cpu=True, report_to="none", save_strategy="no")
    options["per_device_train_batch_size"] = 2
    trainer = Trainer(patch_model(build("llama-2")), TrainingArguments(**options), train_dataset=rows)
    trainer.add_callback(GrowthCallback(trainer, GrowthConfig(budget=5), batches=2))
    with pytest.raises(ValueError, match="5 weights buy nothing"):
        trainer.train()
    assert trainer.state.global_step == 0


# Limits


@pytest.mark.parametrize("limit", ["max_qk_head_dim", "max_v_head_dim"])
def test_a_limit_below_the_present_width_is_refused(limit):
    model = patch_model(build("llama-2"))
    config = {limit: 15, "budget": 0.1}
    with pytest.raises(ValueError, match=rf"{limit}=15 is below.*less than 16.*at least 17"):
        Grower(model, GrowthConfig(**config))
    add_dims(attentions(model)[0], 4, 4)  # one that is wider already stays, and the other may grow
    Grower(model, GrowthConfig(**config | {limit: 18}))
    with pytest.raises(ValueError, match="no layer has less than 20"):
        Grower(model, GrowthConfig(**config | {limit: 18}, layers=[0]))


# Tokens


@pytest.mark.parametrize("key, value", [("input_ids", VOCABULARY), ("input_ids", -1), ("labels", VOCABULARY)])
def test_tokens_that_the_model_does_not_know_are_refused_by_batch(key, value):
    batches = [{name: tensor.clone() for name, tensor in batch.items()} for batch in lm_batches(4)]
    batches[2][key][1, 3] = value
    message = rf"Batch 2 has {key} from -?\d+ to \d+.*0 to {VOCABULARY - 1}.*own tokenizer"
    refused(patch_model(build("llama-2")), batches, message)
    refused(patch_model(build("gpt2-2")), batches, message, GrowthConfig(budget=0.1))


def test_labels_of_other_heads_are_no_tokens():
    model = patch_model(build("llama-2", HEADS["sequence-classification"]))
    batch = {"input_ids": tokens(4), "labels": torch.tensor([0, 1, 1, 0])}
    assert Grower(model, GrowthConfig(qk_dims=2)).measure([batch]).layers


# Names and secrets


def test_names_in_brackets_are_shown_as_they_are(tmp_path):
    (tmp_path / "a[v2]").mkdir()
    (tmp_path / "a[v2]" / "mine").write_text("")
    done = call("export", "m[v2]", "-o", tmp_path / "a[v2]")
    assert done.code == 2 and "a[v2]" in "".join(done.err.replace("│", " ").split()), done.err

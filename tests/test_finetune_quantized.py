"""Training next to quantized weights: adapters alone, merged into the dense model."""

import pytest
from families import save_with_text
from transformers import AutoModelForCausalLM

from hf_growattn.cli.options import read_recipe
from hf_growattn.training.finetuning import finetune, prepare_growth, race_recipe

pytest.importorskip("bitsandbytes")
OPTIONS = "--max_length 16 --growth_batches 4 --budget 0.1 --per_device_train_batch_size 4".split()


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A tiny model in multiples of 64, as 4 bits want it on CPUs, and a text in which each word has one successor."""
    folder = tmp_path_factory.mktemp("given")
    save_with_text(folder, words=1200, variant="smollm3")
    return [str(folder / "model"), str(folder / "text.txt")]


@pytest.mark.parametrize("method, option", [("growth", "--load_in_4bit"), ("lora", "--load_in_8bit")])
def test_the_dense_model_is_saved_with_the_trained_weights(method, option, given, tmp_path):
    words = [*given, "-o", str(tmp_path), *OPTIONS, "--max_steps", "12", "--method", method, option]
    figures = finetune(read_recipe("finetune", words))
    stock, trained = (AutoModelForCausalLM.from_pretrained(folder) for folder in (given[0], tmp_path))
    assert (trained.num_parameters() > stock.num_parameters()) == (method == "growth")
    first, last = figures["held_out"][0][1], figures["held_out"][-1][1]
    assert last < first - 0.5
    assert "Saved with dense weights" in figures["summary"]
    weights = [model.model.layers[0].mlp.up_proj.weight for model in (stock, trained)]
    assert weights[0].equal(weights[1]) == (method == "growth")  # dense, and of LoRA alone moved


def test_a_race_of_the_methods_that_train_quantized_models(given, tmp_path):
    words = [*given, "-o", str(tmp_path / "race"), *OPTIONS, "--load_in_4bit", "--steps", "8", "--seeds", "1"]
    race = race_recipe(read_recipe("race", words))
    assert {run.method for run in race.runs} >= {"growth", "lora"}
    assert race.runs_of("growth")[0].cache > race.runs_of("lora")[0].cache


def test_quantized_weights_do_not_grow_by_themselves(given):
    with pytest.raises(ValueError, match="quantized"):
        prepare_growth(read_recipe("measure", [*given, *OPTIONS, "--load_in_4bit"]))


@pytest.mark.parametrize("options", ["", "--max_growths 0"])
def test_quantized_weights_do_not_train_or_grow_with_others(given, tmp_path, options):
    words = [*given, "-o", str(tmp_path), *OPTIONS, "--load_in_4bit", *options.split()]
    with pytest.raises(ValueError, match=r"[Qq]uantized"):
        finetune(read_recipe("finetune", words))

"""Fine-tuning beside quantized weights through the command line: adapters train, and are merged into dense weights."""

import json
import shutil

import pytest
from families import save_with_text
from test_cli import call
from transformers import AutoModelForCausalLM

pytest.importorskip("bitsandbytes")
OPTIONS = "--max_length 16 --growth_batches 4 --budget 10% --per_device_train_batch_size 4 --max_steps 12".split()


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A tiny model in multiples of 64, as 4 bits want it on CPUs, and a text in which each word has one successor."""
    folder = tmp_path_factory.mktemp("given")
    save_with_text(folder, words=1200, variant="smollm3")
    return [folder / "model", folder / "text.txt"]


def finetuned(given, output, *options) -> tuple[dict, AutoModelForCausalLM]:
    done = call("finetune", *given, "-o", output, *OPTIONS, *options)
    assert done.exit_code == 0, done.output
    assert "merged into the weights as they are before quantizing" in " ".join(done.stdout.split())
    return json.loads((output / "figures.json").read_text()), AutoModelForCausalLM.from_pretrained(output)


@pytest.mark.parametrize("method, option", [("growth", "--load_in_4bit"), ("lora", "--load_in_8bit")])
def test_what_is_saved_is_the_dense_model_with_what_was_trained(method, option, given, tmp_path):
    figures, trained = finetuned(given, tmp_path / "out", "--method", method, option, "--save_steps", 6)
    stock = AutoModelForCausalLM.from_pretrained(given[0])
    assert figures["before"]["parameters"] == stock.num_parameters()  # not those that 4 bits are packed in
    grew = method == "growth"
    assert (trained.num_parameters() > stock.num_parameters()) == grew
    curve = (figures["with_growth"] or figures["without_growth"])["held_out"]
    assert curve[-1][1] < curve[0][1] - 0.5
    # Undoing the rounding to 4 bits moved the loss by .026 of its fall, and without the adapter all of that is gone.
    start = figures["growths"][0]["growth_batches"][0] if grew else curve[0][1]
    assert abs(figures["saved_loss"] - curve[-1][1]) < 0.05 * (start - curve[-1][1])
    weights = [model.model.layers[0].mlp.up_proj.weight for model in (stock, trained)]
    assert weights[0].equal(weights[1]) == grew  # dense, and of LoRA alone moved
    if grew:
        options = "--method", method, option, "--resume_from_checkpoint", tmp_path / "out" / "checkpoint-6"
        _, resumed = finetuned(given, tmp_path / "again", *options)
        assert all(value.equal(resumed.state_dict()[name]) for name, value in trained.state_dict().items())


def test_a_race_of_what_can_be_beside_quantized_weights(given, tmp_path):
    finetuned(given, tmp_path / "out", "--method", "auto", "--load_in_4bit", "--steps", 8)
    race = json.loads((tmp_path / "out-race" / "race.json").read_text())
    assert {run["method"] for run in race["runs"]} == {"growth", "lora"}
    cache = {run["method"]: run["cache"] for run in race["runs"]}
    assert cache["growth"] > cache["lora"]  # also of dims beside the weights
    winner = AutoModelForCausalLM.from_pretrained(tmp_path / "out-race" / "model")
    others = [name for name in race["finalists"] if (tmp_path / f"out-{name}").exists()]  # of two, the one not kept
    assert len(others) == len(race["finalists"]) - 1 and race["winner"] in cache
    trained = AutoModelForCausalLM.from_pretrained(
        tmp_path / (f"out-{race['winner']}" if race["winner"] in others else "out")
    )
    assert winner.num_parameters() == trained.num_parameters()


@pytest.mark.parametrize(
    "command, options, said",
    [
        ("finetune", [], "--load_in_4bit leaves weights that cannot train, and --method full trains them"),
        ("finetune", ["--method", "both"], "Add --method growth, lora or auto"),
        ("finetune", ["--method", "growth", "--compare"], "--compare is not to be had with --load_in_4bit"),
        ("race", ["--full"], "drop --full"),
        ("grow", [], "quantized by bitsandbytes"),
    ],
)
def test_what_quantized_weights_cannot_do_is_refused(command, options, said, given, tmp_path):
    own = OPTIONS[:-2] if command == "race" else OPTIONS
    done = call(command, *given, "-o", tmp_path / "out", *own, "--load_in_4bit", *options)
    assert done.exit_code in (1, 2) and said in " ".join(done.stderr.replace("│", " ").split()), done.stderr
    shutil.rmtree(tmp_path / "out", ignore_errors=True)

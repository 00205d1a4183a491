"""`scripts/finetune.py` as a process on a tiny model and text: it grows, saves, resumes, and refuses in one line."""

import json

import pytest
import torch
from conftest import ROOT
from families import save_with_text
from peft import PeftModel
from safetensors.torch import load_file
from test_data import TEMPLATE
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from hf_growattn import patch_model, unpatch_model

SCRIPT = "scripts/finetune.py"
OPTIONS = "--use_cpu --bf16 False --report_to none --max_length 16 --growth_batches 4 --learning_rate 1e-3".split()
TEXT = "--packing --packing_strategy wrapped --max_steps 16 --save_steps 4 --logging_steps 1".split()
GROWING = "--v_dims 4 --growth_batches 8".split()  # which is enough for the growth to hold
SAMPLE = torch.arange(2, 14)[None]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder with a tiny model and its tokenizer, and a text in which each word has one successor."""
    folder = tmp_path_factory.mktemp("given")
    save_with_text(folder, words=2400)
    return folder


@pytest.fixture(scope="module")
def finetune(forks, given):
    """Run the script on the model, by default on the text; returns what it printed."""

    def run(output, *options, data=("--data_files", given / "text.txt", *TEXT), **how) -> str:
        words = ["--model_name_or_path", given / "model", *OPTIONS, *data, "--output_dir", output, *options]
        done = forks.run(SCRIPT, *words, CUDA_VISIBLE_DEVICES="", HF_DATASETS_CACHE=str(given / "cache"), **how)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def grown(finetune, tmp_path_factory):
    """The folder of a training with a growth half-way, and what it printed."""
    output = tmp_path_factory.mktemp("grown")
    return output, finetune(output, *GROWING)


def log_of(folder) -> list[dict]:
    """The log of the last step's checkpoint."""
    return json.loads((folder / "checkpoint-16" / "trainer_state.json").read_text())["log_history"]


def test_growth_half_way_is_saved_with_its_card(given, grown):
    output, printed = grown
    assert "Step 8:\nLoss before: " in printed
    losses = [entry["loss"] for entry in log_of(output) if "loss" in entry]
    assert losses[-1] < losses[0] - 1
    stock, model = (AutoModelForCausalLM.from_pretrained(folder) for folder in (given / "model", output))
    (added,) = [entry["growth_added_parameters"] for entry in log_of(output) if "growth_added_parameters" in entry]
    assert model.num_parameters() - stock.num_parameters() == added > 0
    assert {each["growth_1"][1] for each in model.config.extra_dims.values()} == {4}
    assert AutoTokenizer.from_pretrained(output)("w5 w7")["input_ids"] == [5, 7]
    assert "Growth 1. Loss before:" in (output / "README.md").read_text()


def test_a_resumed_training_ends_as_the_unbroken_one(finetune, grown, tmp_path):
    output, _ = grown
    finetune(tmp_path, *GROWING, "--resume_from_checkpoint", output / "checkpoint-12")
    one, other = (load_file(folder / "model.safetensors") for folder in (output, tmp_path))
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_two_processes_train_as_one(finetune, tmp_path):
    """Two processes with 4 rows each are one with 8, and end with the same weights but for rounding."""
    options = "--v_dims 4 --growth_batches 3 --max_steps 6 --save_strategy no --per_device_train_batch_size".split()
    finetune(tmp_path / "two", *options, 4, ranks=2)
    finetune(tmp_path / "one", *options, 8)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and any(".extra." in name for name in one)
    assert all(torch.allclose(one[name], two[name], atol=1e-3) for name in one)


def test_a_training_that_did_not_grow_leaves_a_stock_model_and_no_card_of_ours(finetune, tmp_path):
    rows = [{"text": f"w{number} w{number + 1} w{number + 2}"} for number in range(2, 60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = ["--data_files", tmp_path / "rows.jsonl", "--test_split_size", 0.2, "--max_steps", 10]
    finetune(tmp_path / "out", "--budget", 0, data=data)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "out")) is LlamaForCausalLM
    assert "grew" not in (tmp_path / "out" / "README.md").read_text()  # the card is TRL's


def test_adapters_and_new_dims_load_again(finetune, given, tmp_path):
    printed = finetune(tmp_path, "--use_peft", "--lora_r", 4, "--qk_dims", 2, "--v_dims", 2)
    assert "Step 8:\nLoss before: " in printed
    model = patch_model(AutoModelForCausalLM.from_pretrained(given / "model"))
    stock = model(SAMPLE).logits
    model = PeftModel.from_pretrained(model, tmp_path).eval()
    adapted, dims = model(SAMPLE).logits, model.config.extra_dims
    assert dims and not torch.equal(adapted, stock)
    unpatch_model(model.get_base_model(), drop_growth=True)
    assert not torch.equal(model(SAMPLE).logits, adapted)
    assert "hf_growattn" not in (tmp_path / "README.md").read_text()  # the card is peft's


@pytest.mark.parametrize("recipe", ["chat", "completions", "growth", "lora", "text"])
def test_the_yaml_recipes(finetune, given, recipe, tmp_path):
    """Options on the command line override those of a recipe."""
    answer, rows = " ".join(f"w{index}" for index in range(5, 16)), []
    for question in (f"w{index} w3" for index in range(9, 90)):  # the halves of a growth must not have the same rows
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        row = {
            "chat": {"messages": messages},
            "completions": {"prompt": question, "completion": f" {answer}"},
        }.get(recipe, {"text": f"{question} {answer}"})
        rows.append(json.dumps(row))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    words = ["--config", f"scripts/recipes/{recipe}.yaml", "--max_steps", 8, "--warmup_steps", 0]
    words += ["--budget", 0.1] * (recipe != "growth") + ["--chat_template_path", tmp_path / "template.jinja"]
    printed = finetune(tmp_path / "out", *words, data=["--data_files", tmp_path / "rows.jsonl"])
    assert "Step 4:\nLoss before: " in printed
    assert (tmp_path / "out" / "growth").is_dir() == (recipe == "lora")


@pytest.mark.parametrize("options, fix", [
    ("--model_name_or_path none --data_files none.txt --budgt 0.1", "['--budgt', '0.1']"),
    ("--model_name_or_path none --data_files none.txt --budget 0.1 --v_dims 2", "Give a budget, or fixed widths"),
    ("--model_name_or_path none --data_files none.txt --budget 1.5", "budget must be"),
    ("--model_name_or_path none --data_files none.txt --grow_steps never", "invalid int value: 'never'"),
    ("--model_name_or_path none", "give --model_name_or_path, and --data_files"),
    ("--config nowhere.yaml", "nowhere.yaml"),
    ("--config {folder}/types.yaml", "invalid float value: 'fast'"),
    ("--config {folder}/open.yaml", "expected the node content"),
])  # fmt: skip
def test_a_bad_option_is_an_error_of_one_line(forks, tmp_path, options, fix):
    (tmp_path / "types.yaml").write_text("learning_rate: fast")
    (tmp_path / "open.yaml").write_text("datasets: [")
    options = options.format(folder=tmp_path).split()
    done = forks.run(SCRIPT, *options, "--use_cpu", "--output_dir", tmp_path / "out")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith("finetune.py: error: ") and fix in last and "Traceback" not in done.stderr


def test_the_script_is_read_in_one_sitting():
    assert len((ROOT / SCRIPT).read_text().splitlines()) <= 120

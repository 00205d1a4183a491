"""Fine-tuning with growth on a tiny model and a tiny text: saved, reloaded, resumed, by every method."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from families import save_with_text
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hf_growattn.cli.options import read_recipe
from hf_growattn.training import finetuning, methods
from hf_growattn.training.finetuning import finetune, make_schedule

OPTIONS = (
    "--max_length 16 --growth_batches 4 --learning_rate 1e-3 --max_steps 24 --save_steps 6 --logging_steps 2".split()
)
RELOAD = """
import sys, torch, hf_growattn
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
print(model(torch.arange(2, 14)[None]).logits.sum().item(), model.num_parameters())
"""


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> list:
    """A tiny model with its tokenizer, and a text in which each word has one successor; then options."""
    folder = tmp_path_factory.mktemp("given")
    save_with_text(folder, words=2400)
    return [folder / "model", folder / "text.txt", *OPTIONS]


def run(given: list, output: Path, *options) -> dict:
    """Fine-tune in this process, as the command line would."""
    return finetune(read_recipe("finetune", [*map(str, given), "-o", str(output), *map(str, options)]))


def run_process(arguments: list) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, env=environment | {"HF_HUB_OFFLINE": "1"}, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def grown(given, tmp_path_factory) -> tuple[Path, dict]:
    """A training with growth half-way."""
    output = tmp_path_factory.mktemp("grown")
    return output, run(given, output, "--v-dims", 4)


def test_growth_half_way_is_saved_with_its_figures(grown):
    output, figures = grown
    (first_step, first), *_, (last_step, last) = figures["held_out"]
    assert figures["grown_at"] == [12] and (first_step, last_step) == (0, 24) and last < first
    for said in (f"{first:.4f} at step 0, {last:.4f} at step 24", str(output)):
        assert said in figures["summary"]
    assert json.loads(json.dumps(figures))["held_out"] == figures["held_out"]
    assert {"tokenizer.json", "growth.png", "README.md", "checkpoint-24"} <= {path.name for path in output.iterdir()}
    card = (output / "README.md").read_text()
    assert "Growth 1, at step 12. Loss:" in card and f"| step 24 | {last:.4f} |" in card


def test_a_fresh_process_reloads_the_same_model(given, grown):
    output, figures = grown
    total, parameters = run_process(["-c", RELOAD, output]).split()[-2:]
    stock, model = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (given[0], output))
    assert model.num_parameters() - stock.num_parameters() == figures["growths"][0]["added_parameters"] > 0
    assert int(parameters) == model.num_parameters()
    assert float(total) == pytest.approx(model(torch.arange(2, 14)[None]).logits.sum().item(), rel=1e-5)


@pytest.mark.parametrize("step", [6, 18])
def test_a_resumed_training_ends_as_the_unbroken_one(given, grown, tmp_path, step):
    output, figures = grown
    again = run(given, tmp_path, "--v-dims", 4, "--resume_from_checkpoint", output / f"checkpoint-{step}")
    assert again["held_out"] == figures["held_out"] and again["grown_at"] == [12]
    one, other = (load_file(folder / "model.safetensors") for folder in (output, tmp_path))
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_two_processes_train_as_one(given, forks, tmp_path):
    """Two processes with 4 rows each are one with 8; rank 0 alone prints."""
    options = (
        "--v_dims 4 --growth_batches 3 --max_steps 6 --save_strategy no --per_device_eval_batch_size 1 --json".split()
    )
    words = ["finetune", *given, *options, "-o", tmp_path / "two", "--per_device_train_batch_size", 4]
    done = forks.run("hf_growattn", *words, ranks=2, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    two = json.loads(done.stdout)
    one = run(given, tmp_path / "one", *options[:-1], "--per_device_train_batch_size", 8)
    assert two["held_out"] == [pytest.approx(pair, rel=1e-4) for pair in one["held_out"]]
    assert two["grown_at"] == one["grown_at"] == [3]


@pytest.mark.parametrize("options, said", [
    ("--grow_at plateau --eval_steps 1 --growth_batches 2 --max_steps 4", "no growth was due before the end"),
    ("--max_growths 0", ""),
])  # fmt: skip
def test_a_training_that_did_not_grow_is_saved_as_a_stock_model(given, tmp_path, options, said):
    figures = run(given, tmp_path, "--max_steps", 2, "--save_strategy", "no", *options.split())
    assert said in figures["summary"] and ("Nothing grew" in figures["summary"]) == bool(said)
    assert not figures["growths"]
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is LlamaForCausalLM


def test_adapters_grow_along_and_are_merged(given, tmp_path):
    options = "--use_peft --lora_r 4 --lora_dropout 0 --v_dims 2 --save_steps 9".split()
    figures = run(given, tmp_path / "one", *options)
    weights = load_file(tmp_path / "one" / "model.safetensors")
    stock, merged = (AutoModelForCausalLM.from_pretrained(folder) for folder in (given[0], tmp_path / "one"))
    assert merged.num_parameters() > stock.num_parameters() and figures["growths"][0]["applied"]
    run(given, tmp_path / "two", *options, "--resume_from_checkpoint", tmp_path / "one" / "checkpoint-18")
    again = load_file(tmp_path / "two" / "model.safetensors")
    assert weights.keys() == again.keys() and all(weights[name].equal(again[name]) for name in weights)


@pytest.mark.parametrize("method", ["lora", "growth", "both"])
def test_methods_that_train_the_budget_alone(given, tmp_path, method):
    options = ["--method", method, "--budget", "0.1", "--max_steps", 8, "--save_steps", 4]
    figures = run(given, tmp_path / "one", *options)
    assert figures["held_out"][-1][1] < figures["held_out"][0][1] and len(figures["growths"]) == (method != "lora")
    assert ("KV cache" in figures["summary"]) == (method != "lora")
    run(given, tmp_path / "two", *options, "--resume_from_checkpoint", tmp_path / "one" / "checkpoint-4")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.allclose(one[name], two[name], atol=1e-6) for name in one)


@pytest.mark.parametrize(
    "options, message",
    [
        ("--budget 0.1 --qk_dims 2", "Give a budget, or fixed widths"),
        ("--grow_at epoch --grow_steps 3", "by one of steps"),
        ("--budget 1.5", "budget must be a whole number of weights, or a share"),
        ("--growth_batches 0", "batches must be"),
        ("--grow_steps 0", "must be a whole number"),
        ("--max_growths -1", "max_growths must be"),
        ("--method lora --grow_steps 5", "leave out --grow_steps"),
        ("--method both --use_peft", "leave out --use_peft"),
        ("--method growth --v_dims 2", "leave out --v_dims"),
    ],
)
def test_options_that_exclude_each_other_are_refused_before_anything_is_loaded(options, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(read_recipe("finetune", ["none", "none", "-o", "nowhere", *options.split()]))


def test_what_grows_beside_lora_takes_its_share_of_the_rate(given, tmp_path, monkeypatch):
    """Models as small as those of tests give all of it: so the share is set here."""

    class Stop(Exception):
        pass

    def stop(model, rows, share, **options):
        raise Stop(share)

    monkeypatch.setattr(methods.Method, "grown_share", lambda self, width: 0.25)
    monkeypatch.setattr(finetuning, "_prepare_start", lambda recipe, method, model, rows: (model, None))
    monkeypatch.setattr(finetuning.methods, "make_trainer", stop)
    with pytest.raises(Stop, match=r"0\.25"):
        run(given, tmp_path / "m", "--method", "both", "--max_length", "32")

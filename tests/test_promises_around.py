"""Small promises of what is around the engine: training, adapters, cards, reports and the command line."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from every_type import build as build_type
from families import build, lm_batches, tokens, word_tokenizer
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig

import hf_growattn
from hf_growattn import Grower, GrowthConfig, GrowthReport, export_model, patch_model, write_card
from hf_growattn.cli.commands import COMMANDS, main
from hf_growattn.cli.inspection import format_inspection, inspect_model
from hf_growattn.cli.options import UsageError, check_new_folder
from hf_growattn.grow.trial import StepSearch
from hf_growattn.interop import checkpoints
from hf_growattn.measure.blocks import KINDS
from hf_growattn.report import words
from hf_growattn.report.report import LayerGrowth, LayerTrim, TrimReport
from hf_growattn.training.data import prepare_rows
from hf_growattn.training.methods import METHODS, prepare_model
from hf_growattn.training.options import RaceOptions
from hf_growattn.training.race import _Trainings
from hf_growattn.training.trainer import loss_of

CONFIG = GrowthConfig(qk_dims=2, v_dims=2, oversampling=4)


def test_what_a_command_prints_amid_its_work_is_not_its_result(tmp_path, monkeypatch, capsys):
    build("llama-2").save_pretrained(tmp_path)

    def talkative(options, inspect=COMMANDS["inspect"]):
        print("a library says this")
        return inspect(options)

    talkative.__doc__ = COMMANDS["inspect"].__doc__
    monkeypatch.setitem(COMMANDS, "inspect", talkative)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["family"] == "llama" and "a library says this" in printed.err


def test_an_empty_folder_is_as_good_as_a_new_one(tmp_path):
    check_new_folder(str(tmp_path))
    (tmp_path / "notes.txt").write_text("theirs")
    with pytest.raises(UsageError, match="not empty"):
        check_new_folder(str(tmp_path))


def test_a_starvation_of_zero_is_known():
    layer = LayerGrowth(0, "patterns", (8, 9), 1.0, 0.1, 0.0)
    rows = words.rows_of(GrowthReport(2.0, 1.9, [layer, replace(layer, starvation=None)], 8))
    assert [row[3] for row in rows] == ["0.00", "unknown"]


def test_a_search_of_a_loss_below_zero_steps_downhill():
    """Such as a reward with its sign turned: a step is counted by the size of the loss."""
    gradient = SimpleNamespace(block=SimpleNamespace(kind=KINDS["patterns"]))
    tried: list[float] = []
    trial = SimpleNamespace(changes=[SimpleNamespace(gradient=gradient, slope=2.0)])
    trial.set_steps = lambda steps, half: tried.append(steps[0])
    (step,), loss = StepSearch(trial, lambda half: 2 * tried[-1] ** 2 - 2 * tried[-1] - 5, -5.0).run()
    assert min(tried) > 0 and 0 < step < 1 and loss < -5.3


def test_a_card_lists_one_evaluation_once(tmp_path):
    write_card(patch_model(build("llama-2")), tmp_path, log_history=[{"step": 3, "eval_loss": 2.5}])
    assert (tmp_path / "README.md").read_text().count("| step 3 | 2.5000 |") == 1


def test_the_loss_of_a_trainer_leaves_its_arguments(tmp_path):
    options = TrainingArguments(tmp_path, report_to=[], use_cpu=True)
    trainer = Trainer(patch_model(build("llama-2")), options)
    assert options.average_tokens_across_devices
    loss_of(trainer)(trainer.model, lm_batches(1)[0])
    assert trainer.args.average_tokens_across_devices


def test_a_loss_of_zero_was_measured():
    layer = LayerTrim(0, "patterns", (9, 8), 0.0, 0.0, 64)
    assert "Loss 0.0000 -> 0.0000" in str(TrimReport(0.0, 0.0, 1e-3, [layer]))
    assert "Loss" not in str(TrimReport(None, None, 1e-3, [layer]))


def test_inspection_knows_the_stock_width_of_either_kind():
    layer = inspect_model(patch_model(build_type("deepseek_v3")))["layers"][0]
    assert layer["stock_widths"] == [layer["patterns"]["width"], layer["messages"]["width"]] == [24, 16]


def test_each_seed_of_a_race_has_a_growth_of_its_own(tmp_path):
    training = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[], max_length=16)
    rows = Dataset.from_dict(dict.fromkeys(("input_ids", "labels"), tokens(64, 12, seed=1).tolist()))
    prepared = prepare_rows(rows, None, word_tokenizer(), training)
    trainings = _Trainings(lambda: patch_model(build("llama-2")), prepared, RaceOptions(0.2, 4, 8, 2))
    reports = [trainings._prepare("growth", seed)[1] for seed in (0, 0, 1)]
    assert reports[0] is reports[1] and reports[2].loss_before != reports[0].loss_before


@pytest.mark.parametrize("private, asked", [(False, None), (True, True)])
def test_whether_a_repository_is_private_is_left_to_the_hub_unless_told(private, asked, tmp_path, monkeypatch):
    """False would make it public where an organisation's are private by default."""
    patch_model(build("llama-2")).save_pretrained(tmp_path)
    told = []
    commit = SimpleNamespace(commit_url="there")
    monkeypatch.setattr(checkpoints, "push_folder", lambda *args, **options: told.append(options) or commit)
    assert checkpoints.publish(tmp_path, "me/grown", private) == "there"
    assert told[0]["private"] is asked


def test_a_stock_checkpoint_names_no_code(tmp_path):
    model = patch_model(build("llama-2"))
    assert Grower(model, CONFIG).grow(lm_batches(4)).applied
    model.save_pretrained(tmp_path / "grown")
    assert "auto_map" in json.loads((tmp_path / "grown" / "config.json").read_text())
    export_model(AutoModelForCausalLM.from_pretrained(tmp_path / "grown"), tmp_path / "stock")
    assert "auto_map" not in json.loads((tmp_path / "stock" / "config.json").read_text())


@pytest.mark.parametrize("method", ["lora", "both"])
def test_each_seed_begins_with_adapters_of_its_own(method):
    def first(seed: int) -> torch.Tensor:
        model, _ = prepare_model(patch_model(build("llama-2")), METHODS[method], 6, lm_batches(4), seed)
        return next(parameter for name, parameter in model.named_parameters() if "lora_A" in name)

    assert torch.equal(first(1), first(1)) and not torch.equal(first(1), first(2))


@pytest.mark.parametrize("order", ["peft, hf_growattn", "hf_growattn, peft"])
def test_peft_knows_the_method_and_our_types_whichever_is_imported_first(order):
    script = f"""
import {order}, transformers
assert peft.PeftType("GROWATTN") in peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING
assert "growattn_llama" in peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_public_is_listed_before_it_is_used(monkeypatch):
    monkeypatch.delitem(vars(hf_growattn), "export_model", raising=False)
    assert {*hf_growattn.__all__} <= {*dir(hf_growattn)}


def test_a_mean_over_heads_counts_all_of_them():
    figures = inspect_model(patch_model(build("llama-5-bias")))
    used = figures["layers"][0]["patterns"]["effective_rank"]
    assert figures["layers"][0]["key_value_heads"] < len(used)
    assert f"{sum(used) / len(used):.1f} ({min(used):.1f} to {max(used):.1f})" in format_inspection(figures)


def test_a_command_to_copy_is_one():
    command = words.race_command("my models/one", "it's here.txt")
    assert shlex.split(command) == ["growattn", "race", "my models/one", "it's here.txt", "-o", "race"]

"""Small promises of what is around the engine: training, adapters, cards, reports and the command line."""

import functools
import json
import math
import shlex
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from every_type import build as build_type
from families import add_dims, build, lm_batches, tokens
from peft.utils import constants
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import hf_growattn
from hf_growattn import Grower, GrowthCallback, GrowthConfig, GrowthReport, export_model, patch_model, write_card
from hf_growattn.cli.commands import COMMANDS, main
from hf_growattn.cli.inspection import format_inspection, inspect_model
from hf_growattn.cli.options import UsageError, check_new_folder
from hf_growattn.growable.attention import attentions
from hf_growattn.interop import export
from hf_growattn.report import words
from hf_growattn.report.pictures import draw_growth
from hf_growattn.report.report import LayerGrowth
from hf_growattn.training.schedule import Schedule

CONFIG = GrowthConfig(qk_dims=2, v_dims=2, oversampling=4)


def test_what_a_command_prints_amid_its_work_is_not_its_result(tmp_path, monkeypatch, capsys):
    build("llama-2").save_pretrained(tmp_path)

    @functools.wraps(COMMANDS["inspect"])  # whose help its docstring is
    def talkative(options, inspect=COMMANDS["inspect"]):
        print("a library says this")
        return inspect(options)

    monkeypatch.setitem(COMMANDS, "inspect", talkative)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["family"] == "llama" and "a library says this" in printed.err


def test_an_empty_folder_is_as_good_as_a_new_one(tmp_path):
    check_new_folder(str(tmp_path))
    (tmp_path / "notes.txt").write_text("theirs")
    with pytest.raises(UsageError, match="not empty"):
        check_new_folder(str(tmp_path))


def test_a_share_of_zero_out_of_reach_is_known():
    layer = LayerGrowth(0, "qk", (8, 9), 1.0, 0.1, 0.0)
    rows = words.rows_of(GrowthReport(2.0, 0.1, 0.05, True, [layer, replace(layer, out_of_reach=None)], 8))
    assert [row[3] for row in rows] == ["0.00", "-"]


def test_a_card_lists_one_evaluation_once(tmp_path):
    model = patch_model(build("llama-2"))
    add_dims(attentions(model)[0], 4)
    write_card(model, tmp_path, log_history=[{"step": 3, "eval_loss": 2.5}])
    assert (tmp_path / "README.md").read_text().count("| step 3 | 2.5000 |") == 1


def test_inspection_knows_the_stock_width_of_either_kind():
    layer = inspect_model(patch_model(build_type("deepseek_v3")))["layers"][0]
    assert layer["stock_widths"] == [layer["qk"]["width"], layer["v"]["width"]] == [24, 16]


def test_a_stock_checkpoint_names_no_code(tmp_path):
    model = patch_model(build("llama-2"))
    assert Grower(model, CONFIG).find(lm_batches(4)).keep().kept
    model.save_pretrained(tmp_path / "grown")
    assert "auto_map" in json.loads((tmp_path / "grown" / "config.json").read_text())
    export_model(AutoModelForCausalLM.from_pretrained(tmp_path / "grown"), tmp_path / "stock")
    assert "auto_map" not in json.loads((tmp_path / "stock" / "config.json").read_text())


def test_every_method_of_peft_knows_the_targets_of_our_types():
    named = {name: table for name, table in vars(constants).items() if name.startswith("TRANSFORMERS_MODELS_TO_")}
    known = [table for table in named.values() if "llama" in table]
    assert len(known) > 5 and all(table["growattn_llama"] == table["llama"] for table in known)


def test_what_is_public_is_listed_before_it_is_used(monkeypatch):
    monkeypatch.delitem(vars(hf_growattn), "export_model", raising=False)
    assert {*hf_growattn.__all__} <= {*dir(hf_growattn)}


def test_a_mean_over_heads_counts_all_of_them():
    figures = inspect_model(patch_model(build("llama-5-bias")))
    used = figures["layers"][0]["qk"]["effective_rank"]
    assert figures["layers"][0]["key_value_heads"] < len(used)
    assert f"{sum(used) / len(used):.1f} ({min(used):.1f} to {max(used):.1f})" in format_inspection(figures)


def test_a_command_to_copy_is_one():
    command = words.race_command("my models/one", "it's here.txt")
    assert shlex.split(command) == ["growattn", "race", "my models/one", "it's here.txt", "-o", "race"]


@pytest.mark.parametrize("error", [ValueError, OSError, ImportError])
def test_an_error_that_names_its_fix_is_one_line(error, tmp_path, monkeypatch, capsys):
    @functools.wraps(COMMANDS["inspect"])
    def fail(options):
        raise error("install it")

    monkeypatch.setitem(COMMANDS, "inspect", fail)
    assert main(["inspect", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "Error: install it\n"


def test_a_resumed_training_finds_its_last_checkpoint_itself(tmp_path):
    options = TrainingArguments(tmp_path, max_steps=4, save_steps=2, report_to=[], use_cpu=True)
    rows = [dict.fromkeys(("input_ids", "labels"), row) for row in tokens(40, 9, seed=3)]
    expected = None
    for latest in (None, True):
        model = patch_model(build("llama-2"))
        trainer = Trainer(model, options, train_dataset=rows)
        trainer.add_callback(GrowthCallback(trainer, CONFIG, steps=[2], batches=2))
        trainer.train(resume_from_checkpoint=latest)
        state = model.state_dict()
        assert expected is None or all(torch.equal(state[name], expected[name]) for name in expected)
        expected = state
        if latest is None:
            shutil.rmtree(tmp_path / "checkpoint-4")


def test_a_picture_has_a_row_for_each_layer_that_was_looked_at():
    """Of layers 4 and 7 alone, the second row is that of layer 7."""
    layers = [LayerGrowth(number, "qk", (8, 9), 1.0, gain, 0.5) for number, gain in ((4, 0.1), (7, 0.3))]
    axes = draw_growth([GrowthReport(2.0, 0.1, 0.05, True, layers, 8)]).axes[0]
    assert [(text.get_position()[1], text.get_text()) for text in axes.texts] == [(0, "25%"), (1, "75%")]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["4", "7"]


def test_an_export_of_what_is_not_finite_is_refused(tmp_path, monkeypatch):
    """Neither is it near the model's own outputs."""
    model = patch_model(build("llama-2"))
    monkeypatch.setattr(export, "_difference", lambda *_: math.nan)
    with pytest.raises(RuntimeError, match="differs from the model by nan"):
        export_model(model, tmp_path / "stock")
    assert not (tmp_path / "stock").exists()


def test_a_plateau_is_a_loss_that_is_not_the_lowest():
    state = SimpleNamespace(global_step=9, max_steps=20, epoch=0.5)
    schedule = Schedule(at="plateau")
    for losses, expected in (([3.0, 2.0, 1.9], False), ([2.0, 3.0, 2.5], True)):
        state.log_history = [{"step": step, "eval_loss": loss} for step, loss in enumerate(losses)]
        assert schedule.is_due(state) is expected

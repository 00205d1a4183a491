"""What a command prints: its result alone, by one process, and an error that names its fix in one line."""

import functools
import json
import shlex

import pytest
from command import call
from every_type import build as build_type
from families import build

from hf_growattn import patch_model
from hf_growattn.cli.commands import COMMANDS
from hf_growattn.cli.inspection import format_inspection, inspect_model
from hf_growattn.cli.options import UsageError, check_new_folder
from hf_growattn.report import words


@pytest.fixture
def inspected(tmp_path):
    build("llama-2").save_pretrained(tmp_path)
    return tmp_path


def test_what_a_command_prints_amid_its_work_is_not_its_result(inspected, monkeypatch):
    @functools.wraps(COMMANDS["inspect"])  # whose help its docstring is
    def talkative(options, inspect=COMMANDS["inspect"]):
        print("a library says this")
        return inspect(options)

    monkeypatch.setitem(COMMANDS, "inspect", talkative)
    done = call("inspect", inspected, "--json")
    assert json.loads(done.out)["family"] == "llama" and "a library says this" in done.err


def test_one_process_of_several_prints(inspected, monkeypatch):
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert bool(call("inspect", inspected).out) == (rank == "0")


@pytest.mark.parametrize("error", [ValueError, OSError, ImportError])
def test_an_error_that_names_its_fix_is_one_line(error, inspected, monkeypatch):
    @functools.wraps(COMMANDS["inspect"])
    def fail(options):
        raise error("install it")

    monkeypatch.setitem(COMMANDS, "inspect", fail)
    assert call("inspect", inspected)[::2] == (1, "Error: install it\n")


def test_an_empty_folder_is_as_good_as_a_new_one(tmp_path):
    check_new_folder(str(tmp_path))
    (tmp_path / "notes.txt").write_text("theirs")
    with pytest.raises(UsageError, match="not empty"):
        check_new_folder(str(tmp_path))


def test_inspection_knows_both_stock_widths_and_counts_all_heads():
    layer = inspect_model(patch_model(build_type("deepseek_v3")))["layers"][0]
    assert layer["stock_widths"] == [layer["qk"]["width"], layer["v"]["width"]] == [24, 16]
    figures = inspect_model(patch_model(build("llama-5-bias")))
    used = figures["layers"][0]["qk"]["effective_rank"]
    assert figures["layers"][0]["key_value_heads"] < len(used)
    assert f"{sum(used) / len(used):.1f} ({min(used):.1f} to {max(used):.1f})" in format_inspection(figures)


def test_a_command_to_copy_is_one():
    command = words.race_command("my models/one", "it's here.txt")
    assert shlex.split(command) == ["growattn", "race", "my models/one", "it's here.txt", "-o", "race"]

"""What a command prints: its result alone, by one process, and an error that names its fix in one line."""

import functools
import json
import shlex

import pytest
from command import call
from families import add_dims, build

from hf_growattn import GrowthReport, patch_model
from hf_growattn.cli.commands import COMMANDS
from hf_growattn.cli.options import UsageError, check_new_folder
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import sync_config
from hf_growattn.report import words


@pytest.fixture
def words_of_export(tmp_path):
    """A command that works, and writes a new folder."""
    model = patch_model(build("llama-2"))
    add_dims(attentions(model)[0], 4)
    sync_config(model)
    model.save_pretrained(tmp_path / "grown")
    return "export", tmp_path / "grown", "-o", tmp_path / "stock"


def test_what_a_command_prints_amid_its_work_is_not_its_result(words_of_export, monkeypatch):
    @functools.wraps(COMMANDS["export"])  # whose help its docstring is
    def talkative(options, export=COMMANDS["export"]):
        print("a library says this")
        return export(options)

    monkeypatch.setitem(COMMANDS, "export", talkative)
    done = call(*words_of_export, "--json")
    assert json.loads(done.out)["model_type"] == "llama" and "a library says this" in done.err


def test_one_process_of_several_prints(words_of_export, monkeypatch):
    *words, folder = words_of_export
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert bool(call(*words, folder / rank).out) == (rank == "0")


@pytest.mark.parametrize("error", [ValueError, OSError, ImportError])
def test_an_error_that_names_its_fix_is_one_line(error, words_of_export, monkeypatch):
    @functools.wraps(COMMANDS["export"])
    def fail(options):
        raise error("install it")

    monkeypatch.setitem(COMMANDS, "export", fail)
    assert call(*words_of_export)[::2] == (1, "Error: install it\n")


def test_an_empty_folder_is_as_good_as_a_new_one(tmp_path):
    check_new_folder(str(tmp_path))
    (tmp_path / "notes.txt").write_text("theirs")
    with pytest.raises(UsageError, match="not empty"):
        check_new_folder(str(tmp_path))


def test_a_command_to_copy_is_one():
    report = GrowthReport(1.0, 0.0, 0.0, False, [], 0)
    command = words.report_text(report, "my models/one", ["it's here.txt"]).partition("LoRA: ")[2]
    assert shlex.split(command) == ["growattn", "race", "my models/one", "it's here.txt", "-o", "race"]

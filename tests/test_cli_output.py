"""What a command prints: its result alone, by one process, and an error that names its fix in one line."""

import json
import shlex

import pytest
from command import call
from families import add_dims, build

from hf_growattn import GrowthReport, export_model, patch_model
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
    def talkative(*args, write=export_model):
        print("a library says this")
        return write(*args)

    monkeypatch.setattr("hf_growattn.interop.export.export_model", talkative)
    done = call(*words_of_export, "--json")
    assert json.loads(done.out)["model_type"] == "llama" and "a library says this" in done.err


def test_one_process_of_several_prints(words_of_export, monkeypatch):
    *words, folder = words_of_export
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert bool(call(*words, folder / rank).out) == (rank == "0")


@pytest.mark.parametrize("error", [ValueError, OSError, ImportError])
def test_an_error_that_names_its_fix_is_one_line(error, words_of_export, monkeypatch):
    def fail(*_):
        raise error("install it")

    monkeypatch.setattr("hf_growattn.interop.checkpoints.load_model", fail)
    assert call(*words_of_export)[::2] == (1, "Error: install it\n")


def test_an_empty_folder_is_as_good_as_a_new_one(words_of_export):
    *_, folder = words_of_export
    folder.mkdir()
    assert call(*words_of_export).code == 0
    done = call(*words_of_export)
    assert done.code == 2 and "is not empty" in " ".join(done.err.replace("│", "").split())


def test_a_command_to_copy_is_one():
    report = GrowthReport(1.0, 0.0, 0.0, False, [], 0)
    command = words.report_text(report, "my models/one", ["it's here.txt" + " so" * 40]).splitlines()[-1]
    assert shlex.split(command) == ["growattn", "race", "my models/one", "it's here.txt" + " so" * 40, "-o", "race"]

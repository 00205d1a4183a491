"""Saving is all or nothing, and leaves what else lies in the directory."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import data_path
from families import build, tokens
from test_layering import TRAVELLING
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_growattn import patch_model, unpatch_model
from hf_growattn.folders import _exchange
from hf_growattn.modeling import attentions


def grown(qk_dims: int, variant: str = "llama-2"):
    torch.manual_seed(qk_dims)
    model = patch_model(build(variant))
    attentions(model)[0].widen(qk_dims)
    torch.nn.init.normal_(attentions(model)[0].weight_of("query"), std=0.3)
    model.sync_config()
    return model


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def logits(path):
    return AutoModelForCausalLM.from_pretrained(path).eval()(tokens()).logits


@pytest.mark.parametrize("variant", ["llama-2", "gpt2-2"])
def test_saving_over_an_old_checkpoint(tmp_path, variant):
    grown(4, variant).save_pretrained(tmp_path / "m", max_shard_size="20KB")
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    (tmp_path / "m" / "runs").mkdir()
    (tmp_path / "m" / "runs" / "events").write_text("events")
    model = grown(9, variant)
    model.save_pretrained(tmp_path / "m")
    assert torch.equal(logits(tmp_path / "m"), model(tokens()).logits)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    kept = {"m/tokenizer.json", "m/runs/events"}
    code = {f"m/growattn/{name}.py" for name in TRAVELLING} | {"m/growattn/checksums.json"}
    assert files == kept | code | {"m/config.json", "m/generation_config.json", "m/model.safetensors"}


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    grown(4).save_pretrained(tmp_path / "m")
    before = contents(tmp_path / "m")

    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", no_space)
    with pytest.raises(OSError, match="No space"):
        grown(9).save_pretrained(tmp_path / "m")
    assert contents(tmp_path / "m") == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_pushing_passes_every_wish_on(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("hf_growattn.cards.push_model", lambda model, *args, **kwargs: calls.append((args, kwargs)))
    grown(4).save_pretrained(tmp_path / "m", push_to_hub=True, token="secret", private=True, commit_message="grown")
    wishes = {"token": "secret", "private": True, "commit_message": "grown"}
    assert calls == [(("m",), wishes)] and (tmp_path / "m" / "model.safetensors").exists()
    grown(4).save_pretrained(tmp_path / "m", push_to_hub=True, repo_id="me/grown")
    assert calls[1] == (("me/grown",), {"token": None})


def test_exchanging_without_the_system_call(tmp_path, monkeypatch):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    _exchange(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "one" / "file").read_text() == "other"
    monkeypatch.setattr(sys, "platform", "elsewhere")
    _exchange(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "one" / "file").read_text() == "one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other"]


def test_relative_paths_and_files_in_the_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = grown(4)
    model.save_pretrained("m")
    model.save_pretrained(Path("m"))
    model.save_pretrained("deep/er/m")
    assert torch.equal(logits("deep/er/m"), logits("m"))
    Path("file").write_text("")
    with pytest.raises(ValueError, match="needs a directory"):
        model.save_pretrained("file")
    monkeypatch.chdir(tmp_path / "m")
    Path("modeling.py").write_text("mine")
    model.save_pretrained(".")
    assert Path("modeling.py").read_text() == "mine"
    assert torch.equal(logits("."), model(tokens()).logits)
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("m")
    grown(9).save_pretrained("link")
    assert Path("link").is_symlink() and torch.equal(logits("m"), grown(9)(tokens()).logits)


def test_a_rank_that_is_not_the_main_process_writes_nothing(tmp_path):
    grown(4).save_pretrained(tmp_path / "m", is_main_process=False)
    assert not list(tmp_path.rglob("*.safetensors"))


SAVER = """
import os, sys, torch
from transformers import AutoModelForCausalLM
import hf_growattn
path, *sources = sys.argv[1:]
models = [AutoModelForCausalLM.from_pretrained(source) for source in sources]
for _ in sys.stdin:  # a child for each kill, since loading the libraries takes longer than all the rest
    child = os.fork()
    while child == 0:
        for model in models:
            model.save_pretrained(path, max_shard_size="100KB")
    print(child, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


def test_a_killed_save_leaves_a_whole_checkpoint(tmp_path):
    """Two models of different widths are saved in turns; a kill at any moment leaves one of them, whole."""
    expected = []
    for qk_dims in (4, 9):
        model = grown(qk_dims)
        model.save_pretrained(tmp_path / str(qk_dims))
        expected.append(model(tokens()).logits)
    sources, target = [tmp_path / "4", tmp_path / "9"], tmp_path / "m"
    kills, found = 8, set()
    command = [sys.executable, "-c", SAVER, target, *sources]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as saver:
        for kill in range(kills):
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(sources[0], target)
            print("go", file=saver.stdin, flush=True)
            child = int(saver.stdout.readline())
            time.sleep(0.03 * (kill + 1) ** 1.5)
            os.kill(child, signal.SIGKILL)
            assert saver.stdout.readline() == "ended\n"
            result = logits(target)
            matches = [torch.equal(result, logits) for logits in expected]
            assert any(matches)
            found.add(matches.index(True))
    print(f"{kills} kills, found checkpoints {sorted(found)}")


def test_a_model_built_from_a_config_starts_random_everywhere():
    model = AutoModelForCausalLM.from_config(grown(4).config)
    new = attentions(model)[0].weight_of("query")[:, 16:]
    assert new.shape[1] == 4 and 0.1 < new.std() < 0.5 and attentions(model)[0].weight_of("key")[:, 16:].std() > 0.1


def test_the_tokenizer_travels_along(tmp_path):
    source = data_path("models", "stories260K")
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = patch_model(AutoModelForCausalLM.from_pretrained(source))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("Once upon a time")["input_ids"] == tokenizer("Once upon a time")["input_ids"]


def test_a_loaded_models_config_takes_our_type_and_gives_it_back(tmp_path):
    build("llama-2").save_pretrained(tmp_path)
    model = patch_model(AutoModelForCausalLM.from_pretrained(tmp_path))  # a loaded config notes its type by itself
    assert model.config.model_type == model.config.to_dict()["model_type"] == "growattn_llama"
    assert unpatch_model(model).config.model_type == "llama"

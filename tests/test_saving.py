"""Saving replaces a former checkpoint, and leaves what else lies in the directory; tests/test_faults.py kills it."""

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from families import add_dims, build, tokens
from test_layering import TRAVELLING
from transformers import AutoModelForCausalLM

from hf_growattn import patch_model, unpatch_model
from hf_growattn.growable import folders
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import set_dims, sync_config


def grown(qk_dims: int, variant: str = "llama-2"):
    torch.manual_seed(qk_dims)
    model = patch_model(build(variant))
    add_dims(attentions(model)[0], qk_dims)
    sync_config(model)
    return model


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def logits(path):
    return AutoModelForCausalLM.from_pretrained(path).eval()(tokens()).logits


def make(monkeypatch, folder, way):
    """Make a folder one that is saved into in some way."""

    if way == "a mount":  # what lies next to it is on another disk
        monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == folder)
    if way == "closed around":
        access = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder.parent and access(path, mode))


WAYS = ["a folder", "a mount", "closed around"]


@pytest.mark.parametrize("variant, way", [("gpt2-2", "a folder"), *(("llama-2", way) for way in WAYS)])
def test_saving_over_an_old_checkpoint(tmp_path, monkeypatch, variant, way):
    """Shards of the old one would be read with the new one's; files that are not ours stay, nested weights too."""
    grown(4, variant).save_pretrained(tmp_path / "m", max_shard_size="20KB")
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    (tmp_path / "m" / "runs").mkdir()
    (tmp_path / "m" / "runs" / "model.safetensors").write_text("of another training")
    (tmp_path / "m").chmod(0o750)
    make(monkeypatch, tmp_path / "m", way)
    model = grown(9, variant)
    model.save_pretrained(tmp_path / "m")
    assert torch.equal(logits(tmp_path / "m"), model(tokens()).logits)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o750
    kept = {"m/tokenizer.json", "m/runs/model.safetensors"}
    code = {f"m/growattn/{name}.py" for name in TRAVELLING}
    assert files == kept | code | {"m/config.json", "m/generation_config.json", "m/model.safetensors"}


@pytest.mark.parametrize("way", WAYS)
def test_a_save_touches_no_other_save_that_goes_on(tmp_path, monkeypatch, way):
    grown(4).save_pretrained(tmp_path / "m", max_shard_size="20KB")
    make(monkeypatch, tmp_path / "m", way)
    with folders.replacing(tmp_path / "m") as partial:  # as another process: a lock is its opener's
        (partial / "config.json").write_text("{}")
        grown(9).save_pretrained(tmp_path / "m")
        assert (partial / "config.json").exists()
    assert (tmp_path / "m" / "config.json").read_text() == "{}"
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize("moves", [0, 3, 12])
def test_a_save_that_is_interrupted_amid_its_moves_loses_nothing(tmp_path, monkeypatch, moves):
    """By Ctrl-C, or by an error of the disk."""
    grown(4).save_pretrained(tmp_path / "m", max_shard_size="20KB")
    move, count = os.replace, itertools.count()

    def interrupted(*paths):
        if next(count) == moves:
            raise KeyboardInterrupt
        move(*paths)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        grown(9).save_pretrained(tmp_path / "m", max_shard_size="20KB")
    (rest,) = tmp_path.glob(".m.complete-*")
    for place in (tmp_path, tmp_path / "m"):  # in a mount point it lies inside
        rest = rest.rename(place / rest.name)
        with pytest.raises(OSError, match=f"the rest of its files is in {rest}"):
            logits(tmp_path / "m")
    shutil.copytree(rest, tmp_path / "m", dirs_exist_ok=True)
    shutil.rmtree(rest)
    assert torch.equal(logits(tmp_path / "m"), grown(9)(tokens()).logits)


def test_what_is_no_folder_or_no_file_in_it(tmp_path):
    """Pipes and links in place of files are replaced, what they point to stays; a folder is no place for a file."""
    model, folder, blob = grown(4), tmp_path / "m", tmp_path / "blob"
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", "/dev/null"):
        with pytest.raises(ValueError, match="is a file; a checkpoint needs a directory"):
            model.save_pretrained(place)
    folder.mkdir()
    blob.write_text("of another model")
    (folder / "model.safetensors").symlink_to(blob)
    os.mkfifo(folder / "config.json")
    model.save_pretrained(folder)
    assert torch.equal(logits(folder), model(tokens()).logits) and blob.read_text() == "of another model"
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(IsADirectoryError, match=r"m cannot be written: .*config\.json.*Name a folder"):
        model.save_pretrained(folder)


FOREIGN = ["model_ema.safetensors", "model.fp16.safetensors", "model-of-mine.safetensors", "models.safetensors"]


@pytest.mark.parametrize("former, new", [("1GB", "1GB"), ("20KB", "1GB"), ("1GB", "20KB"), ("20KB", "40KB")])
def test_only_weights_that_the_new_ones_replace_go(former, new, tmp_path):
    """Every reader finds one set of weights, with an index or without; other weights in the folder stay."""
    grown(4).save_pretrained(tmp_path / "m", max_shard_size=former)
    for name in FOREIGN:
        (tmp_path / "m" / name).write_text("of someone else")
    model = grown(9)
    model.save_pretrained(tmp_path / "m", max_shard_size=new)
    model.save_pretrained(tmp_path / "expected", max_shard_size=new)
    expected = {path.name for path in (tmp_path / "expected").iterdir()}
    assert {path.name for path in (tmp_path / "m").iterdir()} == expected | set(FOREIGN)
    for name in FOREIGN:
        (tmp_path / "m" / name).unlink()
    assert torch.equal(logits(tmp_path / "m"), model(tokens()).logits)


def test_a_variant_leaves_the_main_weights(tmp_path):
    model = grown(4)
    model.save_pretrained(tmp_path)
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "model_ema.safetensors")
    (tmp_path / "model.safetensors.index.fp16.json").write_text("{}")
    model.save_pretrained(tmp_path, variant="fp16")
    names = {path.name for path in tmp_path.glob("*.safetensors")}
    assert names == {"model.safetensors", "model_ema.safetensors", "model.fp16.safetensors"}
    assert (tmp_path / "model.safetensors.index.fp16.json").exists()
    assert torch.equal(logits(tmp_path), model(tokens()).logits)


STRANGE = ["", "[]", '{"weight_map": 3}', '{"metadata": {}, "weight_map": {"a": "../secret.safetensors"}}']


@pytest.mark.parametrize("index", STRANGE)
def test_an_index_that_is_not_ours_removes_no_other_file(index, tmp_path):
    (tmp_path / "secret.safetensors").write_text("")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / folders.INDEX).write_text(index)
    grown(4).save_pretrained(tmp_path / "m")
    assert (tmp_path / "secret.safetensors").exists() and not (tmp_path / "m" / folders.INDEX).exists()
    assert torch.equal(logits(tmp_path / "m"), grown(4)(tokens()).logits)


def test_relative_paths_and_files_in_the_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = grown(4)
    model.save_pretrained("m")
    model.save_pretrained(Path("m"))
    model.save_pretrained("deep/er/m")
    assert torch.equal(logits("deep/er/m"), logits("m"))
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


def test_a_model_that_did_not_grow_is_saved_as_stock(tmp_path):
    build("llama-2").save_pretrained(tmp_path / "stock")
    model = patch_model(AutoModelForCausalLM.from_pretrained(tmp_path / "stock"))  # its config notes its type by itself
    model.save_pretrained(tmp_path / "patched")
    stock, patched = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("stock", "patched"))
    assert stock == patched
    set_dims(model, {"0": {"growth_1": [1, 0]}})
    assert model.config.model_type == "llama" and model.config.to_dict()["model_type"] == "growattn_llama"
    model.save_pretrained(tmp_path / "grown")
    set_dims(model, {})
    model.save_pretrained(tmp_path / "shrunk")
    assert json.loads((tmp_path / "shrunk" / "config.json").read_text()) == json.loads(stock["config.json"])
    model.config.auto_map = {"AutoConfig": "theirs.Config"}
    config = unpatch_model(model).config
    assert (config.model_type, config.auto_map) == ("llama", {"AutoConfig": "theirs.Config"})

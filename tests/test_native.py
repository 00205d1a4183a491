"""Checkpoints carry the code of their classes: they load where this library is not, and never run it where it is."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import ROOT
from families import HEADS, VARIANTS, add_dims, build, lm_batches, tokens
from test_layering import TRAVELLING
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from hf_growattn import Grower, GrowthConfig, patch_model, unpatch_model
from hf_growattn.growable import models as modeling
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import sync_config

CODE = {f"growattn/{name}.py" for name in TRAVELLING}
COMMIT = "0123456789" * 4


def grown(variant: str, auto_class=AutoModelForCausalLM):
    model = patch_model(build(variant, auto_class))
    for index, attention in enumerate(attentions(model)):
        add_dims(attention, 4 + 2 * index, 2)
    sync_config(model)
    return model


def is_the_librarys(code) -> bool:
    return all(
        path.read_bytes() == (ROOT / "hf_growattn" / "model" / path.name).read_bytes() for path in code.glob("*.py")
    )


def put_in_hub_cache(home, repo: str, checkpoint):
    """Lay a checkpoint out as a download from the Hub does."""
    folder = home / "hub" / f"models--{repo.replace('/', '--')}"
    shutil.copytree(checkpoint, folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)


@pytest.fixture(scope="module")
def without_library(tmp_path_factory):
    """Checkpoints of every kind, what they compute here, and what they compute where the library is not."""
    torch.manual_seed(0)  # what grows below depends on the new dims that are drawn here
    folder = tmp_path_factory.mktemp("native")
    jobs, expected = {}, {}

    def add(name, path, auto_class="AutoModelForCausalLM", new_tokens=12, kwargs=None, **more):
        jobs[name] = {"path": str(path), "auto_class": auto_class, "new_tokens": new_tokens, "kwargs": kwargs or {}}
        jobs[name].update(more, input_ids=tokens().tolist())
        source = folder / "gpt2" if name == "hub" else path
        model = getattr(transformers, auto_class).from_pretrained(source, **(kwargs or {})).eval()
        with torch.no_grad():
            expected[name] = {"output": model(tokens())[0], "dtype": str(model.dtype), "class": type(model).__name__}
            if new_tokens:
                expected[name]["tokens"] = model.generate(tokens(), max_new_tokens=new_tokens, do_sample=False)

    for family, variant in (("llama", "llama-2"), ("gpt2", "gpt2-2")):
        path, model = folder / family, grown(variant)
        model.save_pretrained(path)
        add(family, path, save_to=str(folder / f"{family}-again"))
        add(f"{family}-bf16", path, kwargs={"dtype": "bfloat16"})
        add(f"{family}-base", path, "AutoModel", new_tokens=0, save_to=str(folder / f"{family}-base-again"))
        model.save_pretrained(folder / f"{family}-sharded", max_shard_size="20KB")
        add(f"{family}-sharded", folder / f"{family}-sharded", kwargs={"device_map": {"": "cpu"}})
        add(f"{family}-auto", folder / f"{family}-sharded", kwargs={"device_map": "auto"}, new_tokens=0)
        for head in ("sequence-classification", "token-classification"):
            grown(variant, HEADS[head]).save_pretrained(folder / f"{family}-{head}")
            add(f"{family}-{head}", folder / f"{family}-{head}", HEADS[head].__name__, new_tokens=0)
    for variant in VARIANTS.keys() - {"llama-2", "gpt2-2"}:
        grown(variant).save_pretrained(folder / variant)
        add(variant, folder / variant)
    put_in_hub_cache(folder / "home", "me/grown", folder / "gpt2")
    add("hub", "me/grown")
    (folder / "jobs.json").write_text(json.dumps(jobs))
    environment = {**os.environ, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    files = [ROOT / "tests" / "reload.py", folder / "jobs.json", folder / "results.pt"]
    command = [sys.executable, *files, "without-library"]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder, expected, torch.load(folder / "results.pt")


def test_outputs_are_those_of_the_library(without_library):
    _, expected, results = without_library
    assert results.keys() == expected.keys()
    for name, result in results.items():
        assert result["module"].startswith("transformers_modules."), name
        assert result["class"] == expected[name]["class"] and result["dtype"] == expected[name]["dtype"]
        # The same code on the same weights: nothing but memory alignment differs.
        torch.testing.assert_close(result["output"], expected[name]["output"], rtol=1e-6, atol=1e-6, msg=name)
        if "tokens" in result:
            assert torch.equal(result["tokens"], expected[name]["tokens"]), name


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_is_saved_there_is_whole_and_grows_here(without_library, family):
    folder, expected, _ = without_library
    for name, auto_class in ((family, AutoModelForCausalLM), (f"{family}-base", AutoModel)):
        again = folder / f"{name}-again"
        assert {path.relative_to(again).as_posix() for path in again.rglob("*.py")} == CODE
        assert is_the_librarys(again / "growattn")
        first, second = (json.loads((path / "config.json").read_text()) for path in (folder / family, again))
        assert second["auto_map"] == first["auto_map"] and second["extra_dims"] == first["extra_dims"]
        model = auto_class.from_pretrained(again).eval()
        assert type(model).__module__ == "hf_growattn.growable.models"
        torch.testing.assert_close(model(tokens())[0], expected[name]["output"], rtol=1e-6, atol=1e-6)
    model = AutoModelForCausalLM.from_pretrained(folder / f"{family}-again")
    report = Grower(model, GrowthConfig(qk_dims=2)).find(lm_batches(8)).keep()
    assert report.kept and [a.width_of("query") for a in attentions(model)] == [22, 24]


@pytest.fixture
def hostile(tmp_path):
    """A checkpoint whose code must not run."""
    grown("llama-2").save_pretrained(tmp_path / "m")
    for path in (tmp_path / "m" / "growattn").glob("*.py"):
        path.write_text("raise SystemExit('the code of the checkpoint ran')")
    return tmp_path / "m"


@pytest.mark.parametrize("trust", [None, False, True])
def test_where_the_library_is_its_own_code_runs_and_nobody_is_asked(hostile, monkeypatch, trust):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    kwargs = {} if trust is None else {"trust_remote_code": trust}
    config = AutoConfig.from_pretrained(hostile, **kwargs)
    model = AutoModelForCausalLM.from_pretrained(hostile, **kwargs)
    assert type(config) is type(model.config) is modeling.GrowAttnLlamaConfig
    assert type(model) is type(AutoModelForCausalLM.from_config(config, **kwargs)) is modeling.GrowAttnLlamaForCausalLM
    model.save_pretrained(hostile)  # and the code is that of the library again
    assert is_the_librarys(hostile / "growattn")


def test_a_model_that_runs_its_checkpoints_code_is_told_to_load_again(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    grown("llama-2").save_pretrained(tmp_path / "m")
    name = "growattn/modeling.GrowAttnLlamaForCausalLM"
    model = get_class_from_dynamic_module(name, str(tmp_path / "m")).from_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match="Import hf_growattn first"):
        patch_model(model)


def test_unpatching_forgets_where_the_code_was(tmp_path):
    patch_model(build("gpt2-2")).save_pretrained(tmp_path)
    stock = unpatch_model(AutoModelForCausalLM.from_pretrained(tmp_path))
    stock.save_pretrained(tmp_path / "stock")
    assert not hasattr(stock.config, "auto_map")
    assert not {"growattn", "auto_map"} & {path.name for path in (tmp_path / "stock").iterdir()}


def test_only_classes_of_ours_carry_code(tmp_path):
    model = grown("llama-2")
    model.__class__ = type("Mine", (type(model),), {"__module__": __name__})
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.rglob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())

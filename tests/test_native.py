"""Checkpoints carry the code of their classes: they load where this library is not, and never run it where it is."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import encoders
import pytest
import torch
import transformers
from conftest import ROOT
from families import HEADS, VARIANTS, lm_batches, tokens, wide
from test_layering import TRAVELLING
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from hf_growattn import Grower, GrowthConfig, patch_model, unpatch_model
from hf_growattn.growable import models as modeling
from hf_growattn.growable.attention import attentions

CODE = {f"growattn/{name}.py" for name in TRAVELLING}
COMMIT = "0123456789" * 4
FAMILIES = ("llama-2", "gpt2-2")


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
def saved(tmp_path_factory):
    """Checkpoints of every kind in a folder, and what they compute here."""
    torch.manual_seed(0)  # what grows below depends on the new dims that are drawn here
    folder = tmp_path_factory.mktemp("native")
    jobs, expected = {}, {}

    def add(name, path, auto_class="AutoModelForCausalLM", new_tokens=12, kwargs=None, inputs=None, **more):
        inputs, kwargs = tokens() if inputs is None else inputs, kwargs or {}
        jobs[name] = {"path": str(path), "auto_class": auto_class, "new_tokens": new_tokens, "kwargs": kwargs}
        jobs[name].update(more, input_ids=inputs.tolist())
        source = folder / "gpt2-2" if name == "hub" else path
        model = getattr(transformers, auto_class).from_pretrained(source, **kwargs).eval()
        with torch.no_grad():
            expected[name] = {"output": model(inputs)[0], "dtype": str(model.dtype), "class": type(model).__name__}
            if new_tokens:
                expected[name]["tokens"] = model.generate(inputs, max_new_tokens=new_tokens, do_sample=False)

    for variant in VARIANTS:
        wide(variant, 4, 2).save_pretrained(folder / variant)
        more = {"save_to": str(folder / f"{variant}-again")} if variant in FAMILIES else {}
        add(variant, folder / variant, **more)
    for variant in FAMILIES:
        add(f"{variant}-bf16", folder / variant, kwargs={"dtype": "bfloat16"})
        base = str(folder / f"{variant}-base-again")
        add(f"{variant}-base", folder / variant, "AutoModel", new_tokens=0, save_to=base)
        wide(variant, 4, 2).save_pretrained(folder / f"{variant}-sharded", max_shard_size="20KB")
        add(f"{variant}-sharded", folder / f"{variant}-sharded", kwargs={"device_map": {"": "cpu"}})
        add(f"{variant}-auto", folder / f"{variant}-sharded", kwargs={"device_map": "auto"}, new_tokens=0)
        for head in ("sequence-classification", "token-classification"):
            wide(variant, 4, 2, auto_class=HEADS[head]).save_pretrained(folder / f"{variant}-{head}")
            add(f"{variant}-{head}", folder / f"{variant}-{head}", HEADS[head].__name__, new_tokens=0)
    for name in encoders.ENCODERS:
        wide(encoders.build(name), 3, 2).save_pretrained(folder / name)
        kind = "AutoModelForImageClassification" if name in encoders.SEES else "AutoModelForMaskedLM"
        add(name, folder / name, kind, new_tokens=0, inputs=next(iter(encoders.inputs(name).values())))
    put_in_hub_cache(folder / "home", "me/grown", folder / "gpt2-2")
    add("hub", "me/grown")
    (folder / "jobs.json").write_text(json.dumps(jobs))
    return folder, expected


@pytest.mark.parametrize("mode", ["without-library", "with-library"])
def test_a_fresh_process_computes_the_same(saved, mode):
    """By the code that a checkpoint carries, or by the library, which the Auto classes know of."""
    folder, expected = saved
    environment = {**os.environ, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(ROOT) if mode == "with-library" else ""
    files = [ROOT / "tests" / "reload.py", folder / "jobs.json", folder / "results.pt"]
    command = [sys.executable, *files, mode]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    results = torch.load(folder / "results.pt")
    assert results.keys() == expected.keys()
    module = "transformers_modules." if mode == "without-library" else "hf_growattn.growable.models"
    for name, result in results.items():
        assert result["module"].startswith(module), name
        assert result["class"] == expected[name]["class"] and result["dtype"] == expected[name]["dtype"]
        # The same code on the same weights: nothing but memory alignment differs.
        torch.testing.assert_close(result["output"], expected[name]["output"], rtol=1e-5, atol=1e-5, msg=name)
        if "tokens" in result:
            assert torch.equal(result["tokens"], expected[name]["tokens"]), name
    if mode == "without-library":
        for variant in FAMILIES:
            check_what_was_saved_there(folder, expected, variant)


def check_what_was_saved_there(folder, expected, variant):
    """It is whole, and grows here."""
    for name, auto_class in ((variant, AutoModelForCausalLM), (f"{variant}-base", AutoModel)):
        again = folder / f"{name}-again"
        assert {path.relative_to(again).as_posix() for path in again.rglob("*.py")} == CODE
        assert is_the_librarys(again / "growattn") and not list(again.rglob("*.bin")) + list(again.rglob(".*"))
        first, second = (json.loads((path / "config.json").read_text()) for path in (folder / variant, again))
        for field in ("auto_map", "extra_dims", "model_type"):
            assert second[field] == first[field]
        model = auto_class.from_pretrained(again).eval()
        assert type(model).__module__ == "hf_growattn.growable.models"
        torch.testing.assert_close(model(tokens())[0], expected[name]["output"], rtol=1e-6, atol=1e-6)
    assert first["extra_dims"] == {str(layer): {"growth_1": [4, 2]} for layer in range(2)}
    model = AutoModelForCausalLM.from_pretrained(folder / f"{variant}-again")
    report = Grower(model, GrowthConfig(qk_dims=2)).find(lm_batches(8)).keep()
    assert report.kept and [a.width_of("query") for a in attentions(model)] == [22, 22]


@pytest.fixture
def hostile(tmp_path):
    """A checkpoint whose code must not run."""
    wide("llama-2").save_pretrained(tmp_path / "m")
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
    wide("llama-2").save_pretrained(tmp_path / "m")
    name = "growattn/modeling.GrowAttnLlamaForCausalLM"
    model = get_class_from_dynamic_module(name, str(tmp_path / "m")).from_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match="Import hf_growattn first"):
        patch_model(model)


def test_unpatching_forgets_where_the_code_was(tmp_path):
    wide("gpt2-2").save_pretrained(tmp_path)
    stock = unpatch_model(AutoModelForCausalLM.from_pretrained(tmp_path), drop_growth=True)
    stock.save_pretrained(tmp_path / "stock")
    assert not hasattr(stock.config, "auto_map")
    assert not {"growattn", "auto_map"} & {path.name for path in (tmp_path / "stock").iterdir()}


def test_only_classes_of_ours_carry_code(tmp_path):
    model = wide("llama-2")
    model.__class__ = type("Mine", (type(model),), {"__module__": __name__})
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.rglob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())


def test_pickled_weights_are_not_read(tmp_path):
    """They may hold code, also under the name of safetensors or in an index."""

    class Touch:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    wide("llama-2").save_pretrained(tmp_path / "m")
    weights, index = tmp_path / "m" / "model.safetensors", tmp_path / "m" / "model.safetensors.index.json"
    torch.save({"lm_head.weight": Touch()}, tmp_path / "m" / "pytorch_model.bin")
    for way in ("instead", "indexed", "named"):
        weights.unlink(missing_ok=True)
        if way == "named":
            shutil.copy(tmp_path / "m" / "pytorch_model.bin", weights)
        if way == "indexed":
            index.write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model.bin"}}))
        with pytest.raises(OSError, match=r"model\.safetensors|is not whole|is pickled"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "m")
        index.unlink(missing_ok=True)
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "m" / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "ran").exists()  # so the trap would have worked

"""The project keeps its word: README, scripts, ranges."""

import itertools
import json
import re

import pytest
import torch
from conftest import ROOT, data_path
from families import build, lm_batches
from transformers import AutoModelForCausalLM


def test_the_readme_example_runs(tmp_path, monkeypatch):
    """Every Python block of the README, in order, as a user's script would run it."""
    monkeypatch.chdir(tmp_path)
    model = build("llama-2")
    monkeypatch.setattr(
        "transformers.AutoModelForCausalLM.from_pretrained",
        classmethod(
            lambda cls, name, load=AutoModelForCausalLM.from_pretrained: model if name == "my/llama" else load(name)
        ),
    )
    namespace = {"growth_batches": lm_batches()}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        exec(block, namespace)
    assert namespace["report"].applied
    batch = lm_batches()[0]["input_ids"]
    assert torch.equal(namespace["reloaded"].eval()(batch).logits, namespace["model"].eval()(batch).logits)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


def test_the_lowest_versions_are_those_of_the_ranges():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    ranges = dict(re.findall(r"([\w-]+)>=([\d.]+)", "\n".join(lines)))
    for line in (ROOT / "scripts" / "lowest.txt").read_text().split():
        name, version = line.split("==")
        assert f"{version}.".startswith(f"{ranges[name]}."), line


def run(forks, *words):
    done = forks.run(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_demo_in_a_short_form(forks, tmp_path):
    out = run(forks, "scripts/demo.py", "--steps", "2", "--growth_batches", "2", "--output", tmp_path)
    assert "Held-out loss" in out and f"The model is in {tmp_path / 'grown'}" in out
    assert "Growth 1, at step 1. Loss:" in (tmp_path / "grown" / "README.md").read_text()
    assert (tmp_path / "grown" / "growth.png").read_bytes().startswith(b"\x89PNG")


def parts_of_layers(folder) -> list[list[list[int]]]:
    """The new dims of each layer by growth, as config.json has them."""
    extra_dims = json.loads((folder / "config.json").read_text())["extra_dims"]
    return [[*parts.values()] for parts in extra_dims.values()]


def test_fine_tuning_any_model_on_any_text(forks, tmp_path):
    """A text file, then a folder, where the model that grew on the one grows on."""
    text = data_path("text", "tinyshakespeare.txt").read_text()[:30_000]
    (tmp_path / "texts").mkdir()
    file, output = tmp_path / "texts" / "play.txt", tmp_path / "out"
    file.write_text(text)
    options = ["--output_dir", output, "--max_steps", "2", *"--growth_batches 2 --qk_dims 8 --max_length 128".split()]
    out = run(forks, "hf_growattn", "finetune", data_path("models", "stories260K"), file, *options)
    assert "Held-out loss" in out and (output / "model.safetensors").exists()
    assert parts_of_layers(output) == [[[8, 0]]] * 5
    options[1] = tmp_path / "again"
    run(forks, "hf_growattn", "finetune", output, file.parent, *options)
    assert parts_of_layers(tmp_path / "again") == [[[8, 0], [8, 0]]] * 5

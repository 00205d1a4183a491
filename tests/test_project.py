"""The project keeps its word: README, scripts, ranges."""

import itertools
import json
import re

import pytest
import torch
from conftest import ROOT, data_path
from families import save_with_text, tokens
from transformers import Trainer, TrainingArguments

from hf_growattn import GrowthCallback


def test_the_readme_example_runs(tmp_path, monkeypatch):
    """The README's Python, in order, as a user's script would run it, on a tiny model; the race is in test_race.py."""
    save_with_text(tmp_path, 4096)
    (tmp_path / "text.txt").rename(tmp_path / "my_text.txt")
    monkeypatch.chdir(tmp_path)
    readme = (
        (ROOT / "README.md").read_text().replace("HuggingFaceTB/SmolLM2-135M", "model").replace("lr=2e-5", "lr=1e-3")
    )
    rows = [dict.fromkeys(("input_ids", "labels"), row) for row in tokens(40)]
    arguments = TrainingArguments("trained", report_to="none", use_cpu=True)
    namespace = {"Trainer": Trainer, "arguments": arguments, "rows": rows}
    for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL):
        if "race(" not in block:
            exec(block, namespace)
    assert namespace["report"].kept
    assert isinstance(namespace["trainer"].callback_handler.callbacks[-1], GrowthCallback)
    batch = namespace["batches"][0]
    assert torch.equal(namespace["reloaded"].eval()(batch).logits, namespace["model"].eval()(batch).logits)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


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
    out = run(forks, "scripts/demo.py", "--steps", "8", "--pretraining", "20", "--output", tmp_path)
    assert "before: loss" in out and "LoRA on all linear layers: loss" in out and "wider heads" in out
    assert f"the same again: {tmp_path}" in out and (tmp_path / "transformer" / "README.md").is_file()


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
    given = "--max_steps 4 --growth_batches 2 --qk_dims 8 --max_length 128 --packing --use_cpu --report_to none".split()
    models, options = data_path("models", "stories260K"), [*given, "--output_dir", output]
    out = run(forks, "scripts/finetune.py", "--model_name_or_path", models, "--data_files", file, *options)
    assert "Step 2:" in out and (output / "model.safetensors").exists()
    assert parts_of_layers(output) == [[[8, 0]]] * 5
    options[-1] = tmp_path / "again"
    run(forks, "scripts/finetune.py", "--model_name_or_path", output, "--datasets", file.parent, *options)
    assert parts_of_layers(tmp_path / "again") == [[[8, 0], [8, 0]]] * 5

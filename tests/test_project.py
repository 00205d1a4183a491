"""The project keeps its word: README, scripts, ranges."""

import itertools
import re
import runpy
import shlex

import pytest
import torch
from command import call
from conftest import ROOT
from families import build, save_with_text, tokens, word_tokenizer
from test_data import words as text_of
from transformers import Trainer, TrainingArguments

from hf_growattn import GrowthCallback

SMALL = "--max-length 16 --growth-batches 4 --batch-size 5".split()
TRAINING = "--max_steps 16 --max_length 16 --growth_batches 4 --learning_rate 1e-3 --budget 0.1".split()
TRAINING += "--use_cpu --bf16 False --report_to none".split()
# What a tiny model takes, or no network gives.
CHANGED = {
    "measure": [*SMALL],
    "race": [*SMALL, "--steps", "8", "--budget", "0.05"],
    "scripts/finetune.py": [*TRAINING],
}


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


def test_the_lowest_versions_are_those_of_the_ranges():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    ranges = dict(re.findall(r"([\w-]+)>=([\d.]+)", "\n".join(lines)))
    for line in (ROOT / "scripts" / "lowest.txt").read_text().split():
        name, version = line.split("==")
        assert f"{version}.".startswith(f"{ranges[name]}."), line


def test_the_demo_in_a_short_form(forks, tmp_path):
    done = forks.run("scripts/demo.py", "--steps", "8", "--pretraining", "20", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert "LoRA on all linear layers" in out and ("The winner is" in out or "LoRA wins" in out)
    assert re.search(rf"(\d+%) after training by the winner.\nSaved in {tmp_path}, and loaded from there: \1", out)


def test_the_command_lines_of_the_readme_are_true(tmp_path, monkeypatch):
    for each in (build("llama-2"), word_tokenizer()):
        each.save_pretrained(tmp_path / "my" / "llama")
    for name in ["my_text.txt"]:
        (tmp_path / name).write_text(" ".join(text_of(start, 12 + start // 60) for start in range(180)))
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    seen = []
    for line in "".join(blocks[1:]).replace("\\\n", "").splitlines():  # the first one installs
        program, command, *words = shlex.split(line, comments=True)
        if program == "growattn":
            done = call(command, *words, *CHANGED.get(command, []))
            assert done.code in (0, 3), (line, done)
        elif program == "python":
            monkeypatch.setattr("sys.argv", [command, *words, *CHANGED.get(command, [])])
            runpy.run_path(command, run_name="__main__")
        seen.append(command)
    assert {"measure", "race", "export", "scripts/finetune.py"} <= {*seen}
    assert (tmp_path / "stock" / "config.json").exists()

"""The README's commands run on tiny models."""

import re
import runpy
import shlex

import datasets
from conftest import ROOT
from families import build, word_tokenizer
from test_cli import call
from test_data import CHATS, TEMPLATE, TEXTS

SMALL = "--max_length 16 --growth_batches 4 --per_device_train_batch_size 5 --use_cpu".split()
TRAINING = "--max_steps 16 --max_length 16 --growth_batches 4 --learning_rate 1e-3 --budget 0.1".split()
TRAINING += "--use_cpu --bf16 False --report_to none".split()
# What a tiny model takes, or no network gives.
CHANGED = {
    "measure": [*SMALL],
    "race": [*SMALL, "--steps", "8", "--budget", "0.05"],
    "scripts/finetune.py": [*TRAINING],
}


def test_the_command_lines_of_the_readme_are_true(tmp_path, monkeypatch):
    tokenizer = word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    build("llama-2").save_pretrained(tmp_path / "my" / "llama")
    tokenizer.save_pretrained(tmp_path / "my" / "llama")
    for name in ("my_text.txt", "held_out.txt"):
        (tmp_path / name).write_text(" ".join(TEXTS * 3))
    datasets.Dataset.from_list(CHATS).to_json(tmp_path / "chats.jsonl")
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    seen = []
    for line in "".join(blocks[1:]).replace("\\\n", "").splitlines():  # the first one installs
        program, command, *words = shlex.split(line, comments=True)
        if program == "growattn":
            done = call(command, *words, *CHANGED.get(command, []))
            assert done.code in (0, 3), (line, done)
        elif program == "hf":  # what it uploads is there
            assert (tmp_path / words[1] / "README.md").is_file()
        elif program == "python":
            monkeypatch.setattr("sys.argv", [command, *words, *CHANGED.get(command, [])])
            runpy.run_path(command, run_name="__main__")
        seen.append(command)
    assert {"inspect", "measure", "race", "export", "upload", "scripts/finetune.py", "scripts/evaluate.py"} <= {*seen}
    assert (tmp_path / "stock" / "config.json").exists()

"""The command lines of the README, as they stand there, on tiny models, its table of families."""

import re
import shlex

import datasets
from conftest import ROOT
from families import build, word_tokenizer
from test_cli import call
from test_data import CHATS, TEMPLATE, TEXTS

from hf_growattn.interop.stock import why_not_exportable
from hf_growattn.model.architectures import ARCHITECTURES

SMALL = "--max_length 16 --growth_batches 4 --per_device_train_batch_size 5 --use_cpu".split()
TRAINING = "--max_steps 8 --eval_steps 4 --save_strategy no --budget 5%".split()
# What a tiny model takes, or no network gives; the second training goes elsewhere.
CHANGED = {
    "measure": [*SMALL],
    "race": [*SMALL, "--steps", "8", "--budget", "5%"],
    "finetune": [*SMALL, *TRAINING],
    "push": ["--dry-run", "pushed"],
}


def test_the_command_lines_of_the_readme_are_true(tmp_path, monkeypatch):
    tokenizer = word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    for name, variant in (("my/llama", "llama-2"), ("m", "llama-2")):
        build(variant).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    for name in ("my_text.txt", "held_out.txt"):
        (tmp_path / name).write_text(" ".join(TEXTS * 3))
    datasets.Dataset.from_list(CHATS).to_json(tmp_path / "chats.jsonl")
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    monkeypatch.chdir(tmp_path)
    (block,) = (
        b for b in re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL) if "inspect" in b
    )
    seen = []
    for line in block.splitlines():
        program, command, *words = shlex.split(line, comments=True)
        assert program == "growattn"
        words = [
            f"{word}-{seen.count(command)}" if words[at - 1] == "-o" and command in seen else word
            for at, word in enumerate(words)
        ]
        done = call(command, *words, *CHANGED.get(command, []))
        assert done.code in (0, 3), (line, done)
        seen.append(command)
    assert {"inspect", "measure", "race", "finetune", "export", "push"} <= {*seen}
    assert (tmp_path / "stock" / "config.json").exists() and (tmp_path / "pushed" / "README.md").exists()


def test_the_table_of_families_is_true():
    """Each row against the family's in the tables that the code reads, for the config that is the family's default."""
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| `")]
    told = {name: line.split(" | ")[1:] for line in lines for name in re.findall(r"`([\w-]+)`", line.split(" | ")[0])}
    assert told.keys() >= ARCHITECTURES.keys()
    for name, row in ARCHITECTURES.items():
        (patterns, messages, refactoring, written), refused = told[name], why_not_exportable(name) is not None
        normed = row.query_norm is not None and not refused
        assert (patterns, messages) == ("outside the norms" if normed else "yes", "yes"), name
        assert refactoring == ("messages" if row.rotate else "both"), name
        assert ("messages alone" in written) == normed, name
        assert ("not exportable" in written) == refused, name
        assert ("Llama" in written) == (name == "qwen2"), name

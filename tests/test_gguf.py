"""`scripts/to_gguf.py`, where llama.cpp's sources lie, built: set LLAMA_CPP to their folder."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, data_path
from test_export import ROPES, llama, widened
from transformers import AutoTokenizer

from hf_growattn import export_model

SOURCES = os.environ.get("LLAMA_CPP")
pytestmark = pytest.mark.skipif(
    SOURCES is None, reason="needs llama.cpp: set LLAMA_CPP to its sources, built in build/"
)


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(data_path("models", "stories260K"))


def run(checkpoint) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "scripts" / "to_gguf.py", checkpoint, "--llama-cpp", SOURCES]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("kind", [None, "llama3"])
def test_llama_cpp_generates_the_same_tokens(kind, tokenizer, tmp_path):
    model = widened(llama(vocab_size=len(tokenizer), **({"rope_parameters": dict(ROPES[kind])} if kind else {})))
    export_model(model, tmp_path / "m", tokenizer)
    done = run(tmp_path / "m")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal") == 4 and (tmp_path / "m.gguf").exists()


def test_what_llama_cpp_reads_otherwise_leaves_no_file(tokenizer, tmp_path):
    model = widened(llama(vocab_size=len(tokenizer), rope_parameters=dict(ROPES["llama3"])))
    export_model(model, tmp_path / "m", tokenizer)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    for rope in (config["rope_parameters"], config["rope_scaling"]):
        rope["rope_theta"] = 1.5  # not what export_model writes, so the script leaves it to the converter
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    done = run(tmp_path / "m")
    assert done.returncode == 1 and "DIFFERENT" in done.stdout, done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["m"]

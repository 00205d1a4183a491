"""The command line: what each command prints and leaves, its exit codes, its errors, and Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch
from command import Done, call
from conftest import ROOT
from datasets import Dataset
from families import VOCABULARY, build, lm_batches, save_with_text, tokens, word_tokenizer
from test_saving import contents
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_growattn import Grower, GrowthConfig, Method, __version__, patch_model
from hf_growattn.cli.commands import app
from hf_growattn.cli.data import TextData
from hf_growattn.cli.measuring import training_code
from hf_growattn.interop.checkpoints import load_model
from hf_growattn.report.comparison import RaceResult, Run

SMALL = "--growth-batches 4 --batch-size 5 --max-length 16".split()


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder with a tiny model and its tokenizer, and a text in which each word has one successor."""
    folder = tmp_path_factory.mktemp("given")
    save_with_text(folder, words=1200)
    return folder


@pytest.fixture(scope="module")
def grown(given, tmp_path_factory):
    """The folder of a grown model with its tokenizer."""
    output = tmp_path_factory.mktemp("grown") / "out"
    model = patch_model(AutoModelForCausalLM.from_pretrained(given / "model"))
    assert Grower(model, GrowthConfig(budget=0.05)).find(lm_batches(4)).keep().kept
    model.save_pretrained(output)
    word_tokenizer().save_pretrained(output)
    return output


def only_line(done: Done) -> str:
    """The error of a call that failed: one line, no traceback, nothing on standard output."""
    assert done.code == 1 and not done.out, done
    lines = [line for line in done.err.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1 and "Traceback" not in done.err, done
    return lines[0]


def test_measure_changes_nothing(given):
    before = {path.name: path.read_bytes() for path in (given / "model").iterdir()}
    words = ["measure", given / "model", given / "text.txt", "--budget", "0.05", *SMALL]
    done = call(*words)
    shown = " ".join(done.out.split())
    assert f"growattn race {given / 'model'} {given / 'text.txt'} -o race" in shown
    figures = json.loads(call(*words, "--json").out)
    assert not figures["kept"] and figures["added_parameters"] > 0
    assert figures["holds"] == (figures["fall"] > figures["error"]) and done.code == (0 if figures["holds"] else 3), (
        done
    )
    assert {path.name: path.read_bytes() for path in (given / "model").iterdir()} == before


def test_where_nothing_holds_an_exit_code_says_so(given, no_step):
    done = call("measure", given / "model", given / "text.txt", "--budget", "0.05", *SMALL)
    assert done.code == 3, done


def test_export(grown, tmp_path):
    figures = json.loads(call("export", grown, "-o", tmp_path / "stock", "--json").out)
    assert figures["model_type"] == "llama" and figures["difference"] < 1e-4
    config = json.loads((tmp_path / "stock" / "config.json").read_text())
    assert config["model_type"] == "llama" and (tmp_path / "stock" / "tokenizer.json").exists()
    logits = [AutoModelForCausalLM.from_pretrained(f).eval()(tokens()).logits for f in (grown, tmp_path / "stock")]
    torch.testing.assert_close(*logits, rtol=1e-3, atol=2e-4)  # the weights are rescaled: equal but for fp32's rounding


def test_race_prints_code_that_trains_by_the_winner(given, tmp_path):
    options = "--steps 4 --seeds 1 --budget 0.05 --growth-batches 4".split()
    (tmp_path / "long.txt").write_text((given / "text.txt").read_text() * 8)
    words = ["race", given / "model", tmp_path / "long.txt", "-o", tmp_path / "race", *options]
    done = call(*words)
    assert done.code in (0, 3), done
    assert "before training" in done.out and "To train by the winner" in done.out
    assert "max_length=128" in done.out  # of the rows that were raced, as the model reads no longer ones
    assert done.out.endswith("trainer.train()\n") and str(given / "model") in done.out
    assert json.loads(call(*words, "--json").out)["winner"]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("winner", ["lora", "growth", "mix"])
def test_the_code_of_a_race_trains_by_the_winner(winner, given, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_growattn.training.methods.share_of_new_dims", lambda width: 0.1)
    data = TextData(str(given / "model"), ["rows.jsonl"], max_length=16)
    start = Run("start", 0.0, 0, 0, [9.0, 9.0], 0, 8)
    result = RaceResult(4, start, {}, method=Method(winner, 5000, 1e-3, growth_batches=4))
    short = f'"{tmp_path}", max_steps=2, use_cpu=True, bf16=False, report_to=[]'
    names = {"batches": lm_batches(4), "rows": Dataset.from_dict({"input_ids": tokens(16, 12).tolist()})}
    exec(training_code(result, data).replace('"DIR"', short), names)
    trainer = names["trainer"]
    assert trainer.state.global_step == 2
    rates = {group["initial_lr"] for group in trainer.optimizer.param_groups}
    assert rates == ({1e-3, 1e-4} if winner == "mix" else {1e-3})


def test_errors_name_the_fix(given, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    build("llama-2").save_pretrained(tmp_path / "damaged")
    os.truncate(tmp_path / "damaged" / "model.safetensors", 2000)
    (tmp_path / "coded").mkdir()
    mapped = {"AutoConfig": "coded.Config", "AutoModelForCausalLM": "coded.Model"}
    (tmp_path / "coded" / "config.json").write_text(json.dumps({"model_type": "coded", "auto_map": mapped}))
    (tmp_path / "albert").mkdir()
    (tmp_path / "albert" / "config.json").write_text('{"model_type": "albert"}')
    for options, fix in {
        ("export", tmp_path / "empty", "-o", tmp_path / "out"): "There is no checkpoint in",
        ("export", tmp_path / "damaged", "-o", tmp_path / "out"): "cannot be loaded. SafetensorError",
        ("export", tmp_path / "albert", "-o", tmp_path / "out"): "for this kind of AutoModel: AutoModelForCausalLM.",
        ("export", tmp_path / "coded", "-o", tmp_path / "out"): "code of its own, which is not run here",
        ("measure", "no/such-model", given / "text.txt"): "Check the name and the network",
        ("export", given / "model", "-o", tmp_path / "out"): "which did not grow",
        ("measure", given / "text.txt", given / "model"): "text.txt is a file, and no model: name",
    }.items():
        assert fix in only_line(call(*options)), options


def test_wrong_usage_is_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / "there").write_text("mine")
    (tmp_path / "a[v2]").mkdir()
    (tmp_path / "a[v2]" / "mine").write_text("")
    before = contents(tmp_path)
    for options, fix in {
        "measure m d --grow-steps 5": "--grow-steps",
        f"export m -o {tmp_path}": "not empty",
        f"race m d -o {tmp_path}/there": "not empty",
        "race m d": "--output",
        "measure m": "data",
        "export": "folder",
        "export m --outpt out": "--outpt",
        "measure m d --growth-batches many": "--growth-batches",
        "measure m d --growth-batches 1": "--growth-batches",
        "measure m d --batch-size 0": "--batch-size",
        "race m d -o out --steps 3": "--steps",
        "exprt": "'exprt'",
        f"export m[v2] -o {tmp_path}/a[v2]": "a[v2] exists and is not empty",
    }.items():
        done = call(*options.split())
        assert done.code == 2, (options, done)
        said = " ".join(done.err.replace("│", "").split())
        assert fix.lower() in said.lower(), (options, done.err)  # typer has named arguments in either case
    assert contents(tmp_path) == before


def test_without_trl_an_error_names_it_and_a_version_is_shown(given, monkeypatch):
    assert call("--version").out == f"growattn {__version__}\n"
    monkeypatch.setattr("hf_growattn.cli.commands.find_spec", lambda name: None)
    for words in (["measure", given / "model", "d"], ["race", given / "model", "d", "-o", given / "race"]):
        assert "pip install 'trl>=" in only_line(call(*words))


def test_models_that_cannot_take_the_data_are_refused(given, tmp_path):
    assert "buy nothing" in only_line(call("measure", given / "model", given / "text.txt", *SMALL, "--budget", "1"))
    build("gpt2-2").save_pretrained(tmp_path)
    assert "has no tokenizer that can be loaded" in only_line(call("measure", tmp_path, given / "text.txt", *SMALL))
    larger = word_tokenizer()
    larger.add_tokens([f"w{index}" for index in range(VOCABULARY, VOCABULARY + 9)])
    larger.save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text(f"w5 w{VOCABULARY + 8} " * 400)
    assert "save the model's own tokenizer" in only_line(call("measure", tmp_path, tmp_path / "text.txt", *SMALL))


def test_a_base_model_is_read_as_a_language_model(tmp_path):
    build("llama-2").model.save_pretrained(tmp_path)
    assert type(load_model(str(tmp_path), causal=True)).__name__ == "LlamaForCausalLM"
    AutoModelForSequenceClassification.from_config(build("llama-2").config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"classification\. This command reads plain text, which needs a model that"):
        load_model(str(tmp_path), causal=True)


@pytest.mark.parametrize("kind, options", [(RuntimeError, []), (ValueError, ["--debug"])])
def test_a_fault_shows_where(kind, options, tmp_path, monkeypatch):
    """One of ours always, one that names its fix when asked."""

    def broken(*_):
        raise kind("on\npurpose")

    monkeypatch.setattr("hf_growattn.interop.checkpoints.load_model", broken)
    with pytest.raises(kind, match="on\npurpose"):
        call("export", "m", "-o", tmp_path / "out", *options)


def test_ctrl_c_on_a_real_process(given, tmp_path):
    """While it measures: an exit code of its own, one line, no traceback, no file."""
    options = "--growth-batches 20 --batch-size 1 --max-length 16".split()
    words = ["measure", given / "model", given / "text.txt", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "hf_growattn", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a background job would ignore it
    )
    line = ""
    while not line.startswith("Measuring on"):
        line = process.stderr.readline()
        assert line, "it ended without measuring"
    process.send_signal(signal.SIGINT)
    out, rest = process.communicate(timeout=120)
    assert process.returncode == 130 and not out, rest
    assert rest.endswith("Interrupted: nothing was written.\n") and "Traceback" not in rest
    assert not list(tmp_path.iterdir())


def test_help_explains_every_command():
    names = [str(command.callback.__name__) for command in app.registered_commands]
    for words in ([], *([name] for name in names)):
        done = call(*words, "--help")
        assert done.code == 0 and "usage: growattn" in done.out.lower(), words

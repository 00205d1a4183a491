"""The command line: what each command prints and leaves, its exit codes, its errors, and Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT
from families import VOCABULARY, build, save_with_text, tokens, word_tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_growattn.__main__ import main
from hf_growattn.cli.commands import app
from hf_growattn.training.arguments import budget_of

SMALL = "--growth_batches 4 --per_device_train_batch_size 5 --max_length 16".split()


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder with a tiny model and its tokenizer, and a text in which each word has one successor."""
    folder = tmp_path_factory.mktemp("given")
    save_with_text(folder, words=1200)
    return folder


@pytest.fixture(scope="module")
def grown(given, tmp_path_factory):
    """What `growattn grow` left, and what it printed."""
    output = tmp_path_factory.mktemp("grown") / "out"
    done = call("grow", given / "model", given / "text.txt", "-o", output, "--budget", "5%", "--json", *SMALL)
    assert done.exit_code == 0, done.stderr
    return output, json.loads(done.stdout)


def call(*options):
    return CliRunner().invoke(app, [str(option) for option in options])


def only_line(done) -> str:
    """The error of a call that failed: one line, no traceback, nothing on standard output."""
    assert done.exit_code == 1 and not done.stdout, done.output
    lines = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1 and "Traceback" not in done.stderr
    return lines[0]


def test_inspect_counts_full_heads(tmp_path):
    """A head whose query weights have rank 1 is not full, and the figures say which."""
    model = build("gpt2-2")
    with torch.no_grad():  # head 2 of layer 1 sees one direction only; its biases would be another
        attention = model.transformer.h[1].attn.c_attn
        attention.weight[:, 32:48] = attention.weight[:, 32:33]
        attention.bias[32:48] = attention.bias[32]
    model.save_pretrained(tmp_path)
    done = call("inspect", tmp_path, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["family"], told["stock_width"], told["grown"], len(told["layers"])) == ("gpt2", 16, False, 2)
    patterns = told["layers"][1]["patterns"]
    assert patterns["width"] == 16 and patterns["effective_rank"][2] == pytest.approx(1, abs=1e-3)  # fp32 rounding
    assert 2 not in patterns["full_heads"] and min(patterns["effective_rank"][:2]) > 5
    table = call("inspect", tmp_path).stdout
    assert "GPT2LMHeadModel (stock widths)" in table and f"{model.num_parameters():,} parameters" in table


@pytest.mark.parametrize("variant, head", [("qwen3", "causal-lm"), ("llama-2", "sequence-classification")])
def test_inspect_takes_any_family_and_head(variant, head, tmp_path):
    from families import HEADS

    build(variant, HEADS[head]).save_pretrained(tmp_path)
    done = call("inspect", tmp_path)
    assert done.exit_code == 0, done.output
    assert ("normalised" in done.stdout) == (variant == "qwen3")


def test_measure_changes_nothing_and_says_so_in_words(given):
    before = {path.name: path.read_bytes() for path in (given / "model").iterdir()}
    options = ["measure", given / "model", given / "text.txt", "--budget", "5%", *SMALL]
    done = call(*options)
    assert done.exit_code == 0, done.output
    shown = " ".join(done.stdout.split())
    assert "weights would be added (" in shown and "KV cache: " in shown and " gain most: " in shown
    assert f"`growattn race {given / 'model'} {given / 'text.txt'} -o DIR --budget 5% " in shown
    told = json.loads(call(*options, "--json").stdout)
    assert f"{told['loss_before']:.4f} -> {told['loss_after']:.4f} on the growth batches" in told["verdict"]
    assert not told["applied"] and told["added_parameters"] > 0 and told["loss_after"] < told["loss_before"]
    assert {path.name: path.read_bytes() for path in (given / "model").iterdir()} == before


def test_grow_leaves_a_model_that_loads(given, grown):
    output, told = grown
    assert told["applied"] and told["output"] == str(output)
    widths = {(layer["layer"], layer["kind"]): layer["width"] for layer in told["layers"]}
    assert any(after > before for before, after in widths.values())
    stock, wide = (AutoModelForCausalLM.from_pretrained(folder) for folder in (given / "model", output))
    assert wide.num_parameters() - stock.num_parameters() == told["added_parameters"]
    assert told["added_parameters"] <= 0.05 * stock.num_parameters()
    assert {"model.safetensors", "tokenizer.json", "figures.json"} <= {path.name for path in output.iterdir()}
    assert [path.name for path in output.parent.iterdir()] == ["out"]
    inspected = json.loads(call("inspect", output, "--json").stdout)
    seen = {
        (layer["layer"], kind): layer[kind]["width"]
        for layer in inspected["layers"]
        for kind in layer
        if kind in ("patterns", "messages")
    }
    assert inspected["grown"] and seen == {of: after for of, (_, after) in widths.items()}


def test_grow_leaves_a_page_where_matplotlib_is(grown, monkeypatch, given, tmp_path):
    pytest.importorskip("matplotlib")
    assert "</html>" in (grown[0] / "report.html").read_text()
    monkeypatch.setattr("hf_growattn.training.outcome.drawable", lambda: False)
    done = call("grow", given / "model", given / "text.txt", "-o", tmp_path / "out", "--budget", "5%", *SMALL)
    assert done.exit_code == 0 and "pip install matplotlib" in done.stderr, done.output
    assert not (tmp_path / "out" / "report.html").exists() and (tmp_path / "out" / "model.safetensors").exists()


def test_where_nothing_holds_nothing_is_written(given, tmp_path, monkeypatch):
    """A text of random words: what one half of it teaches does not hold on the other; here, by a step that fails."""
    monkeypatch.setattr(
        "hf_growattn.grow.growth.StepSearch.run", lambda search, *_, **__: ([0.0] * len(search.trial.changes), 9.0)
    )
    done = call("grow", given / "model", given / "text.txt", "-o", tmp_path / "out", "--budget", "5%", *SMALL)
    assert done.exit_code == 3, done.output
    assert "Nothing was grown" in done.stdout and not list(tmp_path.iterdir())


def test_export(grown, tmp_path):
    output, _ = grown
    done = call("export", output, "-o", tmp_path / "stock", "--json")
    told = json.loads(done.stdout)
    assert done.exit_code == 0 and told["model_type"] == "llama" and told["difference"] < 1e-4
    config = json.loads((tmp_path / "stock" / "config.json").read_text())
    assert config["model_type"] == "llama" and (tmp_path / "stock" / "tokenizer.json").exists()
    logits = [AutoModelForCausalLM.from_pretrained(f).eval()(tokens()).logits for f in (output, tmp_path / "stock")]
    torch.testing.assert_close(*logits, rtol=1e-3, atol=2e-4)  # the weights are rescaled: equal but for fp32's rounding


def test_finetune_prints_what_it_leaves(given, tmp_path, monkeypatch):
    """Options of growth and of Trainer, in both spellings; on standard output the figures alone."""
    monkeypatch.setattr(
        "hf_growattn.training.finetuning.reloaded_difference", lambda *_: 0.0
    )  # test_finetune.py does it
    options = "--v-dims 4 --growth_batches 4 --grow_steps 2 --max_steps 4 --max-length 16 --use_cpu".split()
    words = ["finetune", given / "model", given / "text.txt", "-o", tmp_path / "out", *options]
    done = call(*words, "--json")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert told == json.loads((tmp_path / "out" / "figures.json").read_text())
    assert told["after"]["v_head_dim"] == [20, 20] and "Reloaded in a fresh process" in done.stderr
    assert call("inspect", tmp_path / "out", "--json").exit_code == 0
    assert call(*words).exit_code == 2  # the folder is full


def test_an_interrupted_training_says_how_to_go_on(given, tmp_path, monkeypatch):
    from hf_growattn.training.finetuning import MeasuredGrowth
    from hf_growattn.training.recipe import last_checkpoint

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    options = "--grow_steps 3 --max_steps 4 --save_steps 2 --eval_strategy no --max_length 16 --use_cpu".split()
    words = ["finetune", given / "model", given / "text.txt", "-o", tmp_path / "out", *options]
    with monkeypatch.context() as patch:
        patch.setattr(MeasuredGrowth, "_held_out", interrupt)  # at the growth, after step 3
        done = call(*words)
    monkeypatch.setattr("hf_growattn.training.finetuning.reloaded_difference", lambda *_: 0.0)
    last = tmp_path / "out" / "checkpoint-2"
    assert done.exit_code == 130, done.output
    assert done.stderr.endswith(f"Interrupted: {last} is whole; go on with --resume_from_checkpoint True.\n")
    half = tmp_path / "out" / "checkpoint-3"
    half.mkdir()  # as a process leaves it that is killed while it saves
    (half / "model.safetensors").write_bytes(b"half")
    assert last_checkpoint(tmp_path / "out") == str(last)
    assert call(*words, "--growth_batches", "4", "--resume_from_checkpoint", "True").exit_code == 0


def test_evaluate_shows_models_side_by_side(given, grown):
    options = ["evaluate", grown[0], "--base", given / "model", "--text", given / "text.txt"]
    done = call(*options, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    figures = told["models"][str(grown[0])]
    assert told["base"] == str(given / "model") and figures["text.txt"]["perplexity"]["difference"] < 0
    assert figures["model"]["parameters"]["difference"] == grown[1]["added_parameters"]
    shown = call(*options).stdout
    assert "out - base" in shown and "nats a byte" not in shown  # one tokenizer for both


def test_push_writes_a_folder_to_look_at(grown, tmp_path):
    done = call("push", grown[0], "me/grown", "--dry-run", tmp_path / "look", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert set(told["files"]) >= {"README.md", "model.safetensors", "config.json", "tokenizer.json"}
    assert "figures.json" not in told["files"] and (tmp_path / "look" / "README.md").exists()


def test_push_without_a_token_names_the_fix(grown, monkeypatch):
    monkeypatch.setattr("hf_growattn.interop.checkpoints.get_token", lambda: None)
    assert "hf auth login" in only_line(call("push", grown[0], "me/grown"))


def test_errors_name_the_fix(given, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    (tmp_path / "short.txt").write_text("w2 w3 w4")
    (tmp_path / "bad.jsonl").write_text('{"words": "w2"}\n')
    (tmp_path / "broken.jsonl").write_text("w2\n")
    (tmp_path / "latin.txt").write_bytes("\xe9t\xe9".encode("latin-1"))
    (tmp_path / "empty").mkdir()
    build("llama-2").save_pretrained(tmp_path / "damaged")
    os.truncate(tmp_path / "damaged" / "model.safetensors", 2000)
    (tmp_path / "albert").mkdir()
    (tmp_path / "albert" / "config.json").write_text('{"model_type": "albert"}')
    model, text = given / "model", given / "text.txt"
    for options, fix in {
        ("inspect", tmp_path / "empty"): "There is no checkpoint in",
        ("inspect", tmp_path / "damaged"): "cannot be loaded. SafetensorError",
        ("inspect", tmp_path / "albert"): "does not know the model type 'albert'",
        ("inspect", "no/such-model"): "Check the name and the network",
        ("measure", "no/such-model", text): "Check the name and the network",
        ("measure", model, tmp_path / "nowhere.txt"): "check the path of the data",
        ("measure", model, tmp_path / "short.txt"): "too few to hold any out: at least 20",
        ("measure", model, tmp_path / "bad.jsonl"): "has no column text, but words",
        ("measure", model, tmp_path / "broken.jsonl"): "write one entry in a line",
        ("measure", model, tmp_path / "latin.txt"): "not text in UTF-8",
        ("measure", model, tmp_path / "empty"): "There are no .txt, .jsonl, .csv or .parquet files",
        ("export", model, "-o", tmp_path / "out"): "which did not grow",
        ("finetune", model, tmp_path / "nowhere.txt", "-o", tmp_path / "out"): "check the path of the data",
        ("finetune", model, text, "-o", tmp_path / "out", "--max_length", 4096): "choose --max_length 128 or less",
        ("evaluate", model, "--text", text, "--device", "none"): "The device none cannot be used",
        ("evaluate", model, tmp_path / "empty", "--text", text): "There is no checkpoint in",
        ("push", tmp_path / "nowhere", "me/grown", "--dry-run", tmp_path / "look"): "Check the name",
    }.items():
        assert fix in only_line(call(*options)), options


def test_wrong_usage_is_told_before_anything_is_loaded(tmp_path):
    (tmp_path / "there").write_text("mine")
    for options, fix in {
        "measure m d --budget 0": "out of range",
        "measure m d --budget 150%": "out of range",
        "measure m d --budget 2.5": "out of range",
        "measure m d --budget nan": "out of range",
        "measure m d --budget much": "is not a number",
        "measure m d --growth_batches many": "growth_batches",
        "grow m d -o g --method=lora --grow-every 5": "growattn grow does not take --grow_every, --method",
        "race m d -o r --qk_dims 2": "growattn race does not take --qk_dims",
        f"grow m d -o {tmp_path}": "not empty",
        f"grow m d -o {tmp_path}/there": "is a file",
        f"grow m d -o {tmp_path}/there/inside": "nothing can be written in",
        "grow m d": "--output",
        "push m grown": "you/grown",
        "push m a/b/c": "Repo id",
        f"push m me/m --dry-run {tmp_path}": "not empty",
        "finetune m d": "--output",
        "finetune --budget 2% m d -o out": "Name MODEL and DATA first",
        f"finetune m d -o {tmp_path}": "not empty",
        "finetune m d -o out --buget 2%": "unknown: --buget 2%",
        "finetune m d -o out --grow_every 0": "every must be",
        "evaluate m": "name a --text or a --task",
        "dance": "No such command",
    }.items():
        done = call(*options.split())
        assert done.exit_code == 2, (options, done.output)
        assert fix in " ".join(done.stderr.replace("│", " ").split()), (options, done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_what_a_model_cannot_take_is_told(given, tmp_path):
    words = ["measure", given / "model", given / "text.txt", *SMALL]
    assert "buy nothing" in only_line(call(*words, "--budget", "1"))
    assert "choose --max_length 128 or less" in only_line(call(*words, "--max-length", "4096"))
    build("gpt2-2").save_pretrained(tmp_path)
    assert "has no tokenizer that can be loaded" in only_line(call("measure", tmp_path, given / "text.txt", *SMALL))
    larger = word_tokenizer()
    larger.add_tokens([f"w{index}" for index in range(VOCABULARY, VOCABULARY + 9)])
    larger.save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text(f"w5 w{VOCABULARY + 8} " * 400)
    assert "do not belong together" in only_line(call("measure", tmp_path, tmp_path / "text.txt", *SMALL))


def test_budgets_as_people_write_them():
    assert [budget_of(text) for text in ("1%", "0.5%", "0.02", "20000", "2e4", "1")] == [
        0.01,
        0.005,
        0.02,
        20000,
        20000,
        1,
    ]
    assert [type(budget_of(text)) for text in ("1%", "20000")] == [float, int]


def test_an_interrupted_save_leaves_nothing(given, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_growattn.interop.cards.save_figures", interrupted)  # the weights are written by then
    done = call("grow", given / "model", given / "text.txt", "-o", tmp_path / "out", "--budget", "5%", *SMALL)
    assert done.exit_code == 130 and "nothing was written" in done.stderr, done.output
    assert not list(tmp_path.iterdir())


def test_a_fault_of_ours_shows_where_when_asked(monkeypatch):
    def broken(*_):
        raise RuntimeError("on\npurpose")

    monkeypatch.setattr("hf_growattn.interop.checkpoints.load_growable", broken)
    assert only_line(call("inspect", "m")) == "Error: RuntimeError: on purpose (growattn --debug shows where)"
    done = call("--debug", "inspect", "m")
    assert isinstance(done.exception, RuntimeError)


def test_ctrl_c_on_a_real_process(given, tmp_path):
    """While it measures: an exit code of its own, one line, no traceback, no file."""
    output = tmp_path / "out"
    words = [
        given / "model",
        given / "text.txt",
        "-o",
        output,
        *"--growth_batches 20 --per_device_train_batch_size 1 --max_length 16".split(),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "hf_growattn", "grow", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a background job would ignore it
    )
    while not (told := process.stderr.readline()).startswith("Measuring on"):
        assert told, "it ended without measuring"
    process.send_signal(signal.SIGINT)
    out, rest = process.communicate(timeout=120)
    assert process.returncode == 130, rest
    assert rest == "Interrupted: nothing was written.\n" and not out
    assert not list(tmp_path.iterdir())


def test_ctrl_c_while_it_is_being_loaded(monkeypatch, capsys):
    monkeypatch.setattr("hf_growattn.cli.commands.app", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130 and capsys.readouterr().err == "Interrupted: nothing was written.\n"


def test_help_explains_every_command():
    top = call("--help").stdout
    for command in ("inspect", "measure", "grow", "finetune", "evaluate", "export", "push"):
        assert command in top and "Exit codes" in call(command, "--help").stdout
    assert "--install-completion" in top and call("--version").stdout.startswith("growattn 0.")


def test_help_and_completion_need_no_torch(tmp_path):
    """A process of the name under which pip installs the command."""
    (tmp_path / "growattn").write_text(
        "import sys\nfrom hf_growattn.__main__ import main\ntry:\n    main()\n"
        "finally:\n    print({'torch', 'transformers'} & {*sys.modules}, file=sys.stderr)\n"
    )
    completing = {"_GROWATTN_COMPLETE": "complete_bash", "COMP_WORDS": "growattn ev", "COMP_CWORD": "1"}
    for words, more, told in (("finetune", "--help"), {}, "--grow_steps"), ((), completing, "evaluate"):
        command = [sys.executable, tmp_path / "growattn", *words]
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | more
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0 and told in done.stdout and done.stderr == "set()\n", done

"""Fine-tuning as a user runs it: real processes on a tiny model and a tiny text, alone and by both launchers."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from accelerate import PartialState
from conftest import ROOT
from families import save_with_text
from safetensors.torch import load_file

from hf_growattn.cli.commands import app
from hf_growattn.training import finetuning
from hf_growattn.training.recipe import read

OPTIONS = (
    "--max_length 16 --growth_batches 4 --learning_rate 1e-3 --max_steps 24 --save_steps 6 --logging_steps 2".split()
)
TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node=2"
ACCELERATE = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> list:
    """A tiny model with its tokenizer, and a text in which each word has one successor; then options."""
    folder = tmp_path_factory.mktemp("given")
    save_with_text(folder, words=2400)
    return [folder / "model", folder / "text.txt", *OPTIONS]


def start(given: list, output: Path, *options, launcher: str = "") -> subprocess.Popen:
    command = [sys.executable, *launcher.split(), "-m", "hf_growattn", "finetune", *given, "-o", output, *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"HF_HUB_OFFLINE": "1"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([str(word) for word in command], env=environment, cwd=ROOT, **pipes)


def finetune(given: list, output: Path, *options, launcher: str = "") -> tuple[dict, str]:
    """Run to the end, and return the figures and what was printed."""
    process = start(given, output, *options, launcher=launcher)
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return json.loads((output / "figures.json").read_text()), out


@pytest.fixture(scope="module")
def compared(given, tmp_path_factory):
    """A training with growth half-way beside one without: its folder, figures and output."""
    output = tmp_path_factory.mktemp("compared")
    return output, *finetune(given, output, "--compare", "--v-dims", "4", "--grow-steps", "12")


def test_with_and_without_growth(compared):
    output, figures, out = compared
    (growth,) = figures["growths"]
    grown, plain = figures["with_growth"], figures["without_growth"]
    assert growth["step"] == 12 and growth["held_out"][1] < growth["held_out"][0]
    assert [12, growth["held_out"][0]] in plain["held_out"]  # until then the two are one training
    early = [loss for step, loss in grown["training"] if step <= 12]
    assert early == [loss for step, loss in plain["training"] if step <= 12] and len(early) > 3
    assert grown["held_out"][0] == plain["held_out"][0] and grown["held_out"][0][0] == 0
    assert grown["held_out"][-1][0] == plain["held_out"][-1][0] == 24
    assert figures["after"]["v_head_dim"] == [20, 20] and figures["before"]["v_head_dim"] == [16, 16]
    added = figures["after"]["parameters"] - figures["before"]["parameters"]
    assert added == growth["added_parameters"] > 0 and [grew["width"] for grew in growth["layers"]] == [20, 20]
    assert f"{growth['held_out'][0]:.4f}" in out and "16 16 -> 20 20" in out and "without growth" in out
    assert growth["forward"] > 0 and "A forward pass took" in " ".join(out.split())
    assert "Reloaded in a fresh process: largest difference of the logits 0.00e+00" in out
    assert (output / "growth.png").read_bytes().startswith(b"\x89PNG") and not (output / "sample.pt").exists()
    assert "Grown at step 12." in (page := (output / "report.html").read_text())
    assert [each["name"] for each in figures["compared"]] == ["LoRA on all linear layers", "training without growth"]
    for each in figures["compared"]:
        assert f"{each['lead']:+.4f} ± {each['error']:.4f}" in out and f"{each['loss']:.4f}" in page
        assert each["cache_bytes"] == figures["before"]["cache_bytes"] < figures["after"]["cache_bytes"]
        name = {"LoRA on all linear layers": "lora"}.get(each["name"], "without_growth")
        assert each["loss"] == pytest.approx(figures[name]["held_out"][-1][1], rel=0.01)  # a mean over other batches
    assert "Advice" in out and "Advice" in page
    assert (output / "tokenizer.json").exists() and (output / "checkpoint-24").exists()


def test_killed_and_resumed(given, compared, tmp_path):
    """The resumed training ends as the unbroken one, and its figures reach back to the start."""
    unbroken, figures, _ = compared
    options = ["--v_dims", "4", "--grow_steps", "12"]
    process = start(given, tmp_path, *options, "--save_steps", "2", "--save_total_limit", "12")
    while process.poll() is None and not (tmp_path / "checkpoint-16").exists():
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "model.safetensors").exists()
    again, out = finetune(given, tmp_path, *options, "--resume_from_checkpoint", tmp_path / "checkpoint-14")
    assert again["with_growth"] == figures["with_growth"]
    assert [growth["held_out"] for growth in again["growths"]] == [growth["held_out"] for growth in figures["growths"]]
    assert "largest difference of the logits 0.00e+00" in out
    one, other = (load_file(folder / "model.safetensors") for folder in (unbroken, tmp_path))
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_two_processes_with_trainers_own_options(given, tmp_path):
    """Both grow and train as one, and rank 0 alone prints and writes."""
    options = "--bf16 --gradient_accumulation_steps 2 --optim adafactor --lr_scheduler_type reduce_lr_on_plateau"
    options += (
        " --gradient_checkpointing --grow_every 4 --max_growths 2 --budget 0.02 --total_budget 0.03 --max_steps 10"
    )
    figures, out = finetune(given, tmp_path, *options.split(), launcher=TORCHRUN)
    assert [growth["step"] for growth in figures["growths"]] == [4, 8]
    added = figures["after"]["parameters"] - figures["before"]["parameters"]
    assert 0 < added <= 0.03 * figures["before"]["parameters"]
    assert "largest difference of the logits 0.00e+00" in out  # fp32 weights, outside autocast
    assert out.count("Reloaded in a fresh process") == 1 and " ".join(out.split()).count("of that should hold") == 2
    assert figures["with_growth"]["held_out"][-1][1] < figures["with_growth"]["held_out"][0][1]


@pytest.fixture
def main():
    """What `growattn finetune` calls, in this process, on a command line."""
    return lambda *options: finetuning.main(read([*map(str, options)], "finetune"))


def test_two_processes_without_an_accelerator_train_as_one(given, main, monkeypatch, tmp_path):
    """Without being told to use CPUs: two processes with 4 rows each are one with 8, in one folder."""
    options = [*given, *"--v_dims 4 --max_steps 6 --save_strategy no --per_device_eval_batch_size 1".split()]
    two, out = finetune(options, tmp_path / "two", "--per_device_train_batch_size", "4", launcher=ACCELERATE)
    assert out.count("Reloaded in a fresh process") == " ".join(out.split()).count("of that should hold") == 1
    monkeypatch.setattr(finetuning, "reloaded_difference", lambda *_: 0.0)
    one = main(*options, "--per_device_train_batch_size", "8", "--output_dir", tmp_path / "one")
    for losses in ("training", "held_out"):
        assert two["with_growth"][losses] == [pytest.approx(pair, rel=1e-4) for pair in one["with_growth"][losses]]
    assert two["after"] == one["after"] and two["after"]["v_head_dim"] == [20, 20]


def test_several_processes_that_cannot_train_as_one_are_refused(main, capsys, monkeypatch):
    PartialState()  # alone, as on a Mac, where no backend joins processes
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    with pytest.raises(SystemExit):
        main("none", "none", "--output_dir", "none", "--accelerator_config", '{"use_configured_state": true}')
    assert "2 processes were started, and each would train by itself" in capsys.readouterr().err


def test_a_training_that_never_grew_is_saved(given, main, tmp_path):
    options = "--grow_at plateau --max_steps 2 --eval_steps 2 --save_strategy no".split()
    with pytest.raises(ValueError, match=r"the evaluation loss never stopped falling.*It is saved in"):
        main(*given, *options, "--output_dir", tmp_path)
    assert (tmp_path / "model.safetensors").exists() and (tmp_path / "tokenizer.json").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own reading
def test_lora(given, main, monkeypatch, tmp_path, capsys):
    """Adapters grow along; a resumed training ends as the unbroken one, in one plain merged checkpoint."""
    pytest.importorskip("peft")
    options = [
        *given,
        "--output_dir",
        tmp_path,
        *"--use_peft --lora_r 4 --lora_dropout 0".split(),
        "--v_dims",
        "2",
        "--save_steps",
        "9",
    ]
    main(*options, "--compare")
    figures, weights = json.loads((tmp_path / "figures.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert "largest difference of the logits 0.00e+00" in capsys.readouterr().out
    assert [12, figures["growths"][0]["held_out"][0]] in figures["without_growth"]["held_out"]
    assert figures["after"]["v_head_dim"] == [18, 18]
    assert figures["after"]["parameters"] == sum(weight.numel() for weight in weights.values())
    monkeypatch.setattr(finetuning, "reloaded_difference", lambda *_: 0.0)  # once is enough
    main(*options, "--resume_from_checkpoint", tmp_path / "checkpoint-18")
    again = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == again.keys() and all(weights[name].equal(again[name]) for name in weights)


@pytest.mark.parametrize(
    "options, message",
    [
        ("--budget 0.1 --qk_dims 2", "Give a budget, or fixed widths"),
        ("--grow_every 5 --grow_steps 3", "by one of steps"),
        ("--v_dims 2 --total_budget 0.1", "give GrowthConfig a budget"),
        ("--budget 1.5", "out of range"),
        ("--buget 1%", "unknown: --buget 1%"),
        ("--growth_batches 0", "batches must be"),
        ("--grow_every 0", "every must be"),
        ("--grow_at noon", "invalid choice"),
        ("--resume_from_checkpoint True", "no checkpoint to resume from"),
    ],
)
def test_bad_combinations_are_told_before_anything_is_loaded(main, capsys, options, message):
    with pytest.raises(SystemExit, match="2"):
        app(["finetune", "none", "none", "-o", "nowhere", *options.split()])
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_help_lists_the_options(main, capsys):
    with pytest.raises(SystemExit, match="0"):
        app(["finetune", "--help_all"])
    told = " ".join(capsys.readouterr().out.split())
    assert "--learning_rate" in told and "--grow-steps int" in told and "(default: 0.1)" in told

"""Growth inside real trainings: one process and two, killed and resumed, under accelerate and under Trainer."""

import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from families import same

LOOPS = ["accelerate", "trainer"]
SCRIPT = Path(__file__).with_name("training.py")


def run(forks, loop: str, output: Path, *options: str, ranks: int = 0) -> subprocess.CompletedProcess:
    """Train in fresh processes."""
    output.mkdir(exist_ok=True)
    return forks.run(SCRIPT, loop, output, *options, ranks=ranks)


def trained(forks, loop: str, output: Path, *options: str, ranks: int = 0) -> dict[int, float]:
    """Train, and return the loss of every step."""
    done = run(forks, loop, output, *options, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return {int(step): loss for step, loss in json.loads((output / "losses.json").read_text()).items()}


def load(path: Path):
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module", params=LOOPS)
def unbroken(request, forks, tmp_path_factory):
    """An unbroken training in one process: its loop, its folder and its losses."""
    output = tmp_path_factory.mktemp(request.param)
    return request.param, output, trained(forks, request.param, output)


def test_the_growths_lower_the_loss_and_widen(unbroken):
    _, output, losses = unbroken
    weights = load(output / "weights-0.pt")
    assert list(losses) == list(range(1, 13)) and losses[12] < losses[5] < losses[1]
    assert weights["model.layers.0.self_attn.q_proj.weight"].shape == (4 * 16, 48)
    assert {name.split(".")[6] for name in weights if ".extra.growths." in name} == {"growth_1", "growth_2"}


def test_two_processes_train_as_one(unbroken, forks, tmp_path):
    loop, _, losses = unbroken
    on_two_ranks = trained(forks, loop, tmp_path, ranks=2)
    # fp32 sums in another order; 12 steps at a high learning rate multiply the difference
    assert max(abs(losses[step] - on_two_ranks[step]) for step in losses) < 1e-4
    assert same(load(tmp_path / "weights-0.pt"), load(tmp_path / "weights-1.pt"))
    assert same(load(tmp_path / "optimizer-0.pt"), load(tmp_path / "optimizer-1.pt"))


def test_resumed_from_before_a_growth_killed_after_it_and_resumed(unbroken, forks, tmp_path):
    loop, output, losses = unbroken
    shutil.copytree(output / "checkpoint-2", tmp_path / "checkpoint-2")
    killed = run(forks, loop, tmp_path, "--resume", str(tmp_path / "checkpoint-2"), "--die-at", "6")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = trained(forks, loop, tmp_path, "--resume", str(tmp_path / "checkpoint-6"))
    assert again[12] == losses[12]
    assert same(load(output / "weights-0.pt"), load(tmp_path / "weights-0.pt"))
    assert same(load(output / "optimizer-0.pt"), load(tmp_path / "optimizer-0.pt"))


def test_what_growing_together_must_bear(forks, tmp_path):
    """Settings and hooks of the wrapper, accumulation, uneven and absent batches, a failure."""
    done = forks.run(SCRIPT.with_name("torchrun.py"), tmp_path, "ranks_run", ranks=2)
    assert done.returncode == 0, done.stderr
    assert "one_verdict" in done.stdout and "You've set static_graph" not in done.stderr

"""Growth inside real trainings: one process and two, killed and resumed, under accelerate and under Trainer."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LOOPS = ["accelerate", "trainer"]
SCRIPT = Path(__file__).with_name("training.py")


def launch(script: Path, *arguments: str, processes: int) -> subprocess.CompletedProcess:
    """Run a script in one process, or in several that find each other."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [*launcher, str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def run(loop: str, output: Path, *options: str, processes: int = 1) -> subprocess.CompletedProcess:
    """Train in fresh processes."""
    output.mkdir(exist_ok=True)
    return launch(SCRIPT, loop, str(output), *options, processes=processes)


def trained(loop: str, output: Path, *options: str, processes: int = 1) -> dict[int, float]:
    """Train, and return the loss of every step."""
    done = run(loop, output, *options, processes=processes)
    assert done.returncode == 0, done.stderr
    return {int(step): loss for step, loss in json.loads((output / "losses.json").read_text()).items()}


def load(path: Path):
    return torch.load(path, weights_only=True)


def assert_same(one, other):
    """Whatever lies in two nested states is equal, tensors to the bit."""
    if torch.is_tensor(one):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other):
            assert_same(a, b)
    else:
        assert one == other


@pytest.fixture(scope="module", params=LOOPS)
def unbroken(request, tmp_path_factory):
    """An unbroken training in one process: its loop, its folder and its losses."""
    output = tmp_path_factory.mktemp(request.param)
    return request.param, output, trained(request.param, output)


def test_the_growths_lower_the_loss_and_widen(unbroken):
    _, output, losses = unbroken
    weights = load(output / "weights-0.pt")
    assert list(losses) == list(range(1, 13)) and losses[12] < losses[5] < losses[1]
    assert weights["model.layers.0.self_attn.q_proj.weight"].shape == (4 * 16, 48)
    sizes = {name: tuple(value.shape) for name, value in weights.items() if ".extra.parts." in name}
    print(sizes)


def test_two_processes_train_as_one(unbroken, tmp_path):
    loop, _, losses = unbroken
    together = trained(loop, tmp_path, processes=2)
    # fp32 sums in another order; 12 steps at a high learning rate multiply the difference
    assert max(abs(losses[step] - together[step]) for step in losses) < 1e-4
    assert_same(load(tmp_path / "weights-0.pt"), load(tmp_path / "weights-1.pt"))
    assert_same(load(tmp_path / "optimizer-0.pt"), load(tmp_path / "optimizer-1.pt"))


def test_resumed_from_before_a_growth_killed_after_it_and_resumed(unbroken, tmp_path):
    loop, output, losses = unbroken
    shutil.copytree(output / "checkpoint-2", tmp_path / "checkpoint-2")
    killed = run(loop, tmp_path, "--resume", str(tmp_path / "checkpoint-2"), "--die-at", "6")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = trained(loop, tmp_path, "--resume", str(tmp_path / "checkpoint-6"))
    assert again[12] == losses[12]
    assert_same(load(output / "weights-0.pt"), load(tmp_path / "weights-0.pt"))
    assert_same(load(output / "optimizer-0.pt"), load(tmp_path / "optimizer-0.pt"))


def test_what_growing_together_must_bear():
    """Settings and hooks of the wrapper, accumulation, uneven and absent batches, trimming, a failure."""
    done = launch(SCRIPT.with_name("ranks_run.py"), processes=2)
    assert done.returncode == 0, done.stderr
    assert "uneven_batches" in done.stdout and "You've set static_graph" not in done.stderr


def test_two_processes_resume_from_after_a_growth(unbroken, tmp_path):
    loop, output, losses = unbroken
    if loop == "trainer":
        pytest.skip("Trainer keeps random states by process: a checkpoint of one process is resumed by one")
    shutil.copytree(output / "checkpoint-8", tmp_path / "checkpoint-8")
    again = trained(loop, tmp_path, "--resume", str(tmp_path / "checkpoint-8"), processes=2)
    assert again[12] == pytest.approx(losses[12], abs=1e-4)
    assert_same(load(tmp_path / "weights-0.pt"), load(tmp_path / "weights-1.pt"))

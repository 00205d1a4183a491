"""Faults that are real: a save that is killed at any step, or has no room.

GROWATTN_LONG=1 kills a save at every single change of the disk.
"""

import itertools
import os
import resource
import shutil
import signal
import sys
import traceback

import pytest
import transformers
from conftest import LONG
from families import same, wide
from test_saving import contents
from transformers import AutoModelForCausalLM

from hf_growattn import export_model

CHANGES = ("os.", "shutil.", "ctypes.dlsym")  # of the disk, among the events that Python audits; and opening to write


@pytest.fixture(autouse=True)
def no_progress_bars():
    """Their lock is shared by forks, and one that dies with it would hold it for good."""
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()


def in_child(work) -> int:
    """Run in a fork, which imports nothing anew; returns its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at_change(number: int) -> None:
    """Let this process be killed right before it changes the disk for the so-manieth time."""
    changes = itertools.count(1)

    def watch(event, arguments):
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        writes = writes or (event.startswith(CHANGES) and event not in ("os.listdir", "os.scandir"))
        if writes and next(changes) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def limit_files(size: int) -> None:
    """Let no file of this process grow beyond a size: it fails as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("size", ["100KB", "1GB"])
def test_a_save_killed_at_any_step(size, tmp_path):
    """The former model or the new one loads, or none; what is not ours stays; saving again makes the new one whole."""
    target = tmp_path / "there" / "m"
    old, new = wide("llama-2", 4), wide("llama-2", 9)
    old.save_pretrained(tmp_path / "old")
    foreign = ("tokenizer.json", "runs/events", "model_ema.safetensors")
    (tmp_path / "old" / "runs").mkdir()
    for name in foreign:
        (tmp_path / "old" / name).write_text("not ours")
    states, found = [model.state_dict() for model in (old, new)], []

    def save():
        new.save_pretrained(target, max_shard_size=size)

    def killed(number):
        die_at_change(number)
        save()

    def which() -> int | None:
        """The model that loads: 0 for the former one, 1 for the new one, None while the rest of a save is elsewhere."""
        try:
            loaded = AutoModelForCausalLM.from_pretrained(target).state_dict()
        except OSError as error:
            assert "did not finish: the rest of its files is in" in str(error)
            return None
        return next(index for index, state in enumerate(states) if same(state, loaded))

    for number in itertools.count(1, 1 if LONG else 3):
        shutil.rmtree(target.parent, ignore_errors=True)
        shutil.copytree(tmp_path / "old", target)
        code = in_child(lambda number=number: killed(number))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        found.append(which())
        save()
        assert which() == 1 and all((target / path).read_text() == "not ours" for path in foreign)
    assert len(found) > 5
    # Amid the moves of its files none may load: a refusal, and never a mix of two saves.
    assert {0, 1} <= set(found)


def test_a_save_where_no_file_may_grow(tmp_path):
    """The kernel refuses to write on: an OSError that names the place, and nothing has changed."""
    model = wide("llama-2", 9)
    wide("llama-2", 4).save_pretrained(tmp_path / "m")
    before = contents(tmp_path)

    def refused(save, size):
        limit_files(size)
        with pytest.raises(OSError, match=r"cannot be written.*on a disk with room|File too large"):
            save(tmp_path / "m")

    for save in (model.save_pretrained, lambda path: export_model(model, path)):
        for size in (1, 2000, 50_000):
            assert in_child(lambda save=save, size=size: refused(save, size)) == 0
            assert contents(tmp_path) == before


def test_a_damaged_checkpoint_in_a_subfolder_is_told_of(tmp_path):
    model = wide("llama-2")
    model.save_pretrained(tmp_path / "inner", max_shard_size="20kB")
    (tmp_path / "inner" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not an index of weights\. Copy, download or save it again"):
        type(model).from_pretrained(tmp_path, subfolder="inner")

"""Processes that save one folder at once, as an unguarded `torchrun` loop does: the last one wins, and is whole."""

import contextlib
import itertools
import multiprocessing
import os
import random
import shutil
import time
import traceback
from pathlib import Path

import pytest
import torch
import transformers
from conftest import LONG
from test_saving import grown, make
from transformers import AutoModelForCausalLM

from hf_growattn.growable import folders

TRIALS = 20
FORK = multiprocessing.get_context("fork")  # imports nothing anew


@pytest.fixture(autouse=True)
def no_progress_bars():
    """Their lock is shared by forks, and one that dies with it would hold it for good."""
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()


@contextlib.contextmanager
def forked(*works):
    """Processes that do some work each, until the end of the block."""
    jobs = [FORK.Process(target=work, daemon=True) for work in works]
    for job in jobs:
        job.start()
    try:
        yield
    finally:
        for job in jobs:
            job.kill()
            job.join()


def saver(model, folder: Path, size: str, place: Path | None, start, end, errors):
    """Work that saves a model at the same moment as others do, again and again, from some current directory."""

    def work():
        while True:
            start.wait()
            try:
                if place is not None:
                    os.chdir(place)
                model.save_pretrained(folder, max_shard_size=size)
            except BaseException:
                errors.put(traceback.format_exc())
            end.wait()

    return work


def weights_of(folder) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def is_one_of(weights: dict[str, torch.Tensor], models) -> bool:
    states = [model.state_dict() for model in models]
    return any(
        state.keys() == weights.keys() and all(torch.equal(state[name], weights[name]) for name in state)
        for state in states
    )


def one_model():
    model = grown(4)
    return model, model


def two_models(dims: int = 9):
    """Two models that share no weight; by default with other sizes in layer 0."""
    one, other = grown(4), grown(dims)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1)
    return one, other


KINDS = [(one_model, "1GB", "a folder"), (two_models, "40KB", "a folder"), (two_models, "40KB", "the current one")]
KINDS += [(two_models, "40KB", "a mount")]
MORE = [(one_model, "1GB", way) for way in ("the current one", "a mount")] + [(two_models, "40KB", "mixed")]


@pytest.mark.parametrize("models, size, way", KINDS + (MORE if LONG else []))
def test_two_processes_save_one_folder(models, size, way, tmp_path, monkeypatch):
    models, folder = models(), tmp_path / "m"
    models[0].save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    make(monkeypatch, folder, way)
    places = {"the current one": (folder, folder), "mixed": (folder, None)}.get(way, (None, None))
    start, end, errors = FORK.Barrier(3, timeout=60), FORK.Barrier(3, timeout=60), FORK.SimpleQueue()
    with forked(*(saver(model, folder, size, place, start, end, errors) for model, place in zip(models, places))):
        for trial in range(TRIALS):
            if way == "a folder" and trial % 2:
                shutil.rmtree(folder)
            start.wait()
            end.wait()
            assert errors.empty(), errors.get()
            assert is_one_of(weights_of(folder), models)
            assert [path.name for path in tmp_path.iterdir()] == ["m"]
    names = {path.name for path in folder.iterdir()}
    assert way == "a folder" or "tokenizer.json" in names
    assert not [name for name in names if name.startswith(".")]


def test_who_loads_meanwhile_gets_one_save_or_an_error(tmp_path):
    models, folder = two_models(4), tmp_path / "m"
    models[0].save_pretrained(folder, max_shard_size="40KB")

    def save():
        for model in itertools.cycle(models):
            model.save_pretrained(folder, max_shard_size="40KB")
            time.sleep(random.uniform(0, 0.2))

    whole = 0
    with forked(save):
        while whole < 20:
            try:
                weights = weights_of(folder)
            except OSError:
                continue
            assert is_one_of(weights, models)
            whole += 1


def test_a_save_while_a_model_is_loaded_is_noticed(tmp_path, monkeypatch):
    one, other = two_models(4)
    one.save_pretrained(tmp_path)
    monkeypatch.setattr(folders, "_check_files", other.save_pretrained)  # the last step before transformers loads
    with pytest.raises(OSError, match=r"saved again while it was loaded. Load it again"):
        weights_of(tmp_path)


@pytest.mark.parametrize("former, new", [("40KB", "40KB"), ("1GB", "40KB"), ("40KB", "1GB")])
def test_nobody_loads_half_at_any_step_of_a_save_in_place(former, new, tmp_path, monkeypatch):
    models = two_models(4)
    models[0].save_pretrained(tmp_path, max_shard_size=former)
    seen, replace = [], os.replace

    def watched(source, destination):
        replace(source, destination)
        try:
            seen.append(weights_of(tmp_path))
        except OSError:
            seen.append(None)

    monkeypatch.setattr(os, "replace", watched)
    models[1].save_pretrained(tmp_path, max_shard_size=new)
    assert len(seen) > 6 and all(weights is None or is_one_of(weights, models) for weights in seen)
    assert is_one_of(weights_of(tmp_path), models[1:])

"""Shared fixtures: tiny random models of every family, the real pretrained ones, and warnings that fail a test."""

import logging
import os
import sys
from pathlib import Path

import pytest
import torch
from forks import Forks

ROOT = Path(__file__).parents[1]
LONG = bool(os.environ.get("GROWATTN_LONG"))  # what is cut short otherwise in full, which takes minutes
DATA = Path(os.environ.get("GROWATTN_TEST_DATA", ROOT.parent / "shared" / "data"))

# The files that take longest, begun first: with two workers, a long one that begins last would leave the other idle.
LONGEST = ("sharded", "benchmarks", "training", "families", "native", "export", "race", "finetune", "user_loss")
LONGEST += ("project", "attention", "probe", "plan", "tour")

sys.path += [str(ROOT / "scripts" / "bench"), str(ROOT / "scripts")]
torch.set_num_threads(1)  # models this small are slower on more


def pytest_collection_modifyitems(items):
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """Runs scripts in processes of their own that need not import the libraries anew."""
    with Forks(tmp_path_factory.mktemp("forks")) as process:
        yield process


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class _Deprecations(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        if "deprecat" in record.getMessage().lower():
            self.messages.append(record.getMessage())


@pytest.fixture(autouse=True)
def _no_deprecations_logged():
    """transformers announces many deprecations through its logger, where pytest's filters do not see them."""
    handler = _Deprecations()
    logging.getLogger("transformers").addHandler(handler)
    yield
    logging.getLogger("transformers").removeHandler(handler)
    assert handler.messages == []


def data_path(*parts: str) -> Path:
    """A file of the real test data, or a skip where it is absent."""
    path = DATA.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"real test data is absent: {path} (set GROWATTN_TEST_DATA)")
    return path


def real_model(name: str = "stories260K", **kwargs):
    """A real pretrained model in evaluation mode."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(data_path("models", name), **kwargs).eval()


def real_batches(count: int, name: str = "stories260K", start: int = 0, size: int = 8, tokens: int = 128):
    """Batches of input_ids, (size, tokens) each, from a play that the model was not trained on."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(data_path("models", name))
    text = data_path("text", "tinyshakespeare.txt").read_text()[200_000:600_000]
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    first = start * size * tokens
    return list(ids[first : first + count * size * tokens].view(count, size, tokens))


@pytest.fixture
def kept_by_word(monkeypatch):
    monkeypatch.setattr("hf_growattn.Grower.grow", lambda grower, batches: grower.find(batches).keep())


@pytest.fixture
def no_step(monkeypatch):
    """No step lowers the loss, whatever is tried."""

    def run(search, trial, spare=0):
        return [0.0] * len(trial.candidates), 9.0

    monkeypatch.setattr("hf_growattn.grow.growth.StepSearch.run", run)

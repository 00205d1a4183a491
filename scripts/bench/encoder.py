"""A real encoder for retrieval: growth beside what people would pick instead, to find the answer to a question.

    OMP_NUM_THREADS=1 python scripts/bench/encoder.py --model path/to/minilm --pairs instructions.jsonl a.txt

A task is a file of pairs: of JSON rows the last field is the answer to the others, of a text each paragraph the answer
to the one before. An answer is found among others by the angle between means of tokens' last hidden states. Every row
trains as many weights on the same batches in the same order, with several learning rates on the first seed; the best
one counts, and trains the other seeds. A growth looks at the first of these batches, so no row sees more than another.
Runs are kept, each as soon as it ends; the same command goes on with those that are missing.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import page
import runs
import torch
from compared import ONE_RATE, grown_share
from finetuning_run import cosine
from real_model import best, lead_over
from tasks import forward_ratio, restore
from texts import english, load_texts, train_tokenizer
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from hf_growattn import patch_model
from hf_growattn.growable.models import attentions
from hf_growattn.training.methods import METHODS, Budget, readable, slow_what_grew, started, trained_weights

RANK = 3  # of LoRA on all linear layers: the least that a third of it is a whole rank of
LORA = METHODS["lora"].title
ROWS = {METHODS[name].title: METHODS[name] for name in ("lora", "growth", "both")} | {ONE_RATE: METHODS["both"]}
RATES = (0.15, 0.5, 1.5)  # over hidden_size: those of a race, and a smaller one
STEP = 3  # from one to the next, and beyond the end where the best one stands there
SCALE = 20.0  # of the cosine, as sentence-transformers has it
LEAST = 40  # characters of a paragraph: shorter ones answer anything


@dataclass(frozen=True)
class Setting:
    """The size of everything.

    Attributes:
        steps: batches that every row sees.
        pairs: of a batch; each answer is told from the others.
        tokens: of a text, at most.
        growth_batches: that a growth looks at.
        held_out: pairs to measure on; each answer is told from all others.
    """

    steps: int = 40
    pairs: int = 16
    tokens: int = 32
    growth_batches: int = 6
    held_out: int = 256


QUICK = Setting(steps=3, pairs=4, growth_batches=2, held_out=16)


def pairs_of(path: str) -> list[tuple[str, str]]:
    """Questions and answers: of JSON rows, of a text's paragraphs, or without a path of Python's documentation."""
    if Path(path).suffix not in (".json", ".jsonl"):
        texts = load_texts(path) if path else english()
        paragraphs = [[p.strip() for p in text.split("\n\n")] for text in texts]
        found = [pair for one in paragraphs for pair in itertools.pairwise(one)]
        return [pair for pair in found if min(map(len, pair)) >= LEAST]
    whole = Path(path).read_text()
    rows = json.loads(whole) if path.endswith(".json") else [json.loads(line) for line in whole.splitlines()]
    asked = ["\n".join(filter(None, [*row.values()][:-1])) for row in rows]
    before, after = shared(asked), shared([text[::-1] for text in asked])  # of a template
    return [(text[before : len(text) - after], [*row.values()][-1]) for text, row in zip(asked, rows)]


def shared(texts: list[str]) -> int:
    """How many characters all texts begin with."""
    return sum(1 for _ in itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*texts)))


def data(tokenizer, path: str, setting: Setting, seed: int) -> tuple[list[dict], dict]:
    """Batches to train on, and one to measure on, the same for all seeds: questions, then their answers."""
    found = pairs_of(path)
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    aside, rest = order[: setting.held_out], order[setting.held_out :]
    wanted = torch.arange(setting.steps * setting.pairs) % len(rest)
    rest = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(1 + seed))][wanted]

    def batch(numbers: torch.Tensor) -> dict:
        chosen = [found[number] for number in numbers.tolist()]
        texts = [question for question, _ in chosen] + [answer for _, answer in chosen]
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=setting.tokens, return_tensors="pt")
        return {name: tokens[name] for name in ("input_ids", "attention_mask")}

    return [batch(numbers) for numbers in rest.split(setting.pairs)], batch(aside)


def scores(model, batch: dict) -> torch.Tensor:
    """Every question against every answer, (pairs, pairs)."""
    hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
    questions, answers = normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1).chunk(2)
    return SCALE * questions @ answers.T


def contrastive(model, batch: dict) -> torch.Tensor:
    """The loss of telling the answer to each question from the other answers."""
    found = scores(model, batch)
    return cross_entropy(found, torch.arange(len(found)))


@torch.no_grad()
def measured(model, held_out: dict) -> dict:
    """The loss, and recall@1: the share of questions whose own answer is the nearest."""
    model.eval()
    found = scores(model, held_out)
    own = torch.arange(len(found))
    return {"loss": cross_entropy(found, own).item(), "recall": (found.argmax(1) == own).float().mean().item()}


def trained_at(model, rate: float, grown_share: float, batches: list[dict], seed: int) -> None:
    """Train by AdamW, a batch a step, and what grew beside LoRA by a share of the learning rate."""
    torch.manual_seed(seed)  # of dropout
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not weights:
        return  # a growth that finds nothing leaves nothing to train
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0)
    slow_what_grew(optimizer, model, grown_share)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(len(batches), step))
    model.train()
    for batch in batches:
        contrastive(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def fresh(model: str):
    """A patched copy of the encoder."""
    return patch_model(AutoModel.from_pretrained(model, dtype="float32", add_pooling_layer=False))


def measure(model: str, task: str, path: str, row: str, seed: int, rates: list[float], setting: dict) -> dict:
    """Train a row with each of the learning rates from the same start, for `collect`."""
    how, encoder = Setting(**setting), fresh(model)
    batches, held_out = data(AutoTokenizer.from_pretrained(model), path, how, seed)
    if not row:
        return measured(encoder, held_out)
    budget = Budget.near(encoder, RANK * Budget.near(encoder, 1).of_a_rank)
    began = time.process_time()
    trained, report = started(encoder, ROWS[row], budget, batches[: how.growth_batches], seed, lambda _: contrastive)
    told = {"weights": trained_weights(trained), "start_seconds": time.process_time() - began}
    if report:
        told["at_start"] = measured(trained, held_out)
    at_start = {p: p.detach().clone() for p in trained.parameters() if p.requires_grad}
    told["ended"] = []
    share = grown_share(row, ROWS[row], encoder.config.hidden_size)
    for rate in rates:
        restore(at_start)
        trained_at(trained, rate, share, batches, seed)
        told["ended"].append({"rate": rate, **measured(trained, held_out)})
    if report:
        merged = trained if trained is encoder else trained.merge_and_unload()
        told["forward"] = forward_ratio(merged.eval(), fresh(model).eval(), batches[0], turns=7)
    return told


def beyond_the_end(run: dict) -> list[float]:
    """A learning rate a step beyond those that a run tried, if the best of them was the first or the last."""
    rates = sorted(end["rate"] for end in run.get("ended", []))
    if not rates or best(run)["rate"] not in (rates[0], rates[-1]):
        return []
    return [readable(rates[0] / STEP if best(run)["rate"] == rates[0] else rates[-1] * STEP)]


def joined(done: list[dict]) -> list[dict]:
    """One run of those that differ in their learning rates alone."""
    found: dict[tuple, dict] = {}
    for run in done:
        first = found.setdefault((run["task"], run["row"], run["seed"]), run)
        if first is not run:
            found[run["task"], run["row"], run["seed"]] = first | {
                "ended": first["ended"] + run["ended"],
                "seconds": first["seconds"] + run["seconds"],
            }
    return [*found.values()]


def page_of(figures: dict) -> page.Page:
    """What the figures say."""
    done, setting = figures["runs"], figures["setting"]
    starts = {run["task"]: run for run in done if not run["row"]}
    grouped: dict[tuple[str, str], list[dict]] = {}
    for run in done:
        if run["row"]:
            grouped.setdefault((run["task"], run["row"]), []).append(run)
    leads = {key: lead_over(grouped[key[0], LORA], group) for key, group in grouped.items() if key[1] != LORA}
    lines = []
    for task, start in starts.items():
        lines.append([f"**{task}**", "before training", f"{start['loss']:.3f}", f"{start['recall']:.1%}", *[""] * 4])
        rows = {row: group for (name, row), group in grouped.items() if name == task}
        for row, group in sorted(rows.items(), key=lambda entry: _mean(entry[1], "loss")):
            forward = [run["forward"] for run in group if "forward" in run]
            lead = runs.spread(leads[task, row]) if row != LORA else ""
            found = [task, row, f"{_mean(group, 'loss'):.3f}", f"{_mean(group, 'recall'):.1%}", lead]
            found += [f"{best(group[0])['rate']:.1e}", f"{group[0]['weights']:,}", runs.spread(forward, 2)]
            lines.append(["", *found[1:]])
    columns = ["task", "row", "held-out loss", "recall@1", "lead over LoRA on all linear layers", "rate", "weights"]
    ahead = [key for key, lead in leads.items() if min(lead) > 0]
    behind = [key for key, lead in leads.items() if max(lead) < 0]
    said = f"Rows with growth that end below LoRA on all linear layers with every seed: {len(ahead)} of {len(leads)}, "
    said += f"over {len(starts)} tasks; above it with every seed: {len(behind)}."
    for task in starts:
        told = [f"{row} {statistics.fmean(lead):+.3f}" for (name, row), lead in leads.items() if name == task]
        said += f" Leads on {task}: {', '.join(told)}."
    sizes = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in setting.items())
    text = f"""
The encoder has {figures["heads"]} heads {figures["head_dim"]} wide. All rows train about as many weights as LoRA of
rank {RANK} on all linear layers: {sizes}.
The first seed tries {len(RATES)} learning rates, and a fourth where the best is the least or the largest; the best one
counts, and trains the other seeds. Losses and recall are means over seeds; a lead is the difference of losses in nats,
with its range over seeds. Chance is a loss of {math.log(setting["held_out"]):.2f} and a recall of 1 in
{setting["held_out"]}. The loss is that of {SCALE:g} times the cosines: where it starts above chance, that number is
wrong for the task, and some of what it falls by is no better order; recall does not depend on it. An encoder keeps no
KV cache, so what growth costs is time: "forward" is that of a pass, grown against un-grown; LoRA is merged for free.
The rate of a mix is LoRA's, and what grew takes a share of it (mix_rates.md), but in the row "at one rate". No
pretrained encoder with narrower heads, as ESM-2 has, was at hand.
"""
    return page.Page(
        title=f"A real encoder: {figures['model']}",
        claim=said,
        summary=page.table([*columns, "forward"], lines),
        text=text,
        draw=lambda plt: draw(plt, grouped, list(starts)),
    )


def _mean(group: list[dict], name: str) -> float:
    return statistics.fmean(best(run)[name] for run in group)


def draw(plt, grouped: dict, tasks: list[str]):
    """A panel for each task: the loss of each row by the learning rate, of the first seed."""
    figure, panels = plt.subplots(1, len(tasks), figsize=(4.4 * len(tasks), 3.6), layout="constrained", squeeze=False)
    for panel, task in zip(panels[0], tasks):
        for row in ROWS:
            ends = sorted(grouped[task, row][0]["ended"], key=lambda end: end["rate"])
            panel.plot([end["rate"] for end in ends], [end["loss"] for end in ends], "o-", label=row)
        panel.set(xscale="log", xlabel="learning rate", ylabel="held-out loss", title=task)
        panel.tick_params(axis="x", which="minor", labelbottom=False)
    panels[0][0].legend(fontsize=8)
    return figure


def tiny(folder: Path) -> str:
    """A tiny BERT with random weights and its tokenizer, in a folder."""
    tokenizer = train_tokenizer(english(), 2000)
    tokenizer.pad_token = tokenizer.eos_token
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def main() -> None:
    """Train every row on every task with the first seed, then the other seeds, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hub id of an encoder like BERT")
    parser.add_argument("--pairs", nargs="*", default=[], help="files of pairs, each a task")
    parser.add_argument("--seeds", type=int, default=2, help="how many; of the order of pairs, dropout, LoRA's weights")
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few steps: shows that it runs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.model, arguments.pairs, arguments.seeds = tiny(arguments.output / "tiny"), [""], 1
    if not (arguments.model and arguments.pairs):
        parser.error("--model and --pairs are needed, or --quick")
    setting = asdict(QUICK if arguments.quick else Setting())
    arguments.output.mkdir(parents=True, exist_ok=True)
    attention = attentions(fresh(arguments.model))[0]
    rates = [readable(rate / attention.config.hidden_size) for rate in RATES]
    tasks = {Path(path).stem or "Python's documentation": path for path in arguments.pairs}
    jobs = [
        {"model": arguments.model, "task": task, "path": path, "row": row, "seed": 0}
        | {"rates": rates if row else [], "setting": setting}
        for task, path in tasks.items()
        for row in ["", *ROWS]
    ]
    kept = arguments.output / "encoder.jsonl"
    done = runs.collect(measure, jobs, kept, arguments.processes)
    beyond = [job | {"rates": beyond_the_end(run)} for job, run in zip(jobs, done) if beyond_the_end(run)]
    done = joined(done + runs.collect(measure, beyond, kept, arguments.processes))
    more = [
        job | {"seed": seed, "rates": [best(run)["rate"]]}
        for seed in range(1, arguments.seeds)
        for job, run in zip(jobs, done)
        if job["row"]
    ]
    done += runs.collect(measure, more, kept, arguments.processes)
    names = ("task", "row", "seed", "loss", "recall", "ended", "weights", "forward")
    figures = {
        "model": Path(arguments.model).name,
        "heads": attention.heads_of("query"),
        "head_dim": attention.head_dim,
        "setting": setting,
        "runs": page.kept(done, *names),
    }
    seconds = sum(run["seconds"] for run in done)
    page.publish("encoder", figures, sorted({run["seed"] for run in done}), arguments.output, seconds)


if __name__ == "__main__":
    main()

"""A real pretrained model: growth beside what people would pick instead, on texts and on phone books in words.

    OMP_NUM_THREADS=1 python scripts/bench/real_model.py --model path/to/smollm2 --text a.txt b.json

Every row trains as many weights on the same batches in the same order, with two learning rates, and more for as long as
the best is the largest or the smallest. A growth looks at the first of these batches, so no row sees more of the text
than another. Runs are kept, each as soon as it ends; the same command goes on with those that are missing.
"""

import argparse
import math
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import page
import runs
import torch
from compared import ONE_RATE, grown_share, lora_within
from finetuning_run import ALL, LINEAR, cosine, documents_of, projections
from peft import LoraConfig, LoraGAConfig, get_peft_model, preprocess_loraga
from tasks import blocks_of, forward_ratio, restore
from texts import english, train_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_growattn import patch_model
from hf_growattn.growable.models import cache_bytes
from hf_growattn.training.methods import METHODS, Budget, Method, readable, slow_what_grew, started, trained_weights

RANK = 3  # of LoRA on all linear layers: the least that a third of it is a whole rank of
STEP = 3  # between a learning rate and the next
KNOWN = ("model", "task", "path", "row", "seed", "setting")  # what makes a run, but for its learning rates
CLOSE = 0.02  # nats: rows that end nearer to each other than this take more seeds
SEEDS = (0, 1, 2)
LORA = "LoRA on all linear layers"
ADAPTERS = {"LoRA on q, k, v, o": (ALL, True), "LoRA-GA on all linear layers": (LINEAR, "lora_ga")}
ROWS = {METHODS[name].title: METHODS[name] for name in ("lora", "growth", "both", "full")}
ROWS |= {ONE_RATE: METHODS["both"]} | {title: Method(title) for title in ADAPTERS}
BOOKS = {f"phone book of {entries}": entries for entries in (20, 50, 100)}
WORDS, ASKED, FIGURES = 64, 8, 3  # first and second words of names, names asked for in a row, figures of a number


@dataclass(frozen=True)
class Setting:
    """The size of everything.

    Attributes:
        steps: batches that every row sees.
        tokens: of a batch, about.
        block_size: of a row of text.
        growth_batches: that a growth or LoRA-GA looks at.
        held_out: tokens to measure on, about.
    """

    steps: int = 40
    tokens: int = 256
    block_size: int = 128
    growth_batches: int = 8
    held_out: int = 4096


QUICK = Setting(steps=3, tokens=64, block_size=32, growth_batches=2, held_out=256)


def text_rows(tokenizer, path: str, setting: Setting, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of a text and their labels, (rows, tokens); the first are the same for all seeds, to measure on."""
    blocks = blocks_of(documents_of(path), tokenizer, setting.block_size)
    blocks = blocks[torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))]
    held_out = setting.held_out // setting.block_size
    order = torch.randperm(len(blocks) - held_out, generator=torch.Generator().manual_seed(seed)) + held_out
    chosen = torch.cat([blocks[:held_out], blocks[order[torch.arange(rows - held_out) % len(order)]]])
    return chosen, chosen


def common_words(tokenizer) -> list[str]:
    """Words that are one token each, the most common ones first."""
    words = []
    for token in range(len(tokenizer)):
        word = tokenizer.decode([token])
        if word[:1] == " " and word[1:].isascii() and word[1:].isalpha() and word.islower() and 5 <= len(word) <= 9:
            words.append(word)
    return words[: 2 * WORDS]


def book_rows(tokenizer, entries: int, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Phone books: names of two words with a number each, then some names again; only their numbers are labels.

    A name shares each of its words with others, so both have to be looked up.
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    words = common_words(tokenizer)
    first, second = words[0::2], words[1::2]
    books, labels = [], []
    for _ in range(rows):
        names = torch.randperm(len(first) * len(second), generator=generator)[:entries].tolist()
        numbers = torch.randint(10, (entries, FIGURES), generator=generator).tolist()
        asked = torch.randperm(entries, generator=generator)[:ASKED].tolist()
        ids, wanted = [], []
        for place, entry in enumerate([*range(entries), *asked]):
            one, other = divmod(names[entry], len(second))
            name = tokenizer.encode(f"{first[one]}{second[other]}:", add_special_tokens=False)
            number = [id for f in numbers[entry] for id in tokenizer.encode(str(f), add_special_tokens=False)]
            end = tokenizer.encode("\n", add_special_tokens=False)
            ids += name + number + end
            answer = number if place >= entries else [-100] * len(number)
            wanted += [-100] * len(name) + answer + [-100] * len(end)
        books.append(ids)
        labels.append(wanted)
    return torch.tensor(books), torch.tensor(labels)


def data(tokenizer, task: str, path: str, setting: Setting, seed: int) -> tuple[list[dict], list[dict]]:
    """Batches to train on, and batches to measure on."""
    if path:
        size = max(setting.tokens // setting.block_size, 1)
        aside = setting.held_out // setting.block_size
        rows, labels = text_rows(tokenizer, path, setting, aside + setting.steps * size, seed)
        tested, trained = (rows[:aside], labels[:aside]), (rows[aside:], labels[aside:])
    else:
        length = book_rows(tokenizer, BOOKS[task], 1, 0)[0].shape[1]
        size, aside = max(setting.tokens // length, 1), max(setting.held_out // length, 8)
        tested = book_rows(tokenizer, BOOKS[task], aside, -1)
        trained = book_rows(tokenizer, BOOKS[task], setting.steps * size, seed)
    return tuple(
        [{"input_ids": ids, "labels": wanted} for ids, wanted in zip(*(part.split(size) for part in both))]
        for both in (trained, tested)
    )


@torch.no_grad()
def measured(model, batches: list[dict]) -> dict:
    """The loss of a labelled token, and the share of whole numbers that are right where numbers are asked for."""
    model.eval()
    lost, tokens, right = 0.0, 0, []
    for batch in batches:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].float()
        labels = batch["labels"][:, 1:]
        lost += torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum").item()
        tokens += int((labels != -100).sum())
        right.append((logits.argmax(-1) == labels)[labels != -100])
    told = {"loss": lost / tokens}
    if (batches[0]["labels"] == -100).any():
        each = tokens // (ASKED * sum(len(batch["labels"]) for batch in batches))
        told["right"] = torch.cat(right).view(-1, each).all(1).float().mean().item()
    return told


def prepared(model, row: str, batches: list[dict], setting: Setting, seed: int):
    """What trains in a row, and how many weights growth has added."""
    budget = RANK * Budget.near(model, 1).of_a_rank
    if row not in ADAPTERS:
        trained, report = started(model, ROWS[row], Budget.near(model, budget), batches[: setting.growth_batches], seed)
        return trained, report.added_parameters if report else 0
    roles, start = ADAPTERS[row]
    options = lora_within(projections(model, roles), budget)
    torch.manual_seed(seed)
    model.requires_grad_(False)
    if start == "lora_ga":
        config = LoraConfig(init_lora_weights=start, lora_ga_config=LoraGAConfig(), **options)
        few = batches[: setting.growth_batches]
        preprocess_loraga(model, config, lambda: [model(**b, use_cache=False).loss.backward() for b in few])
    else:
        config = LoraConfig(**options)
    return get_peft_model(model, config), 0


def trained_at(model, rate: float, grown_share: float, batches: list[dict]) -> None:
    """Train by AdamW, a batch a step, and what grew beside LoRA by a share of the learning rate."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not weights:
        return  # a growth that finds nothing leaves nothing to train
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0)
    slow_what_grew(optimizer, model, grown_share)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(len(batches), step))
    model.train()
    for batch in batches:
        model(**batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def measure(model: str, task: str, path: str, row: str, seed: int, rates: list[float], setting: dict) -> dict:
    """Train a row with each of the learning rates from the same start, for `collect`."""
    how, tokenizer = Setting(**setting), AutoTokenizer.from_pretrained(model)
    batches, held_out = data(tokenizer, task, path, how, seed)
    fresh = patch_model(AutoModelForCausalLM.from_pretrained(model, dtype="float32"))
    if not row:
        return measured(fresh, held_out)
    cache, began = cache_bytes(fresh), time.process_time()
    trained, added = prepared(fresh, row, batches, how, seed)
    told = {"weights": trained_weights(trained), "start_seconds": time.process_time() - began}
    told["cache"] = cache_bytes(fresh) / cache - 1
    if added and trained is fresh:  # an adapter in a row would be merged before it serves
        other = patch_model(AutoModelForCausalLM.from_pretrained(model, dtype="float32"))
        told["forward"] = forward_ratio(fresh, other, {"input_ids": held_out[0]["input_ids"], "use_cache": False})
    if added:
        told["at_start"] = measured(trained, held_out)["loss"]
    at_start = {p: p.detach().clone() for p in trained.parameters() if p.requires_grad}
    told["ended"] = []
    share = grown_share(row, ROWS[row], fresh.config.hidden_size)
    for rate in rates:
        restore(at_start)
        trained_at(trained, rate, share, batches)
        told["ended"].append({"rate": rate, **measured(trained, held_out)})
    return told


def rates_of(row: str, width: int) -> list[float]:
    """The learning rates that a row tries: those of a race."""
    return [readable(rate / width) for rate in ROWS[row].rates]


def best(run: dict) -> dict:
    """The better end of a run."""
    return min(run["ended"], key=lambda end: end["loss"])


def beyond(done: list[dict]) -> list[dict]:
    """Runs with a learning rate beyond the best one, for rows in which that is the largest or the smallest tried."""
    jobs = []
    for run in done:
        rates = sorted(end["rate"] for end in run.get("ended", []))
        if len(rates) > 1 and (found := best(run)["rate"]) in (rates[0], rates[-1]):
            further = readable(found * STEP if found == rates[-1] else found / STEP)
            jobs.append({name: run[name] for name in KNOWN} | {"rates": [further]})
    return jobs


def joined(done: list[dict], more: list[dict]) -> list[dict]:
    """Runs with the ends of others that differ in their learning rates alone."""
    whole = []
    for run in done:
        others = [other for other in more if all(other[name] == run[name] for name in KNOWN)]
        ended = [end for other in (run, *others) for end in other.get("ended", [])]
        seconds = sum(other["seconds"] for other in (run, *others))
        whole.append(run | ({"ended": ended, "seconds": seconds} if others else {}))
    return whole


def more_seeds(done: list[dict]) -> list[dict]:
    """Runs with the better rate and other seeds, of LoRA and what ended near to it; if growth did, of all growth."""
    ended = {(run["task"], run["row"]): best(run)["loss"] for run in done if run["row"]}
    near = {key for key in ended if abs(ended[key] - ended.get((key[0], LORA), math.inf)) < CLOSE}
    compared = {task for task, row in near if row != LORA}
    growing = {task for task, row in near if "growth" in row}
    near |= {(task, row) for task, row in ended if "growth" in row and task in growing}
    wanted = [run for run in done if run["task"] in compared and (run["task"], run["row"]) in near]
    return [
        {name: run[name] for name in KNOWN} | {"seed": seed, "rates": [best(run)["rate"]]}
        for seed in SEEDS[1:]
        for run in wanted
    ]


def page_of(figures: dict) -> page.Page:
    """What the figures say."""
    done = page.out_of_table(figures["runs"])
    starts = {run["task"]: run for run in done if not run["row"]}
    grouped: dict[tuple[str, str], list[dict]] = {}
    for run in done:
        if run["row"]:
            grouped.setdefault((run["task"], run["row"]), []).append(run)
    loss = {key: statistics.fmean(best(run)["loss"] for run in group) for key, group in grouped.items()}
    lines, leads = [], {}
    for task, start in starts.items():
        right = f", {start['right']:.0%} right" if "right" in start else ""
        lines.append([f"**{task}**", "before training", f"{start['loss']:.3f}{right}", "", "", "", "", ""])
        for name, row in sorted(grouped, key=loss.__getitem__):
            if name == task:
                group = grouped[name, row]
                leads[name, row] = lead_over(grouped.get((name, LORA), []), group)
                lines.append(["", row, *line_of(group, leads[name, row])])
    columns = ["task", "row", "held-out loss", "lead over LoRA on all linear layers", "rate", "weights", "KV cache"]
    ours = {key: lead for key, lead in leads.items() if "growth" in key[1] and lead}
    ahead = sorted({task for (task, _), lead in ours.items() if min(lead) > 0.01})
    tasks = list(dict.fromkeys(task for task, _ in ours))
    top = max(ours, key=lambda key: statistics.fmean(ours[key]), default=None)
    said = f"Growth, alone or with LoRA, ends more than 0.01 below LoRA on all linear layers on {len(ahead)} of "
    said += f"{len(tasks)} tasks{': ' + ', '.join(ahead) if ahead else ''}."
    if top:
        seeds = len(ours[top])
        said += f" Its best lead is {statistics.fmean(ours[top]):+.3f}, {top[1]} on {top[0]}, "
        said += f"over {seeds} seeds." if seeds > 1 else "with one seed."
    setting = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in figures["setting"].items())
    text = f"""
Every row but "all weights" trains about as many weights as LoRA of rank {RANK} on all linear layers: {setting}.
Each has learning rates a factor of {STEP} apart, and the best one counts; the table says of how many. The seed is 0;
what has a range has more, and is their mean. A lead is over the seeds that both rows have, so it may be another than
that of the losses. The KV cache is that of a token, against the model before; "forward" is the time of a forward pass,
grown against un-grown, and LoRA is merged for free. Phone books have names of two words out of {WORDS} each; "right" is
the share of numbers that are right in every figure. The rate of a mix is LoRA's, and what grew takes a share of it
(mix_rates.md), but in the row "at one rate". What is not in the table was not run.
"""
    return page.Page(
        title=f"A real model: {figures['model']}",
        claim=said,
        summary=page.table([*columns, "forward"], lines),
        text=text,
        draw=lambda plt: draw(plt, leads, list(starts)),
    )


def lead_over(lora: list[dict], group: list[dict]) -> list[float]:
    """By how much a row ends below LoRA, for each seed that both have."""
    ends = {run["seed"]: best(run)["loss"] for run in lora}
    return [ends[run["seed"]] - best(run)["loss"] for run in group if run["seed"] in ends]


def line_of(group: list[dict], lead: list[float]) -> list[str]:
    """The cells of a row of the table."""
    end, first = [best(run) for run in group], group[0]
    right = f", {statistics.fmean(e['right'] for e in end):.0%} right" if "right" in end[0] else ""
    losses = [e["loss"] for e in end]
    over_seeds = f" ({min(losses):.3f} to {max(losses):.3f})" if len(losses) > 1 else ""
    spread = f" ({min(lead):+.3f} to {max(lead):+.3f})" if len(lead) > 1 else ""
    forward = f"{first['forward']:.2f}" if "forward" in first else ""
    return [
        f"{statistics.fmean(losses):.3f}{over_seeds}{right}",
        f"{statistics.fmean(lead):+.3f}{spread}" if lead and first["row"] != LORA else "",
        f"{end[0]['rate']:.1e} of {len(first['ended'])}",
        f"{first['weights']:,}",
        f"{first['cache']:+.0%}",
        forward,
    ]


def draw(plt, leads: dict, tasks: list[str]):
    """A point for each row on each task: its lead over LoRA on all linear layers."""
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    rows = [row for row in ROWS if row != LORA]
    for place, row in enumerate(rows):
        points = [(x, statistics.fmean(leads[task, row])) for x, task in enumerate(tasks) if leads.get((task, row))]
        if points:
            axes.plot([x + (place - 2) / 15 for x, _ in points], [y for _, y in points], "o", label=row)
    axes.axhline(0, color="0.5", linewidth=1)
    axes.set_xticks(range(len(tasks)), tasks, rotation=15)
    axes.set_ylabel("lead over LoRA on all linear layers, nats")
    axes.legend(fontsize=8)
    return figure


def tiny(folder: Path) -> str:
    """A tiny Llama with random weights and its tokenizer, in a folder."""
    tokenizer = train_tokenizer(english(), 2000)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def main() -> None:
    """Train every row on every task, then more seeds where it is close, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hub id of a causal LM with separate projections")
    parser.add_argument("--text", nargs="*", default=[], help="texts, as for finetuning.py")
    parser.add_argument("--tasks", nargs="*", help="only these, by name: the others are left out of this run and page")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), help="only these")
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few steps: shows that it runs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.model, arguments.tasks = tiny(arguments.output / "tiny"), [next(iter(BOOKS))]
    if not arguments.model:
        parser.error("--model is needed, or --quick")
    setting = asdict(QUICK if arguments.quick else Setting())
    arguments.output.mkdir(parents=True, exist_ok=True)
    width = patch_model(AutoModelForCausalLM.from_pretrained(arguments.model)).config.hidden_size
    tasks = {Path(text).stem: text for text in arguments.text} | dict.fromkeys(BOOKS, "")
    tasks = {name: path for name, path in tasks.items() if not arguments.tasks or name in arguments.tasks}
    jobs = [
        {"model": arguments.model, "task": task, "path": path, "row": row, "seed": 0}
        | {"rates": rates_of(row, width) if row else [], "setting": setting}
        for task, path in tasks.items()
        for row in ["", *arguments.rows]
    ]
    kept = arguments.output / "real_model.jsonl"
    done = runs.collect(measure, jobs, kept, arguments.processes)
    while (further := beyond(done)) and not arguments.quick:
        done = joined(done, runs.collect(measure, further, kept, arguments.processes))
    done += runs.collect(measure, more_seeds(done), kept, arguments.processes)
    names = ("task", "row", "seed", "loss", "right", "ended", "weights", "cache", "forward", "at_start")
    kept_runs = page.in_table(page.kept(done, *names))
    figures = {"model": Path(arguments.model).name, "setting": setting, "runs": kept_runs}
    seeds, seconds = sorted({run["seed"] for run in done}), sum(run["seconds"] for run in done)
    page.publish("real_model", figures, seeds, arguments.output, seconds)


if __name__ == "__main__":
    main()

"""Races on text: models and texts, each pair as by `growattn race`, and then trainings five times as long.

    pip install ".[trl]"
    OMP_NUM_THREADS=1 python scripts/bench/text.py --model a/llama --text a.txt b.jsonl --pretrain stories.jsonl

A pair is a model and a text. Its race compares LoRA, growth, and a mix of both. Then each of them trains five times as
long, at the rates that the race has chosen: does its winner end lowest there? `--pretrain` adds small models that are
trained on another text first; `--large` adds models that race on the first text, without the long trainings. Pairs are
kept in the output as they end, and so are the trainings of a race; the same command goes on with what is missing.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean

import page
import torch
from fit import fit
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_growattn import Method, race
from hf_growattn.cli.data import TextData, read_rows
from hf_growattn.measure.passes import default_loss
from hf_growattn.report.comparison import MARGIN, TITLES, RaceResult, compare_runs
from hf_growattn.training.methods import weights_of_rank_one

sys.path.insert(0, str(Path(__file__).parent.parent))
from texts import blocks_of, english, load_texts, train_tokenizer

LONGER = 5  # times as many steps
RANK = 3  # of LoRA on all linear layers, whose weights are the budget: the least that a mix can share
SEEDS = 2  # of a race, and of the long trainings
READ = 600  # batches that a small model is trained on first


@dataclass(frozen=True)
class Pair:
    """A model and a text to race on.

    Attributes:
        model: path or Hub id.
        text: path of a text file, or of JSON rows; empty for Python's own documentation.
        steps, growth_batches: of the race.
        rows, tokens: of a batch.
        characters: that are read of the text.
        is_long: whether the long trainings follow.
    """

    model: str
    text: str
    steps: int = 40
    growth_batches: int = 8
    rows: int = 8
    tokens: int = 64
    characters: int = 2_000_000
    is_long: bool = True

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{Path(self.model).name} on {Path(self.text).stem or 'Python'}"


def small_models(words: int) -> dict[str, Callable]:
    """Untrained models of four layers, 64 wide, with heads of 16."""
    sizes = {"vocab_size": words, "hidden_size": 64, "num_hidden_layers": 4}
    llama = LlamaConfig(num_attention_heads=8, head_dim=16, intermediate_size=172, tie_word_embeddings=True, **sizes)
    others = {"n_positions": 256, "bos_token_id": None, "eos_token_id": None}
    others |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    gpt2 = GPT2Config(num_attention_heads=4, **sizes, **others)
    return {
        "Llama, heads 16 wide": partial(LlamaForCausalLM, llama),
        "GPT-2, heads 16 wide": partial(GPT2LMHeadModel, gpt2),
    }


def make_small_models(source: str, text: str, kept: Path) -> list[str]:
    """The folders of small models, trained on a text by the first call; the tokenizer is that of another model."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    folders = {kept / name: make for name, make in small_models(len(tokenizer)).items()}
    for folder, make in folders.items():
        if folder.exists():
            continue
        torch.manual_seed(0)
        model, blocks = make(), blocks_of(load_texts(text), tokenizer, Pair.tokens)
        drawn = torch.randint(len(blocks), (READ, Pair.rows), generator=torch.Generator().manual_seed(0))
        batches = ({"input_ids": blocks[rows], "labels": blocks[rows]} for rows in drawn)
        fit(model, [{"params": list(model.parameters()), "lr": 4e-3}], batches, default_loss, READ)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return [str(folder) for folder in folders]


def make_tiny_model(folder: Path) -> str:
    """A tiny Llama with random weights and a tokenizer of English: nothing is downloaded."""
    tokenizer = train_tokenizer(english(), 300)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run_pair(pair: Pair, kept: Path) -> dict:
    """The race of a pair and its long trainings as figures; what an earlier call has found is read."""
    file = kept / f"{pair.name}.json"
    if file.exists():
        return json.loads(file.read_text())
    began = time.process_time()
    text = kept / f"{pair.name}.txt"
    texts = load_texts(pair.text) if pair.text else english()
    text.write_text("\n\n".join(texts)[: pair.characters], encoding="utf-8")
    rows = read_rows(TextData(pair.model, [str(text)], pair.tokens, pair.rows))
    train, held_out = rows.draw_batches(LONGER * pair.steps, 0), rows.held_out_batches()
    make_model = partial(AutoModelForCausalLM.from_pretrained, pair.model, dtype="float32")
    result = race(
        make_model,
        train,
        held_out,
        budget=RANK * weights_of_rank_one(make_model(), {}),
        steps=pair.steps,
        seeds=SEEDS,
        growth_batches=pair.growth_batches,
        output=kept / pair.name,
    )
    figures: dict = {"pair": pair.name, "winner": result.winner, "challenger": result.challenger}
    figures |= {"verdict": result.verdict, "missing": result.missing, "start": result.start.loss}
    figures |= {"steps": pair.steps, "rows": pair.rows, "tokens": pair.tokens, "growth_batches": pair.growth_batches}
    figures |= {"seconds": time.process_time() - began, "methods": {}}
    for name in result.rates:
        figures["methods"][name] = figures_of(result, name)
        if pair.is_long:
            ends = [train_long(make_model, result, name, train, held_out, seed) for seed in range(SEEDS)]
            figures["methods"][name]["long"] = ends
    figures = page.finite(figures | {"all_seconds": time.process_time() - began})
    file.write_text(json.dumps(figures))
    return figures


def figures_of(result: RaceResult, name: str) -> dict:
    """What the page says of a method: the mean held-out loss, the lead over LoRA, and what it costs."""
    runs = result.runs_of(name)
    lead, error = compare_runs(runs, result.runs_of("lora"))
    cost = {"weights": runs[0].weights, "cache": runs[0].cache / result.start.cache - 1, "seeds": len(runs)}
    return {"loss": fmean(run.loss for run in runs), "lead": lead, "error": error, "rate": runs[0].rate, **cost}


def train_long(make_model: Callable, result: RaceResult, name: str, train: list, held_out: list, seed: int) -> float:
    """The held-out loss of a method after the long training, at the rate of the race."""
    if seed:  # which sees the batches in another order
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
        train = [train[number] for number in order]
    batches = list(islice(cycle(train), LONGER * result.steps))
    torch.manual_seed(seed)
    method = Method(name, learning_rate=result.rates[name], **result.options)
    model, groups = method.prepare(make_model(), batches)
    fit(model, groups, batches, default_loss, len(batches))
    with torch.no_grad():
        return fmean(default_loss(model, batch).item() for batch in held_out)


def end_of(row: dict, name: str) -> float:
    """The mean loss of a method after the long trainings; infinite if one diverged."""
    ends = row["methods"][name]["long"]
    return float("inf") if None in ends else fmean(ends)


def shortfall(row: dict) -> float:
    """How much higher the race's winner ends than the best method in the long trainings, 0 if it is the best."""
    return end_of(row, row["winner"]) - min(end_of(row, name) for name in row["methods"])


def has_long(row: dict) -> bool:
    """Whether a pair had its long trainings."""
    return "long" in row["methods"]["lora"]


def lead_of(row: dict, name: str) -> str:
    """The lead of a method over LoRA with its standard error."""
    found = row["methods"].get(name)
    if found is None:
        return "not trained"
    return "diverged" if found["lead"] is None else f"{found['lead']:+.3f} ± {found['error']:.3f}"


def make_claim(rows: list[dict]) -> str:
    """Who wins how often, and whether longer trainings agree."""
    won = sum(row["winner"] == "lora" for row in rows)
    claim = f"LoRA wins {won} of {len(rows)} races on text; growth or the mix wins {len(rows) - won}."
    long = [row for row in rows if has_long(row)]
    if long:
        right = sum(shortfall(row) <= MARGIN for row in long)
        below = sum(end_of(row, "lora") - min(end_of(row, name) for name in row["methods"]) <= MARGIN for row in long)
        claim += (
            f" In trainings {LONGER} times as long, LoRA ends lowest in {below} of {len(long)}, within {MARGIN} nats."
        )
        claim += (
            f" The winner of the race does in {right}, and ends at most {max(map(shortfall, long)):.3f} nats higher."
        )
    return claim + "".join(f" {row['pair']}: {row['verdict']}" for row in rows if not has_long(row))


def table_of_pairs(rows: list[dict]) -> str:
    """A line for each race: its leads, its winner, what growth costs, and what the long trainings say."""
    lines = []
    for row in rows:
        caches = [row["methods"].get(name, {}).get("cache") for name in ("growth", "mix")]
        ends = ["not run", ""]
        if has_long(row):
            lowest = min(row["methods"], key=partial(end_of, row))
            ends = [TITLES[lowest], f"{shortfall(row):.3f}"]
        line = [row["pair"], f"{row['methods']['lora']['loss']:.3f}", lead_of(row, "growth"), lead_of(row, "mix")]
        line += [TITLES[row["winner"]], ", ".join("" if cache is None else f"{cache:+.0%}" for cache in caches)]
        lines.append([*line, *ends])
    head = ["model and text", "LoRA", "growth leads by", "mix leads by", "winner", "KV cache of growth, of the mix"]
    return page.table([*head, "lowest in the end", "winner is higher by"], lines)


def table_of_methods(rows: list[dict]) -> str:
    """A line for each method of each race, the lowest loss first."""
    lines = []
    for row in rows:
        lines.append([row["pair"], "before training", f"{row['start']:.3f}", *[""] * 6])
        for name, found in sorted(row["methods"].items(), key=lambda item: item[1]["loss"] or float("inf")):
            loss = "diverged" if found["loss"] is None else f"{found['loss']:.3f}"
            lead = lead_of(row, name) if name != "lora" else ""
            sizes = [f"{found['rate']:.2g}", f"{found['weights']:,}", f"{found['cache']:+.0%}", found["seeds"]]
            end = page.spread([value for value in found.get("long", []) if value is not None])
            lines.append([row["pair"], TITLES[name], loss, lead, *sizes, end])
        lines += [[row["pair"], TITLES[name], why, *[""] * 6] for name, why in row["missing"].items()]
    head = ["model and text", "trained by", "loss", "lead over LoRA", "learning rate", "weights", "KV cache", "seeds"]
    return page.table([*head, f"loss after {LONGER} times the steps"], lines)


def draw(rows: list[dict], plt):
    """The lead of growth and of the mix in the race against that in the long trainings."""
    figure, panel = plt.subplots(figsize=(6, 4.5), layout="constrained")
    for name in ("growth", "mix"):
        found = [row for row in rows if has_long(row) and lead_of(row, name)[0] in "+-"]
        leads = [row["methods"][name]["lead"] for row in found]
        errors = [2 * row["methods"][name]["error"] for row in found]
        ends = [end_of(row, "lora") - end_of(row, name) for row in found]
        panel.errorbar(leads, ends, xerr=errors, fmt="o", markersize=4, label=TITLES[name])
    panel.axhline(0, color="0.6", linewidth=1)
    panel.axvline(0, color="0.6", linewidth=1)
    panel.set(xlabel="lead over LoRA in the race, nats, ± two standard errors")
    panel.set(ylabel=f"lead after {LONGER} times the steps, nats")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


def make_page(rows: list[dict]) -> page.Page:
    """The page of the pairs that have run."""
    verdicts = "\n".join(f"- {row['pair']}: {row['verdict']}" for row in rows)
    sizes = "; ".join(sorted({"{steps} steps of {rows} x {tokens} tokens".format(**row) for row in rows}))
    return page.Page(
        title="Races on text",
        claim=make_claim(rows),
        summary=table_of_pairs(rows),
        text=f"{ABOUT.format(sizes=sizes)}\n\n## Verdicts\n\n{verdicts}\n\n## All methods\n\n{table_of_methods(rows)}",
        draw=partial(draw, rows),
    )


ABOUT = f"""`hf_growattn.race` on batches as `growattn race` makes them of a text, of which a tenth, at most 128 rows,
is held out; {{sizes}}. All methods train as many weights as LoRA of rank {RANK} on all linear layers. Each
learning rate is the best of three, chosen by trainings of a quarter of the steps. LoRA and the better one of growth and
the mix train with {SEEDS} seeds. A lead is in nats a token, ± its standard error over held-out batches and seeds.
Growth or the mix wins if it leads by more than {MARGIN} nats and by two standard errors. The KV cache is that of a
token, against the model before; LoRA is merged.

In the long trainings each method of a race trains {LONGER} times as long, with {SEEDS} seeds, at the rate that the race
chose for it. A race is right if its winner ends at most {MARGIN} nats above the lowest of them. Models called "heads 16
wide" have four layers, 64 wide, and were first trained on another text for {READ} batches; the others come
pretrained."""


def make_pairs(arguments: argparse.Namespace) -> list[Pair]:
    """The pairs that the options name, the large models last."""
    if arguments.quick:
        model = make_tiny_model(arguments.output / "tiny")
        return [Pair(model, "", steps=4, growth_batches=2, rows=2, tokens=32, characters=20_000)]
    models = list(arguments.model)
    if arguments.pretrain:
        models += make_small_models(arguments.model[0], arguments.pretrain, arguments.output / "text")
    pairs = [Pair(model, text) for text in arguments.text for model in models]
    large = {"steps": 20, "rows": 4, "characters": 60_000, "is_long": False}
    return pairs + [Pair(model, arguments.text[0], **large) for model in arguments.large]


def main() -> None:
    """Run the pairs that are left, and write the page after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=[], help="paths or Hub ids of small causal LMs")
    parser.add_argument("--large", nargs="*", default=[], help="those of larger ones, which race on the first text")
    parser.add_argument("--text", nargs="+", default=[], help="text files, also of JSON rows")
    parser.add_argument("--pretrain", default="", help="the text that small models are trained on first")
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--quick", action="store_true", help="one tiny pair: shows that it runs")
    arguments = parser.parse_args()
    if not (arguments.quick or (arguments.model and arguments.text)):
        parser.error("--model and --text are needed, or --quick")
    torch.set_num_threads(1)  # models this small are slower on more
    kept = arguments.output / "text"
    kept.mkdir(parents=True, exist_ok=True)
    rows: list[dict] = []
    for pair in make_pairs(arguments):
        rows.append(run_pair(pair, kept))
        seconds = sum(row["all_seconds"] for row in rows)
        page.publish("text", make_page(rows), {"races": rows}, [*range(SEEDS)], arguments.output, seconds)


if __name__ == "__main__":
    main()

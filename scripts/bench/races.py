"""Whether a race tells what training five times as long would.

    python scripts/bench/races.py --model stories=path/to/llama --text a.txt b.jsonl --pretrain b.jsonl

A pair is a model and something to train it on: the given models and small ones that the script trains first, on texts;
and phone books (recall.py) and nearest neighbours (neighbour_task.py), whose models have heads of several widths. For
each, a race says what to train; then every method of it trains five times as long, with three seeds, whoever is behind.
Nothing else is chosen by hand: learning rates, too, are the race's own, in both.
"""

import argparse
import itertools
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import neighbour_task
import page
import recall_task
import runs
import torch
from datasets import Dataset
from finetuning_run import documents_of
from tokenizers import Tokenizer, models
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig

from hf_growattn import patch_model
from hf_growattn.training.contest import MARGIN, Contest
from hf_growattn.training.data import Prepared, prepared
from hf_growattn.training.methods import METHODS, Budget
from hf_growattn.training.race import run_race

RANK = 3  # of LoRA: the least that a third of it is a whole rank of
LONGER, LONG_SEEDS = 5, 3
RACE, LONG = "race", "long"  # the parts of a pair
WIDTHS = (4, 16)  # of the heads of the Llamas that the script trains
BOOKS = {  # width of queries and keys, names, pairs in a book
    f"phone book, queries {width} wide, {pairs} of {names} names": recall_task.Setting(
        head_dim=width, names=names, many=pairs
    )
    for width, names, pairs in itertools.product((4, 6, 8), (64, 2048), (16, 32, 64))
}
NEIGHBOURS = {  # width of queries and keys, points to compare with; the space has 32 dims
    f"nearest neighbour, queries {width} wide, {points} points": neighbour_task.Setting(
        head_dim=width, points=points, sequences=256 // points
    )
    for width, points in itertools.product((4, 8, 16, 32), (16, 32))
}


@dataclass(frozen=True)
class Setting:
    """The size of everything.

    Attributes:
        steps, seeds: of the race.
        batch_size, block_size: of a batch of text.
        growth_batches: that a growth looks at.
        rows: of a phone book or of nearest neighbours, in all.
    """

    steps: int = 40
    seeds: int = 2
    batch_size: int = 8
    block_size: int = 64
    growth_batches: int = 8
    rows: int = 2400


QUICK = Setting(steps=4, seeds=1, batch_size=4, block_size=16, growth_batches=2, rows=120)
LARGE = Setting(steps=20, batch_size=4)  # for models of which a step takes seconds


def config_of(setting: Setting, output: Path) -> SFTConfig:
    """How to train."""
    return SFTConfig(
        output_dir=str(output),
        max_length=setting.block_size,
        packing=True,
        packing_strategy="wrapped",
        per_device_train_batch_size=setting.batch_size,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
    )


def on_text(model: str, text: str, setting: Setting, output: Path):
    """What a race of a model on a text takes."""
    tokenizer, training = AutoTokenizer.from_pretrained(model), config_of(setting, output)
    tokenizer.eos_token = tokenizer.eos_token or tokenizer.bos_token
    pieces = [whole[at : at + 2000] for whole in documents_of(text) for at in range(0, len(whole), 2000)]
    rows = prepared(Dataset.from_dict({"text": pieces[:1000]}), None, tokenizer, training)
    return lambda: patch_model(AutoModelForCausalLM.from_pretrained(model)), tokenizer, rows, training


def book_rows(books: recall_task.Setting, rows: int) -> dict[str, torch.Tensor]:
    """Phone books with their questions, tokens and labels."""
    drawn = recall_task.draw(books, rows, books.many, books.many, torch.Generator().manual_seed(1))
    book = drawn["input_ids"].shape[1] - drawn["labels"].shape[1]  # its pairs are not asked for
    return {"input_ids": drawn["input_ids"], "labels": functional.pad(drawn["labels"], (book, 0), value=-100)}


def on_task(pair: str, setting: Setting, output: Path, folder: Path):
    """What a race of a narrow model on phone books or nearest neighbours takes."""
    if pair in BOOKS:
        task = BOOKS[pair]
        folder /= f"{task.head_dim}-{task.names}"
        words, size = task.names + task.numbers, max(task.pairs // task.many, 1)
        fresh, drawn = partial(recall_task.pretrained, task, False, 0, folder), book_rows(task, setting.rows)
    else:
        task = NEIGHBOURS[pair]
        folder /= f"neighbours-{task.head_dim}-{task.points}"
        words, size = task.words, task.sequences
        fresh = partial(neighbour_task.pretrained, task, folder)
        drawn = neighbour_task.draw(task, setting.rows, torch.Generator().manual_seed(1))
    folder.mkdir(parents=True, exist_ok=True)
    bare = Tokenizer(models.WordLevel({str(word): word for word in range(words)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="0", pad_token="0")
    whole = Dataset.from_dict({name: column.tolist() for name, column in drawn.items()})
    whole = whole.train_test_split(128 if setting.rows > 1000 else 20, seed=0, shuffle=False)

    def collate(rows: list[dict]) -> dict:
        return {name: torch.tensor([row[name] for row in rows]) for name in drawn}

    smaller = replace(setting, batch_size=size, block_size=None)
    return fresh, tokenizer, Prepared(whole["train"], whole["test"], collate), config_of(smaller, output)


def measure(pair: str, model: str, text: str, part: str, setting: dict, folder: Path) -> dict:
    """The race of a pair, or the long trainings of all its methods, for `collect`."""
    how = Setting(**setting)
    output = folder / "races" / pair.replace(" ", "-").replace(",", "") / part
    given = on_text(model, text, how, output) if text else on_task(pair, how, output, folder)
    steps, seeds = (how.steps, how.seeds) if part == RACE else (LONGER * how.steps, LONG_SEEDS)
    budget = RANK * Budget.near(given[0](), 1).of_a_rank
    began = time.process_time()  # other work on the machine does not count
    contest = run_race(
        *given,
        full=False,
        budget=budget,
        steps=steps,
        seeds=seeds,
        growth_batches=how.growth_batches,
        halving=part == RACE,
    )
    return summary(contest) | {"processor": time.process_time() - began}


def summary(contest: Contest) -> dict:
    """What the page needs of a contest."""
    challenger = contest.challenger("lora")
    lead = contest.lead(challenger, "lora") if challenger else None
    ended = {name: contest.loss(name) for name in METHODS if contest.of(name)}
    return {
        "winner": contest.winner,
        "challenger": challenger,
        "lead": {"mean": lead.mean, "error": lead.error} if lead else None,
        "overtime": any(contest.of(name, contest.overtime) for name in METHODS),
        "losses": {"start": contest.start.loss, **ended},
        "cache": {name: contest.of(name)[0].cache / contest.start.cache - 1 for name in ended},
        "rates": {name: contest.of(name)[0].rate for name in ended},
    }


def told_of(run: dict) -> dict:
    """What `summary` told of a run, and its time."""
    names = ("winner", "challenger", "lead", "overtime", "losses", "cache", "rates", "processor")
    return {name: run[name] for name in names if name in run}


def shortened(value):
    """The same with all numbers at five digits, which is more than a page shows."""
    if isinstance(value, dict):
        return {name: shortened(one) for name, one in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def lead_of(told: dict) -> float:
    """How far growth ends below LoRA; where it was out, it is behind by enough."""
    return told["lead"]["mean"] if told["lead"] else -1.0


def long_lead(pair: dict) -> float:
    """How far what the race took for the better growth ends below LoRA after the long training."""
    losses, name = pair["long"]["losses"], pair["race"]["challenger"]
    return losses["lora"] - losses[name] if name in losses else lead_of(pair["long"])


def right(pair: dict) -> bool:
    """Whether the race chose what the long trainings show to be lower; LoRA where there is next to nothing in it."""
    return long_lead(pair) > 0 if pair["race"]["winner"] != "lora" else long_lead(pair) < MARGIN


def regret(pair: dict) -> float:
    """How far the race's choice ends above the best method after the long trainings."""
    losses = {name: loss for name, loss in pair["long"]["losses"].items() if name != "start"}
    return losses.get(pair["race"]["winner"], max(losses.values())) - min(losses.values())


def page_of(figures: dict) -> page.Page:
    """What the figures say."""
    pairs = figures["pairs"]
    groups = {
        "the text it was pretrained on": [p for p in pairs if p["known"]],
        "other texts": [p for p in pairs if p["text"] and not p["known"]],
        "phone books": [p for p in pairs if p["pair"] in BOOKS],
        "nearest neighbours": [p for p in pairs if p["pair"] in NEIGHBOURS],
    }
    timed = [(p[RACE]["processor"], p[LONG]["processor"]) for p in pairs if "processor" in p[LONG]]
    share, total = [race / long for race, long in timed], sum(r for r, _ in timed) / sum(l for _, l in timed)
    longer = sum(p[RACE].get("overtime", False) for p in pairs)
    wrong = [max(-long_lead(pair), 0.0) for pair in pairs if pair["race"]["winner"] != "lora"]
    hits, lost, near = sum(map(right, pairs)), max(map(regret, pairs)), sum(regret(p) <= MARGIN for p in pairs)
    grown = sum(pair["race"]["winner"] != "lora" for pair in pairs)
    rows = [
        [name, len(group), sum(p["race"]["winner"] != "lora" for p in group), sum(map(right, group))]
        for name, group in groups.items()
        if group
    ]
    lines = [
        [
            pair["pair"],
            "growth" if pair["race"]["winner"] != "lora" else "LoRA",
            _lead(pair["race"]["lead"]),
            _lead(pair["long"]["lead"]),
            ", ".join(f"{METHODS[n].title} {loss:.3f}" for n, loss in pair["long"]["losses"].items() if n in METHODS),
            f"{pair['long']['cache'].get(pair['race']['challenger'] or '', 0):+.0%}",
            f"{regret(pair):.3f}",
            "right" if right(pair) else "wrong",
        ]
        for pair in sorted(pairs, key=long_lead, reverse=True)
    ]
    large = sorted({pair["pair"].split(" on ")[0] for pair in pairs if pair.get("large")})
    larger = f"; for {', '.join(large)} `{asdict(LARGE)}`" if large else ""
    columns = ["model and data", "the race says", "lead of growth in the race", "after the long training"]
    columns += ["losses after the long training", "KV cache of growth", "above the best method", ""]
    return page.Page(
        title="What a race tells",
        claim=(
            f"Over {len(pairs)} pairs of a model and data, a race is right {hits} times; it says growth {grown} times. "
            f"Trained {LONGER} times as long, what it chose ends within {MARGIN} nats of the best method in {near} "
            f"pairs, and {lost:.3f} above it in the worst."
        ),
        summary=page.table(["data", "pairs", "the race says growth", "it is right"], rows),
        text=(
            f"Setting: `{figures['setting']}`{larger}. The long trainings have {LONG_SEEDS} seeds and the race's own "
            "choice of learning rates, out of two; both train to the end where they are near. Right: the sign of the "
            f"difference after the long training, or both under {MARGIN}. All methods train as many weights as LoRA of "
            f"rank {RANK} on all linear layers. A lead is in nats a token, with its standard error over rows and "
            "seeds; that of the better of growth and growth with LoRA. In a race, who is surely behind after one seed "
            "is out, who wins by far has one seed, and two whose order is open, and matters, train for twice the steps "
            f"({longer} pairs); the long trainings have none of this. These rules were made while looking at the "
            "pairs here, all but those of the small GPT-2, so new pairs may fare worse. Races and long trainings were "
            "not all run on one day, nor by one command; what is not in the table was not run. Time is the "
            f"processor's, in the {len(share)} pairs whose trainings were not resumed in between; all their races "
            f"together took {total:.2f} of what their long trainings took."
            "\n\n" + page.table(columns, lines)
        ),
        draw=partial(draw, pairs, groups),
        reaches=[
            page.Reach(
                "A race is right in at least 90 % of the pairs",
                f"{hits} of {len(pairs)}",
                "reached" if hits >= 0.9 * len(pairs) else "missed",
            ),
            page.Reach(
                f"A race's verdict for growth is never wrong by more than {MARGIN}",
                f"wrong by at most {max(wrong, default=0):.3f} in {len(wrong)} verdicts",
                "reached" if max(wrong, default=0) <= MARGIN else "missed",
            ),
            page.Reach(
                f"What a race chooses ends at most {MARGIN} above the best method",
                f"at most {lost:.3f}, within it in {near} of {len(pairs)} pairs",
                "reached" if lost <= MARGIN else "missed",
            ),
            page.Reach(
                "A race takes at most a fifth of the time of the long trainings",
                f"{runs.spread(share, 2)} of it in {len(share)} pairs",
                "reached" if max(share, default=1) <= 0.2 else "missed",
            ),
        ],
    )


def _lead(lead: dict | None) -> str:
    return f"{lead['mean']:+.3f} ± {lead['error']:.3f}" if lead else "out"


def draw(pairs: list[dict], groups: dict[str, list[dict]], plt):
    """The lead in the race against that after the long training."""
    figure, panel = plt.subplots(figsize=(5.6, 4.2), layout="constrained")
    for name, group in groups.items():
        shown = [pair for pair in group if pair["race"]["lead"] and pair["long"]["lead"]]
        errors = [pair["race"]["lead"]["error"] for pair in shown]
        points = [lead_of(pair["race"]) for pair in shown], [long_lead(pair) for pair in shown]
        panel.errorbar(*points, xerr=errors, fmt="o", markersize=4, label=name)
    panel.axhline(0, color="0.6", linewidth=1)
    panel.axvline(0, color="0.6", linewidth=1)
    panel.set(xlabel="lead of growth over LoRA in the race, nats", ylabel=f"trained {LONGER} times as long, nats")
    panel.legend(fontsize=8)
    return figure


def llama(width: int, tokenizer) -> LlamaForCausalLM:
    """An untrained Llama with heads of some width."""
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 4, "num_attention_heads": 8}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    positions = {"max_position_embeddings": 256, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(head_dim=width, vocab_size=len(tokenizer), **sizes, **ends, **positions))


def trained_here(tokenizer, text: str, folder: Path) -> dict[str, str]:
    """Small models, trained on a text by the first who asks; where they are, by name."""
    from finetuning import gpt2, pretrained
    from finetuning_run import SOURCES
    from finetuning_run import Setting as Sizes

    builds = {f"Llama, heads {width} wide": partial(llama, width, tokenizer) for width in WIDTHS}
    builds["GPT-2, heads 8 wide"] = partial(gpt2, tokenizer)
    places = {}
    for name, build in builds.items():
        SOURCES.update({"pretraining": text, f"{name}'s tokenizer": tokenizer})
        place = folder / name.replace(", ", "-").replace(" ", "-").lower()
        places[name] = pretrained(name, build, "pretraining", place, Sizes())
        tokenizer.save_pretrained(place)
    return places


def main() -> None:
    """Race every pair, train every pair, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=[], help="causal LMs, as NAME=path or Hub id")
    parser.add_argument("--large", nargs="*", default=[], help="the same, models that race for half as many steps")
    parser.add_argument("--text", nargs="*", default=[], help="texts, as for finetuning.py")
    parser.add_argument("--pretrain", help="the text that the given models know; small models are trained on it")
    parser.add_argument("--folder", type=Path, default=Path("scripts/output"), help="keeps models and runs")
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one phone book, a few steps: shows that it runs")
    arguments = parser.parse_args()
    setting = QUICK if arguments.quick else Setting()
    arguments.output.mkdir(parents=True, exist_ok=True)
    given = dict(name.split("=", 1) for name in arguments.model)
    if arguments.pretrain and given:
        tokenizer = AutoTokenizer.from_pretrained(next(iter(given.values())))
        given |= trained_here(tokenizer, arguments.pretrain, arguments.folder)
    large = dict(name.split("=", 1) for name in arguments.large)
    jobs = [
        {"pair": f"{name} on {Path(text).stem}", "model": path, "text": text}
        for name, path in (given | large).items()
        for text in arguments.text
    ]
    tasks = [next(iter(BOOKS)), next(iter(NEIGHBOURS))] if arguments.quick else [*BOOKS, *NEIGHBOURS]
    jobs += [{"pair": name, "model": "", "text": ""} for name in tasks]
    kept = arguments.output / "races.jsonl"
    for job in jobs:
        job["setting"] = asdict(LARGE if job["model"] in large.values() else setting)
    jobs = [job | {"part": part} for job in jobs for part in (RACE, LONG)]
    done = runs.collect(partial(measure, folder=arguments.folder), jobs, kept, arguments.processes)
    pairs = [
        {"pair": run["pair"], RACE: shortened(told_of(run)), LONG: shortened(told_of(long))}
        | {
            "text": Path(run["text"]).name if run["text"] else "",
            "known": bool(run["text"]) and run["text"] == arguments.pretrain,
            "large": run["model"] in large.values(),
        }
        for run, long in zip(done[::2], done[1::2])
    ]
    figures = {"setting": asdict(setting), "pairs": pairs}
    page.publish("races", figures, list(range(LONG_SEEDS)), arguments.output, sum(run["seconds"] for run in done))


if __name__ == "__main__":
    main()

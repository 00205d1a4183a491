"""Whether what a growth measures before any training tells how much more it will be worth than LoRA.

    python scripts/bench/instrument.py --model path/to/llama --text a.txt b.txt c.txt d.txt --pretrain stories.jsonl

A pair is a model and a text. Small Llamas whose heads are of different widths, and a GPT-2, are trained on a text by
the script; these and the given model are fine-tuned on each text with a frozen base, by growth and by LoRA on q, k, v
and o, at equal added parameters and equal tokens, as in finetuning.py. What `Grower.measure` says before is held
against how much lower the loss of growth ends.
"""

import argparse
import math
import random
import statistics
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path

import page
import torch
from finetuning import FROZEN, FROZEN_TABLE, GUIDED, LORA, QUICK, gpt2, job, measure, pretrained, quick_sources, tuned
from finetuning_run import SOURCES, Run, Setting, data
from runs import collect
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_growattn import Grower, GrowthConfig

WIDTHS = (2, 4, 16)  # of the heads of the Llamas that are trained here
REACH = 0.7
MEASURED = 0.01  # of the weights: what `growattn measure` asks for unless told otherwise
WORTH = 0.01  # nats a token, a hundredth of the perplexity: a smaller lead is none that anyone would care for


def predicted_gain(layer: dict) -> float:
    """First-order gain of a layer and kind on unseen batches, at the step that the growth took."""
    return layer["step_size"] * sum(v * s for v, s in zip(layer["validated"], layer["strength"]))


def validated_gain(report: dict) -> float:
    """First-order gain on unseen batches for each million of added weights, at the steps that the growth took."""
    gain = sum(map(predicted_gain, report["layers"]))
    return gain / report["added_parameters"] * 1e6 if report["added_parameters"] else 0.0


def measured_gain(report: dict) -> float:
    """How far the growth lowers the loss of its batches, for each million of added weights."""
    fall = report["loss_before"] - report["loss_after"]
    return fall / report["added_parameters"] * 1e6 if report["added_parameters"] else 0.0


def starvation(report: dict) -> float:
    """Starvation of layers and kinds, each weighted by what its new directions gain."""
    weights = [layer["step_size"] * sum(layer["in_sample"]) for layer in report["layers"]]
    values = [layer["starvation"] for layer in report["layers"]]
    return sum(w * v for w, v in zip(weights, values)) / sum(weights) if sum(weights) else 0.0


def starved_gain(report: dict) -> float:
    """The validated gain of all layers and kinds, each weighted by its starvation, as `growattn measure` tells it."""
    return sum(layer["starvation"] * predicted_gain(layer) for layer in report["layers"])


PREDICTORS = {
    "validated gain a million weights": validated_gain,
    "measured gain a million weights": measured_gain,
    "starvation": starvation,
    "starved gain": starved_gain,
}


def spearman(first: list[float], second: list[float]) -> float:
    """Correlation of the ranks."""
    ranks = [[sorted(values).index(value) for value in values] for values in (first, second)]
    return statistics.correlation(*ranks) if all(len(set(of)) > 1 for of in ranks) else 0.0


def interval(first: list[float], second: list[float], draws: int = 2000) -> tuple[float, float]:
    """A 90 % interval of Spearman's correlation, by drawing pairs anew."""
    chance, places = random.Random(0), range(len(first))
    drawn = ([chance.choice(places) for _ in places] for _ in range(draws))
    found = sorted(spearman([first[i] for i in some], [second[i] for i in some]) for some in drawn)
    return found[int(0.05 * draws)], found[int(0.95 * draws)]


def without_model(pairs: list[dict], name: str, model: str) -> float:
    """Spearman's correlation of a predictor with the lead, over the pairs of all other models."""
    others = [p for p in pairs if p["model"] != model]
    return spearman([p[name] for p in others], [p["lead"] for p in others]) if len(others) > 1 else math.nan


def threshold(values: list[float], pays: list[bool]) -> float:
    """The value that parts best what pays from what does not, half-way between two pairs."""
    ordered = sorted(values)
    cuts = [ordered[0], *((low + high) / 2 for low, high in pairwise(ordered))]
    return max(cuts, key=lambda cut: sum((value >= cut) == paid for value, paid in zip(values, pays)))


def left_out(values: list[float], pays: list[bool]) -> float:
    """Share of the pairs that a threshold from all the others puts on the right side."""
    right = 0
    for place, (value, paid) in enumerate(zip(values, pays)):
        others = [*values[:place], *values[place + 1 :]], [*pays[:place], *pays[place + 1 :]]
        right += (value >= threshold(*others)) == paid
    return right / len(values)


def measured_before(model: str, text: str, seed: int, setting: dict) -> dict:
    """What `growattn measure` would say of the batches that growth will measure, for `collect`."""
    run = Run(FROZEN[GUIDED], False, model, text, 0.0, seed, Setting(**setting))
    report = Grower(run.model.requires_grad_(True), GrowthConfig(budget=MEASURED, seed=seed)).measure(run.measured())
    return {"measured": asdict(report)}


def pair(runs: list[dict], model: str, text: str) -> dict:
    """What was measured before training, and what came of it, medians over the seeds."""
    own = [run for run in runs if run["model"] == model and run["text"] == text]
    of = {(run["row"], run["seed"]): run for run in own if "row" in run}
    reports = [run["measured"] for run in own if "measured" in run]
    seeds = sorted({seed for _, seed in of})
    leads = [of[LORA, seed]["loss"] - of[GUIDED, seed]["loss"] for seed in seeds]
    error = statistics.stdev(leads) / len(leads) ** 0.5 if len(leads) > 1 else math.inf
    return {
        "model": model,
        "text": text,
        "added": [statistics.median(of[row, seed]["added"] for seed in seeds) for row in (GUIDED, LORA)],
        "losses": [statistics.median(of[row, seed]["loss"] for seed in seeds) for row in (GUIDED, LORA)],
        "lead": statistics.fmean(leads),
        "error": error,
        "pays": statistics.fmean(leads) > max(2 * error, WORTH),
        **{name: statistics.median(map(predict, reports)) for name, predict in PREDICTORS.items()},
    }


def page_of(figures: dict) -> page.Page:
    """The page, out of its figures."""
    setting, pairs = figures["setting"], figures["pairs"]
    leads, pays = [p["lead"] for p in pairs], [p["pays"] for p in pairs]
    found = {}
    for name in PREDICTORS:
        values = [p[name] for p in pairs]
        found[name] = {
            "spearman": spearman(values, leads),
            "interval": interval(values, leads),
            "threshold": threshold(values, pays),
            "right": left_out(values, pays),
        }
    best = max(found, key=lambda name: found[name]["spearman"])
    rows = [
        [
            n,
            f"{f['spearman']:.2f} ({f['interval'][0]:.2f} to {f['interval'][1]:.2f})",
            f"{f['threshold']:.3g}",
            f"{f['right']:.0%}",
        ]
        for n, f in found.items()
    ]
    head = ["measured before training", "Spearman (90 % interval)", "threshold", "right side of it, left out"]
    tokens = setting["steps"] * setting["batch_size"] * setting["block_size"]
    text = (
        f"Each training saw {tokens:,} tokens, some of which growth measured first. What is measured before is what a "
        f"budget of {MEASURED:.0%} of the weights would buy, as `growattn measure` asks for by default. The lead is "
        "how much lower the held-out loss ends by growth than by LoRA, nats a token, mean over the seeds with its "
        "standard error; growth "
        f"pays where that is above two of them and above {WORTH} nats. The threshold parts best those pairs from the "
        "others; the last column of the table above says how often one made from all other pairs is right. Starved "
        "gain is the validated gain, nats a token, of all layers and kinds, each weighted by its starvation. The "
        "interval comes from drawing pairs anew; those of one model or text are not independent, so it is too "
        "narrow.\n\nSpearman's correlation without the pairs of one model:\n\n"
    )
    models = list(dict.fromkeys(p["model"] for p in pairs))
    without = [[name, *(f"{without_model(pairs, name, model):.2f}" for model in models)] for name in PREDICTORS]
    text += page.table(["measured before training", *(f"without {model}" for model in models)], without) + "\n\n"
    columns = ["model", "text", "added by growth, LoRA", "loss by growth, LoRA", "lead", *PREDICTORS]
    lines = [
        [
            p["model"],
            p["text"],
            ", ".join(f"{n:,.0f}" for n in p["added"]),
            ", ".join(f"{loss:.3f}" for loss in p["losses"]),
            f"{p['lead']:.3f} +- {p['error']:.3f}",
            *(f"{p[name]:.3g}" for name in PREDICTORS),
        ]
        for p in sorted(pairs, key=lambda p: -p["lead"])
    ]
    strongest = found[best]["spearman"]
    claim = (
        f"Over {len(pairs)} pairs of a model and a text, growth ended more than {WORTH} nats below LoRA, and beyond "
        f"noise, in {sum(pays)}. Of what is measured before training, the {best} tells most about the lead: Spearman "
        f"{strongest:.2f}."
    )
    reaches = [
        page.Reach(
            f"{name} predicts how much growth beats LoRA, at least 12 pairs: Spearman {REACH} or more",
            f"{found[name]['spearman']:.2f} over {len(pairs)} pairs",
            "reached" if found[name]["spearman"] >= REACH and len(pairs) >= 12 else "missed",
        )
        for name in ("validated gain a million weights", "starvation", "starved gain")
    ]
    return page.Page(
        title="What is measured beforehand",
        claim=claim,
        summary=page.table(head, rows),
        text=text + page.table(columns, lines),
        draw=partial(draw, pairs, found),
        reaches=reaches,
    )


def draw(pairs: list[dict], found: dict, plt):
    """The lead over each predictor, a colour for each model."""
    figure, panels = plt.subplots(
        1, len(PREDICTORS), figsize=(3.6 * len(PREDICTORS), 3.4), layout="constrained", sharey=True
    )
    for panel, name in zip(panels, PREDICTORS):
        for model in dict.fromkeys(p["model"] for p in pairs):
            of_model = [p for p in pairs if p["model"] == model]
            points = [p[name] for p in of_model], [p["lead"] for p in of_model]
            panel.errorbar(*points, yerr=[p["error"] for p in of_model], fmt="o", markersize=4, label=model)
        panel.axhline(0, color="0.6", linewidth=1)
        panel.axvline(found[name]["threshold"], color="0.6", linewidth=1, linestyle=":")
        panel.set(xlabel=name, title=f"Spearman {found[name]['spearman']:.2f}")
    panels[0].set(ylabel="lead of growth over LoRA, nats")
    panels[0].legend(fontsize=7)
    return figure


def llama(width: int, tokenizer) -> LlamaForCausalLM:
    """An untrained Llama with heads of some width."""
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 4, "num_attention_heads": 8}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    positions = {"max_position_embeddings": 256, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(head_dim=width, vocab_size=len(tokenizer), **sizes, **ends, **positions))


def sources(arguments: argparse.Namespace, setting: Setting) -> tuple[list[str], list[str]]:
    """Names of the models and of the texts, with what they stand for noted in `SOURCES`."""
    given, texts = Path(arguments.model).name, [Path(text).stem for text in arguments.text]
    SOURCES.update({given: arguments.model, "pretraining": arguments.pretrain, **dict(zip(texts, arguments.text))})
    SOURCES[f"{given}'s tokenizer"] = tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    untrained = {f"Llama, heads {width} wide": lambda width=width: llama(width, tokenizer) for width in WIDTHS}
    untrained["GPT-2"] = lambda: gpt2(tokenizer)
    for name, build in untrained.items():
        SOURCES[f"{name}'s tokenizer"] = tokenizer
        folder = arguments.models / name.replace(", ", "-").replace(" ", "-").lower()
        SOURCES[name] = pretrained(name, build, "pretraining", folder, setting)
    return [given, *untrained], texts


def main() -> None:
    """Train the models, fine-tune every pair both ways, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hub id of a causal LM")
    parser.add_argument("--text", nargs="+", help="texts, as for finetuning.py")
    parser.add_argument("--pretrain", help="text on which the small models are trained")
    parser.add_argument("--models", type=Path, default=Path("scripts/output"), help="where those are kept")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--quick", action="store_true", help="two tiny random models, one text: shows that it runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    setting, seeds = (QUICK, [0]) if arguments.quick else (Setting(), arguments.seeds)
    models, texts = quick_sources() if arguments.quick else sources(arguments, setting)
    arguments.output.mkdir(parents=True, exist_ok=True)
    kept = arguments.output / "finetuning.jsonl"  # what finetuning.py ran is not run again
    runs = []
    for model in models:
        for text in texts:
            data(model, text, setting.block_size)  # here, so that the processes of the runs find it
            swept = tuned(FROZEN_TABLE, model, [GUIDED, LORA], text, setting, kept)
            rates = {row: min(losses, key=losses.get) for row, losses in swept.items()}
            jobs = [job(FROZEN_TABLE, model, text, row, rates[row], seed, setting) for seed in seeds for row in rates]
            runs += collect(measure, jobs, kept)
            shared = {"model": model, "text": text, "setting": asdict(setting)}
            jobs = [shared | {"seed": seed} for seed in seeds]
            runs += collect(measured_before, jobs, arguments.output / "instrument.jsonl")
    pairs = [pair(runs, model, text) for model in models for text in texts]
    figures = {"setting": asdict(setting), "pairs": pairs}
    page.publish("instrument", figures, seeds, arguments.output, sum(run["seconds"] for run in runs))


if __name__ == "__main__":
    main()

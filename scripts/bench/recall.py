"""Where LoRA cannot follow: a phone book, with more names than `d_k` dims can tell apart.

    python scripts/bench/recall.py

'anna seven bob nine carla two ... bob nine anna seven': pairs of name and number, then questions. A narrow model that
was trained on short books is fine-tuned on long ones: by peft's adapters, by all its weights, by growth. LoRA at any
rank leaves a head's queries and keys `d_k` wide, so its pattern has rank `d_k` at most. The first runs of a seed train
its models, which the others read from a folder that is deleted at the end.
"""

import argparse
import shutil
import statistics
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import page
import torch
from compared import grower, ranks_within
from peft import LoraConfig, get_peft_model
from recall_task import Setting, draw, pretrained, recall, train
from runs import collect, spread
from tasks import forward_ratio
from torch import nn

from hf_growattn import GrowthConfig, GrowthReport
from hf_growattn.growable.models import attentions

TUNING_SEED = 100


QUICK = Setting(
    hidden=16, names=16, numbers=4, few=[2], many=4, pretraining=4, steps=4, pairs=16, dims=4, growth_batches=2,
    asked=[2, 4], held_out=4, rates={"all": [1e-2], "added": [1e-2]},
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """How the pretrained model is fine-tuned.

    Attributes:
        wide: whether it was pretrained with heads as wide as growth makes them.
        growth: arguments of `GrowthConfig`; `dims` is a share of the setting's, 0 spends as many weights by budget.
        adapter: arguments of peft's `LoraConfig`; without a rank it has as many weights as growth adds.
        everything: whether all weights train, not only added ones.
    """

    wide: bool = False
    growth: dict | None = None
    adapter: dict | None = None
    everything: bool = False


QK, QKVO = ["q_proj", "k_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = [*QKVO, "gate_proj", "up_proj", "down_proj"]
NONE, GUIDED, RANDOM, FULL, WIDE = "no training", "guided growth", "random growth", "all weights", "wide from scratch"
BUDGET = "guided growth by budget"
ROWS = {
    NONE: Row(),
    "LoRA on q, k": Row(adapter={"target_modules": QK}),
    "LoRA on q, k, v, o": Row(adapter={"target_modules": QKVO}),
    "LoRA on q, k, v, o, full rank": Row(adapter={"target_modules": QKVO, "rank": 64}),
    "LoRA on all linear layers": Row(adapter={"target_modules": LINEAR}),
    "LoRA on all linear layers, full rank": Row(adapter={"target_modules": LINEAR, "rank": 64}),
    "PiSSA on q, k, v, o": Row(adapter={"target_modules": QKVO, "init_lora_weights": "pissa"}),
    RANDOM: Row(growth={"dims": 1, "estimator": "random"}),
    GUIDED: Row(growth={"dims": 1}),
    "guided growth, half the dims": Row(growth={"dims": 1 / 2}),
    "guided growth, a quarter of the dims": Row(growth={"dims": 1 / 4}),
    BUDGET: Row(growth={"dims": 0}),
    FULL: Row(everything=True),
    "random growth, all weights": Row(growth={"dims": 1, "estimator": "random"}, everything=True),
    "guided growth, all weights": Row(growth={"dims": 1}, everything=True),
    WIDE: Row(wide=True, everything=True),
}
PEFT = [name for name, row in ROWS.items() if row.adapter]


def added_by_growth(setting: Setting) -> int:
    """Weights and biases of all new dims of both layers' queries and keys."""
    return 2 * 2 * setting.dims * (setting.hidden + 1)


def adapted(setting: Setting, model: nn.Module, rank: int = 0, **options) -> nn.Module:
    """The model with LoRA at a rank, or with about as many weights as growth adds."""
    targets, raised = tuple(options["target_modules"]), {}
    costs = {name: sum(m.weight.shape) for name, m in model.named_modules() if name.endswith(targets)}
    if not rank:
        rank, raised = ranks_within(costs, added_by_growth(setting))
    options["rank_pattern"] = raised
    options["alpha_pattern"] = {name: 2 * more for name, more in raised.items()}
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, **options))


def grow(
    setting: Setting,
    model: nn.Module,
    batches: list[dict],
    seed: int,
    dims: float,
    estimator: str = "whitened",
    **options,
) -> GrowthReport:
    """Grow by a share of the setting's dims in every layer, or of as many weights where they are worth most."""
    spent = {"qk_dims": round(dims * setting.dims)} if dims else {"budget": added_by_growth(setting)}
    return grower(model, GrowthConfig(seed=seed, **spent, **options), estimator=estimator).grow(batches)


def train_new_dims_only(model: nn.Module, old: list[tuple[int, int]]) -> None:
    """Freeze everything, and of the weights that grew all old entries, by their gradient."""
    model.requires_grad_(False)
    for layer, widths in zip(attentions(model), old):
        for roles, width in ((("query", "key"), widths[0]), (("value", "output"), widths[1])):
            for module, name, axis in (entry for role in roles for entry in layer.parameters_along(role)):
                weight = getattr(module, name)
                if weight.shape[axis] > width:  # one head, so its new dims come last
                    new = (torch.arange(weight.shape[axis]) >= width).view(-1, *[1] * (weight.dim() - 1 - axis))
                    weight.requires_grad_(True).register_hook(partial(torch.mul, new))


def measure(folder: Path, row: str, rate: float, seed: int, setting: dict) -> dict:
    """One run, for `collect`."""
    how, setting = ROWS[row], Setting(**setting)
    model = pretrained(setting, how.wide, seed, folder)
    before = sum(weight.numel() for weight in model.parameters())
    generator = torch.Generator().manual_seed(5000 + seed)
    many, sequences = setting.many, setting.pairs // setting.many
    batch = partial(draw, setting, sequences, many, many, generator)
    measured, steps, found = [], setting.steps if row != NONE else 0, {}
    if how.growth:
        measured = [batch() for _ in range(1 if how.growth.get("estimator") else setting.growth_batches)]
        old = [(layer.qk_head_dim, layer.v_head_dim) for layer in attentions(model)]
        report = grow(setting, model, measured, seed, **how.growth, old_dims_train=how.everything)
        steps -= len(measured)
        found = {"report": asdict(report), "at_growth": recall(setting, model, many, seed)}
        if not how.everything:
            train_new_dims_only(model, old)
    widths = [(layer.qk_head_dim, layer.v_head_dim) for layer in attentions(model)]
    if how.growth or how.wide:
        books = draw(setting, sequences, many, many, torch.Generator().manual_seed(0))
        found["forward"] = forward_ratio(model, pretrained(setting, False, seed, folder), books, turns=21)
    if how.adapter:
        model = adapted(setting, model, **how.adapter)
    added = sum(weight.numel() for weight in model.parameters()) - before
    tokens = (steps + len(measured)) * sequences * 4 * many
    if steps:
        train(model, [batch] * steps, rate)
    recalled = {str(pairs): recall(setting, model, pairs, seed) for pairs in setting.asked}
    counts = {"added": added, "trained": before + added if how.everything else added, "tokens": tokens}
    return found | counts | {"widths": widths, "recall": recalled}


def tuned(setting: dict, folder: Path, kept: Path) -> dict[str, dict[float, dict]]:
    """A run at each learning rate, on the tuning seed: beyond an end that wins, and for peft's rows at half steps."""
    found: dict[str, dict[float, dict]] = {name: {} for name in ROWS}

    def run(wanted: dict[str, list[float]]) -> None:
        asked = [{"row": name, "rate": rate} for name, rates in wanted.items() for rate in rates]
        shared = {"seed": TUNING_SEED, "setting": setting}
        for done in collect(partial(measure, folder), [shared | job for job in asked], kept):
            found[done["row"]][done["rate"]] = done

    run({name: setting["rates"]["all" if row.everything else "added"] for name, row in ROWS.items()} | {NONE: [0.0]})
    wanted = found
    while wanted:
        best = {name: best_rate(of_row) for name, of_row in found.items() if len(of_row) > 1}
        wanted = {name: [rate * 3] for name, rate in best.items() if rate == max(found[name])}
        wanted |= {name: [rate / 3] for name, rate in best.items() if rate == min(found[name])}
        run(wanted)
    run({name: [best[name] / 3**0.5, best[name] * 3**0.5] for name in PEFT if name in best})
    return found


def best_rate(found: dict[float, dict]) -> float:
    """The learning rate of the run that recalls most."""
    return max(found, key=lambda rate: end_of(found[rate]))


def end_of(run: dict) -> float:
    """Recall of books as long as those of fine-tuning."""
    return run["recall"][str(run["setting"]["many"])]


def claim(setting: Setting, runs: dict[str, list[dict]]) -> tuple[str, list[page.Reach]]:
    """Who wins and who loses at the long books, and the reach: of equal dims everywhere, and of a budget."""
    ends = {name: [run["recall"][str(setting.many)] for run in of_row] for name, of_row in runs.items()}
    middle = {name: statistics.median(values) for name, values in ends.items()}
    best = max(PEFT, key=middle.get)
    better = [name for name in ROWS if middle[name] > middle[GUIDED]]
    text = (
        f"In books of {setting.many} pairs, queries {setting.head_dim} wide recall {middle[NONE]:.2f} of the numbers. "
        f"Fine-tuned by the best of peft's rows ({best}): {middle[best]:.2f}; frozen but for {setting.dims} guided new "
        f"dims a layer: {middle[GUIDED]:.2f}; for as many weights where growth by budget puts them: "
        f"{middle[BUDGET]:.2f}; for {setting.dims} random dims a layer: {middle[RANDOM]:.2f}. All weights, not grown: "
        f"{middle[FULL]:.2f}. Better than guided growth: {'; '.join(better) or 'no row'}."
    )
    aim, reaches = "Phone book: recall of {} above every peft row's by more than twice the range over seeds", []
    for name in (GUIDED, BUDGET):
        gap, noise = middle[name] - middle[best], max(max(v) - min(v) for v in (ends[name], ends[best]))
        clear = gap > 2 * noise and min(ends[name]) > max(ends[best])
        verdict = "undecided" if len(ends[name]) < 3 else "reached" if clear else "missed"
        measured = f"{spread(ends[name], 3)} against {spread(ends[best], 3)} ({best})"
        reaches.append(page.Reach(aim.format(name), measured, verdict))
    return text, reaches


def page_of(figures: dict) -> page.Page:
    """The page, out of its figures."""
    setting, sweeps, summary, curves = Setting(**figures["setting"]), figures["sweep"], [], []
    whole = page.out_of_table(figures["runs"])
    runs = {row: [run for run in whole if run["row"] == row] for row in ROWS}
    said, reaches = claim(setting, runs)
    for name, of_row in runs.items():
        first, took = of_row[0], [[run[key] for run in of_row] for key in ("seconds", "peak_bytes")]
        recalled = [spread([run["recall"][str(n)] for run in of_row], 2) for n in setting.asked]
        grown = spread([run["at_growth"] for run in of_row if "at_growth" in run], 2)
        cells = [", ".join(str(width) for width, _ in first["widths"])]
        cells += [f"{first[key]:,}" for key in ("added", "trained", "tokens")]
        cells += [grown, f"**{recalled[setting.asked.index(setting.many)]}**"]
        narrow = len(first["widths"]) * (setting.head_dim + setting.hidden)
        cells += [f"{sum(map(sum, first['widths'])) / narrow - 1:+.0%}"]
        cells += [spread([run["forward"] for run in of_row if "forward" in run], 2), spread(took[0], 0)]
        summary.append([name, *cells, spread([peak / 1e6 for peak in took[1]], 0)])
        curves.append([name, f"{first['rate']:.2g}", *recalled])
    head = ["row", "width of q, k", "added", "trained", "tokens", "recall at growth", f"recall of {setting.many}"]
    swept = [
        [row, ", ".join(f"{run['rate']:.2g}: {run['recall']:.2f}" for run in sweeps if run["row"] == row)]
        for row in ROWS
    ]
    text = f"""A book is pairs of a name and a number, {setting.names} and {setting.numbers} words of one token; then
names are asked for, and the number has to follow. The model is a stock SmolLM3 of two layers, {setting.hidden} wide,
with one head each; queries and keys are {setting.head_dim} wide, values {setting.hidden}; the second layer has no
rotation, so its pattern has rank {setting.head_dim}. It starts near an induction circuit, and is trained for
{setting.pretraining} steps on books of {", ".join(map(str, setting.few))} pairs, then for {setting.steps} on books of
{setting.many}: less the {setting.growth_batches} batches that a growth measures, so that all rows see the same tokens.
Adapters have as many weights as {setting.dims} new dims of every layer's queries and keys, as whole ranks allow; at
full rank more. Growth is at the start; unless a row says that all weights train, only adapters or new dims do. The
control that width is what lacks: "{WIDE}", as wide as growth makes it, beside "{FULL}". AdamW without decay, one
cosine, the rate of each row swept by factors of 3, of peft's rows also at half steps, on seed {TUNING_SEED}. Recall is
the share of right numbers of {16 * setting.held_out:,}; median (range) over seeds. "{NONE}" and "{WIDE}" took their
time in pretraining. The KV cache is that of a token, and "forward" the CPU time of a pass, beside "{NONE}"; LoRA is
merged for free. Names and steps were chosen, on seeds 100 and 0, so that width binds: with 256 names "{FULL}" did as
well as growth.

## Recall by number of pairs

{page.table(["row", "rate", *setting.asked], curves)}

## Recall of {setting.many} by learning rate, on the tuning seed

{page.table(["row", "rate: recall"], swept)}"""
    return page.Page(
        title="A phone book: where LoRA cannot follow",
        claim=said,
        summary=page.table([*head, "KV cache", "forward", "time, s", "peak, MB"], summary),
        text=text,
        draw=partial(draw_page, setting, runs),
        reaches=reaches,
    )


def draw_page(setting: Setting, runs: dict[str, list[dict]], plt):
    """Recall over the number of pairs, median and range."""
    figure, panel = plt.subplots(figsize=(9, 5), layout="constrained")
    for name, of_row in runs.items():
        values = [sorted(run["recall"][str(pairs)] for run in of_row) for pairs in setting.asked]
        style = "--" if ROWS[name].adapter else ":" if ROWS[name].everything else "-"
        (line,) = panel.plot(setting.asked, [statistics.median(v) for v in values], style, marker=".", label=name)
        panel.fill_between(setting.asked, *zip(*((v[0], v[-1]) for v in values)), color=line.get_color(), alpha=0.15)
    panel.set(xlabel="pairs in the book", ylabel="numbers recalled", xscale="log", ylim=(None, 1.01))
    panel.set_xticks(setting.asked, setting.asked)
    panel.minorticks_off()
    figure.legend(loc="outside right upper", fontsize=8, handlelength=4)
    return figure


def main() -> None:
    """Sweep the learning rates, run the rows, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps: shows that it runs")
    arguments = parser.parse_args()
    setting, seeds = (QUICK, [TUNING_SEED]) if arguments.quick else (Setting(), arguments.seeds)
    plain = asdict(setting)
    folder, kept = arguments.output / "recall_models", arguments.output / "recall.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    sweeps = tuned(plain, folder, kept)
    rates = {name: best_rate(found) for name, found in sweeps.items()}
    jobs = [{"row": row, "rate": rates[row], "seed": seed, "setting": plain} for seed in seeds for row in ROWS]
    runs = collect(partial(measure, folder), jobs, kept)
    shutil.rmtree(folder)
    swept = [found[rate] for found in sweeps.values() for rate in sorted(found)]
    counts, costs = ("widths", "added", "trained", "tokens"), ("seconds", "peak_bytes")
    needed = page.kept(runs, "row", "seed", "rate", *counts, "at_growth", "recall", "forward", *costs)
    figures = {
        "setting": plain,
        "sweep": [{"row": run["row"], "rate": run["rate"], "recall": end_of(run)} for run in swept],
        "runs": page.in_table(needed),
    }
    page.publish("recall", figures, seeds, arguments.output, sum(run["seconds"] for run in runs + swept))


if __name__ == "__main__":
    main()

"""Where LoRA cannot follow: a phone book, with more names than `d_k` dims can tell apart.

    python scripts/bench/recall.py

'anna seven bob nine carla two ... bob nine anna seven': pairs of name and number, then questions. A narrow model that
was trained on short books is fine-tuned on long ones: by peft's adapters, by all its weights, by growth. LoRA at any
rank leaves a head's queries and keys `d_k` wide, so its pattern has rank `d_k` at most. The first runs of a seed train
its models, which the others read from a folder that is deleted at the end.
"""

import argparse
import json
import shutil
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from page import RESULTS, Page, Reach, table
from peft import LoraConfig, get_peft_model
from runs import collect, spread
from torch import nn
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from hf_growattn import Grower, GrowthConfig, GrowthReport, patch_model
from hf_growattn.modeling import attentions

TUNING_SEED = 100
THETA = 254.0  # with 4 dims, the base at which no other offset up to 160 is close to that of the token before


@dataclass(frozen=True)
class Setting:
    """The task and its training.

    Attributes:
        hidden, head_dim: width of the model, and of the queries and keys of its one head a layer.
        names, numbers: words of either kind.
        few, many: pairs in the books of pretraining, which takes turns, and of fine-tuning.
        pretraining, steps: optimizer steps; what a growth measures is taken off `steps`.
        pairs: pairs in a batch, so that a batch has as many sequences as fit.
        dims: that a growth adds to the queries and keys of each layer.
        growth_batches: batches that a growth measures; random growth measures one.
        asked: numbers of pairs that recall is measured at, on `held_out` books of 16 questions each.
        rates: of learning, for rows that train all weights and for those that train added ones.
    """

    hidden: int = 64
    head_dim: int = 4
    names: int = 2048
    numbers: int = 32
    few: list[int] = field(default_factory=lambda: [2, 4, 8])
    many: int = 32
    pretraining: int = 150
    pretraining_rate: float = 4e-3
    steps: int = 120
    pairs: int = 256
    dims: int = 8
    growth_batches: int = 16
    asked: list[int] = field(default_factory=lambda: [2, 4, 8, 16, 32, 64])
    held_out: int = 128
    rates: dict[str, list[float]] = field(default_factory=lambda: {"all": [1e-3, 3e-3], "added": [3e-3, 1e-2]})


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
NONE, GUIDED, RANDOM, FULL, WIDE = "no training", "guided growth", "random growth", "all weights", "wide from scratch"
BUDGET = "guided growth by budget"
ROWS = {
    NONE: Row(),
    "LoRA on q, k": Row(adapter={"target_modules": QK}),
    "LoRA on q, k, v, o": Row(adapter={"target_modules": QKVO}),
    "LoRA on q, k, v, o, full rank": Row(adapter={"target_modules": QKVO, "rank": 64}),
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


def draw(setting: Setting, sequences: int, pairs: int, questions: int, generator: torch.Generator) -> dict:
    """Books of pairs, each name once, and questions with their answers, on which alone the loss is."""
    names = torch.rand(sequences, setting.names, generator=generator).argsort(1)[:, :pairs] + setting.numbers
    book = torch.stack((names, torch.randint(setting.numbers, names.shape, generator=generator)), -1)
    asked = torch.randint(pairs, (sequences, questions, 1), generator=generator).expand(-1, -1, 2)
    asked = book.gather(1, asked)
    answers = asked.masked_fill(torch.tensor([True, False]), -100)
    ids = torch.cat((book, asked), 1).flatten(1)
    return {"input_ids": ids, "labels": answers.flatten(1), "logits_to_keep": 2 * questions}


@torch.no_grad()
def build(setting: Setting, extra: int, seed: int) -> SmolLM3ForCausalLM:
    """Two SmolLM3 layers, the second without rotation, started near an induction circuit, which is slow to form.

    The first layer looks at the token before (its biases do) and passes it on turned; the second compares a token with
    what is so turned, by a random projection as wide as its head. Values are as wide as the model.
    """
    torch.manual_seed(seed)
    config = SmolLM3Config(
        vocab_size=setting.names + setting.numbers,
        hidden_size=setting.hidden,
        intermediate_size=setting.hidden,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=setting.head_dim,
        no_rope_layers=[1, 0],
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        attention_bias=True,
        tie_word_embeddings=True,
        initializer_range=setting.hidden**-0.5,
        use_cache=False,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )
    model = patch_model(SmolLM3ForCausalLM(config))
    before, match = layers = attentions(model)
    for layer in layers:
        layer.widen(qk_dims=extra, v_dims=setting.hidden - setting.head_dim)
        nn.init.eye_(layer.projection_of("value").weight)
    model.sync_config()
    turn = torch.linalg.qr(torch.randn(setting.hidden, setting.hidden))[0]
    size = 1.5 * setting.hidden**-0.5  # next to embeddings of this size without the factor
    before.projection_of("output").weight.copy_(size * turn)
    match.projection_of("output").weight.copy_(size * torch.eye(setting.hidden))
    angles = THETA ** -(torch.arange(0, setting.head_dim, 2) / setting.head_dim)
    there = torch.cat((angles**0, angles * 0))
    ahead = torch.cat((angles.cos(), angles.sin()))  # by one position
    for role, bias in (("query", there), ("key", ahead)):
        nn.init.normal_(before.projection_of(role).weight, std=0.02)
        before.projection_of(role).bias[: setting.head_dim] = 10 * bias
    query = torch.randn(setting.head_dim + extra, setting.hidden) * 1.5 * setting.hidden**-0.5
    match.projection_of("query").weight.copy_(query)
    match.projection_of("key").weight.copy_(query @ turn.T)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.mul_(0.1)
    return model.requires_grad_(True)


def train(model: nn.Module, batches: list[Callable[[], dict]], rate: float) -> None:
    """AdamW without decay and one cosine over the batches, a step for each."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if not weights:
        return  # a growth may find nothing that holds
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    for batch in batches:
        model(**batch()).loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def pretrained(setting: Setting, wide: bool, seed: int, folder: Path) -> SmolLM3ForCausalLM:
    """The model of a seed, trained on short books by the first who asks."""
    model = build(setting, setting.dims if wide else 0, seed)
    kept = folder / f"{'wide' if wide else 'narrow'}-{seed}.pt"
    if not kept.exists():
        generator = torch.Generator().manual_seed(seed)
        turns = [setting.few[step % len(setting.few)] for step in range(setting.pretraining)]
        batches = [partial(draw, setting, setting.pairs // n, n, n, generator) for n in turns]
        train(model, batches, setting.pretraining_rate)
        torch.save(model.state_dict(), kept)
    model.load_state_dict(torch.load(kept))
    return model.eval()


@torch.no_grad()
def recall(setting: Setting, model: nn.Module, pairs: int, seed: int) -> float:
    """Share of right numbers among the answers of held-out books."""
    batch = draw(setting, setting.held_out, pairs, 16, torch.Generator().manual_seed(10_000 + seed))
    answers = batch["labels"][:, 1:]
    right = model(**batch).logits[:, :-1].argmax(-1) == answers
    return right[answers >= 0].float().mean().item()


def added_by_growth(setting: Setting) -> int:
    """Weights and biases of all new dims of both layers' queries and keys."""
    return 2 * 2 * setting.dims * (setting.hidden + 1)


def adapted(setting: Setting, model: nn.Module, rank: int = 0, **options) -> nn.Module:
    """The model with LoRA at a rank, or at the one that comes closest to the weights of growth."""
    targets = tuple(options["target_modules"])
    sizes = sum(sum(module.weight.shape) for name, module in model.named_modules() if name.endswith(targets))
    rank = rank or round(added_by_growth(setting) / sizes)
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, **options))


def grow(setting: Setting, model: nn.Module, batches: list[dict], seed: int, dims: float, **options) -> GrowthReport:
    """Grow by a share of the setting's dims in every layer, or of as many weights where they are worth most."""
    spent = {"qk_dims": round(dims * setting.dims)} if dims else {"budget": added_by_growth(setting)}
    return Grower(model, GrowthConfig(seed=seed, **spent, **options)).grow(batches)


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


def claim(setting: Setting, runs: dict[str, list[dict]]) -> tuple[str, list[Reach]]:
    """Who wins and who loses at the long books, and the reach: of equal dims everywhere, and of a budget."""
    ends = {name: [end_of(run) for run in of_row] for name, of_row in runs.items()}
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
        reaches.append(Reach(aim.format(name), measured, verdict))
    return text, reaches


def write(output: Path, setting: Setting, runs: dict[str, list[dict]], sweeps: dict, seeds: list[int]) -> None:
    """The page."""
    (said, reaches), summary, curves = claim(setting, runs), [], []
    for name, of_row in runs.items():
        first, took = of_row[0], [[run[key] for run in of_row] for key in ("seconds", "peak_bytes")]
        recalled = [spread([run["recall"][str(n)] for run in of_row], 2) for n in setting.asked]
        grown = spread([run["at_growth"] for run in of_row if "at_growth" in run], 2)
        cells = [", ".join(str(width) for width, _ in first["widths"])]
        cells += [f"{first[key]:,}" for key in ("added", "trained", "tokens")]
        cells += [grown, f"**{recalled[setting.asked.index(setting.many)]}**", spread(took[0], 0)]
        summary.append([name, *cells, spread([peak / 1e6 for peak in took[1]], 0)])
        curves.append([name, f"{first['rate']:.2g}", *recalled])
    head = ["row", "width of q, k", "added", "trained", "tokens", "recall at growth", f"recall of {setting.many}"]
    swept = [
        [row, ", ".join(f"{r:.2g}: {end_of(found[r]):.2f}" for r in sorted(found))] for row, found in sweeps.items()
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
time in pretraining. Names and steps were chosen, on seeds 100 and 0, so that width binds: with 256 names "{FULL}" did
as well as growth.

## Recall by number of pairs

{table(["row", "rate", *setting.asked], curves)}

## Recall of {setting.many} by learning rate, on the tuning seed

{table(["row", "rate: recall"], swept)}"""
    every = [run for of_row in [*runs.values(), *map(dict.values, sweeps.values())] for run in of_row]
    figures = {"setting": asdict(setting), "runs": [{k: v for k, v in run.items() if k != "setting"} for run in every]}
    shown, title = table([*head, "time, s", "peak, MB"], summary), "A phone book: where LoRA cannot follow"
    page = Page("recall", title, said, shown, text, figures, seeds, sum(run["seconds"] for run in every), reaches)
    page.write(output, partial(draw_page, setting, runs))


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
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps: shows that it runs")
    arguments = parser.parse_args()
    setting, seeds = (QUICK, [TUNING_SEED]) if arguments.quick else (Setting(), arguments.seeds)
    plain = json.loads(json.dumps(asdict(setting)))
    folder, kept = arguments.output / "recall_models", arguments.output / "recall.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    sweeps = tuned(plain, folder, kept)
    rates = {name: best_rate(found) for name, found in sweeps.items()}
    jobs = [{"row": row, "rate": rates[row], "seed": seed, "setting": plain} for seed in seeds for row in ROWS]
    made = collect(partial(measure, folder), jobs, kept)
    write(arguments.output, setting, {row: [run for run in made if run["row"] == row] for row in ROWS}, sweeps, seeds)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()

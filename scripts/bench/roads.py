"""The drafts' other roads: factoring old and new dims anew, and moving the old weights, beside plain growth and LoRA.

    python scripts/bench/roads.py --model a/llama --text Shakespeare.txt --pretrain stories.jsonl

The small GPT-2 of `finetuning.py`, whose patterns are free of positions, as `method="refactor"` needs. It is trained on
`--pretrain` in the tokens of `--model`, then grows once on `--text`. Frozen base: the old weights move once, at the
growth, where a road writes them; then the new dims alone train. Training base: all weights train after it. Every row
has a learning rate of its own, swept on a seed that is not reported.
"""

import argparse
import statistics
from dataclasses import asdict
from functools import partial
from pathlib import Path

import page
import torch
from finetuning import QUICK, gpt2, pretrained, quick_sources
from finetuning_page import Results, beyond_noise, sweep_table
from finetuning_run import SOURCES, Row, Run, Setting, data
from peft import LoraConfig, get_peft_model
from runs import collect, spread
from transformers import AutoTokenizer
from transformers.pytorch_utils import Conv1D

from hf_growattn import freeze_old_dims

NONE, APPEND, UPDATE, REFACTOR, LORA = "no growth", "append", "update_existing", "refactor", "LoRA on all linear layers"
MOVES = {"old_dims_train": True}  # the old dims take their own steepest step, so new ones need not do what those can
ROWS = {
    NONE: Row(),
    APPEND: Row((0.0,)),
    UPDATE: Row((0.0,), config={"update_existing": True} | MOVES),
    REFACTOR: Row((0.0,), config={"method": "refactor"} | MOVES),
    LORA: Row(adapter="LoRA"),
}
FROZEN, TRAINING = "frozen base", "training base"
RATES = {FROZEN: (0.01, 0.02, 0.04), TRAINING: (0.001, 0.002, 0.004)}
TUNING_SEED = 100


class RoadRun(Run):
    """A run whose growth may move old weights, or one of LoRA on all linear layers."""

    moved = 0  # old weights that the growth wrote

    def old_entries(self) -> dict[str, torch.Tensor]:
        """A copy of all weights but those that growth added."""
        masks = self.masks()
        parameters = self.model.named_parameters()
        return {name: (p[~masks[p]] if p in masks else p).detach().flatten().clone() for name, p in parameters}

    def grow(self) -> None:
        """Grow, and count the old weights that moved; from here on they stay where the base is frozen."""
        self.model.requires_grad_(True)
        super().grow()
        if not self.full:
            self.model.requires_grad_(False)
            freeze_old_dims(self.model)
        former, self.before = self.before, self.old_entries()
        self.moved = sum((former[name].flatten() != old).sum().item() for name, old in self.before.items())

    def adapt(self) -> None:
        """LoRA on all linear layers, at the rank that comes nearest to the weights that the growths train."""
        linear = [module for module in self.model.modules() if isinstance(module, Conv1D)]
        wanted = self.budget + (self.model.num_parameters() if self.full else 0)
        rank = max(round(wanted / sum(sum(module.weight.shape) for module in linear)), 1)
        options = {"target_modules": "all-linear", "fan_in_fan_out": True}
        self.trained = get_peft_model(self.model, LoraConfig(r=rank, lora_alpha=rank, **options))

    def figures(self) -> dict:
        """What the run found, with how many weights trained and moved."""
        found, everything = super().figures(), self.full and not self.row.adapter
        return found | {"trained": self.model.num_parameters() if everything else found["added"], "moved": self.moved}


def measure(table: str, row: str, rate: float, seed: int, text: str, setting: dict) -> dict:
    """One run, for `collect`."""
    run = RoadRun(ROWS[row], table == TRAINING, "GPT-2", text, rate, seed, Setting(**setting)).run()
    return run | {"model": "GPT-2"}  # as the tables know it


def swept(table: str, run_all) -> dict[str, dict[float, float]]:
    """Each row's loss at each learning rate on the tuning seed, beyond `RATES` until the best has a worse neighbour."""
    losses: dict[str, dict[float, float]] = {row: {} for row in ROWS}
    wanted = {row: list(RATES[table]) if table == TRAINING or row != NONE else [0.0] for row in ROWS}
    while any(wanted.values()):
        jobs = [{"table": table, "row": row, "rate": r, "seed": TUNING_SEED} for row in ROWS for r in wanted[row]]
        for run in run_all(jobs):
            losses[run["row"]][run["rate"]] = run["loss"]
        for row, found in losses.items():
            best = min(found, key=found.get)
            ends = {min(found): best / 2, max(found): best * 2}
            wanted[row] = [ends[best]] if best in ends and best else []
    return losses


def lead(results: Results, row: str, figure: str, other: str = APPEND) -> tuple[float, float]:
    """By how much a figure of a row is above that of another, seed by seed: mean, half of its 95 % interval."""
    theirs = results.of(other)
    return beyond_noise([run[figure] - theirs[which][figure] for which, run in results.of(row).items()])


def said(mean: float, error: float, other: str = "it") -> str:
    """A difference in words."""
    where = "level with" if abs(mean) <= error else "below" if mean < 0 else "above"
    return f"{where} {other} ({mean:+.3f} ± {error:.3f})"


def claim(tables: list[Results]) -> str:
    """What each road is worth against plain growth, what LoRA is, and whether the road was worth it at all."""
    parts = []
    for results in tables:
        ends = [
            f"{road} starts {said(*lead(results, road, 'at_growth'))} and ends {said(*lead(results, road, 'loss'))}"
            for road in (UPDATE, REFACTOR)
        ]
        ends += [f"{row} ends {said(*lead(results, row, 'loss'))}" for row in (NONE, LORA)]
        ends.append(f"refactor ends {said(*lead(results, REFACTOR, 'loss', NONE), NONE)}")
        parts.append(f"{results.which.capitalize()}, against plain growth: {'; '.join(ends)}.")
    return " ".join(parts)


def table_of(tables: list[Results]) -> str:
    """One line for each row of each table."""
    head = ["", "row", "weights trained", "old weights moved by the growth", "loss after the growth", "loss at the end"]
    lines = []
    for results, row in ((each, row) for each in tables for row in each.rows):
        runs = list(results.of(row).values())
        sizes = [f"{statistics.median(run[name] for run in runs):,.0f}" for name in ("trained", "moved")]
        losses = [[run[name] for run in runs if name in run] for name in ("at_growth", "loss")]
        above = "" if row == APPEND else "{:+.3f} ± {:.3f}".format(*lead(results, row, "loss"))
        cache = f"{statistics.median(run['cache'] for run in runs):+.0%}"
        forward = spread([run["forward"] for run in runs if "forward" in run], 2)
        seconds = [spread([run[name] for run in runs], 0) for name in ("seconds", "growth_seconds")]
        lines.append([results.which, row, *sizes, *map(spread, losses), above, cache, forward, *seconds])
    return page.table([*head, "at the end, above append", "KV cache", "forward", "seconds", "of them growth"], lines)


def draw(tables: list[Results], plt):
    """For each row where it ends, and by a ring where its growth started it; a panel for each table."""
    figure, panels = plt.subplots(1, len(tables), figsize=(9, 2.8), layout="constrained", sharey=True)
    for panel, results in zip(panels, tables):
        for place, row in enumerate(results.rows):
            runs = results.of(row).values()
            if starts := [run["at_growth"] for run in runs if "at_growth" in run]:
                panel.plot(statistics.median(starts), place, "o", color="C0", mfc="none")
            panel.plot([run["loss"] for run in runs], [place] * len(runs), "o", color="C0", alpha=0.7)
        panel.set(title=results.which, xlabel="held-out loss, nats a token")
        panel.set(yticks=range(len(results.rows)), yticklabels=results.rows)
    panels[0].invert_yaxis()
    return figure


def page_of(figures: dict) -> page.Page:
    """The page, out of its figures."""
    setting, runs = figures["setting"], page.out_of_table(figures["runs"])
    tables = [Results(runs, which, "GPT-2", {}) for which in (FROZEN, TRAINING)]
    text = (
        f"A small GPT-2 that knows stories grows once, at the start, on {tables[0].texts[0]}. Every row sees "
        f"{setting['steps']} batches of {setting['batch_size']} x {setting['block_size']} tokens; growths measure the "
        f"first {setting['measured']} of them. Held-out loss on {setting['held_out']} blocks. The budget is what "
        f"{setting['dims']} pattern and {setting['dims']} message dims a head add; LoRA takes the rank whose weights "
        "come nearest to those that train beside it. `update_existing` also takes the steepest step of the old "
        "weights; `refactor` writes the best balanced factors of that whole stepped product in place of old and new "
        "dims. A frozen base means for both that the old attention moves once, at the growth, and never again: from "
        "then on the gradients of all old entries are masked, and at the end they are compared, to the bit, with what "
        "the growth left. The count of moved weights says how much of a frozen checkpoint that rewrites. AdamW without "
        "weight decay, warm-up, cosine, clipping at 1. Loss: median (range) over the seeds; differences: mean over the "
        'seeds with its 95 % interval. The KV cache is that of a token, against the model before; "forward" is the CPU '
        "time of a pass, grown against un-grown. LoRA is merged for free.",
        "## Learning rates",
        *(sweep_table(sweep) for sweep in figures["sweeps"]),
    )
    return page.Page(
        title="The drafts' other roads",
        claim=claim(tables),
        summary=table_of(tables),
        text="\n\n".join(text),
        draw=partial(draw, tables),
    )


def main() -> None:
    """Sweep the learning rates, run the rows, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hub id of a causal LM, for its tokenizer")
    parser.add_argument("--text", help="text to grow on: a file or a Hub id")
    parser.add_argument("--pretrain", help="text to train the GPT-2 on first")
    parser.add_argument("--gpt2", type=Path, default=Path("scripts/output/gpt2"), help="where that GPT-2 is kept")
    parser.add_argument("--steps", type=int, default=Setting.steps, help="batches that every row sees")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--quick", action="store_true", help="a tiny random model and few steps: shows that it runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    setting, seeds = Setting(steps=arguments.steps), arguments.seeds
    if arguments.quick:
        setting, seeds = QUICK, [0, 1]
        _, (text,) = quick_sources()
    elif not (arguments.model and arguments.text and arguments.pretrain):
        parser.error("--model, --text and --pretrain are needed, or --quick")
    else:
        text = Path(arguments.text).stem
        SOURCES.update({text: arguments.text, "pretraining": arguments.pretrain})
        SOURCES["GPT-2's tokenizer"] = tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        SOURCES["GPT-2"] = pretrained("GPT-2", lambda: gpt2(tokenizer), "pretraining", arguments.gpt2, setting)
    data("GPT-2", text, setting.block_size)  # here, so that the processes of the runs find it
    arguments.output.mkdir(parents=True, exist_ok=True)

    def run_all(jobs: list[dict]) -> list[dict]:
        common = {"text": text, "setting": asdict(setting)}
        return collect(measure, [job | common for job in jobs], arguments.output / "roads.jsonl")

    runs, sweeps = [], []
    for table, rates in RATES.items():
        losses = swept(table, run_all) if setting.sweeps else {row: {rates[1]: 0.0} for row in ROWS}
        best = {row: min(found, key=found.get) for row, found in losses.items()}
        jobs = [{"table": table, "row": row, "rate": best[row], "seed": seed} for seed in seeds for row in ROWS]
        runs += run_all(jobs)
        sweeps += [{"table": table, "model": "GPT-2", "text": text, "losses": losses}] if setting.sweeps else []
    which, costs = ("table", "model", "text", "row", "seed"), ("trained", "moved", "seconds", "growth_seconds")
    needed = page.kept(runs, *which, *costs, "at_growth", "loss", "cache", "forward")
    figures = {"setting": asdict(setting), "sweeps": sweeps, "runs": page.in_table(needed)}
    page.publish("roads", figures, seeds, arguments.output, sum(run["seconds"] for run in runs))


if __name__ == "__main__":
    main()

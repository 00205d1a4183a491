"""The page of `finetuning.py`: tables, verdicts and picture out of its runs."""

import math
import statistics
from functools import partial

from page import Page, Reach, in_rows, table
from runs import spread

# Student's t for 95 % of two sides, by degrees of freedom.
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


def beyond_noise(differences: list[float]) -> tuple[float, float]:
    """Mean of paired differences and half the width of its 95 % interval; infinite for a single one."""
    if len(differences) < 2:
        return differences[0], math.inf
    error = statistics.stdev(differences) / len(differences) ** 0.5
    return statistics.fmean(differences), STUDENT.get(len(differences) - 1, 1.96) * error


class Results:
    """The runs of one table and one model."""

    def __init__(self, runs: list[dict], which: str, model: str, groups: dict[str, list[str]]):
        self.runs = [run for run in runs if run["table"] == which and run["model"] == model]
        self.which, self.model, self.groups = which, model, groups
        self.rows, self.texts = (list(dict.fromkeys(run[key] for run in self.runs)) for key in ("row", "text"))

    def of(self, row: str, text: str | None = None) -> dict[tuple, dict]:
        """The runs of a row, by text and seed."""
        return {
            (run["text"], run["seed"]): run
            for run in self.runs
            if run["row"] == row and (text is None or run["text"] == text)
        }

    def median(self, row: str, text: str) -> float:
        """Of the held-out loss at the end."""
        return statistics.median(run["loss"] for run in self.of(row, text).values())

    def best(self, group: str, text: str) -> str:
        """The row of a group that ends lowest on a text, of those that ran on it."""
        return min((row for row in self.groups[group] if self.of(row, text)), key=partial(self._key, text))

    def _key(self, text: str, row: str) -> float:
        return self.median(row, text)

    def difference(self, row: str, other: str, text: str) -> tuple[float, float]:
        """How much a row ends above another one on a text, seed by seed."""
        mine, theirs = self.of(row, text), self.of(other, text)
        return beyond_noise([mine[key]["loss"] - theirs[key]["loss"] for key in mine if key in theirs])

    def summary(self) -> str:
        """One line for each row."""
        head = ["row", "weights added", "steps of training", *self.texts, "KV cache", "forward", "seconds"]
        head += ["of them growth", "peak MB"]
        lines = []
        for row in self.rows:
            runs = list(self.of(row).values())
            lines.append(
                [
                    row,
                    spread([run["added"] for run in runs], 0),
                    spread([run["steps"] for run in runs], 0),
                    *(spread([run["loss"] for run in self.of(row, text).values()]) for text in self.texts),
                    f"{statistics.median(run['cache'] for run in runs):+.0%}",
                    spread([run["forward"] for run in runs if "forward" in run], 2),
                    spread([run["seconds"] for run in runs], 0),
                    spread([run["growth_seconds"] for run in runs if run["growth_seconds"]], 0),
                    f"{statistics.median(run['peak_bytes'] for run in runs) / 1e6:.0f}",
                ]
            )
        return table(head, lines)

    def against(self, other_of: dict[str, str]) -> str:
        """Every row's paired differences to one row of each text."""
        head = ["row", *(f"{text}, above {other_of[text]}" for text in self.texts)]

        def cell(row: str, text: str) -> str:
            return _signed(*self.difference(row, other_of[text], text)) if self.of(row, text) else ""

        return table(head, [[row, *(cell(row, text) for text in self.texts)] for row in self.rows])

    def perplexities(self) -> str:
        """Median perplexity at the end, and right after the first growth."""
        lines = []
        for row in self.rows:
            cells = []
            for text in self.texts:
                runs = list(self.of(row, text).values())
                if not runs:
                    cells.append("")
                    continue
                cell = f"{math.exp(self.median(row, text)):.2f}"
                grown = [run["at_growth"] for run in runs if "at_growth" in run]
                cells.append(f"{cell} ({math.exp(statistics.median(grown)):.2f} at growth)" if grown else cell)
            lines.append([row, *cells])
        return table(["row", *self.texts], lines)

    def compared(self, row: str, group: str) -> dict[str, list[str]]:
        """Texts on which a row ends better than the best of a group, worse, and neither, beyond the noise."""
        texts: dict[str, list[str]] = {"better": [], "worse": [], "as well": []}
        for text in self.texts:
            mean, error = self.difference(row, self.best(group, text), text)
            texts["as well" if abs(mean) <= error else "better" if mean < 0 else "worse"].append(text)
        return texts


def _signed(mean: float, error: float) -> str:
    return f"{mean:+.3f}" + (f" ± {error:.3f}" if 0 < error < math.inf else "")


def _said(found: dict[str, list[str]], other: str) -> str:
    words = {"better": f"below {other}", "as well": f"level with {other}", "worse": f"above {other}"}
    return ", ".join(f"{words[how]} on {' and '.join(texts)}" for how, texts in found.items() if texts)


def reaches(frozen: list[Results], full: list[Results], main: str, grown: list[str], seeds: int) -> list[Reach]:
    """What was aimed at."""
    found = []
    for results in frozen[:1]:
        compared = results.compared(main, "peft")
        best = {text: results.best("peft", text) for text in results.texts}
        details = [f"{text} {_signed(*results.difference(main, best[text], text))} ({best[text]})" for text in best]
        good = not compared["worse"] and len(compared["better"]) >= 2
        verdict = "undecided" if seeds < 3 else "reached" if good else "missed"
        aim = (
            f"{results.model}, frozen base: growth never worse than the best peft row on any text, better on at least 2"
        )
        found.append(Reach(aim, f"loss above the best peft row's: {'; '.join(details)}", verdict))
    for results in full:
        for row in grown:
            compared = results.compared(row, "none")
            details = [f"{text} {_signed(*results.difference(row, 'no growth', text))}" for text in results.texts]
            verdict = "undecided" if seeds < 3 else "missed" if compared["worse"] else "reached"
            aim = f"{results.model}, full fine-tuning: {row} never worse than no growth at equal tokens"
            found.append(Reach(aim, f"loss above that without growth: {'; '.join(details)}", verdict))
    return found


def sweep_table(sweep: dict) -> str:
    """Loss at each learning rate."""
    found = {row: {float(rate): loss for rate, loss in losses.items()} for row, losses in sweep["losses"].items()}
    rates = sorted({rate for losses in found.values() for rate in losses})
    lines = []
    for row, losses in found.items():
        best = min(losses.values())
        lines.append(
            [
                row,
                *(
                    f"**{losses[r]:.3f}**"
                    if losses.get(r) == best
                    else f"{losses.get(r, ''):.3f}"
                    if r in losses
                    else ""
                    for r in rates
                ),
            ]
        )
    return f"{sweep['model']}, {sweep['table']}, {sweep['text']}:\n\n{table(['row', *rates], lines)}"


def draw(results: Results, shown: list[str], plt):
    """Held-out loss over tokens for some rows, a panel for each text: the median over the seeds."""
    figure, panels = plt.subplots(1, len(results.texts), figsize=(4 * len(results.texts), 3.6), layout="constrained")
    for panel, text in zip([panels] if len(results.texts) == 1 else panels, results.texts):
        for row in (row for row in shown if results.of(row, text)):
            curves = [run["curve"] for run in results.of(row, text).values()]
            points = [(step[0][0], statistics.median(loss for _, loss in step)) for step in zip(*curves)]
            panel.plot(*zip(*points), marker="o", markersize=3, label=row)
        panel.set(title=f"{results.model} on {text}", xlabel="tokens", ylabel="held-out loss")
    panel.legend(fontsize=7)
    return figure


def page_of(figures: dict, names: dict) -> Page:
    """The page, out of its figures.

    Args:
        figures: `setting`, `sweeps` with the losses by learning rate of each table, model and text, and `runs`.
        names: `growth`, the row that the aims are about; `both`, with LoRA; `peft`, all rows of peft's alone;
            `patterns`, what may only change patterns; `none`, what full fine-tuning is without growth; `shown`, what
            the picture shows.
    """
    setting, sweeps, runs = figures["setting"], figures["sweeps"], in_rows(figures["runs"])
    groups = {"peft": names["peft"], "none": names["none"]}
    models = list(dict.fromkeys(run["model"] for run in runs))
    frozen = [Results(runs, "frozen base", model, groups) for model in models]
    full = [r for r in (Results(runs, "full fine-tuning", model, groups) for model in models) if r.runs]
    grown = [row for row in (full[0].rows if full else []) if row not in names["none"]]
    first = frozen[0]
    against = {text: first.best("peft", text) for text in first.texts}
    best = "the best of peft's rows"
    claims = [
        f"{results.model} with a frozen base: the loss of growth by budget ends "
        f"{_said(results.compared(names['growth'], 'peft'), best)}."
        for results in frozen
    ]
    claims += [
        f"{results.model} with a frozen base: a third of the budget in growth and the rest in LoRA ends "
        f"{_said(results.compared(names['both'], 'peft'), best)}."
        for results in frozen
        if names["both"] in results.rows
    ]
    patterns, lora_qk = names["patterns"]
    if {patterns, lora_qk} <= set(first.rows):
        shared = [text for text in first.texts if first.of(patterns, text) and first.of(lora_qk, text)]
        details = [f"{text} {_signed(*first.difference(patterns, lora_qk, text))}" for text in shared]
        claims.append(f"Where queries and keys alone may change, growth beside LoRA: {'; '.join(details)}.")
    claims += [
        f"{results.model}, full fine-tuning: {row} ends {_said(results.compared(row, 'none'), 'no growth')}."
        for results in full
        for row in grown
    ]
    tokens = setting["batch_size"] * setting["block_size"]
    text = [
        f"Every row sees {setting['steps']} batches of {setting['batch_size']} x {setting['block_size']} tokens "
        f"({setting['steps'] * tokens:,}) and trains on them. Rows that grow by the gradient measure "
        f"{setting['measured']} of these batches (all of a row's growths together), as do EVA and LoRA-GA: at the "
        'start those that training sees first, later those that it saw last; "set aside" are those that it never sees, '
        f"which costs as many steps. Held-out loss on {setting['held_out']} blocks. "
        f"The budget is what a uniform growth by {setting['dims']} pattern and "
        f"{setting['dims']} message dims a head adds; random growth adds just that, and peft's rows take the nearest "
        "rank; AdaLoRA starts at one and a half times that rank. AdamW without weight decay, a twentieth of the steps "
        "warm-up, cosine, clipping at 1. Frozen base: after a growth the gradients of all old entries are masked, and "
        "at the end they are compared with the base, to the bit. So `old_dims_train=False`, but beside LoRA, which "
        'moves the old dims, and in "growth beyond the old dims", which shows what that is worth. '
        "Each row's learning rate is swept on each text, on a seed that is not reported; rates within 0.01 of the best "
        "are compared on two more. "
        "Growth, random growth, LoRA of both kinds, both together and the best of peft's rows in the sweep on the "
        "first text see all texts, patterns alone, growth beyond the old dims and full fine-tuning the first, and rows "
        "that stand in a sweep's table alone nothing more. Loss: median (range) over the seeds. Differences: mean over "
        'the seeds, with its 95 % interval. "LoRA" alone is on q, k, v, o. The KV cache is that of a token, against '
        'the model before; "forward" is the CPU time of a pass, grown against un-grown. LoRA is merged for free.',
        *(f"## {r.model}, {r.which}\n\n{r.summary()}\n\nPerplexity:\n\n{r.perplexities()}" for r in (*frozen, *full)),
        "## Differences, seed by seed",
        f"{first.model}, frozen base, against the best of peft's rows:\n\n{first.against(against)}",
        *(
            f"{r.model}, {r.which}, against {names['growth']}:\n\n{r.against(dict.fromkeys(r.texts, names['growth']))}"
            for r in frozen
        ),
        *(
            f"{r.model}, {r.which}, against no growth:\n\n{r.against(dict.fromkeys(r.texts, 'no growth'))}"
            for r in full
        ),
        "## Learning rates",
        *(sweep_table(sweep) for sweep in sweeps if sweep["losses"]),
    ]
    return Page(
        title="Fine-tuning beside LoRA and its kin",
        claim=" ".join(claims),
        summary=first.summary(),
        text="\n\n".join(text),
        draw=partial(draw, first, names["shown"]),
        reaches=reaches(frozen, full, names["growth"], grown, len({run["seed"] for run in runs})),
    )

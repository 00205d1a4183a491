"""What each way to choose directions is worth: held-out loss right after growth, by estimator, dims and kind.

    OMP_NUM_THREADS=1 python scripts/bench/estimators.py --model path/to/llama --text my_text.txt

Every row has the same model, growth batches, held-out batches, ridge and step search; nothing is trained after the
growth. All estimators see the whole gradient, so the table compares them and not their sketches.
"""

from dataclasses import replace
from functools import partial

import page
from compared import ESTIMATORS, compared_gradients
from runs import collect, spread
from tasks import TextTask, chosen, held_out, task_parser

from hf_growattn.grow.batches import halves_of
from hf_growattn.grow.plan import strength_of
from hf_growattn.grow.search import StepSearch
from hf_growattn.grow.trial import Change, Trial
from hf_growattn.growable.models import attentions
from hf_growattn.measure.blocks import measure_moments
from hf_growattn.measure.gradients import Gradient, exact_gradients
from hf_growattn.measure.kinds import MESSAGES, PATTERNS
from hf_growattn.measure.passes import mean_loss, undisturbed

OURS = {"whitened": True, "whitened, old dims frozen": False}  # and what each takes as `old_dims_train`
OTHERS = [name for name in ESTIMATORS if name not in OURS]
ROWS = [*OURS, *OTHERS]
CHOICES = {"patterns": [PATTERNS], "messages": [MESSAGES], "both": [PATTERNS, MESSAGES]}


def gradients_of(estimator: str, model, growth, dims: int) -> list[Gradient]:
    """Directions of every layer and kind by one estimator."""
    halves = halves_of(growth)
    with undisturbed(model):
        blocks, _ = measure_moments(model, attentions(model), [PATTERNS, MESSAGES], growth, 0.05)
        if estimator in OURS:
            blocks = [replace(block, old_dims_train=OURS[estimator]) for block in blocks]
            return exact_gradients(model, blocks, halves, dims)
        return compared_gradients(estimator, model, blocks, halves, dims, 0.05, seed=0)


def loss_after(model, gradients: list[Gradient], dims: int, growth, fresh) -> float:
    """Grow for a moment along these directions by the searched step, and return the held-out loss."""
    halves = [half[:: max(len(half) // 8, 1)] for half in halves_of(growth)]
    trial = Trial([Change(gradient, dims, strength_of(gradient)[:dims]) for gradient in gradients])
    try:
        with undisturbed(model):
            steps, _ = StepSearch(trial, lambda half: mean_loss(model, halves[half])).run()
        trial.take(steps)
        return held_out(model, fresh)
    finally:
        trial.undo()


def measure(task: TextTask, seed: int, estimator: str, dims: list[int], **_) -> dict:
    """All columns of one estimator, on the data of one seed."""
    model, (growth, fresh) = task.load(seed), task.data(seed)
    gradients = gradients_of(estimator, model, growth, max(dims))
    losses = {}
    for choice, kinds in CHOICES.items():
        which = [gradient for gradient in gradients if gradient.block.kind in kinds]
        for number in dims:
            losses[column(choice, number)] = loss_after(model, which, number, growth, fresh)
    return {"before": held_out(model, fresh), "losses": losses}


def column(choice: str, dims: int) -> str:
    """What a column is called."""
    return f"{choice}, {dims} dims"


def gains(runs: list[dict], estimator: str, name: str) -> list[float]:
    """By how much the held-out loss fell in a column, for each seed."""
    return [run["before"] - run["losses"][name] for run in runs if run["estimator"] == estimator]


def median(values: list[float]) -> float:
    """The median, as `spread` writes it."""
    return float(spread(values, 6).split()[0])


def claim(runs: list[dict], columns: list[str]) -> str:
    """In how many columns each of ours gains more than all that are not ours, and where one of those gains more."""
    parts = []
    for ours in OURS:
        won, lost = 0, []
        for name in columns:
            own = median(gains(runs, ours, name))
            other = max(OTHERS, key=lambda e: median(gains(runs, e, name)))
            theirs = median(gains(runs, other, name))
            won += own >= theirs
            lost += [f"{name}: {other} {theirs:.4f}, ours {own:.4f}"] if own < theirs else []
        beaten = f", and loses in {'; '.join(lost)}" if lost else ""
        parts.append(f'"{ours}" lowers the held-out loss most in {won} of {len(columns)} columns{beaten}.')
    return f"By the median over the seeds, against the estimators that are not ours: {' '.join(parts)}"


def draw(runs: list[dict], columns: list[str], plt):
    """A panel for each column, a bar for each estimator with its range."""
    figure, panels = plt.subplots(1, len(columns), figsize=(2.6 * len(columns), 3), layout="constrained", sharey=True)
    for panel, name in zip(panels, columns):
        for place, estimator in enumerate(ROWS):
            values = gains(runs, estimator, name)
            panel.barh(place, median(values), color="C0" if estimator in OURS else "0.7")
            panel.plot([min(values), max(values)], [place, place], color="black", linewidth=1)
        panel.set(title=name, xlabel="fall of the loss, nats", yticks=range(len(ROWS)), yticklabels=ROWS)
    panels[0].invert_yaxis()
    return figure


def page_of(figures: dict) -> page.Page:
    """The page, out of its figures."""
    setting, runs, rows = figures["setting"], figures["runs"], []
    columns = [column(choice, number) for choice in CHOICES for number in setting["dims"]]
    for estimator in ROWS:
        own = [run for run in runs if run["estimator"] == estimator]
        seconds, peak = spread([run["seconds"] for run in own], 0), spread([run["peak_bytes"] / 1e6 for run in own], 0)
        rows.append([estimator, *(spread(gains(runs, estimator, name), 4) for name in columns), seconds, peak])
    before = spread([run["before"] for run in runs if run["estimator"] == ROWS[0]], 4)
    return page.Page(
        title="Ways to choose directions",
        claim=claim(runs, columns),
        summary=page.table(["estimator", *columns, "seconds", "peak, MB"], rows),
        text=(
            f"{setting['data']}: fall of the held-out loss right after growth, in nats a token, median (range) over "
            f"the seeds; {before} before. Every layer grows by so many dims of the kinds named, along directions from "
            f"{setting['batches']} batches of {setting['batch_size']} x {setting['block_size']} tokens, by a step that "
            "the same search finds; held out are as many. Nothing is trained. Seconds and memory are those of a whole "
            'row. "whitened" is ours, with the whole gradient; "old dims frozen" is ours with `old_dims_train=False`, '
            "which leaves in what the old dims could follow if they trained; "
            '"per-sequence" and "pooled-truncated" are the drafts\' own; "gradient" is GradMax\'s; "random" leaves the '
            "function as it is, as Net2Net does."
        ),
        draw=partial(draw, runs, columns),
    )


def main() -> None:
    """Measure, and write the page."""
    parser = task_parser(__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[2, 8])
    arguments, task = chosen(parser)
    setting = task.setting() | {"dims": [1] if arguments.quick else arguments.dims}
    jobs = [setting | {"seed": seed, "estimator": e} for seed in arguments.seeds for e in ROWS]
    runs = collect(partial(measure, task), jobs, arguments.output / "estimators.jsonl")
    needed = page.kept(runs, "seed", "estimator", "before", "losses", "seconds", "peak_bytes")
    seconds = sum(run["seconds"] for run in runs)
    page.publish("estimators", {"setting": setting, "runs": needed}, arguments.seeds, arguments.output, seconds)


if __name__ == "__main__":
    main()

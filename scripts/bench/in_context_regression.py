"""In-context linear regression (Garg et al. 2022): narrow heads grown in the middle of training.

    OMP_NUM_THREADS=1 python scripts/bench/in_context_regression.py

A GPT-2 sees points x and values w^T x of a linear function that it never saw, and predicts the value of the next x.
"""

from dataclasses import replace

import page
from harness import Cell
from in_context_task import InContextRegression
from methods import LORA, Method
from results import Declared, Results, make_parser, parse, spread

RATES = (1.5e-3, 3e-3, 6e-3)
GUIDED, RANDOM = "guided growth", "random growth"
QKVO = ("attn.c_attn", "attn.c_proj")  # GPT-2 has queries, keys and values in one matrix
LINEAR = (*QKVO, "mlp.c_fc", "mlp.c_proj")


def methods(task: InContextRegression) -> dict[str, Method]:
    """What is compared; all weights train but where the base is frozen, once the model changes."""
    growth = Method(growth={"qk_dims": task.wide - task.narrow}, at=0.5, base=True, rates=RATES)
    lora = Method(adapter="lora", targets=LINEAR, at=0.5, base=True, rates=RATES)
    return {
        "stay narrow": Method(base=True, rates=RATES),
        GUIDED: growth,
        RANDOM: replace(growth, random=True),
        LORA: lora,
        f"{LORA}, base frozen": replace(lora, base=False),
        "LoRA on q, k, v, o": replace(lora, targets=QKVO),
        "wide heads from scratch": Method(base=True, wide=True, rates=RATES),
    }


def reaches(results: Results) -> list[page.Reach]:
    """Whether growth is better than every row of peft's by more than twice the range over seeds."""
    (task,) = results.tasks
    best = results.best(task, [name for name in results.methods[task] if "LoRA" in name])
    ours, theirs, lead = results.values(task, GUIDED), results.values(task, best), results.lead(task, GUIDED, best)
    noise = max(max(values) - min(values) for values in (ours, theirs))
    verdict = "undecided" if len(ours) < 3 else "reached" if lead.mean > 2 * noise else "missed"
    aim = "In-context regression with narrow heads: better than every peft row by more than twice the seeds' range"
    return [page.Reach(aim, f"{spread(ours)} against {spread(theirs)} ({best})", verdict)]


PAGE = Declared(
    name="in_context_regression",
    title="In-context linear regression",
    text="""y = w^T x, x and w Gaussian, drawn afresh for every sequence; values have unit variance, so that an error is
the squared error over the number of dims. Two tokens a point, (x, 0, query) and (x, y, example), read in by a trained
linear map; predictions at the queries, which see all examples before them. The error is the mean over all numbers of
examples; "after all examples" is that of the last query. Garg et al. have x and y in tokens of their own, 12 layers and
a curriculum. Otherwise a stock GPT-2 without position embeddings. All weights train for half of the steps; then the
model changes, and training goes on with the same optimizer, without the base where it is frozen.""",
    growing=[GUIDED, RANDOM],
    more={"after all examples": "last", "right after the change": "at_change"},
    reaches=reaches,
)


def main() -> None:
    """Run the page."""
    arguments = parse(make_parser(__doc__))
    task = InContextRegression()
    if arguments.quick:
        sizes = {"dims": 3, "points": 6, "d": 8, "narrow": 2, "wide": 4, "batch_size": 4, "held_out": 16}
        task = InContextRegression(steps=6, growth_batches=2, **sizes)
    PAGE.run([Cell(task, methods(task))], arguments)


if __name__ == "__main__":
    main()

"""Where LoRA cannot follow: a phone book, with more names than narrow queries can tell apart.

    OMP_NUM_THREADS=1 python scripts/bench/recall.py

A narrow model that was trained on short books is fine-tuned on long ones: by peft's adapters, by all its weights, by
growth. LoRA at any rank leaves a head's queries and keys as wide as they are, so the rank of its pattern stays.
"""

import statistics
from dataclasses import replace

import page
from harness import Cell
from methods import LORA, NOTHING, Method
from recall_task import PhoneBook
from results import Declared, Results, make_parser, parse, spread

QK, QKVO = ("query", "key"), ("query", "key", "value", "output")
ADDED, ALL = (3e-3, 1e-2), (1e-3, 3e-3)  # learning rates of what is added, and of all weights
GUIDED, RANDOM, FULL, BUDGET = "guided growth", "random growth", "all weights", "guided growth by budget"


def methods(dims: int) -> dict[str, Method]:
    """What is compared; a growth by fixed widths adds `dims` to each layer's queries and keys."""
    lora = Method(adapter="lora", rates=ADDED)
    growth = Method(growth={"qk_dims": dims}, rates=ADDED)
    return {
        "no training": NOTHING,
        "LoRA on q, k": Method(adapter="lora", targets=QK, rates=ADDED),
        "LoRA on q, k, v, o": Method(adapter="lora", targets=QKVO, rates=ADDED),
        LORA: lora,
        f"{LORA}, full rank": replace(lora, rank=64, rates=ALL),
        "PiSSA on q, k, v, o": Method(adapter="pissa", targets=QKVO, rates=ADDED),
        RANDOM: replace(growth, random=True),
        GUIDED: growth,
        f"{GUIDED}, half the dims": Method(growth={"qk_dims": max(dims // 2, 1)}, rates=ADDED),
        BUDGET: Method(growth={}, rates=ADDED),
        FULL: Method(base=True, rates=ALL),
        "random growth, all weights": Method(growth={"qk_dims": dims}, random=True, base=True, rates=ALL),
        "guided growth, all weights": Method(growth={"qk_dims": dims}, base=True, rates=ALL),
        "wide from scratch": Method(wide=True, base=True, rates=ALL),
    }


def reaches(results: Results) -> list[page.Reach]:
    """Whether growth recalls more than every row of peft's by more than twice the range over seeds."""
    (task,) = results.tasks
    adapters = [name for name in results.methods[task] if "LoRA" in name or "PiSSA" in name]
    best, found = results.best(task, adapters), []
    for name in (GUIDED, BUDGET):
        ours, theirs = results.values(task, name), results.values(task, best)
        noise = max(max(values) - min(values) for values in (ours, theirs))
        clear = statistics.median(ours) - statistics.median(theirs) > 2 * noise and min(ours) > max(theirs)
        verdict = "undecided" if len(ours) < 3 else "reached" if clear else "missed"
        aim = f"Phone book: recall of {name} above every peft row's by more than twice the range over seeds"
        found.append(page.Reach(aim, f"{spread(ours)} against {spread(theirs)} ({best})", verdict))
    return found


PAGE = Declared(
    name="recall",
    title="A phone book: where LoRA cannot follow",
    text="""A book is pairs of a name and a number, words of one token; then names are asked for, and the number has to
follow. The model is a stock SmolLM3 of two layers with one head each; the second layer has no rotation, so the rank of
its pattern is the width of its queries. It starts near an induction circuit, and is trained on books of a few pairs
before all of this. Recall is the share of right numbers in books as long as those of fine-tuning. The control that
width is what lacks is "wide from scratch", as wide as growth makes it, next to "all weights".""",
    growing=[GUIDED, BUDGET],
    more={"right after the change": "at_change", "recall of 64 pairs": "of 64"},
    reaches=reaches,
)


def main() -> None:
    """Run the page."""
    arguments = parse(make_parser(__doc__))
    task = PhoneBook()
    if arguments.quick:
        tiny = {"hidden": 16, "head_dim": 2, "names": 16, "numbers": 4, "few": (2,), "many": 4, "pretraining": 2}
        task = PhoneBook(steps=4, growth_batches=2, pairs=8, dims=2, asked=(2, 4), held_out=4, **tiny)
    PAGE.run([Cell(task, methods(task.dims))], arguments)


if __name__ == "__main__":
    main()

"""Where width binds: the phone book of recall.py, over the width of queries and keys and the number of items.

OMP_NUM_THREADS=1 python scripts/bench/recall_map.py --processes 2
"""

from functools import partial
from itertools import product

from harness import Cell
from methods import LORA, NOTHING, Method
from recall_task import PhoneBook
from results import Declared, Results, make_parser, parse

WIDTHS, PAIRS, NAMES = (4, 6, 8, 16), (16, 32, 64), (64, 2048)
FULL_RANK, GROWN = f"{LORA}, full rank", "growth by budget"
METHODS = {  # learning rates around the best ones of recall.py
    "no training": NOTHING,
    LORA: Method(adapter="lora", rates=(1e-2, 3e-2)),
    FULL_RANK: Method(adapter="lora", rank=64, rates=(1e-3, 3e-3)),
    GROWN: Method(growth={}, rates=(1e-2, 3e-2)),
}
PAYS = 0.01  # of recall: nobody would care for a smaller lead


def claim(results: Results) -> str:
    """In how many cells growth pays, against LoRA at equal weights and at full rank."""
    parts = []
    for other, against in ((LORA, "at equal weights"), (FULL_RANK, "against full rank")):
        leads = {task: results.lead(task, GROWN, other) for task in results.tasks}
        pays = [task for task, lead in leads.items() if min(lead.values) > 0 and lead.mean > PAYS]
        largest = max(leads, key=lambda task: leads[task].mean)
        parts.append(f"{len(pays)} {against}, where its largest lead is {leads[largest]} ({largest})")
    start = f"Of {len(results.tasks)} phone books growth recalls more than LoRA on all linear layers, with every seed"
    return f"{start} and by more than {PAYS}, in {'; '.join(parts)}."


def draw(results: Results, plt):
    """A map for each number of names: the lead of growth over LoRA at equal weights and at full rank."""
    tasks: list[PhoneBook] = list(results.tasks.values())
    names = sorted({task.names for task in tasks})
    widths, pairs = sorted({task.head_dim for task in tasks}), sorted({task.many for task in tasks})
    figure, panels = plt.subplots(2, len(names), figsize=(4.2 * len(names), 6), layout="constrained", squeeze=False)
    for (down, other), (across, count) in product(enumerate((LORA, FULL_RANK)), enumerate(names)):
        leads = {
            (task.many, task.head_dim): results.lead(task.name, GROWN, other).mean
            for task in tasks
            if task.names == count
        }
        grid = [[leads.get((row, width), 0.0) for width in widths] for row in pairs]
        panel = panels[down][across]
        image = panel.imshow(grid, origin="lower", cmap="RdBu", vmin=-0.3, vmax=0.3, aspect="auto")
        for (y, row), (x, width) in product(enumerate(pairs), enumerate(widths)):
            panel.text(x, y, f"{leads.get((row, width), 0.0):+.2f}", ha="center", va="center", fontsize=8)
        panel.set_xticks(range(len(widths)), widths)
        panel.set_yticks(range(len(pairs)), pairs)
        against = "at equal weights" if other == LORA else "LoRA at full rank"
        panel.set(xlabel="width of queries and keys", ylabel="pairs in a book", title=f"{count:,} names, {against}")
    figure.colorbar(image, ax=panels, label="lead of growth in recall", shrink=0.7)
    return figure


PAGE = Declared(
    name="recall_map",
    title="Where width binds: a map",
    text="The model and the data are those of recall.py, with other widths, pairs and names.",
    growing=[GROWN],
    claim=claim,
    draw=draw,
)


def main() -> None:
    """Run every cell."""
    arguments = parse(make_parser(__doc__))
    make, widths, pairs, names = PhoneBook, WIDTHS, PAIRS, NAMES
    if arguments.quick:
        tiny = {"hidden": 16, "numbers": 4, "few": (2,), "pretraining": 2, "pairs": 8, "asked": (2,), "held_out": 4}
        make, widths, pairs, names = partial(PhoneBook, steps=2, growth_batches=2, dims=2, **tiny), (2,), (4,), (16,)
    tasks = [make(head_dim=w, many=p, names=n) for w, p, n in product(widths, pairs, names)]
    PAGE.run([Cell(task, METHODS) for task in tasks], arguments)


if __name__ == "__main__":
    main()

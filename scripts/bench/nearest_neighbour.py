"""What growth is worth where rank is what is missing: the nearest neighbour (Amsel, Yehudai, Bruna 2024).

    OMP_NUM_THREADS=1 python scripts/bench/nearest_neighbour.py

Return the nearest of N points on a sphere to a query on it. One head as wide as the data does it; narrow heads would
have to be very many. Heads that start narrow are grown in the middle of training.
"""

import statistics
from dataclasses import replace

import page
from harness import Cell
from methods import LORA, Method
from nearest_task import NearestNeighbour
from results import Declared, Results, make_parser, parse, spread

RATES = (3e-3, 6e-3, 1.2e-2)
STAY, SCRATCH = "stay narrow", "full width from scratch"
# Each guided method, and the random one that grows at the same time.
GUIDED = {
    "guided growth": "random growth",
    "guided growth after a quarter": "random growth after a quarter",
}


def methods(task: NearestNeighbour) -> dict[str, Method]:
    """What is compared; q, k, v, o are all linear layers that there are, since the MLP is zeroed."""
    qkvo = ("query", "key", "value", "output")
    lora = Method(adapter="lora", targets=qkvo, at=0.5, base=True, rates=RATES)
    guided = Method(growth={"qk_dims": task.d - task.width}, at=0.5, base=True, rates=RATES)
    quarter = replace(guided, at=0.25)
    half_name, quarter_name = GUIDED
    return {
        STAY: Method(base=True, rates=RATES),
        SCRATCH: Method(base=True, wide=True, rates=RATES),
        LORA: lora,
        f"{LORA}, base frozen": replace(lora, base=False),
        half_name: guided,
        GUIDED[half_name]: replace(guided, random=True),
        quarter_name: quarter,
        GUIDED[quarter_name]: replace(quarter, random=True),
    }


def reaches(results: Results) -> list[page.Reach]:
    """Whether growth ends at most at a share of others' errors, on every seed."""
    task, found = next(iter(results.tasks)), []
    for name, chance in GUIDED.items():
        for other, share in ((SCRATCH, 0.75), (chance, 0.5), (LORA, 1.0)):
            pairs = zip(results.values(task, name), results.values(task, other))
            ratios = [own / its for own, its in pairs]
            verdict = "reached" if max(ratios) <= share else "missed" if min(ratios) > share else "undecided"
            aim = f"Nearest neighbour, {name}: at most {share} times the error of {other}"
            found.append(page.Reach(aim, f"{spread(ratios, 2)} times", verdict))
    return found


def draw(results: Results, plt):
    """Held-out error over steps: the median of the seeds."""
    figure, panel = plt.subplots(figsize=(8, 4.5), layout="constrained")
    task = next(iter(results.tasks))
    for method in results.methods[task]:
        curves = [row["curve"] for row in results.rows(task, method)]
        steps = [step for step, _ in curves[0]]
        middle = [statistics.median(error for _, error in points) for points in zip(*curves)]
        panel.plot(steps, middle, marker=".", label=method)
    panel.set(xlabel="steps", ylabel="held-out mean square error", ylim=(0, None), title=task)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


PAGE = Declared(
    name="nearest_neighbour",
    title="Nearest neighbour",
    text="""Points and queries lie on a sphere. The model is one stock SmolLM3 layer without rotation, its MLP zeroed
and no final norm; queries and keys start narrow, values are as wide as a point. Mean square error of a coordinate on
held-out queries. All weights train, unless a method freezes the base, until the model changes: after half of the steps,
or a quarter. LoRA gets the number of weights that growth to full width adds. In the theory narrow heads
have to be very many: the last rows have more of them.""",
    growing=list(GUIDED),
    more={"right after the change": "at_change"},
    reaches=reaches,
    draw=draw,
)


def main() -> None:
    """Run the page."""
    arguments = parse(make_parser(__doc__))
    task = NearestNeighbour()
    if arguments.quick:
        task = NearestNeighbour(steps=8, growth_batches=2, d=8, points=4, queries=4, width=2, heads=4, held_out=2)
    more = [replace(task, heads=number * task.heads) for number in (2, 4)]
    cells = [Cell(task, methods(task)), *(Cell(each, {STAY: Method(base=True, rates=RATES)}) for each in more)]
    PAGE.run(cells, arguments)


if __name__ == "__main__":
    main()

"""What a budget buys: held-out loss right after growth, allocated, uniform, patterns only and messages only.

    OMP_NUM_THREADS=1 python scripts/bench/allocation.py --model path/to/llama --text my_text.txt

Every row adds as many parameters as a uniform growth by `--dims` pattern and message dims a head, with the same model,
growth batches and held-out batches; nothing is trained after the growth.
"""

from functools import partial

import page
from runs import collect, spread
from tasks import TextTask, chosen, held_out, serving_cost, task_parser

from hf_growattn import Grower, GrowthConfig

NONE, UNIFORM, ALLOCATED = "no growth", "uniform", "allocated"
KINDS = {ALLOCATED: ["patterns", "messages"], "patterns only": ["patterns"], "messages only": ["messages"]}
ROWS = (NONE, UNIFORM, *KINDS)


def measure(task: TextTask, seed: int, growth: str, dims: int, budget: int = 0, **_) -> dict:
    """Grow a fresh copy of the model, and return its held-out loss and the parameters that were added."""
    model, (batches, fresh) = task.load(seed), task.data(seed)
    if growth == NONE:
        return {"loss": held_out(model, fresh), "parameters": 0, "cache": 0.0, "forward": 1.0}
    config = dict(qk_dims=dims, v_dims=dims) if growth == UNIFORM else dict(budget=budget, kinds=KINDS[growth])
    report = Grower(model, GrowthConfig(**config)).grow(batches)
    cost = serving_cost(model, task.load(seed), fresh[0])
    return {"loss": held_out(model, fresh), "parameters": report.added_parameters} | cost


def losses(runs: list[dict], growth: str) -> list[float]:
    """Held-out losses of a row, by seed."""
    return [run["loss"] for run in runs if run["growth"] == growth]


def above(runs: list[dict], growth: str) -> list[float]:
    """By how much a row ends above the allocated one, seed by seed."""
    return [loss - best for loss, best in zip(losses(runs, growth), losses(runs, ALLOCATED))]


def claim(runs: list[dict]) -> str:
    """What the allocated growth gains, and which row beats it on how many seeds."""
    gained, others = above(runs, NONE), [row for row in ROWS if row not in (NONE, ALLOCATED)]
    text = f"A growth that allocates its budget lowers the held-out loss by {spread(gained, 4)}. "
    parts = []
    for row in others:
        values = above(runs, row)
        parts.append(f"{row} on {sum(v > 0 for v in values)} of {len(values)} seeds (by {spread(values, 4)})")
    return text + f"It ends below {', '.join(parts)}."


def draw(runs: list[dict], plt):
    """A dot for each run."""
    figure, panel = plt.subplots(figsize=(6, 2.6), layout="constrained")
    for place, row in enumerate(ROWS):
        panel.plot(losses(runs, row), [place] * len(losses(runs, row)), "o", alpha=0.7)
    panel.set(xlabel="held-out loss, nats a token", yticks=range(len(ROWS)), yticklabels=ROWS)
    panel.invert_yaxis()
    return figure


def page_of(figures: dict) -> page.Page:
    """The page, out of its figures."""
    setting, runs, rows = figures["setting"], figures["runs"], []
    for row in ROWS:
        own = [run for run in runs if run["growth"] == row]
        cells = [[run["parameters"] for run in own], [run["seconds"] for run in own]]
        peaks = spread([run["peak_bytes"] / 1e6 for run in own], 0)
        lead = "" if row == ALLOCATED else spread(above(runs, row), 4)
        cost = [f"{max(run['cache'] for run in own):+.0%}", spread([run["forward"] for run in own], 2)]
        rows.append([row, spread(losses(runs, row), 4), lead, *(spread(values, 0) for values in cells), peaks, *cost])
    head = ["growth", "held-out loss", "above the allocated one by", "added parameters", "seconds", "peak, MB"]
    head += ["KV cache, at most", "forward pass"]
    return page.Page(
        title="What a budget buys",
        claim=claim(runs),
        summary=page.table(head, rows),
        text=(
            f"{setting['data']}, median (range) over the seeds. The budget is what {setting['dims']} dims of each kind "
            f"add to every head. A growth measures {setting['batches']} batches of {setting['batch_size']} x "
            f"{setting['block_size']} tokens; held out are as many. Nothing is trained. Seconds and memory count "
            "loading the model and its held-out loss too. KV cache and forward pass stand against the model before."
        ),
        draw=partial(draw, runs),
    )


def main() -> None:
    """Grow, and write the page."""
    parser = task_parser(__doc__)
    parser.add_argument("--dims", type=int, default=2, help="dims of each kind in the uniform growth")
    arguments, task = chosen(parser)
    setting = task.setting() | {"dims": arguments.dims}
    one = partial(collect, partial(measure, task), kept=arguments.output / "allocation.jsonl")
    runs = one([setting | {"seed": seed, "growth": row} for seed in arguments.seeds for row in (NONE, UNIFORM)])
    budget = max(run["parameters"] for run in runs)
    jobs = [setting | {"seed": seed, "growth": row, "budget": budget} for seed in arguments.seeds for row in KINDS]
    runs += one(jobs)
    needed = page.kept(runs, "seed", "growth", "loss", "parameters", "cache", "forward", "seconds", "peak_bytes")
    seconds = sum(run["seconds"] for run in runs)
    page.publish("allocation", {"setting": setting, "runs": needed}, arguments.seeds, arguments.output, seconds)


if __name__ == "__main__":
    main()

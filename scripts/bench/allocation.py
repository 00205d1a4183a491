"""What a budget buys: held-out loss right after growth, allocated, uniform, patterns only and messages only.

    python scripts/bench/allocation.py --model path/to/llama --text my_text.txt --nearest-neighbour

Every row adds the same number of parameters (the budget of a uniform growth by `--dims` pattern and message dims a
head), with the same model, growth batches and held-out batches; nothing is trained after the growth.
"""

from tasks import chosen_tasks, held_out, spread, task_parser
from tqdm.auto import tqdm
from transformers import logging as transformers_logging

from hf_growattn import Grower, GrowthConfig

ALLOCATED = {
    "allocated": ["patterns", "messages"],
    "patterns only": ["patterns"],
    "messages only": ["messages"],
}


def grown_loss(task, seed: int, growth, fresh, **config) -> tuple[float, int]:
    """Grow a fresh copy of the model; return its held-out loss and the parameters that were added."""
    model = task.load(seed)
    report = Grower(model, GrowthConfig(**config)).grow(growth)
    return held_out(model, fresh), report.added_parameters


def main() -> None:
    """Grow, seed by seed, and print one table for each task."""
    parser = task_parser(__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[2], help="dims of each kind in the uniform growth")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    for task in chosen_tasks(arguments):
        for dims in arguments.dims:
            losses: dict[str, list[float]] = {name: [] for name in ("none", "uniform", *ALLOCATED)}
            for seed in tqdm(arguments.seeds, desc=task.name, disable=None):
                data = task.data(seed)
                losses["none"].append(held_out(task.load(seed), data[1]))
                loss, budget = grown_loss(task, seed, *data, qk_dims=dims, v_dims=dims)
                losses["uniform"].append(loss)
                for name, kinds in ALLOCATED.items():
                    losses[name].append(grown_loss(task, seed, *data, budget=budget, kinds=kinds)[0])
            print(f"\n{task.name}: {budget:,} parameters added, seeds {arguments.seeds}, {arguments.batches} batches\n")
            print(
                "| growth | held-out loss, median (range) | above the allocated one by, median (range) |\n|---|---|---|"
            )
            for name, values in losses.items():
                above = [value - best for value, best in zip(values, losses["allocated"])]
                print(f"| {name} | {spread(values)} | {'' if name == 'allocated' else spread(above)} |", flush=True)


if __name__ == "__main__":
    main()

"""What a budget buys: held-out loss right after growth, allocated, uniform, patterns only and messages only.

    python scripts/bench/allocation.py --model path/to/llama --text my_text.txt --nearest-neighbour

Every row adds the same number of parameters (the budget of a uniform growth by `--dims` pattern and message dims a
head), with the same model, growth batches and held-out batches; nothing is trained after the growth.
"""

from tasks import chosen_tasks, held_out, spread, task_parser
from tqdm.auto import tqdm
from transformers import logging as transformers_logging

from hf_growattn import Grower, GrowthConfig


def main() -> None:
    """Grow, seed by seed, and print one table for each task."""
    parser = task_parser(__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[2], help="dims of each kind in the uniform growth")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    for task in chosen_tasks(arguments):
        for dims in arguments.dims:
            losses: dict[str, list[float]] = {}
            for seed in tqdm(arguments.seeds, desc=task.name, disable=None):
                growth, fresh = task.data(seed)

                def grown(name, seed=seed, growth=growth, fresh=fresh, losses=losses, **config):
                    model = task.load(seed)
                    losses.setdefault("before", []).append(held_out(model, fresh)) if name == "uniform" else None
                    report = Grower(model, GrowthConfig(**config)).grow(growth)
                    losses.setdefault(name, []).append(held_out(model, fresh))
                    return report.added_parameters

                budget = grown("uniform", qk_dims=dims, v_dims=dims)
                grown("allocated", budget=budget)
                grown("patterns only", budget=budget, kinds=["patterns"])
                grown("messages only", budget=budget, kinds=["messages"])
            print(f"\n{task.name}: {budget:,} parameters added, seeds {arguments.seeds}, {arguments.batches} batches\n")
            print("| growth | held-out loss, median (range) | allocated is lower by, median (range) |\n|---|---|---|")
            for name, values in losses.items():
                lead = [value - best for value, best in zip(values, losses["allocated"])]
                print(f"| {name} | {spread(values)} | {'' if name == 'allocated' else spread(lead)} |", flush=True)


if __name__ == "__main__":
    main()

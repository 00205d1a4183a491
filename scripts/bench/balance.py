"""How to split the magnitude of a new pair of factors: both sides alike against the existing weights, or evenly.

    python scripts/bench/balance.py --model path/to/llama --text my_text.txt --nearest-neighbour

Same model, directions, step and training batches; only the split differs: each column's rms the same multiple of its
side's existing weights (what `Grower` does), or the square root of the singular value on each side.
"""

from tasks import NearestNeighbour, chosen_tasks, held_out, spread, task_parser, train
from tqdm.auto import tqdm
from transformers import logging as transformers_logging

from hf_growattn import Grower, GrowthConfig, functional

ALIKE = functional.balance
SPLITS = {"alike against the existing weights": ALIKE, "even": lambda stacked, shared, *sizes: (stacked, shared)}


def main() -> None:
    """Grow and train on, seed by seed, and print one table for each task."""
    parser = task_parser(__doc__)
    parser.add_argument("--dims", type=int, default=4, help="dims of each kind")
    parser.add_argument("--steps", type=int, default=200, help="training steps after the growth")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--frozen", action="store_true", help="train the attention of the grown model only")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    for task in chosen_tasks(arguments):
        at_growth: dict[str, list[float]] = {name: [] for name in SPLITS}
        trained: dict[str, list[float]] = {name: [] for name in SPLITS}
        for seed in tqdm(arguments.seeds, desc=task.name, disable=None):
            growth, fresh = task.data(seed)
            for name, split in SPLITS.items():
                functional.balance = split
                model = task.load(seed)
                values = 0 if isinstance(task, NearestNeighbour) else arguments.dims
                Grower(model, GrowthConfig(qk_dims=arguments.dims, v_dims=values)).grow(growth)
                at_growth[name].append(held_out(model, fresh))
                if arguments.frozen:
                    for parameter_name, parameter in model.named_parameters():
                        parameter.requires_grad_("attn" in parameter_name)
                train(model, task, arguments.steps, seed, arguments.learning_rate)
                trained[name].append(held_out(model, fresh))
        functional.balance = ALIKE
        lead = [even - alike for alike, even in zip(*trained.values())]
        print(f"\n{task.name}: {arguments.dims} dims, {arguments.steps} steps at {arguments.learning_rate}, ", end="")
        print(f"seeds {arguments.seeds}, median (range)\n")
        print("| split | held-out loss at growth | after training |\n|---|---|---|")
        for name in SPLITS:
            print(f"| {name} | {spread(at_growth[name])} | {spread(trained[name])} |")
        print(f"\nThe even split ends higher by {spread(lead)}.", flush=True)


if __name__ == "__main__":
    main()

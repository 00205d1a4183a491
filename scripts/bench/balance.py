"""How to split the magnitude of a new pair of factors: evenly, or both sides alike against the existing weights.

    python scripts/bench/balance.py --model path/to/llama --text my_text.txt --nearest-neighbour

Same model, directions, step and training batches; only the split differs: the square root of the singular value on each
side (what `Grower` does), or each column's rms the same multiple of its side's existing weights.
"""

import torch
from tasks import NearestNeighbour, chosen_tasks, held_out, spread, task_parser, train
from torch import Tensor
from tqdm.auto import tqdm
from transformers import logging as transformers_logging

from hf_growattn import Grower, GrowthConfig
from hf_growattn.functional import stack_groups
from hf_growattn.trial import _Write

EVEN = _Write._factors


def balance(stacked: Tensor, shared: Tensor, stacked_rms: Tensor, shared_rms: Tensor) -> tuple[Tensor, Tensor]:
    """Scale each pair of columns against each other so that both sides stand out alike; their product stays.

    Afterwards each column's rms is the same multiple of the rms of the existing weights of its side: an optimizer whose
    steps have one size for all weights then turns neither side faster than the other.

    Args:
        stacked, shared: new columns, (H, a, p) and (G, b, p); a column of either side may be zero and then stays even.
        stacked_rms, shared_rms: root mean squares of the existing weights, scalars.
    """
    groups = len(shared)
    on_stacked = stack_groups(stacked, groups).square().mean(-2).sqrt() / stacked_rms  # (G, p)
    on_shared = shared.square().mean(-2).sqrt() / shared_rms
    scale = torch.where((on_stacked > 0) & (on_shared > 0), (on_shared / on_stacked).sqrt(), 1.0)
    per_head = scale.repeat_interleave(len(stacked) // groups, 0).unsqueeze(-2)
    return stacked * per_head, shared / scale.unsqueeze(-2)


def alike(self, *directions):
    """The factors of `Grower`, split alike against the existing weights."""
    return balance(*EVEN(self, *directions), *(factors.square().mean().sqrt() for factors in self.old))


SPLITS = {"even": EVEN, "alike against the existing weights": alike}


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
                _Write._factors = split
                model = task.load(seed)
                values = 0 if isinstance(task, NearestNeighbour) else arguments.dims
                Grower(model, GrowthConfig(qk_dims=arguments.dims, v_dims=values)).grow(growth)
                at_growth[name].append(held_out(model, fresh))
                if arguments.frozen:
                    for parameter_name, parameter in model.named_parameters():
                        parameter.requires_grad_("attn" in parameter_name)
                train(model, task, arguments.steps, seed, arguments.learning_rate)
                trained[name].append(held_out(model, fresh))
        _Write._factors = EVEN
        lead = [other - even for even, other in zip(*trained.values())]
        print(f"\n{task.name}: {arguments.dims} dims, {arguments.steps} steps at {arguments.learning_rate}, ", end="")
        print(f"seeds {arguments.seeds}, median (range)\n")
        print("| split | held-out loss at growth | after training |\n|---|---|---|")
        for name in SPLITS:
            print(f"| {name} | {spread(at_growth[name])} | {spread(trained[name])} |")
        print(f"\nThe other split ends above the even one by {spread(lead)}.", flush=True)


if __name__ == "__main__":
    main()

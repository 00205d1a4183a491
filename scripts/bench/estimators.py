"""What each way to choose directions is worth: held-out loss right after growth, by estimator, dims and kind.

    python scripts/bench/estimators.py --model path/to/llama --text my_text.txt --nearest-neighbour

Every row has the same model, growth batches, held-out batches, ridge and step search; nothing is trained after the
growth. All estimators see the whole gradient, so the table compares them and not their sketches.
"""

from tasks import chosen_tasks, halves_of, held_out, spread, task_parser
from tqdm.auto import tqdm
from transformers import logging as transformers_logging

from hf_growattn.blocks import measure_moments
from hf_growattn.estimators import ESTIMATORS, compared_gradients
from hf_growattn.gradients import Gradient, exact_gradients
from hf_growattn.modeling import attentions
from hf_growattn.plan import strength_of
from hf_growattn.probe import MESSAGES, PATTERNS, mean_loss, undisturbed
from hf_growattn.trial import Change, StepSearch, Trial

CHOICES = {"patterns": [PATTERNS], "messages": [MESSAGES], "both": [PATTERNS, MESSAGES]}


def measure(estimator: str, model, growth, dims: int) -> list[Gradient]:
    """Directions of every layer and kind by one estimator."""
    halves = halves_of(growth)
    with undisturbed(model):
        blocks, _ = measure_moments(model, attentions(model), [PATTERNS, MESSAGES], growth, 0.05)
        if estimator == "whitened":
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


def main() -> None:
    """Measure, seed by seed, and print one table for each task."""
    parser = task_parser(__doc__)
    parser.add_argument("--estimators", nargs="+", choices=ESTIMATORS, default=ESTIMATORS)
    parser.add_argument("--dims", type=int, nargs="+", default=[2, 8])
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    for task in chosen_tasks(arguments):
        losses: dict[tuple[str, str, int], list[float]] = {}
        before = []
        for seed in tqdm(arguments.seeds, desc=task.name, disable=None):
            model, (growth, fresh) = task.load(seed), task.data(seed)
            before.append(held_out(model, fresh))
            for estimator in arguments.estimators:
                gradients = measure(estimator, model, growth, max(arguments.dims))
                for choice, kinds in CHOICES.items():
                    chosen = [gradient for gradient in gradients if gradient.block.kind in kinds]
                    for dims in arguments.dims:
                        row = losses.setdefault((estimator, choice, dims), [])
                        row.append(loss_after(model, chosen, dims, growth, fresh))
        print(f"\n{task.name}: held-out loss before growth {spread(before)}; seeds {arguments.seeds}, ", end="")
        print(f"{arguments.batches} batches; median (range)\n")
        columns = [(choice, dims) for choice in CHOICES for dims in arguments.dims]
        print("| estimator | " + " | ".join(f"{choice}, {dims} dims" for choice, dims in columns) + " |")
        print("|---" * (len(columns) + 1) + "|")
        for estimator in arguments.estimators:
            cells = [spread(losses[estimator, choice, dims]) for choice, dims in columns]
            print(f"| {estimator} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

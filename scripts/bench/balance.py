"""How to split the magnitude of a new pair of factors: evenly, or both sides alike against the existing weights.

    OMP_NUM_THREADS=1 python scripts/bench/balance.py --model path/to/llama --text my_text.txt

Same model, directions, step and training batches; only the split differs: the square root of the singular value on each
side (what `Grower` does), or each column's rms the same multiple of its side's existing weights.
"""

from functools import partial

import page
import torch
from runs import collect, spread
from tasks import TextTask, chosen, held_out, task_parser, train
from torch import Tensor

from hf_growattn import Grower, GrowthConfig
from hf_growattn.functional import stack_groups
from hf_growattn.trial import _Write

EVEN = _Write._factors


def balance(stacked: Tensor, shared: Tensor, stacked_rms: Tensor, shared_rms: Tensor) -> tuple[Tensor, Tensor]:
    """Scale each pair of columns against each other so that both sides stand out alike; their product stays.

    Afterwards each column's rms is the same multiple of the rms of the existing weights of its side: an optimizer whose
    steps have one size for all weights then turns neither side faster than the other.

    Args:
        stacked: new columns, (H, a, p); one that is zero on either side stays even.
        shared: new columns, (G, b, p).
        stacked_rms: root mean square of the existing weights of that side, a scalar.
        shared_rms: the same of the other side.
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


def measure(task: TextTask, seed: int, split: str, dims: int, steps: int, learning_rate: float, **_) -> dict:
    """Grow a fresh copy of the model by one split and train it on; the held-out loss after either."""
    _Write._factors = SPLITS[split]  # of this process, which ends with the run
    model, (growth, fresh) = task.load(seed), task.data(seed)
    Grower(model, GrowthConfig(qk_dims=dims, v_dims=dims)).grow(growth)
    at_growth = held_out(model, fresh)
    train(model, task, steps, seed, learning_rate)
    return {"at growth": at_growth, "trained": held_out(model, fresh)}


def claim(runs: list[dict]) -> str:
    """Which split ends lower."""
    lead = leads(runs)
    better = sum(value > 0 for value in lead)
    return (
        f"The even split of a new pair of factors (ours) ends lower than the one that is alike against the existing "
        f"weights on {better} of {len(lead)} seeds: by {spread(lead, 4)} nats a token."
    )


def leads(runs: list[dict]) -> list[float]:
    """By how much the other split ends above the even one, by seed."""
    even, other = ([run["trained"] for run in runs if run["split"] == split] for split in SPLITS)
    return [loss - mine for mine, loss in zip(even, other)]


def draw(runs: list[dict], plt):
    """A line from the growth to the end of training for each run."""
    figure, panel = plt.subplots(figsize=(5, 3), layout="constrained")
    for color, split in zip(("C0", "C1"), SPLITS):
        for number, run in enumerate(run for run in runs if run["split"] == split):
            label = split if number == 0 else None
            panel.plot([0, run["steps"]], [run["at growth"], run["trained"]], "o-", color=color, label=label)
    panel.set(xlabel="training steps after the growth", ylabel="held-out loss, nats a token")
    panel.legend()
    return figure


def main() -> None:
    """Grow and train on, and write the page."""
    parser = task_parser(__doc__)
    parser.add_argument("--dims", type=int, default=4, help="dims of each kind")
    parser.add_argument("--steps", type=int, default=200, help="training steps after the growth")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    arguments, task = chosen(parser)
    setting = {"data": task.name, "batches": task.batches, "dims": arguments.dims}
    setting |= {"steps": 2 if arguments.quick else arguments.steps, "learning_rate": arguments.learning_rate}
    jobs = [setting | {"seed": seed, "split": split} for seed in arguments.seeds for split in SPLITS]
    runs = collect(partial(measure, task), jobs, arguments.output / "balance.jsonl")
    rows = []
    for split in SPLITS:
        own = [run for run in runs if run["split"] == split]
        cells = [spread([run[name] for run in own], 4) for name in ("at growth", "trained")]
        seconds, peak = spread([run["seconds"] for run in own], 0), spread([run["peak_bytes"] / 1e6 for run in own], 0)
        rows.append([split, *cells, seconds, peak])
    page.Page(
        name="balance",
        title="How to split the magnitude of new factors",
        claim=claim(runs),
        summary=page.table(["split", "held-out loss at growth", "after training", "seconds", "peak, MB"], rows),
        text=(
            f"{task.name}, median (range) over the seeds: every layer grows by {arguments.dims} dims of each kind, "
            f"then all weights train for {setting['steps']} steps of {task.batch_size} x {task.blocks.shape[1]} tokens "
            f"(AdamW, {arguments.learning_rate}, not swept, cosine). Same model, directions, step and batches for both "
            "rows; the product of the factors is the same, so they differ after training alone."
        ),
        figures={"runs": runs},
        seeds=arguments.seeds,
        seconds=sum(run["seconds"] for run in runs),
    ).write(arguments.output, partial(draw, runs))


if __name__ == "__main__":
    main()

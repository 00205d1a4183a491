"""How to split the magnitude of a new pair of factors.

    OMP_NUM_THREADS=1 python scripts/bench/balance.py --model path/to/llama --text my_text.txt

Same model, directions, step and training batches; only the split differs: the square root of the singular value on each
side, but never less on the shared one than the existing weights have (what `Grower` does); that without the bound; or
each column's rms the same multiple of its side's existing weights. Beside them: LoRA on all linear layers with as many
weights, which trains nothing else, at the better of a race's learning rates; and all weights without a growth.
"""

from collections.abc import Callable
from functools import partial

import page
import torch
from compared import lora_within
from finetuning_run import LINEAR, budget_of, projections
from peft import LoraConfig, get_peft_model
from runs import collect, spread
from tasks import TextTask, chosen, held_out, serving_cost, task_parser, train
from torch import Tensor

from hf_growattn import Grower, GrowthConfig
from hf_growattn.grow.trial import _Write
from hf_growattn.measure.functional import stack_groups
from hf_growattn.training.methods import METHODS

OURS = _Write._split


def even(write: _Write, stacked: Tensor, shared: Tensor) -> Tensor:
    """As `Grower` has it without a bound."""
    return torch.ones(())


def alike(write: _Write, stacked: Tensor, shared: Tensor) -> Tensor:
    """Both sides the same multiple of the rms of the existing weights of their side, for each group and pair."""
    old_stacked, old_shared = (side.square().mean() for side in write.block.old_factors())
    on_stacked = stack_groups(stacked, len(shared)).square().mean(-2) / old_stacked
    return (on_stacked / (shared.square().mean(-2) / old_shared)) ** 0.25


def split_by(scale_of: Callable[[_Write, Tensor, Tensor], Tensor]) -> Callable:
    """A split in which the shared side is so many times what it is in the even one; dims without a gain as in ours."""

    def split(write: _Write, step: float, source: int) -> tuple[Tensor, Tensor]:
        stacked, shared, taken = write.new[source]
        idle_stacked, idle_shared = OURS(write, step, source)
        scale = torch.where(taken, scale_of(write, stacked, shared), 1.0)
        sides = stacked * write._per_head(step**0.5 / scale), shared * (scale * step**0.5).unsqueeze(-2)
        return (
            torch.where(write._per_head(taken), sides[0], idle_stacked),
            torch.where(taken.unsqueeze(-2), sides[1], idle_shared),
        )

    return split


BOUNDED, EVEN, ALIKE = "even, bounded (ours)", "even", "alike against the existing weights"
SPLITS = {BOUNDED: OURS, EVEN: split_by(even), ALIKE: split_by(alike)}
LORA, PLAIN = METHODS["lora"].title, "all weights, no growth"
ROWS = (*SPLITS, PLAIN, LORA)


def measure(task: TextTask, seed: int, split: str, dims: int, steps: int, learning_rate: float, **_) -> dict:
    """Grow a fresh copy of the model by one split and train it on; the held-out loss after either."""
    model, (growth, fresh) = task.load(seed), task.data(seed)
    cost = {"cache": 0.0, "forward": 1.0}
    if split in SPLITS:
        _Write._split = SPLITS[split]  # of this process, which ends with the run
        Grower(model, GrowthConfig(qk_dims=dims, v_dims=dims)).grow(growth)
        cost = serving_cost(model, task.load(seed), fresh[0])
    start = {"at growth": held_out(model, fresh)} | cost
    if split == LORA:
        return start | {"trained": min(_adapted(task, seed, budget_of(model, dims), steps, fresh))}
    train(model, task, steps, seed, learning_rate)
    return start | {"trained": held_out(model, fresh)}


def _adapted(task: TextTask, seed: int, weights: int, steps: int, fresh: list[dict]):
    """The held-out loss after training LoRA on all linear layers with each of a race's learning rates."""
    for rate in METHODS["lora"].rates:
        model = task.load(seed)
        options = lora_within(projections(model, LINEAR), weights)
        torch.manual_seed(seed)
        adapted = get_peft_model(model, LoraConfig(**options))
        train(adapted, task, steps, seed, rate / model.config.hidden_size)
        yield held_out(adapted, fresh)


def claim(runs: list[dict]) -> str:
    """Which split ends lower."""
    said = []
    for other in (EVEN, ALIKE):
        lead = leads(runs, other)
        better = sum(value > 0 for value in lead)
        said.append(f'"{other}" on {better} of {len(lead)} seeds, by {spread(lead, 4)} nats a token')
    return f"Split evenly with a bound below (ours), new factors end lower than {'; than '.join(said)}."


def leads(runs: list[dict], other: str) -> list[float]:
    """By how much another split ends above ours, by seed."""
    ours, theirs = ([run["trained"] for run in runs if run["split"] == split] for split in (BOUNDED, other))
    return [loss - mine for mine, loss in zip(ours, theirs)]


def draw(steps: int, runs: list[dict], plt):
    """A line from the growth to the end of training for each run."""
    figure, panel = plt.subplots(figsize=(5, 3), layout="constrained")
    for color, split in zip(("C0", "C1", "C2", "C3", "C4"), ROWS):
        for number, run in enumerate(run for run in runs if run["split"] == split):
            label = split if number == 0 else None
            panel.plot([0, steps], [run["at growth"], run["trained"]], "o-", color=color, label=label)
    panel.set(xlabel="training steps after the growth", ylabel="held-out loss, nats a token")
    panel.legend()
    return figure


def page_of(figures: dict) -> page.Page:
    """The page, out of its figures."""
    setting, runs, rows = figures["setting"], figures["runs"], []
    for split in ROWS:
        own = [run for run in runs if run["split"] == split]
        cells = [spread([run[name] for run in own], 4) for name in ("at growth", "trained")]
        seconds, peak = spread([run["seconds"] for run in own], 0), spread([run["peak_bytes"] / 1e6 for run in own], 0)
        cost = [f"{own[0]['cache']:+.0%}", spread([run["forward"] for run in own], 2)]
        rows.append([split, *cells, seconds, peak, *cost])
    columns = ["split", "held-out loss at growth", "after training", "seconds", "peak, MB", "KV cache", "forward pass"]
    return page.Page(
        title="How to split the magnitude of new factors",
        claim=claim(runs),
        summary=page.table(columns, rows),
        text=(
            f"{setting['data']}, median (range) over the seeds: every layer grows by {setting['dims']} dims of each "
            f"kind, then all weights train for {setting['steps']} steps of {setting['batch_size']} x "
            f"{setting['block_size']} tokens (AdamW, {setting['learning_rate']}, not swept, cosine). Same model, "
            "directions, step and batches for the splits; the product of the factors is the same, so they differ after "
            "training alone. LoRA has as many weights as the growth adds and trains nothing else, at the better of two "
            "learning rates. KV cache and forward pass stand against the model before; LoRA is merged."
        ),
        draw=partial(draw, setting["steps"], runs),
    )


def main() -> None:
    """Grow and train on, and write the page."""
    parser = task_parser(__doc__)
    parser.add_argument("--dims", type=int, default=4, help="dims of each kind")
    parser.add_argument("--steps", type=int, default=200, help="training steps after the growth")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    arguments, task = chosen(parser)
    setting = task.setting() | {"dims": arguments.dims, "learning_rate": arguments.learning_rate}
    setting |= {"steps": 2 if arguments.quick else arguments.steps}
    jobs = [setting | {"seed": seed, "split": split} for seed in arguments.seeds for split in ROWS]
    runs = collect(partial(measure, task), jobs, arguments.output / "balance.jsonl")
    needed = page.kept(runs, "seed", "split", "at growth", "trained", "cache", "forward", "seconds", "peak_bytes")
    seconds = sum(run["seconds"] for run in runs)
    page.publish("balance", {"setting": setting, "runs": needed}, arguments.seeds, arguments.output, seconds)


if __name__ == "__main__":
    main()

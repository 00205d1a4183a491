"""What a growth by budget costs, in training steps of the same run, its memory, and the loss after it.

    OMP_NUM_THREADS=1 python scripts/bench/growth_cost.py --model stories260K smollm2-135m --text a.txt

A model with random weights comes without files; `--model` adds pretrained ones. Seconds are those of the processor, or
of the clock where there is a GPU. Runs are kept as they end in growth_cost.jsonl; the same command goes on with those
that are missing.
"""

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path

import page
import torch
from page import make_parser, parse, spread
from peak_memory import peak_of_tensors
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, logging

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.measure import directions

sys.path.insert(0, str(Path(__file__).parent.parent))
from texts import blocks_of, load_texts

RANDOM = "Llama with random weights"
STEPS = 4  # before the growth and after it; the first makes the optimizer's state
LONGEST = 2_000_000  # characters that are read of a document
MEMORY_BATCHES = 4  # of which each half has two, need no less memory than more of them
LOSSES = ["model", "loss of the growth batches", "after the growth", "held out", "seeds"]


@dataclass(frozen=True)
class Setting:
    """What is grown, on what.

    Attributes:
        model, text: paths or Hub ids; without a model one with random weights, on random tokens.
        width: of the model with random weights.
        batches, rows, tokens: that the growth looks at, and the size of each.
        budget: share of the weights.
        frozen: whether the base does not train.
    """

    model: str = ""
    text: str = ""
    width: int = 256
    batches: int = 8
    rows: int = 2
    tokens: int = 512
    budget: float = 0.025
    frozen: bool = False

    @property
    def name(self) -> str:
        """What tables call it."""
        if not self.model:
            return RANDOM
        base = "frozen" if self.frozen else "training"
        return f"{Path(self.model).name} on {Path(self.text).stem}, {base} base"


def setting_of(model: str, text: str) -> Setting:
    """Sizes for a pretrained model: a small one gets larger batches, and a larger share of its weights."""
    if "stories260K" in model:
        return Setting(model, text, batches=16, rows=8, tokens=128, budget=0.05, frozen=True)
    budget = 0.02 if "tinystories-3M" in model else 0.006
    return Setting(model, text, batches=12, rows=4, tokens=128, budget=budget, frozen=True)


def random_llama(width: int, tokens: int) -> LlamaForCausalLM:
    """Four layers of heads that are 64 wide."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=4,
        num_attention_heads=width // 64,
        head_dim=64,
        max_position_embeddings=tokens,
    )
    return LlamaForCausalLM(config)


def now() -> float:
    """Seconds: of the processor, since others use the machine too, or with a GPU of the clock."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


@torch.no_grad()
def held_out(model: torch.nn.Module, batches: list[dict]) -> float:
    """Mean loss in evaluation mode."""
    model.eval()
    return statistics.fmean(model(**batch).loss.item() for batch in batches)


def measure(setting: Setting, seed: int) -> dict:
    """Times of training steps and of a growth between them, its memory, and the loss after it, as a row.

    The learning rate is 0, so that the growth sees the model as it was loaded.
    """
    began = time.monotonic()
    grown, optimizer, growing, fresh = prepare(setting, seed)
    config = GrowthConfig(budget=setting.budget, old_dims_train=not setting.frozen)
    steps = seconds_of_steps(grown, optimizer, growing)[1:]
    start = now()
    report = Grower(grown, config, optimizer).find(growing).keep()
    growth = now() - start
    row: dict = {"name": setting.name, "seed": seed, "batches": setting.batches}
    row |= {"step": statistics.median(steps + seconds_of_steps(grown, optimizer, growing)), "growth": growth}
    row |= {"before": report.loss_before, "after": report.loss_before - report.fall, "held_out": held_out(grown, fresh)}
    grown, optimizer, growing, _ = prepare(setting, seed)
    growing = growing[:MEMORY_BATCHES]
    train_step(grown, optimizer, growing[0])
    row["peak_step"] = peak_of_tensors(lambda: train_step(grown, optimizer, growing[0]))
    row["peak_growth"] = peak_of_tensors(lambda: Grower(grown, config, optimizer).find(growing).keep())
    return row | {"seconds": time.monotonic() - began}


@lru_cache
def blocks(model: str, text: str, tokens: int) -> torch.Tensor:
    """The blocks of a text in the tokens of a model, in an order that is always the same."""
    found = blocks_of([part[:LONGEST] for part in load_texts(text)], AutoTokenizer.from_pretrained(model), tokens)
    return found[torch.randperm(len(found), generator=torch.Generator().manual_seed(0))]


def prepare(setting: Setting, seed: int):
    """A patched model, its optimizer, batches to grow on and equally many that the growth never sees."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if setting.model:
        model = AutoModelForCausalLM.from_pretrained(setting.model, dtype="float32")
        whole = blocks(setting.model, setting.text, setting.tokens)
    else:
        model = random_llama(setting.width, setting.tokens)
        shape = (512, setting.tokens)
        whole = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    model = patch_model(model).to(device)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))
    parts = [whole[some].to(device) for some in order[: 2 * setting.batches * setting.rows].split(setting.rows)]
    batches = [{"input_ids": part, "labels": part} for part in parts]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    return model, optimizer, batches[: setting.batches], batches[setting.batches :]


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict) -> None:
    """One step."""
    model.train()
    model(**batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def seconds_of_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict]) -> list[float]:
    """The time of each of some steps."""
    marks = [now()]
    for number in range(STEPS):
        train_step(model, optimizer, batches[number % len(batches)])
        marks.append(now())
    return [end - start for start, end in pairwise(marks)]


def measure_all(settings: list[Setting], seeds: list[int], kept: Path) -> list[dict]:
    """The rows of all settings and seeds; those that a file has not yet are measured first, and added to it."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    found = {json.dumps(each["of"]): each["row"] for each in map(json.loads, lines)}
    rows = []
    for setting, seed in tqdm([(setting, seed) for setting in settings for seed in seeds], disable=None):
        of = [asdict(setting), seed]
        key = json.dumps(of)
        if key not in found:
            found[key] = measure(setting, seed)
            with kept.open("a") as file:
                file.write(json.dumps({"of": of, "row": found[key]}) + "\n")
        rows.append(found[key])
    return rows


def in_steps(rows: list[dict]) -> list[float]:
    """A growth, in training steps."""
    return [row["growth"] / row["step"] for row in rows]


def peaks(rows: list[dict]) -> list[float]:
    """The memory of a growth over that of a training step."""
    return [row["peak_growth"] / row["peak_step"] for row in rows]


def draw(groups: dict[str, list[dict]], plt):
    """A bar for each model."""
    figure, panel = plt.subplots(figsize=(8, 1 + 0.5 * len(groups)), layout="constrained")
    panel.barh(list(groups), [statistics.median(in_steps(rows)) for rows in groups.values()])
    panel.set(xlabel="training steps")
    return figure


def page_of(groups: dict[str, list[dict]]) -> page.Page:
    """The page, out of the rows of each model, text and base."""
    cost, losses = [], []
    for name, rows in groups.items():
        cost.append([name, spread(in_steps(rows), 1), spread(peaks(rows), 2)])
        figures = [spread([row[figure] for row in rows], 4) for figure in ("before", "after", "held_out")]
        losses.append([name, *figures, len(rows)])
    first, second = directions.FIRST_PASSES
    medians = [f"{spread(in_steps(rows), 1)} ({name})" for name, rows in groups.items()]
    return page.Page(
        title="What a growth takes",
        claim=f"A growth by budget takes, in training steps: {'; '.join(medians)}.",
        summary=page.table(["model", "growth, steps", "memory"], cost),
        text=(
            "Times of a growth with its optimizer, in training steps (median of seven around it, in the same process, "
            "in seconds of the processor); median (range) over the seeds. "
            "Memory is what torch allocates in a growth over that of a training step. The passes of a sketch "
            f"read one batch in {first}, one in {second} and all. A growth also reads all batches once for the moments "
            "and once to judge the step, and a few for the line search.\n\n" + page.table(LOSSES, losses)
        ),
        draw=partial(draw, groups),
    )


def main() -> None:
    """Run what is missing, and write the page."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", nargs="*", default=[], help="paths or Hub ids of pretrained models")
    parser.add_argument("--text", nargs="*", default=[], help="text files, also of JSON rows")
    arguments = parse(parser)
    settings = [Setting()]
    settings += [setting_of(model, text) for model in arguments.model for text in arguments.text]
    if arguments.quick:
        settings = [Setting(width=64, batches=2, tokens=16, budget=0.05)]
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows = measure_all(settings, arguments.seeds, arguments.output / "growth_cost.jsonl")
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["name"], []).append(row)
    figures = {"rows": [row for group in groups.values() for row in group]}
    seconds = sum(row["seconds"] for row in rows)
    page.publish("growth_cost", page_of(groups), figures, arguments.seeds, arguments.output, seconds)


if __name__ == "__main__":
    main()

"""One run of `growth_cost.py`: a growth between training steps, by whichever engine is on Python's path.

    PYTHONPATH=path/to/an/engine python scripts/bench/growth_cost_run.py '{"model": ..., ...}'

It uses nothing of the engine but what every version of it has, and prints its figures as JSON.
"""

import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch

if not torch.cuda.is_available():
    time.perf_counter = time.process_time  # the growth's own phases too: others on the machine change nothing then

from memory import peak_of_tensors
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, logging

from hf_growattn import Grower, GrowthConfig, patch_model

sys.path.insert(0, str(Path(__file__).parents[1]))
from texts import blocks_of, load_texts

RANDOM = "Llama with random weights"
STEPS = 4  # before the growth and after it; the first makes the optimizer's state


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


def rows_of(model: str, text: str, tokens: int, vocabulary: int) -> torch.Tensor:
    """Blocks of a text, (rows, tokens); random tokens for a model with random weights."""
    if model == RANDOM:
        return torch.randint(vocabulary, (512, tokens), generator=torch.Generator().manual_seed(0))
    documents = load_texts(text)
    if text.endswith(".jsonl"):  # all strings of a row, one after the other
        rows = [json.loads(line) for line in documents[0].splitlines()]
        documents = ["\n".join(value for value in row.values() if value) for row in rows]
    documents = [document.replace("<unk>", "unk")[:2_000_000] for document in documents]
    return blocks_of(documents, AutoTokenizer.from_pretrained(model), tokens)


def now() -> float:
    """Seconds: of the processor, or with a GPU of the clock."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def held_out(model: torch.nn.Module, batches: list[dict]) -> float:
    """Mean loss, dropout off."""
    model.eval()
    with torch.no_grad():
        return statistics.fmean(model(**batch).loss.item() for batch in batches)


def measure(
    model: str, text: str, width: int, batches: int, rows: int, tokens: int, budget: float, frozen: bool, seed: int,
    memory: bool, **_,
) -> dict:  # fmt: skip
    """Times of steps and of a growth with its phases, and the loss after it; or, in place of all, the peaks of memory.

    The learning rate is 0, so that the growth sees the model as it was loaded.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = random_llama(width, tokens) if model == RANDOM else AutoModelForCausalLM.from_pretrained(model)
    grown = patch_model(loaded).to(device)
    blocks = rows_of(model, text, tokens, grown.config.vocab_size)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))
    parts = [blocks[some].to(device) for some in order[: 2 * batches * rows].split(rows)]
    both = [{"input_ids": part, "labels": part} for part in parts]
    growing, fresh = both[:batches], both[batches:]
    optimizer = torch.optim.AdamW(grown.parameters(), lr=0.0)
    grower = Grower(grown, GrowthConfig(budget=budget, old_dims_train=not frozen), optimizer)

    def step(index: int) -> None:
        grown.train()
        grown(**growing[index % batches]).loss.backward()
        torch.nn.utils.clip_grad_norm_(grown.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def seconds_of_steps() -> list[float]:
        marks = [now()]
        for index in range(STEPS):
            step(index)
            marks.append(now())
        return [end - start for start, end in pairwise(marks)]

    if memory:
        step(0)
        return {"peak_step": peak(lambda: step(1)), "peak_growth": peak(lambda: grower.grow(growing))}
    steps = seconds_of_steps()[1:]
    start = now()
    report = grower.grow(growing)
    growth = now() - start
    return {
        "step": statistics.median(steps + seconds_of_steps()),
        "growth": growth,
        "phases": report.seconds,
        "added": report.added_parameters,
        "before": report.loss_before,
        "after": report.loss_after,
        "held_out": held_out(grown, fresh),
    }


def peak(action) -> int:
    """The most bytes of tensors that a call holds at a time, beside those from before it."""
    if not torch.cuda.is_available():
        return peak_of_tensors(action)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(json.dumps(measure(**json.loads(sys.argv[1]))))

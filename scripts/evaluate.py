"""Perplexity of two checkpoints on the same text, and how far apart they are.

    python scripts/evaluate.py gpt2 grown held_out.txt

Both may be stock or grown, folders or Hub ids. Their tokenizers must agree. The README shows `lm_eval` for tasks.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import logging as transformers_logging

from hf_growattn.interop.checkpoints import load_config, load_model, load_tokenizer
from hf_growattn.report.words import format_table

LONGEST_BLOCK = 1024  # longer blocks need memory for their logits, and lower the perplexity little
IGNORED = -100


def cut_blocks(ids: list[int], length: int, bos: int | None = None) -> list[list[int]]:
    """Blocks of at most `length` tokens, in which each token is predicted once.

    Blocks begin with `bos`. Without one, a block begins with the last token of the block before it, and nothing
    predicts the first token of the text.
    """
    step = length - 1
    if bos is not None:
        return [[bos, *ids[start : start + step]] for start in range(0, len(ids), step)]
    return [ids[start : start + length] for start in range(0, len(ids) - 1, step)]


@torch.no_grad()
def score_blocks(model, blocks: list[list[int]], batch_size: int) -> torch.Tensor:
    """The summed negative log-likelihood of each block, in nats, as (blocks,)."""
    scores = []
    for start in tqdm(range(0, len(blocks), batch_size), desc="batches", leave=False, disable=None):
        rows = [torch.tensor(block) for block in blocks[start : start + batch_size]]
        input_ids = pad_sequence(rows, batch_first=True).to(model.device)  # on the right, where causal models look last
        labels = pad_sequence(rows, batch_first=True, padding_value=IGNORED).to(model.device)[:, 1:]
        logits = model(input_ids=input_ids, use_cache=False, return_dict=True).logits[:, :-1].float()
        losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
        scores.append(losses.double().sum(1).cpu())
    return torch.cat(scores)


def estimate_mean(nats: torch.Tensor, counts: torch.Tensor) -> tuple[float, float]:
    """The mean for a token and its standard error over blocks, from the sums and token counts of the blocks."""
    mean = nats.sum() / counts.sum()
    residuals = nats - mean * counts
    blocks = len(nats)
    error = (residuals.square().sum() * blocks / (blocks - 1)).sqrt() / counts.sum()
    return mean.item(), error.item()


def read_tokens(names: list[str], text: str) -> tuple[list[int], int | None]:
    """The tokens of a text, and what begins a block.

    Raises:
        ValueError: the tokenizers of the models differ.
    """
    first, second = (load_tokenizer(name) for name in names)
    encoded = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for tokenizer in (first, second)]
    if first.get_vocab() != second.get_vocab() or encoded[0] != encoded[1]:
        raise ValueError(f"{names[0]} and {names[1]} have different tokenizers, so their losses do not compare.")
    begins = first("")["input_ids"][:1] == [first.bos_token_id]
    return encoded[0], first.bos_token_id if begins else None


def choose_length(names: list[str], asked: int | None) -> int:
    """The tokens in a block: what was asked for, or what both models can read."""
    configs = [load_config(name).get_text_config() for name in names]
    longest = min(getattr(config, "max_position_embeddings", None) or LONGEST_BLOCK for config in configs)
    if asked is None:
        return min(longest, LONGEST_BLOCK)
    if not 2 <= asked <= longest:
        raise ValueError(f"--max_length must be from 2 to {longest}, the longest input of these models.")
    return asked


def compare(names: list[str], text: str, max_length: int | None, batch_size: int, dtype: str) -> str:
    """A table with the perplexity of both models, and the paired difference.

    Raises:
        ValueError: a checkpoint cannot be loaded, the tokenizers differ, or the text is too short.
    """
    length = choose_length(names, max_length)
    ids, bos = read_tokens(names, text)
    blocks = cut_blocks(ids, length, bos)
    if len(blocks) < 2:
        raise ValueError(f"The text has {len(ids)} tokens, less than two blocks: take a longer one or --max_length.")
    counts = torch.tensor([len(block) - 1 for block in blocks], dtype=torch.float64)
    device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    scores, rows = [], []
    for name in names:
        model = load_model(name, causal=True, dtype=dtype).to(device)
        scores.append(score_blocks(model, blocks, batch_size))
        mean, error = estimate_mean(scores[-1], counts)
        rows.append([name, f"{model.num_parameters():,}", f"{math.exp(mean):.3f}", f"{mean:.4f} ± {error:.4f}"])
        del model
    difference, error = estimate_mean(scores[1] - scores[0], counts)
    table = format_table(["model", "parameters", "perplexity", "nats a token"], rows)
    lead = (
        f"{names[1]} minus {names[0]}: {difference:+.4f} ± {error:.4f} nats a token, paired over {len(blocks)} blocks"
    )
    return f"{table}\n{lead} of {length} tokens."


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="folder or Hub id of the first model")
    parser.add_argument("model", help="folder or Hub id of the second model")
    parser.add_argument("text", type=Path, help="UTF-8 text file that neither was trained on")
    parser.add_argument("--max_length", type=int, help="tokens in a block (default: at most 1024)")
    parser.add_argument("--batch_size", type=int, default=4, help="blocks read at once (default: %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16", "auto"], default="float32")
    options = parser.parse_args()
    if options.batch_size < 1:
        parser.error("--batch_size must be at least 1")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    names = [options.base, options.model]
    try:
        text = options.text.read_text(encoding="utf-8")
        print(compare(names, text, options.max_length, options.batch_size, options.dtype))
    except (OSError, ValueError) as error:
        raise SystemExit(f"Error: {error}") from None


if __name__ == "__main__":
    main()

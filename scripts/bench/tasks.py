"""The task that benchmarks share: a pretrained model on a text it does not know, and a tiny one that needs no files.

It gives fresh copies of one model, batches to grow on and batches that the growth never sees.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import page
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, logging

from hf_growattn import patch_model
from hf_growattn.growable.models import cache_bytes
from hf_growattn.measure.passes import mean_loss, undisturbed

sys.path.insert(0, str(Path(__file__).parents[1]))
from texts import blocks_of, english, load_texts, train_tokenizer

Batches = list[dict[str, torch.Tensor]]


def task_parser(description: str) -> argparse.ArgumentParser:
    """The options that benchmarks of a model and a text share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hub id of a causal LM")
    parser.add_argument("--text", help="text file or Hub id that it grows on")
    parser.add_argument("--batches", type=int, default=8, help="batches to grow on, and to measure on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--quick", action="store_true", help="a tiny model and one seed: shows that it runs")
    return parser


def chosen(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, "TextTask"]:
    """The arguments, and the task that they name: with `--quick` a tiny one, and one seed."""
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.quick:
        arguments.seeds = arguments.seeds[:1]
        return arguments, TinyTask()
    if not (arguments.model and arguments.text):
        parser.error("--model and --text are needed, or --quick")
    return arguments, TextTask(arguments.model, arguments.text, batches=arguments.batches)


def texts_of(path: str, longest: int = 2_000_000) -> list[str]:
    """The documents of a text file, folder or Hub data set, each cut to a length."""
    # The literal <unk> of WikiText would become a special token.
    return [text.replace("<unk>", "unk")[:longest] for text in load_texts(path)]


def held_out(model: nn.Module, batches: Batches) -> float:
    """Mean loss of batches, dropout off."""
    with undisturbed(model):
        return mean_loss(model, batches)


@dataclass
class TextTask:
    """A pretrained causal LM and a text; each seed draws its own growth and held-out blocks.

    Attributes:
        model: path or Hub id.
        text: text file, folder of text files or Hub id.
        batches, batch_size, block_size: the growth set; the held-out set is as large.
    """

    model: str
    text: str
    batches: int = 32
    batch_size: int = 8
    block_size: int = 128

    def __post_init__(self):
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        texts = texts_of(self.text)
        self.blocks = blocks_of(texts, tokenizer, self.block_size)
        self.name = f"{Path(self.model).name} on {Path(self.text).name}"

    def setting(self) -> dict:
        """Its name and sizes, for JSON."""
        sizes = {"batches": self.batches, "batch_size": self.batch_size, "block_size": self.blocks.shape[1]}
        return {"data": self.name, **sizes}

    def load(self, seed: int) -> nn.Module:
        """A fresh patched copy of the model."""
        return patch_model(AutoModelForCausalLM.from_pretrained(self.model)).eval()

    def data(self, seed: int) -> tuple[Batches, Batches]:
        """Growth batches and held-out batches of one seed."""
        rows = self.batches * self.batch_size
        order = torch.randperm(len(self.blocks), generator=torch.Generator().manual_seed(seed))
        return self._batches(order[:rows]), self._batches(order[rows : 2 * rows])

    def training_batch(self, generator: torch.Generator, seed: int) -> dict[str, torch.Tensor]:
        """A random batch that is not among the held-out ones of the seed."""
        rows = self.batches * self.batch_size
        order = torch.randperm(len(self.blocks), generator=torch.Generator().manual_seed(seed))
        allowed = torch.cat((order[:rows], order[2 * rows :]))
        return self._batches(allowed[torch.randint(len(allowed), (self.batch_size,), generator=generator)])[0]

    def _batches(self, rows: torch.Tensor) -> Batches:
        return [{"input_ids": part, "labels": part} for part in self.blocks[rows].split(self.batch_size)]


class TinyTask(TextTask):
    """A tiny Llama with random weights on the English that every CPython carries: no file, no download."""

    def __init__(self):
        self.batches, self.batch_size = 2, 2
        texts = english()
        tokenizer = train_tokenizer(texts, 300)
        self.blocks = blocks_of(texts, tokenizer, block_size=16)
        self.name = "a tiny Llama on Python's documentation"
        sizes = dict(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            head_dim=4,
        )
        # Weights so large that attention attends to something.
        self.config = LlamaConfig(max_position_embeddings=16, initializer_range=0.3, **sizes)

    def load(self, seed: int) -> nn.Module:
        """A fresh patched model of the seed."""
        torch.manual_seed(seed)
        return patch_model(LlamaForCausalLM(self.config)).eval()


def train(model: nn.Module, task: TextTask, steps: int, seed: int, learning_rate: float) -> None:
    """Train all that is not frozen with AdamW and a cosine schedule."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate, weight_decay=0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(2000 + seed)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(**task.training_batch(generator, seed)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    model.eval()


@torch.no_grad()
def restore(at_start: dict) -> None:
    """Give parameters the values that they started from."""
    for parameter, value in at_start.items():
        parameter.copy_(value)


def serving_cost(model: nn.Module, other: nn.Module, batch: dict) -> dict:
    """What a model costs at inference against another: the share its KV cache is larger by, and its forward passes."""
    inputs = {"input_ids": batch["input_ids"], "use_cache": False}
    return {"cache": cache_bytes(model) / cache_bytes(other) - 1, "forward": forward_ratio(model, other, inputs, 21)}


def forward_ratio(model, other, inputs: dict, turns: int = 5) -> float:
    """CPU time of a forward pass of one model over that of another, the median of turns."""
    ratios = []
    with torch.no_grad():
        for turn in range(turns + 1):  # the first one warms up
            times = []
            for each in (model, other):
                began = time.process_time()
                each(**inputs)
                times.append(time.process_time() - began)
            ratios += [times[0] / times[1]] if turn else []
    return statistics.median(ratios)

"""The two tasks that the benchmarks share: a pretrained model on a text it does not know, and the nearest neighbour.

Both give a fresh copy of one model, batches to grow on and batches that the growth never sees.
"""

import argparse
import copy
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2ForSequenceClassification

from hf_growattn import patch_model
from hf_growattn.probe import mean_loss, undisturbed

sys.path.insert(0, str(Path(__file__).parents[1]))
from finetune import blocks_of, load_texts

Batches = list[dict[str, torch.Tensor]]


def halves_of(batches: Batches) -> tuple[Batches, Batches]:
    """Every other batch, as `Grower` splits them."""
    return batches[0::2], batches[1::2]


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def chosen_tasks(arguments: argparse.Namespace) -> list:
    """The tasks named on the command line."""
    tasks = [TextTask(arguments.model, text, batches=arguments.batches) for text in arguments.text]
    return [*tasks, NearestNeighbour(batches=arguments.batches)] if arguments.nearest_neighbour else tasks


def task_parser(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hub id of a causal LM")
    parser.add_argument("--text", nargs="*", default=[], help="text files or Hub ids that it grows on")
    parser.add_argument("--nearest-neighbour", action="store_true", help="the task of the nearest neighbour too")
    parser.add_argument("--batches", type=int, default=32, help="batches to grow on, and to measure on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    return parser


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
        # The literal <unk> of WikiText would become a special token.
        texts = [text.replace("<unk>", "unk")[:2_000_000] for text in load_texts(self.text)]
        self.blocks = blocks_of(texts, tokenizer, self.block_size)
        self.name = f"{Path(self.model).name} on {Path(self.text).name}"

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


@dataclass
class NearestNeighbour:
    """Return the nearest of N Gaussian points to a query, in d dimensions (draft 002; Amsel, Yehudai, Bruna 2024).

    The model is GPT-2 with one layer, `d / r` heads of width `r`, position embeddings of zero, and a regression head
    on the query, which comes last and is masked as a key; the loss is the mean square error of each coordinate.
    """

    d: int = 64
    points: int = 16
    head_dim: int = 8
    steps: int = 1200
    batches: int = 32
    batch_size: int = 128
    learning_rate: float = 3e-3

    def __post_init__(self):
        self.name = f"nearest neighbour, d {self.d}, {self.points} points, heads {self.head_dim} wide"
        self.trained: dict[int, nn.Module] = {}

    def build(self, seed: int) -> nn.Module:
        """An untrained model."""
        torch.manual_seed(seed)
        config = GPT2Config(
            vocab_size=1,
            n_positions=self.points + 1,
            n_embd=self.d,
            n_layer=1,
            n_head=self.d // self.head_dim,
            n_inner=self.d,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            num_labels=self.d,
            problem_type="regression",
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = GPT2ForSequenceClassification(config)
        model.transformer.wpe.weight.requires_grad_(False).zero_()
        return patch_model(model)

    def load(self, seed: int) -> nn.Module:
        """A copy of the model of this seed, trained once."""
        if seed not in self.trained:
            model = self.build(seed)
            train(model, self, self.steps, seed, self.learning_rate)
            self.trained[seed] = model.eval()
        return copy.deepcopy(self.trained[seed])

    def draw(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """A batch: points and query as `inputs_embeds`, the nearest point as the label."""
        x = torch.randn(self.batch_size, self.points + 1, self.d, generator=generator)
        distances = (x[:, :-1] - x[:, -1:]).square().sum(-1)
        mask = torch.ones(self.batch_size, self.points + 1, dtype=torch.long)
        mask[:, -1] = 0
        nearest = x[torch.arange(self.batch_size), distances.argmin(-1)]
        return {"inputs_embeds": x, "attention_mask": mask, "labels": nearest}

    def data(self, seed: int) -> tuple[Batches, Batches]:
        """Growth batches and held-out batches of one seed."""
        generator = torch.Generator().manual_seed(1000 + seed)
        drawn = [self.draw(generator) for _ in range(2 * self.batches)]
        return drawn[: self.batches], drawn[self.batches :]

    def training_batch(self, generator: torch.Generator, seed: int) -> dict[str, torch.Tensor]:
        """A fresh batch."""
        return self.draw(generator)


def train(model: nn.Module, task, steps: int, seed: int, learning_rate: float) -> None:
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

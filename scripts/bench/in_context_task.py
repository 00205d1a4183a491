"""In-context linear regression (Garg et al. 2022): the task and its model, a GPT-2 that reads continuous vectors."""

from dataclasses import dataclass

import torch
from harness import Task
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_growattn import patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import sync_config


@dataclass(frozen=True)
class InContextRegression(Task):
    """Points x and values w^T x of a linear function that the model never saw; predict the value of the next x.

    Attributes:
        dims, points: of x, and how many there are in a sequence.
        d, layers: of the model.
        narrow, wide: queries and keys before growth, and after it; there are `d / narrow` heads.
        batch_size: sequences of a batch.
        held_out: sequences to measure on.
    """

    steps: int = 1000
    growth_batches: int = 32
    dims: int = 20
    points: int = 30
    d: int = 48
    layers: int = 2
    narrow: int = 2
    wide: int = 12
    batch_size: int = 32
    held_out: int = 1024

    metric = "error"

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"regression in {self.dims} dims, heads {self.narrow} wide"

    def batch(self, seed: int, step: int) -> dict:
        """Fresh functions and points."""
        generator = torch.Generator().manual_seed((1000 + seed) * 100_003 + step)
        return self.draw(self.batch_size, generator)

    def draw(self, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Tokens (x, 0, 1) and (x, y, 0) of each point in turn, (rows, 2 N, dims + 2), and each one's y, (rows, 2 N).

        Values have unit variance, so a squared error is one over the number of dims in the units of Garg et al.
        """
        x = torch.randn(rows, self.points, self.dims, generator=generator)
        weight = torch.randn(rows, self.dims, 1, generator=generator) / self.dims**0.5
        y = x @ weight
        query = torch.cat((x, torch.zeros_like(y), torch.ones_like(y)), -1)
        example = torch.cat((x, y, torch.zeros_like(y)), -1)
        tokens = torch.stack((query, example), 2).flatten(1, 2)
        return {"tokens": tokens, "labels": y[..., 0].repeat_interleave(2, 1)}

    def loss(self, model: nn.Module, batch: dict) -> Tensor:
        """Squared error at the queries."""
        return model(inputs_embeds=model.read_in(batch["tokens"]), labels=batch["labels"]).loss

    def budget(self, model: nn.Module) -> int:
        """Weights and biases of the new queries and keys."""
        return 2 * (self.wide - self.narrow) * (self.d // self.narrow) * (self.d + 1) * self.layers

    def measure(self, model: nn.Module, seed: int) -> dict[str, float]:
        """The error over all numbers of examples, and after all of them."""
        total = torch.zeros(self.points)
        drawn = self.draw(self.held_out, torch.Generator().manual_seed(2000 + seed))
        for tokens, labels in zip(*(part.split(self.batch_size) for part in (drawn["tokens"], drawn["labels"]))):
            found = model(inputs_embeds=model.read_in(tokens)).logits[..., 0]
            total += (found - labels).square()[:, 0::2].sum(0)
        errors = total / self.held_out
        return {"error": errors.mean().item(), "last": errors[-1].item()}

    @torch.no_grad()
    def without_training(self, seed: int) -> dict[str, float]:
        """Least squares on the examples so far."""
        drawn = self.draw(self.held_out, torch.Generator().manual_seed(2000 + seed))
        x, y = drawn["tokens"][:, 0::2, : self.dims].double(), drawn["labels"][:, 0::2].double()
        errors = [y[:, 0].square().mean().item()]
        for count in range(1, self.points):
            solution = torch.linalg.lstsq(x[:, :count], y[:, :count, None], driver="gelsd").solution
            errors.append(((x[:, count, None] @ solution)[:, 0, 0] - y[:, count]).square().mean().item())
        return {"least squares": sum(errors) / len(errors)}

    def model(self, seed: int, wide: bool = False) -> nn.Module:
        """An untrained GPT-2 with a linear read-in and no positions: causality alone orders the examples.

        The further queries and keys of a wide one are new dims from the start, with weights drawn as the stock ones.
        """
        torch.manual_seed(seed)
        config = GPT2Config(
            vocab_size=1,
            n_positions=2 * self.points,
            n_embd=self.d,
            n_layer=self.layers,
            n_head=self.d // self.narrow,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
            activation_function="gelu_pytorch_tanh",  # GPT-2's own, in one kernel
            tie_word_embeddings=False,
            use_cache=False,
        )
        model = GPT2LMHeadModel(config)
        model.loss_function = squared_error
        model.read_in = nn.Linear(self.dims + 2, self.d)
        nn.init.normal_(model.read_in.weight, std=(self.dims + 2) ** -0.5)
        for unused in (model.transformer.wte.weight, model.transformer.wpe.weight):
            unused.requires_grad_(False).zero_()
        patch_model(model)
        if wide:
            for attention in attentions(model):
                new = attention.add_new_dims("wide", qk_dims=self.wide - self.narrow, v_dims=0)
                nn.init.normal_(new.in_proj.weight, std=config.initializer_range)
            sync_config(model)
        return model


def squared_error(logits: Tensor, labels: Tensor, **_) -> Tensor:
    """Mean over the queries, the even tokens."""
    return (logits[..., 0] - labels).square()[:, 0::2].mean()

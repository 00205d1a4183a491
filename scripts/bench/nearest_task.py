"""The nearest neighbour: points on a sphere and queries on it, whose targets are the nearest points. Task and model."""

from dataclasses import dataclass

import torch
from harness import Task
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from transformers import SmolLM3Config, SmolLM3ForTokenClassification
from wide_values import widen_values

from hf_growattn import patch_model
from hf_growattn.growable.attention import attentions


@dataclass(frozen=True)
class NearestNeighbour(Task):
    """Return the nearest of some points on a sphere to each query on it (Amsel, Yehudai, Bruna 2024).

    Attributes:
        d, points: dims of a point, and how many there are in a sequence.
        queries: of a sequence, each on its own: they do not see one another.
        width, heads: of queries and keys before growth; values are `d` wide.
        sequences: in a batch.
        held_out: batches to measure on.
    """

    steps: int = 2400
    growth_batches: int = 256
    warmup: float = 0.0
    d: int = 64
    points: int = 16
    queries: int = 16
    width: int = 8
    heads: int = 8
    sequences: int = 4
    held_out: int = 64

    metric = "error"

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.points} points in {self.d} dims, {self.heads} heads {self.width} wide"

    def batch(self, seed: int, step: int) -> dict:
        """Fresh points."""
        return self.draw(torch.Generator().manual_seed((1000 + seed) * 100_003 + step))

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Points, then queries, which are no keys; the residual stream adds a query to the nearest point."""
        tokens = self.points + self.queries
        x = torch.randn(self.sequences, tokens, self.d, generator=generator)
        x *= self.d**0.5 / x.norm(dim=-1, keepdim=True)  # what the RMS norm leaves as it is
        points, queries = x[:, : self.points], x[:, self.points :]
        nearest = (queries @ points.mT).argmax(-1, keepdim=True)
        mask = (torch.arange(tokens) < self.points).long().expand(self.sequences, -1)
        return {"inputs_embeds": x, "attention_mask": mask, "labels": points.take_along_dim(nearest, 1) + queries}

    def budget(self, model: nn.Module) -> int:
        """What growth to queries and keys as wide as a point adds."""
        return 2 * self.heads * (self.d - self.width) * self.d

    def measure(self, model: nn.Module, seed: int) -> dict[str, float]:
        """Mean square error of a coordinate of held-out queries."""
        generator = torch.Generator().manual_seed(2000 + seed)
        losses = [model(**self.draw(generator)).loss for _ in range(self.held_out)]
        return {"error": torch.stack(losses).mean().item()}

    def model(self, seed: int, wide: bool = False) -> nn.Module:
        """One SmolLM3 layer without rotation whose output is its attention's: no MLP, no final norm; untrained."""
        torch.manual_seed(seed)
        config = SmolLM3Config(
            vocab_size=1,
            hidden_size=self.d,
            intermediate_size=1,
            num_hidden_layers=1,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            no_rope_layers=[0],
            head_dim=self.d if wide else self.width,
            num_labels=self.d,
            classifier_dropout=0.0,
            use_cache=False,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="eager",  # faster than sdpa on sequences this short
        )
        model = SmolLM3ForTokenClassification(config).requires_grad_(False)
        nn.init.zeros_(model.model.layers[0].mlp.down_proj.weight)
        nn.init.eye_(model.score.weight)
        model.model.norm = nn.Identity()
        model.loss_function = loss_of_queries
        widen_values(model, self.d)
        (attention,) = attentions(patch_model(model))
        attention.module.scaling = self.width**-0.5  # of a wide model, too, as after a growth
        for role in ("query", "key", "value", "output"):
            nn.init.normal_(attention.projection_of(role).weight, std=config.initializer_range)
        attention.module.requires_grad_(True)
        return model


def loss_of_queries(logits: Tensor, labels: Tensor, config=None) -> Tensor:
    """Mean square error of a coordinate; the queries come last."""
    return mse_loss(logits[:, -labels.shape[1] :], labels)

"""Nearest neighbours as next tokens: which of the points before is nearest to a query? For races of narrow models."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from harness import Task, pretrained
from torch import nn
from transformers import SmolLM3Config, SmolLM3ForCausalLM
from wide_values import widen_values

from hf_growattn import patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.training.methods import weights_of_rank_one


@dataclass(frozen=True)
class NextNeighbour(Task):
    """Points as tokens, then queries as tokens, each before its answer; the model is pretrained on the same.

    Attributes:
        head_dim: how wide the queries and keys of the one head are.
        points: that a query is compared with; a sequence has the same number of queries.
        dims: of the space that points and queries are drawn in; the model is twice as wide.
        vocabulary: points to draw from, and the number of queries to draw from.
        pretraining: optimizer steps.
        sequences: of a batch.
        held_out: sequences to measure on.
    """

    head_dim: int = 4
    points: int = 16
    dims: int = 32
    vocabulary: int = 1024
    pretraining: int = 400
    sequences: int = 16
    held_out: int = 128

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"nearest of {self.points} tokens, queries {self.head_dim} wide"

    @property
    def words(self) -> int:
        """Tokens that there are."""
        return 2 * self.vocabulary

    def directions(self) -> torch.Tensor:
        """Where each token lies, (words, dims): points first, then queries; each has length 1."""
        drawn = torch.randn(self.words, self.dims, generator=torch.Generator().manual_seed(7))
        return drawn / drawn.norm(dim=-1, keepdim=True)

    def draw(self, sequences: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Points, each once in a sequence, then queries, each before its answer, on which alone the loss is."""
        places = self.directions()
        order = torch.rand(sequences, self.vocabulary, generator=generator).argsort(1)
        points = order[:, : self.points]
        queries = torch.randint(self.vocabulary, points.shape, generator=generator) + self.vocabulary
        nearest = (places[queries] @ places[points].mT).argmax(-1)
        answers = points.gather(1, nearest)
        asked = torch.stack((queries, answers), -1).flatten(1)
        labels = torch.stack((torch.full_like(answers, -100), answers), -1).flatten(1)
        return {
            "input_ids": torch.cat((points, asked), 1),
            "labels": torch.cat((torch.full_like(points, -100), labels), 1),
        }

    def batch(self, seed: int, step: int) -> dict:
        """Fresh points."""
        return self.draw(self.sequences, torch.Generator().manual_seed((1 + seed) * 100_003 + step))

    def budget(self, model: nn.Module) -> int:
        """What LoRA of rank 3 on all linear layers has."""
        return 3 * weights_of_rank_one(model, {})

    def measure(self, model: nn.Module, seed: int) -> dict[str, float]:
        """The loss of answers, and the share that is right."""
        batch = self.draw(self.held_out, torch.Generator().manual_seed(10_000 + seed))
        found, labels = model(**batch), batch["labels"][:, 1:]
        right = found.logits[:, :-1].argmax(-1) == labels
        return {"loss": found.loss.item(), "right": right[labels >= 0].float().mean().item()}

    def model(self, seed: int, wide: bool = False) -> nn.Module:
        """The model, trained on the task; the same for all seeds."""
        model = pretrained(self, build(self), "neighbours", self.first_batches(), 1e-2)
        return model.requires_grad_(True)

    def first_batches(self) -> Iterator[dict]:
        """The batches of pretraining."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.pretraining):
            yield self.draw(self.sequences, generator)


@torch.no_grad()
def build(task: NextNeighbour, seed: int = 0) -> SmolLM3ForCausalLM:
    """One SmolLM3 layer without rotation: points lie in one half of the embedding and queries in the other.

    So nothing attends to itself. Queries and keys start as random projections of the two halves; values pass points on
    whole, and the tied head reads them. The embedding stays as it is: what is near is not to be learned.
    """
    torch.manual_seed(seed)
    hidden = 2 * task.dims
    config = SmolLM3Config(
        vocab_size=task.words,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=task.head_dim,
        no_rope_layers=[0],
        tie_word_embeddings=True,
        use_cache=False,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )
    model = SmolLM3ForCausalLM(config)
    widen_values(model, hidden)
    (layer,) = attentions(patch_model(model))
    embedding = model.get_input_embeddings().weight.zero_()
    points, queries = task.directions().split(task.vocabulary)
    embedding[: task.vocabulary, : task.dims] = points
    embedding[task.vocabulary :, task.dims :] = queries
    if task.head_dim < task.dims:
        compared = torch.linalg.qr(torch.randn(task.dims, task.head_dim))[0].T
    else:
        compared = torch.eye(task.head_dim, task.dims)
    for role, half in (("key", slice(0, task.dims)), ("query", slice(task.dims, None))):
        layer.projection_of(role).weight.zero_()[:, half] = 2 * compared
    nn.init.eye_(layer.projection_of("value").weight)
    nn.init.eye_(layer.projection_of("output").weight)
    model.model.norm.weight.fill_(1.5)
    for each in model.model.layers:
        each.mlp.down_proj.weight.mul_(0.1)
    model.requires_grad_(True)
    embedding.requires_grad_(False)
    return model

"""Nearest neighbours as next tokens: which of the points before is nearest to a query? The task and its model."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from recall_task import train
from torch import nn
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from hf_growattn import patch_model
from hf_growattn.growable.models import attentions


@dataclass(frozen=True)
class Setting:
    """The task and its training.

    Attributes:
        head_dim: how wide the queries and keys of the one head are.
        points: that a query is compared with; there are as many queries in a sequence.
        dims: of the space that points and queries are drawn in; the model is twice as wide.
        vocabulary: points to draw from, and as many queries.
        pretraining: optimizer steps.
        sequences: of a batch.
    """

    head_dim: int = 4
    points: int = 16
    dims: int = 32
    vocabulary: int = 1024
    pretraining: int = 400
    sequences: int = 16

    @property
    def words(self) -> int:
        """Tokens that there are."""
        return 2 * self.vocabulary


def directions(setting: Setting) -> torch.Tensor:
    """Where each token lies, (words, dims): points first, then queries; each has length 1."""
    drawn = torch.randn(setting.words, setting.dims, generator=torch.Generator().manual_seed(7))
    return drawn / drawn.norm(dim=-1, keepdim=True)


def draw(setting: Setting, sequences: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Points, each once in a sequence, then queries, each before its answer, on which alone the loss is."""
    places = directions(setting)
    order = torch.rand(sequences, setting.vocabulary, generator=generator).argsort(1)
    points = order[:, : setting.points]
    queries = torch.randint(setting.vocabulary, points.shape, generator=generator) + setting.vocabulary
    nearest = (places[queries] @ places[points].mT).argmax(-1)
    answers = points.gather(1, nearest)
    asked = torch.stack((queries, answers), -1).flatten(1)
    labels = torch.stack((torch.full_like(answers, -100), answers), -1).flatten(1)
    return {
        "input_ids": torch.cat((points, asked), 1),
        "labels": torch.cat((torch.full_like(points, -100), labels), 1),
    }


@torch.no_grad()
def build(setting: Setting, seed: int = 0) -> SmolLM3ForCausalLM:
    """One SmolLM3 layer without rotation: points lie in one half of the embedding and queries in the other.

    So nothing attends to itself. Queries and keys start as random projections of the two halves; values pass points on
    whole, and the tied head reads them. The embedding stays as it is: what is near is not to be learned.
    """
    torch.manual_seed(seed)
    hidden = 2 * setting.dims
    config = SmolLM3Config(
        vocab_size=setting.words,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=setting.head_dim,
        no_rope_layers=[0],
        tie_word_embeddings=True,
        use_cache=False,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )
    model = patch_model(SmolLM3ForCausalLM(config))
    (layer,) = attentions(model)
    layer.widen(v_dims=hidden - setting.head_dim)
    model.sync_config()
    embedding = model.get_input_embeddings().weight.zero_()
    points, queries = directions(setting).split(setting.vocabulary)
    embedding[: setting.vocabulary, : setting.dims] = points
    embedding[setting.vocabulary :, setting.dims :] = queries
    if setting.head_dim < setting.dims:
        compared = torch.linalg.qr(torch.randn(setting.dims, setting.head_dim))[0].T
    else:
        compared = torch.eye(setting.head_dim, setting.dims)
    for role, half in (("key", slice(0, setting.dims)), ("query", slice(setting.dims, None))):
        layer.projection_of(role).weight.zero_()[:, half] = 2 * compared
    nn.init.eye_(layer.projection_of("value").weight)
    nn.init.eye_(layer.projection_of("output").weight)
    model.model.norm.weight.fill_(1.5)
    for each in model.model.layers:
        each.mlp.down_proj.weight.mul_(0.1)
    model.requires_grad_(True)
    embedding.requires_grad_(False)
    return model


def pretrained(setting: Setting, folder: Path) -> SmolLM3ForCausalLM:
    """The model, trained on the task by the first who asks."""
    model, kept = build(setting), folder / "neighbour.pt"
    if not kept.exists():
        generator = torch.Generator().manual_seed(0)
        batches = [partial(draw, setting, setting.sequences, generator)] * setting.pretraining
        train(model, batches, 1e-2)
        torch.save(model.state_dict(), kept)
    model.load_state_dict(torch.load(kept))
    return model.requires_grad_(True).eval()

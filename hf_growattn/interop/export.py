"""`export_model`: a grown model as a checkpoint of a stock architecture, which needs no code of ours to load."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..growable.attention import attentions
from ..growable.folders import replacing
from ..growable.growths import cache_bytes, check_kind, is_grown
from ..growable.models import GrowableModelMixin
from ..growable.training_state import refuse_meta, refuse_sharded
from .stock import fresh_rotary, stock_model

# Largest difference of the logits, over the largest logit, that is never questioned; and how many times the rounding
# of the exported model itself is not: two models that compute the same round apart.
TOLERANCE, TIMES_ROUNDING = 1e-5, 4.0
_TOKENS = 128  # of the comparison


@dataclass(frozen=True)
class ExportReport:
    """What `export_model` wrote; prints as its widths and what the KV cache costs.

    Attributes:
        path: the checkpoint.
        model_type: its architecture.
        head_dim: the width of all heads.
        difference: largest difference between its logits and the model's, over the largest logit.
        cache_bytes: of a token's keys and values, of the model and of the checkpoint.
        parameters: likewise.
    """

    path: Path
    model_type: str
    head_dim: int
    difference: float
    cache_bytes: tuple[int, int]
    parameters: tuple[int, int]

    def __str__(self) -> str:
        return "\n".join(
            [
                f"A stock {self.model_type} with {self.parameters[1]:,} parameters in {self.path}.",
                f"Width of all heads: {self.head_dim}.",
                "KV cache: {:,} bytes a token, {:,} before the export.".format(*reversed(self.cache_bytes)),
                f"Largest difference of the logits: {self.difference:.1e} of the largest logit.",
            ]
        )


def export_model(model: PreTrainedModel, directory, tokenizer=None) -> ExportReport:
    """Write a patched model, grown or not, as a checkpoint that plain transformers loads, with the same outputs.

    The stock class reloads it and is compared with the model on random tokens, at once and through the cache, before
    it takes its place at `directory`. The model stays as it is. Of several processes, call it in one.

    All heads become as wide as the widest, rounded up to a multiple of 8 for flash kernels; the report gives the bytes
    of the KV cache that this costs. A grown model may rotate by frequencies of type "default" or "llama3", which
    transformers 4 reads, too. Families that normalize queries or keys, or rotate a part of each head, have no stock
    form once their heads are wider.

    Args:
        model: a patched model, with any head; adapters merged.
        directory: where to write; other files that lie there stay.
        tokenizer: saved along, if given. The generation config travels anyway.

    Raises:
        TypeError: `model` is not patched.
        ValueError: no stock class can hold it, or it is quantized or offloaded; the message says why and what to do.
        OSError: `directory` cannot be written; what was there is as it was.
        RuntimeError: the reloaded checkpoint computes something else, and was removed.
    """
    check_kind(model)
    if not isinstance(model, GrowableModelMixin):
        raise TypeError(
            f"export_model needs a patched model, not {type(model).__name__}. Pass the model inside a wrapper, that of "
            "peft after merge_and_unload(); a stock model needs no export: use its save_pretrained."
        )
    refuse_sharded(model, [])
    refuse_meta(model.named_parameters())
    directory = Path(directory).resolve()
    with replacing(directory) as partial, torch.random.fork_rng():
        stock = stock_model(model)
        stock_class: Any = type(stock)
        stock.save_pretrained(partial)
        if is_grown(model):
            _add_older_names(partial / "config.json")
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        parameters = model.num_parameters(), stock.num_parameters()
        cached, width = (cache_bytes(model), cache_bytes(stock)), attentions(stock)[0].shape.qk_head_dim
        del stock  # what is new in it makes room for what is reloaded
        difference = _verify(model, stock_class, partial)
    return ExportReport(directory, stock_class.config_class.model_type, width, difference, cached, parameters)


def _add_older_names(file: Path) -> None:
    """Repeat the rotation under the names of transformers 4, whose readers would silently take the default one."""
    config = json.loads(file.read_text())
    rope = config.get("rope_parameters")
    if rope:
        config["rope_theta"] = rope["rope_theta"]
        if rope["rope_type"] != "default":
            config["rope_scaling"] = rope
        if rope["rope_type"] == "longrope":
            config["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


@torch.no_grad()
def _verify(model: PreTrainedModel, stock_class: type[PreTrainedModel], path: Path) -> float:
    """Reload what was written, and return how far it is from the model."""
    try:
        inputs = _example(model)
        expected = _outputs(_as_loaded(model), inputs)
    except Exception as error:
        raise ValueError(
            f"What is written is compared on random tokens or an image, with which alone {stock_class.__name__} does "
            f"not run ({error}). Save the model as it is, with model.save_pretrained."
        ) from error
    stock = stock_class.from_pretrained(path)
    nn.Module.to(stock, model.device).eval()
    found = _outputs(stock, inputs)
    difference, allowed = _difference(expected, found), TOLERANCE
    if not difference <= allowed:
        finer = torch.float64 if stock.dtype in (torch.float32, torch.float64) else torch.float32
        if stock._can_set_experts_implementation():
            stock.set_experts_implementation("eager")  # the grouped product of experts takes no fp64
        nn.Module.to(stock, finer)
        precise = _outputs(stock, inputs)
        allowed = max(TOLERANCE, TIMES_ROUNDING * _difference(precise, found))
    if not difference <= allowed:  # which NaN is not, either
        raise RuntimeError(
            f"The exported {stock_class.__name__} differs from the model by {difference:.1e} of the largest logit, of "
            f"which rounding explains {allowed:.1e}, so nothing was written. Save the model as it is, with "
            "model.save_pretrained."
        )
    return difference


def _as_loaded(model: PreTrainedModel) -> PreTrainedModel:
    """The model in evaluation mode with the same weights, and rotary embeddings as loading would build them."""
    weights = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    twin = copy.deepcopy(model, weights).eval()
    for module in twin.modules():
        if hasattr(module, "rotary_emb"):
            module.rotary_emb = fresh_rotary(module.rotary_emb).to(model.device)
    return twin


def _example(model: PreTrainedModel) -> Tensor:
    """Random tokens, (1, tokens), or a random image for a model that sees."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    if model.main_input_name == "pixel_values":
        shape = (1, config.num_channels, config.image_size, config.image_size)
        return torch.randn(shape, generator=generator).to(model.device)
    limit = min(_TOKENS, getattr(config, "max_position_embeddings", _TOKENS))
    vocabulary = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    return torch.randint(vocabulary, (1, limit), generator=generator).to(model.device)


def _outputs(model: PreTrainedModel, inputs: Tensor) -> list[Tensor]:
    """What a model returns for tokens, and for the second half of them from the cache of the first; or for an image."""
    inputs = inputs.to(model.dtype) if inputs.is_floating_point() else inputs
    torch.manual_seed(0)  # some draw a mask
    given = {"decoder_input_ids": inputs} if model.config.is_encoder_decoder else {}
    outputs = [value for value in model(inputs, return_dict=True, **given).values() if isinstance(value, Tensor)]
    if model.can_generate() and not given:
        first, second = inputs.tensor_split(2, dim=1)
        begun = model(first, use_cache=True, return_dict=True)
        name = next(name for name in ("cache", "past_key_values") if name in begun)  # the first since transformers 5.24
        outputs.append(model(second, use_cache=True, return_dict=True, **{name: begun[name]}).logits)
    return outputs


def _difference(expected: list[Tensor], found: list[Tensor]) -> float:
    """Largest difference over the largest entry."""
    return max(((theirs - ours).abs().max() / ours.abs().max()).item() for ours, theirs in zip(expected, found))

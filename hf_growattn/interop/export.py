"""`export_model`: a grown model as a checkpoint of a stock architecture, which needs no code of ours to load."""

import json
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..grow.checks import refuse_sharded
from ..growable.folders import replacing
from ..growable.models import GrowableModelMixin, is_grown
from ..measure.passes import undisturbed
from ..model.configuration import stock_head_dim
from .costs import Cost, costs_of
from .stock import fresh_rotary, rope_parameters, stock_form, stock_model
from .unequal import MODEL_TYPE, names_of_other_readers, widths

# Largest difference of the logits, over the largest logit, that is never questioned; and how many times the rounding
# of the exported model itself is not: two models that compute the same round apart.
TOLERANCE, TIMES_ROUNDING = 1e-5, 4.0
_TOKENS = 128  # of the comparison
# What transformers 4, and with it older readers, look for instead of an entry of `rope_parameters`.
_OLDER_NAMES = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}


@dataclass(frozen=True)
class ExportReport:
    """What `export_model` wrote.

    Attributes:
        path: the checkpoint.
        model_type: its architecture.
        head_dim, v_head_dim: the widths of its queries and keys, and of its values.
        parameters: how many it holds.
        difference: largest difference between its logits and the model's, over the largest logit.
        exact_up_to: the longest sequence, where frequencies that the model adapts to longer ones had to be fixed; None
            without a limit.
        costs: bytes of the KV cache and weights, "before growth" and in each form, "native", "padded" and "unequal",
            that the model can have; see `costs_of`.
    """

    path: Path
    model_type: str
    head_dim: int
    v_head_dim: int
    parameters: int
    difference: float
    exact_up_to: int | None
    costs: dict[str, Cost]


def export_model(model: PreTrainedModel, directory, target: str = "auto", tokenizer=None) -> ExportReport:
    """Write a patched model, grown or not, as a checkpoint that plain transformers loads, with the same outputs.

    It is reloaded by the stock class and compared with the model on random tokens, at once and through the cache,
    before it takes its place at `directory`. The model stays as it is. Hidden states of a GPT-2-like model come out
    wider: the first entries are the model's. Of several processes, call it in one.

    A grown Llama, Mistral without a window or Qwen2, with default rotation and no biases but on queries, keys and
    values, can be a stock MiMo V2 Flash, with one width for all queries and keys and another for all values. "auto"
    takes it where the KV cache comes out smaller. A tied head is written apart there, which may be many weights:
    `costs` tells, and target="llama" keeps it tied. Other families have other norms, activations or experts; task heads
    and scaled rotations have no such class. transformers runs it with eager attention. vLLM and SGLang have it, which
    was read, not run (vllm mimo_v2_flash.py at 01ed47b, flash_attn_diffkv.py at 0305565; sglang mimo_v2_flash.py at
    0a41b3b): config.json repeats what they read under their names. FlashAttention 3, which vLLM calls for it, takes
    unequal widths on Hopper alone, queries up to 64 wide, or 136 to 192 with values of 104 to 128; for other widths
    choose target="llama".

    In all other forms heads are as wide as the widest, rounded up to a multiple of 8, or of 2 where the residual stream
    widens with them.
    transformers 4 reads the same rotation, except in Gemma 3. llama.cpp runs Llama, Mistral without a window and a few
    more with the same tokens: scripts/to_gguf.py converts, compares, and mends a scaled rotation, which llama.cpp's
    converter drops. vLLM was read, not run (models/llama.py at e06c9ba, granite.py at 68f442e, transformers/base.py at
    03bf3c9, rotary_embedding at 07b12f1, cpu_attn.py at 0035860): its Llama and Granite take the width, the biases and
    both rope types; its FlashAttention takes widths of 8, 16, .. 256, its Triton attention 32 and more, its CPU
    attention 32, 64, 80, 96, 112, 128, 160, 192, 224 and 256. All layers have the same widths, so pages of its cache
    are of one size. What was not exported goes to vLLM's backend for transformers models, which was read, not run,
    either (fusers/attention.py at 0848e67, transformers/__init__.py at 055e47c). That keeps heads `config.head_dim`
    wide, which growth leaves as it was: a layer that is wider than vLLM's own raises there, and says so.

    Args:
        model: a patched model, with any head; adapters merged.
        directory: where to write; other files that lie there stay.
        target: a stock model type, or "auto" for the best one that fits. "granite" holds the softmax scale in its
            config, so nothing is folded into the queries, and half precision stays closer; few heads exist for it.
        tokenizer: saved along, if given. The generation config travels anyway.

    Returns:
        A report with what was written and how close it is.

    Raises:
        TypeError: `model` is not patched.
        ValueError: no stock class can hold it, it is quantized, or the target is unknown; the message says why and what
            to do.
        OSError: `directory` cannot be written; what was there is as it was.
        RuntimeError: the reloaded checkpoint computes something else; nothing is left of it.
    """
    if not isinstance(model, GrowableModelMixin):
        raise TypeError(
            f"export_model needs a patched model, not {type(model).__name__}. Pass the model inside a wrapper; a stock "
            "model needs no export: use its save_pretrained."
        )
    refuse_sharded(model, [])
    form, target_class = stock_form(model, target)
    directory = Path(directory).resolve()
    with replacing(directory) as partial:
        stock = stock_model(model, form, target_class)
        stock.save_pretrained(partial)
        if is_grown(model) or stock.config.model_type == MODEL_TYPE:
            _add_older_names(partial / "config.json")
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        model_type, parameters = stock.config.model_type, stock.num_parameters()
        head_dim, v_head_dim = widths(model) if model_type == MODEL_TYPE else (stock_head_dim(stock.config),) * 2
        del stock  # what is new in it makes room for what is reloaded
        difference = _verify(model, target_class, partial)
    dynamic = is_grown(model) and any(p["rope_type"] == "dynamic" for p in rope_parameters(model.config).values())
    limit = model.config.max_position_embeddings if dynamic and not form.partial else None
    costs = costs_of(model)
    return ExportReport(directory, model_type, head_dim, v_head_dim, parameters, difference, limit, costs)


def _add_older_names(file: Path) -> None:
    """Repeat the rotation under the names of transformers 4, whose readers would silently take the default one."""
    config = json.loads(file.read_text())
    if config["model_type"] == MODEL_TYPE:
        config |= names_of_other_readers(config)
    rope, names = config.get("rope_parameters") or {}, _OLDER_NAMES.get(config["model_type"], {})
    if "rope_type" in rope:  # else there is none, or one for each type of layer, for which they have no name
        for name in {"rope_theta", "partial_rotary_factor"} & rope.keys():
            config[names.get(name, name)] = rope[name]
        if rope["rope_type"] != "default":
            config["rope_scaling"] = rope
        if rope["rope_type"] == "longrope":
            config["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


@torch.no_grad()
def _verify(model: PreTrainedModel, stock_class: type[PreTrainedModel], path: Path) -> float:
    """Reload what was written, and return how far it is from the model."""
    inputs = _example(model)
    with undisturbed(model), _fresh_rotaries(model):
        expected = _outputs(model, inputs)
    attention = model.config._attn_implementation
    if attention == "sdpa" and not stock_class._supports_sdpa:
        attention = "eager"
    stock = stock_class.from_pretrained(path, attn_implementation=attention)
    nn.Module.to(stock, model.device).eval()
    difference = _difference(expected, _outputs(stock, inputs))
    if difference <= TOLERANCE:
        return difference
    allowed = max(TOLERANCE, TIMES_ROUNDING * _rounding(stock, inputs))
    if not difference <= allowed:
        raise RuntimeError(
            f"The exported {stock_class.__name__} differs from the model by {difference:.1e} of the largest logit, of "
            f"which rounding explains {allowed:.1e}, so nothing was written. Save the model as it is, with "
            "model.save_pretrained."
        )
    return difference


@contextmanager
def _fresh_rotaries(model: PreTrainedModel):
    """Lend the model rotary embeddings as loading would build them; the live ones note which lengths they met."""
    owners = [
        (module, cast(nn.Module, module.rotary_emb)) for module in model.modules() if hasattr(module, "rotary_emb")
    ]
    try:
        for module, rotary in owners:
            module.rotary_emb = fresh_rotary(rotary).to(model.device)
        yield
    finally:
        for module, rotary in owners:
            module.rotary_emb = rotary


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
    outputs = [value for value in model(inputs, return_dict=True).values() if isinstance(value, Tensor)]
    if model.can_generate():
        first, second = inputs.tensor_split(2, dim=1)
        begun = model(first, use_cache=True)
        name = next(name for name in ("cache", "past_key_values") if name in begun)  # the first since transformers 5.24
        outputs.append(model(second, use_cache=True, **{name: begun[name]}).logits)
    return outputs


def _difference(expected: list[Tensor], found: list[Tensor]) -> float:
    """Largest difference over the largest entry; of hidden states of a wider stream the model's own entries count."""
    return max(
        ((theirs[..., : ours.shape[-1]] - ours).abs().max() / ours.abs().max()).item()
        for ours, theirs in zip(expected, found)
    )


def _rounding(stock: PreTrainedModel, inputs: Tensor) -> float:
    """What the next precision would change in the outputs, and the last bit of each rotary frequency in fp32."""
    rounded = _outputs(stock, inputs)
    if stock._can_set_experts_implementation():
        stock.set_experts_implementation("eager")  # the grouped product of experts takes no fp64
    nn.Module.to(stock, torch.float64 if stock.dtype in (torch.float32, torch.float64) else torch.float32)
    for name, buffer in stock.named_buffers():
        if name.endswith("inv_freq"):
            buffer.mul_(1 + torch.finfo(torch.float32).eps)
    return _difference(_outputs(stock, inputs), rounded)

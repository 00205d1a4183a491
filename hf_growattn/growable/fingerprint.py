"""Whether a model has the old weights that a growth was found on: a few numbers of each, read where they lie."""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..model.families import base_layer, linear_sizes
from ..model.new_dims import ExtraDims, full_tensor
from .projections import answers, is_plain

_ENTRIES = 8  # of each weight
_ROUNDING, _QUANTIZATION = 0.01, 0.5  # how far they may be apart, relative to their norm: bf16 rounds by 0.4 %
Fingerprint = dict[str, tuple[str, list[float]]]  # by module, what quantizes it, and some of its weights


@torch.no_grad()
def fingerprint(model: PreTrainedModel, state_dict: dict[str, Tensor] | None = None, prefix: str = "") -> Fingerprint:
    """Some old weights of every linear layer and embedding of the base model, without adapters and task heads.

    Args:
        model: the patched model.
        state_dict: where weights are read if all ranks of a sharded model have gathered it.
        prefix: of the names of the model's parameters in `state_dict`.
    """
    names = {parameter: f"{prefix}{name}" for name, parameter in model.named_parameters()}
    start = next(name for name, module in model.named_modules() if module is model.base_model)
    found: Fingerprint = {}
    for name, child in _readable_modules(model.base_model, start):
        inside: Any = base_layer(child)
        if getattr(child, "merged", False):
            continue
        with align_module_device(inside):
            if is_plain(inside) or isinstance(inside, nn.Embedding):
                own: Any = inside.weight
                weight = own if state_dict is None else state_dict.get(names.get(own, ""))
                kind, read = "", None if weight is None else _entries(inside, full_tensor(weight))
            else:
                kind, read = type(inside).__name__, _computed_entries(inside)
        if read is not None and not read.is_meta:
            found[name] = kind, read.float().tolist()
    return found


def _readable_modules(module: nn.Module, place: str) -> Iterator[tuple[str, nn.Module]]:
    """The linear layers and embeddings in a module, with their adapters around them, by path."""
    for name, child in module.named_children():
        path, inside = f"{place}.{name}" if place else name, base_layer(child)
        if linear_sizes(inside) is not None or isinstance(inside, nn.Embedding):
            yield path, child
        elif not isinstance(child, ExtraDims):
            yield from _readable_modules(child, path)


def _spread(size: int, device: torch.device) -> Tensor:
    return torch.arange(_ENTRIES, device=device) * size // _ENTRIES


def _entries(module: Any, weight: Tensor) -> Tensor:
    """Entries of a weight (outputs, inputs), from its first corner to its last; of the first rows of an embedding."""
    by_output = weight.T if isinstance(module, Conv1D) else weight
    rows = _spread(by_output.shape[0], weight.device)
    if isinstance(module, nn.Embedding):  # which may have been resized since
        rows = torch.arange(_ENTRIES, device=weight.device) % len(weight)
    return by_output[rows, _spread(by_output.shape[1], weight.device)]


def _computed_entries(module: Any) -> Tensor | None:
    """The same entries of a quantized projection: of its answers to some unit vectors."""
    inputs, outputs = linear_sizes(module)
    questions = torch.zeros(_ENTRIES, inputs)
    questions[range(_ENTRIES), _spread(inputs, questions.device)] = 1.0
    try:
        computed = answers(module, questions)
    except Exception:  # of a kernel that wants another device or other sizes: nothing is known of these weights then
        return None
    return computed[range(_ENTRIES), _spread(outputs, computed.device)]


def is_of_another_base(ours: Fingerprint, saved: Fingerprint) -> bool:
    """Whether two fingerprints are of different weights, in whatever precision; quantized ones are compared roughly."""
    for name in ours.keys() & saved.keys():
        (kind, own), (saved_kind, other) = ours[name], saved[name]
        before, now = torch.tensor(other), torch.tensor(own)
        tolerance = _ROUNDING if kind == saved_kind else _QUANTIZATION
        if not torch.dist(before, now) <= tolerance * before.norm():
            return True
    return False

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
from .growths import name_in_base
from .projections import answers, is_plain

_ENTRIES = 8  # of each weight
_ROUNDING, _QUANTIZATION = 0.01, 0.5  # how far they may be apart, relative to their norm: bf16 rounds by 0.4 %
Fingerprint = dict[str, tuple[str, list[float]]]  # by the name of a weight, what quantizes it, and some of its entries


@torch.no_grad()
def fingerprint(model: PreTrainedModel, state_dict: dict[str, Tensor] | None = None, prefix: str = "") -> Fingerprint:
    """Some entries of every weight of the base model and of the output embeddings, without adapters and task heads.

    Args:
        model: the patched model.
        state_dict: where weights are read if all ranks of a sharded model have gathered it.
        prefix: of the names of the model's parameters in `state_dict`.
    """
    names = {parameter: f"{prefix}{name}" for name, parameter in model.named_parameters()}
    head = model.get_output_embeddings()
    found: Fingerprint = {}

    def note(name: str, kind: str, entries: Tensor | None) -> None:
        if entries is not None and not entries.is_meta:
            found[name_in_base(model, name)] = kind, entries.float().tolist()

    for path, child in _base_modules(model):
        inside: Any = base_layer(child)
        is_quantized = linear_sizes(inside) is not None and not is_plain(inside)
        with align_module_device(inside):
            if is_quantized:
                note(f"{path}.weight", type(inside).__name__, _computed_entries(inside))
            for own, parameter in inside.named_parameters(recurse=False):
                weight = parameter if state_dict is None else state_dict.get(names.get(parameter, ""))
                if weight is not None and weight.numel() and not (is_quantized and own == "weight"):
                    may_grow = child is head or isinstance(inside, nn.Embedding)
                    note(f"{path}.{own}", "", _entries(full_tensor(weight), isinstance(inside, Conv1D), may_grow))
    return found


def _base_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose weights tell a base, with their adapters around them, by path."""
    base, head = model.base_model, model.get_output_embeddings()
    for path, module in model.named_modules():
        if module is base:
            yield from _modules_in(module, path)
        elif module is head and is_plain(module) and not getattr(module, "merged", False):  # no copy that trains whole
            yield path, module


def _modules_in(module: nn.Module, place: str) -> Iterator[tuple[str, nn.Module]]:
    """A module and those inside, but for new dims, adapters and what adapters are merged into."""
    yield place, module
    for name, child in module.named_children():
        if isinstance(child, ExtraDims) or getattr(child, "merged", False):
            continue
        path = f"{place}.{name}" if place else name
        child = getattr(child, "original_module", child)  # of which peft trains a copy (modules_to_save)
        if base_layer(child) is child:
            yield from _modules_in(child, path)
        else:
            yield path, child


def _spread(size: int, device: torch.device) -> Tensor:
    return torch.arange(_ENTRIES, device=device) * size // _ENTRIES


def _entries(weight: Tensor, is_transposed: bool, may_grow: bool) -> Tensor:
    """Entries of a weight, from its first corner to its last; of its first rows where others may have been added."""
    if weight.dim() != 2:
        return weight.flatten()[_spread(weight.numel(), weight.device)]
    by_output = weight.T if is_transposed else weight
    rows = _spread(by_output.shape[0], weight.device)
    if may_grow:
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

"""Training next to quantized weights (`--load_in_4bit`, `--load_in_8bit`): adapters alone, merged at the end."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from ..growable.attention import keep_unpacked
from ..growable.growths import is_grown, load_growth, save_growth
from ..growable.models import GrowableModelMixin
from ..interop.peft_method import GrowAttnConfig, initialize_growattn_weights
from ..report.report import GrowthReport


def is_quantized(model: nn.Module) -> bool:
    """Whether a model, or what peft has wrapped, was loaded quantized."""
    return any(getattr(module, "is_quantized", False) for module in model.modules())


def move_to_device(model: nn.Module, device: torch.device) -> Any:
    """The model on a device, to be trained; a quantized one stays where it was loaded."""
    keep_unpacked(model)
    return model if is_quantized(model) else model.to(device)


def add_adapter(config: PeftConfig, model: PreTrainedModel, seed: int) -> nn.Module:
    """Give a model an adapter, whose weights are drawn by a seed."""
    torch.manual_seed(seed)
    return get_peft_model(model, config)


def grow_quantized(
    model: PreTrainedModel, weights: int, batches: list, seed: int, loss_of: Callable[[nn.Module], Callable] | None
) -> tuple[nn.Module, GrowthReport]:
    """The model with new dims where they help most, as an adapter next to its quantized weights."""
    adapted: Any = add_adapter(GrowAttnConfig(budget=weights, task_type="CAUSAL_LM"), model, seed)
    report = initialize_growattn_weights(adapted, batches, loss=loss_of and loss_of(adapted))
    return adapted, report


def merge_adapters(adapted: PeftModel, dense: PreTrainedModel) -> GrowableModelMixin:
    """The dense model that was quantized, with the adapters merged into it, and the new dims of its base."""
    with tempfile.TemporaryDirectory() as folder:
        if is_grown(adapted):
            save_growth(adapted, folder)
            load_growth(dense, folder)
        adapted.save_pretrained(folder, save_embedding_layers=False)
        return PeftModel.from_pretrained(dense, folder).merge_and_unload()

"""Attention that grows: widen the heads of Hugging Face models where the loss asks for it."""

import importlib
import sys
from pathlib import Path

# The command `growattn` imports what it needs itself, so that its help and its completion are there without torch.
if Path([*sys.argv, ""][0]).name not in ("growattn", "growattn.exe"):
    from .architectures import Architecture
    from .attention import GrowableAttention
    from .cards import model_card
    from .export import ExportReport, export_model
    from .growth import Grower
    from .pages import save_report
    from .patch import patch_model, register_architecture, unpatch_model
    from .plan import GrowthConfig
    from .report import GrowthReport, TrimReport
    from .trim import trim_model
    from .views import attention_views

__all__ = [
    "Architecture",
    "ExportReport",
    "GrowableAttention",
    "Grower",
    "GrowthCallback",
    "GrowthConfig",
    "GrowthReport",
    "TrimReport",
    "attention_views",
    "export_model",
    "model_card",
    "patch_model",
    "register_architecture",
    "save_report",
    "trim_model",
    "unpatch_model",
]
__version__ = "0.1.0"

# Found when they are asked for, since they import what few need: transformers' Trainer, and peft, which is optional.
_ON_DEMAND = {
    "GrowthCallback": "trainer",
    "GrowAttnConfig": "peft_method",
    "initialize_growattn_weights": "peft_method",
}


def __getattr__(name: str):
    if name in _ON_DEMAND:
        return getattr(importlib.import_module(f".{_ON_DEMAND[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

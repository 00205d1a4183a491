"""Attention that grows: widen the heads of Hugging Face models where the loss asks for it."""

from .attention import GrowableAttention
from .growth import Grower
from .patch import patch_model, unpatch_model
from .plan import GrowthConfig
from .report import GrowthReport, TrimReport
from .trim import trim_model
from .views import attention_views

__all__ = [
    "GrowableAttention",
    "Grower",
    "GrowthCallback",
    "GrowthConfig",
    "GrowthReport",
    "TrimReport",
    "attention_views",
    "patch_model",
    "trim_model",
    "unpatch_model",
]
__version__ = "0.1.0"


def __getattr__(name: str):
    if name == "GrowthCallback":  # Trainer imports every integration that is installed: only for those who use it
        from .trainer import GrowthCallback

        return GrowthCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

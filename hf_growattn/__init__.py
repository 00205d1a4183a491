"""Attention that grows: widen the heads of Hugging Face models where the loss asks for it."""

from .attention import GrowableAttention
from .growth import Grower
from .patch import patch_model, unpatch_model
from .plan import GrowthConfig
from .report import GrowthReport
from .trainer import GrowthCallback
from .views import attention_views

__all__ = [
    "GrowableAttention",
    "Grower",
    "GrowthCallback",
    "GrowthConfig",
    "GrowthReport",
    "attention_views",
    "patch_model",
    "unpatch_model",
]
__version__ = "0.1.0"

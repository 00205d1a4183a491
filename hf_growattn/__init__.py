"""Attention that grows: widen the query/key width of Hugging Face models where the loss asks for it."""

from .attention import GrowableAttention
from .growth import Grower, GrowthConfig, GrowthReport
from .patch import patch_model, unpatch_model

__all__ = ["GrowableAttention", "Grower", "GrowthConfig", "GrowthReport", "patch_model", "unpatch_model"]
__version__ = "0.1.0"

"""Attention that grows: widen the heads of Hugging Face models where the loss asks for it.

`patch_model` makes a model growable, and `Grower.find` (`grow.growth`) finds new dims. The way of a batch: the model
computes its loss while a probe sits in each attention module (`model.hooks` lets it join, `measure.passes` runs the
batches); the probe's gradient says what new dims could do (`measure.directions`); dims are chosen (`grow.plan`), tried
in the same place by steps that other batches judge (`grow.trial`), and kept there, in `attention.extra`
(`growable.growths`), or dropped. Old weights are never touched. Each room, a sub-package, says in its first lines what
lives there. Import from here alone: what lies deeper may move.
"""

import importlib

from .growable.registration import register_families

__version__ = "0.1.0"

# Where each public name is found when it is asked for.
_PLACES = {
    "GrowAttnConfig": "interop.peft_method",
    "Growth": "grow.growth",
    "Grower": "grow.growth",
    "GrowthCallback": "training.callback",
    "GrowthConfig": "grow.plan",
    "GrowthReport": "report.report",
    "Method": "training.methods",
    "AttentionLayout": "growable.projections",
    "attention_views": "measure.views",
    "export_model": "interop.export",
    "initialize_growattn_weights": "interop.peft_method",
    "load_growth": "growable.growth_files",
    "patch_model": "growable.models",
    "race": "training.race",
    "register_architecture": "growable.projections",
    "save_growth": "growable.growth_files",
    "unpatch_model": "growable.models",
    "write_card": "interop.cards",
}
__all__ = list(_PLACES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name in _PLACES or name.startswith("GrowAttn"):  # a model class, which the Auto classes look for here
        return getattr(importlib.import_module(f".{_PLACES.get(name, 'growable.models')}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})


# peft knows a saved adapter by the name of its method, whichever of the two libraries is imported first.
importlib.import_module(".interop.peft_method", __name__)
register_families(importlib.import_module(__name__))

"""Refuse what is sharded: growth needs every weight and its optimizer state whole, in one process."""

from collections.abc import Iterable
from itertools import chain

from torch import nn

# By package and class ("" is any class of the package), so that nothing has to be imported or even installed.
_CLASSES = {
    ("torch.distributed", "DTensor"): "a DTensor, of FSDP2 or tensor parallelism",
    ("torch.distributed", "FSDPModule"): "sharded by FSDP2",
    ("torch.distributed", "FullyShardedDataParallel"): "wrapped by FSDP1",
    ("torch.distributed", "ZeroRedundancyOptimizer"): "torch's ZeroRedundancyOptimizer",
    ("deepspeed", ""): "DeepSpeed's",
}
# By what the libraries leave on a parameter; FSDP1 and ZeRO-3 may be met without their wrappers.
_MARKS = {"_fsdp_flattened": "flattened by FSDP1", "ds_id": "partitioned by DeepSpeed ZeRO-3"}
_DISTRIBUTED_TYPES = ("FSDP", "DEEPSPEED", "MEGATRON_LM")


def refuse_sharded(model: nn.Module, optimizers: Iterable, accelerator=None) -> None:
    """Make sure that neither the model nor its bare optimizers are sharded over processes.

    Raises:
        ValueError: they are, by FSDP, tensor parallelism, DeepSpeed, Megatron or ZeroRedundancyOptimizer.
    """
    kind = str(getattr(getattr(accelerator, "distributed_type", None), "value", None))
    found = f"accelerator.distributed_type is {kind}" if kind in _DISTRIBUTED_TYPES else None
    parts = chain(model.named_modules(), model.named_parameters()) if isinstance(model, nn.Module) else ()
    for name, part in chain(((f"the optimizer, {type(o).__name__},", o) for o in optimizers), parts):
        how = _sharding_of(part)
        found = found or (how and f"{name or 'the model'} is {how}")
    if found:
        raise ValueError(
            f"Growth needs every weight and its optimizer state whole, and {found}. Save the full model and the full "
            "optimizer state, grow them in one process, un-sharded, and load the grown checkpoint into the sharded "
            "run: scripts/grow_sharded.py does so for FSDP2."
        )


def _sharding_of(part) -> str | None:
    """What shards a module, a parameter or an optimizer, by its marks and its classes; None if nothing does."""
    known = [what for mark, what in _MARKS.items() if hasattr(part, mark)]
    for cls in type(part).__mro__:
        known += [
            what
            for (package, name), what in _CLASSES.items()
            if f"{cls.__module__}.".startswith(f"{package}.") and name in ("", cls.__name__)
        ]
    return next(iter(known), None)

"""Refuse what is sharded: growth needs every weight and its optimizer state whole, in one process."""

from collections.abc import Iterable, Iterator

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
    """Make sure that neither the model nor its optimizers are sharded over processes.

    Raises:
        ValueError: they are, by FSDP, tensor parallelism, DeepSpeed, Megatron or ZeroRedundancyOptimizer.
    """
    for found in _shardings(model, optimizers, accelerator):
        raise ValueError(
            f"Growth needs every weight and its optimizer state whole, and {found}. Save the full model and the full "
            "optimizer state, grow them in one process, un-sharded, and load the grown checkpoint into the sharded "
            "run: scripts/grow_sharded.py does so for FSDP2."
        )


def _shardings(model, optimizers, accelerator) -> Iterator[str]:
    """Say what is sharded, one clause for each thing found."""
    kind = str(getattr(getattr(accelerator, "distributed_type", None), "value", None))
    if kind in _DISTRIBUTED_TYPES:
        yield f"accelerator.distributed_type is {kind}"
    for optimizer in optimizers:
        for inner in (optimizer, getattr(optimizer, "optimizer", None)):  # accelerate's wrapper holds another
            for what in _known_as(inner):
                yield f"the optimizer, {type(inner).__name__}, is {what}"
    if not isinstance(model, nn.Module):
        return
    for name, module in model.named_modules():
        for what in _known_as(module):
            yield f"{name or 'the model'} is {what}"
    for name, parameter in model.named_parameters():
        marks = [what for mark, what in _MARKS.items() if hasattr(parameter, mark)]
        for what in [*marks, *_known_as(parameter)]:
            yield f"{name} is {what}"


def _known_as(thing) -> list[str]:
    """What the classes of an object, its parents among them, are known as in the table."""
    classes = [(f"{cls.__module__}.", cls.__name__) for cls in type(thing).__mro__]
    return [
        what
        for (package, name), what in _CLASSES.items()
        if any(module.startswith(f"{package}.") and name in ("", own) for module, own in classes)
    ]

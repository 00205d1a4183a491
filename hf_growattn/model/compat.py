"""Every private name of transformers and torch that this library needs, each with the reason.

`tests/test_compat.py` fails by the name of the first one that is gone.
"""

from collections.abc import Callable
from typing import Any

from torch import nn


def remove_hooks(module: nn.Module, is_ours: Callable[[Any], bool]) -> None:
    """Remove the forward hooks of a module that are ours: a handle would not follow a copy or a pickle of it."""
    hooks = {**module._forward_pre_hooks, **module._forward_hooks}  # their numbers are unique in a process
    tables: tuple[Any, ...] = (
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    )
    for number in [number for number, hook in hooks.items() if is_ours(hook)]:
        for table in tables:
            table.pop(number, None)


def replace_base(cls: type, old: type, new: type) -> type:
    """The class with another one in the place of a base: `fully_shard` derives a class of its own from a model's."""
    if cls is old:
        return new
    bases = tuple(replace_base(base, old, new) if issubclass(base, old) else base for base in cls.__bases__)
    namespace = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls.__name__.replace(old.__name__, new.__name__), bases, namespace)

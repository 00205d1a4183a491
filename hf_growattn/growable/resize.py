"""One parameter before and after a change of width: what of it stays, and where that lands."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .sharding import fill_whole, laid_out_like, whole


@dataclass
class Resize:
    """One parameter of a projection before and after a change of width.

    Attributes:
        module, name: where the parameter lives.
        old, new: the parameters; `new` holds at `positions` along `axis` what `old` holds at `kept`, zeros elsewhere.
        axis: the axis whose size changed.
        kept: (n,) indices along `axis` of `old`: all of them, unless dims were cut.
        positions: (n,) indices along `axis` of `new`.
        steepness: (entries of `new` along `axis`,) largest squared gradients of a few batches, in units of what is
            usual at `positions`; None where nobody measured them.
    """

    module: nn.Module
    name: str
    old: nn.Parameter
    new: nn.Parameter
    axis: int
    kept: Tensor
    positions: Tensor
    steepness: Tensor | None = None

    def carry(self, old: Tensor, new: Tensor) -> Tensor:
        """Copy what is kept of a tensor of the old parameter's shape into one of the new one's, and return that."""
        kept = old.index_select(self.axis, self.kept.to(old.device))
        return new.index_copy_(self.axis, self.positions.to(new.device), kept)

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that lies along the old parameter, such as its gradient, with zeros for entries that are new."""
        shape = list(tensor.shape)
        shape[self.axis] = self.new.shape[self.axis]
        return self.carry(tensor, tensor.new_zeros(shape))

    def trained(self, parameter: nn.Parameter) -> torch.Tensor:
        """Which of the old or the new parameter's entries along `axis` train, where others are frozen: indices."""
        along = torch.arange(parameter.shape[self.axis], device=parameter.device)
        frozen = getattr(parameter, "frozen_entries", None)
        return along if frozen is None else along[~frozen.flatten().to(along.device)]

    def fill(self) -> None:
        """Write what is kept of the old parameter, of its gradient and of its `frozen_entries` into the new one."""
        old = whole(self.old.detach())
        fill_whole(self.new.detach(), self.carry(old, old.new_zeros(self.new.shape)))
        if self.old.grad is not None:
            self.new.grad = laid_out_like(self.spread(whole(self.old.grad)), self.new)
        if "frozen_entries" in vars(self.old):
            vars(self.new)["frozen_entries"] = self.spread(vars(self.old)["frozen_entries"])

    def mark_frozen(self) -> None:
        """Note the entries that come from a frozen parameter in the new one, so that the others may train alone.

        `frozen_entries` is True for them, and has size 1 along all other axes. By itself it changes nothing.
        """
        if not self.old.requires_grad:
            shape = [1] * self.old.dim()
            shape[self.axis] = self.old.shape[self.axis]
            frozen = torch.ones(shape, dtype=torch.bool, device=self.old.device)
            vars(self.new)["frozen_entries"] = self.spread(frozen)

    def hand_over_hooks(self) -> None:
        """Let hooks on the old parameter's gradient run for the new one; the handles that remove them stay valid."""
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(self.old, hooks):
                setattr(self.new, hooks, getattr(self.old, hooks))

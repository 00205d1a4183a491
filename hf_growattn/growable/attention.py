"""`GrowableAttention`: self-attention of a living model, whose widths can grow, and which dims can be put beside."""

import types
from typing import Any

import torch

from .widths import Widths


class GrowableAttention(Widths):
    """Mixin for a stock self-attention class: one forward for all families, with widths of its own that can change.

    Per head the weights are laid out `[old dims | new dims]`: old dims rotate where the family rotates, new dims never
    do. So the logits are `s (q_old k_old^T + q_new k_new^T)`, and dims whose query or key weights are zero change
    nothing.

    Attributes:
        extension: None, or a module that lengthens queries, keys and values for as long as it is set, and whose
            `output` turns what comes out of the added value dims into an addition to this module's output.
    """

    extension: Any  # of a module

    def adopt(self) -> None:
        """Fill the attributes of a module whose class was just swapped from the stock one, at the stock widths."""
        super().adopt()
        self.extension = None
        self._renew_old_forward(type(self))

    def release(self) -> None:
        """Drop what `adopt` added, before the stock class is put back."""
        ours = {"qk_head_dim", "v_head_dim", "extension", "eager_attention", "rotate", "_heads_in_group"}
        ours |= {name for name, _ in self.architecture.aliases}
        if self.architecture.scaling is not None:
            ours.add("scaling")
        for name in ours & vars(self).keys():
            delattr(self, name)
        self._renew_old_forward(type(self).__bases__[1])

    def _renew_old_forward(self, cls: type) -> None:
        if "_old_forward" in vars(self):  # accelerate's hooks hold the bound forward of the former class
            self._old_forward = types.MethodType(cls.forward, self)

    def _heads(self, hidden_states: torch.Tensor, position_embeddings) -> tuple[torch.Tensor, ...]:
        heads = super()._heads(hidden_states, position_embeddings)
        return heads if self.extension is None else self.extension(hidden_states, *heads)

    def _joined(self, attn_output: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        added = attn_output.shape[-1] - self.v_head_dim
        if self.extension is None or not added:
            return super()._joined(attn_output, shape)
        attn_output, beside = attn_output.split((self.v_head_dim, added), dim=-1)
        return super()._joined(attn_output, shape) + self.extension.output(beside)

    @property
    def window(self) -> int | None:
        """How many tokens a query sees back to itself; None for all of them."""
        path = dict(self.architecture.passes).get("sliding_window")
        if path is None and self._at("attention_type") == "local":  # GPT-Neo keeps its window in its mask
            path = "config.window_size"
        return self._at(path) if path else None

    @property
    def normalises(self) -> bool:
        """Whether old dims are normalised, so that their logits are no bilinear form of the input."""
        return self._norm(self.architecture.query_norm) is not None

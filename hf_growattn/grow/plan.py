"""What to grow: `GrowthConfig`, and how a budget is spent over layers, patterns and messages."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..growable.attention import GrowableAttention
from ..measure import functional as F
from ..measure.gradients import Gradient
from ..measure.kinds import KINDS, MESSAGES, PATTERNS, Kind
from .trial import Change, parameters_of_a_dim

_CANDIDATES = 16  # directions of a layer and kind that a budget chooses from in one growth
_EVEN_SHARES = 4  # times the even share of a budget: the most that one layer and kind gets


@dataclass(frozen=True)
class GrowthConfig:
    """What to grow, and how to measure. Give `budget`, or fixed widths by `qk_dims` and `v_dims`.

    Attributes:
        qk_dims: dims to add to the queries and keys of each head (patterns).
        v_dims: dims to add to the values of each head (messages).
        budget: weights to add at most: a whole number, or a share of the model's parameters such as 0.01. Layers and
            kinds get the more of it the more gain they promise on unseen batches, and none where no gain holds.
        kinds: what a budget may buy, "patterns", "messages" or both.
        layers: indices of the layers to grow; None grows every layer.
        max_qk_head_dim, max_v_head_dim: widths that growth does not exceed; None means the size of the input.
        multiple_of: grown widths are rounded up to a multiple of this (8 suits tensor cores, and export).
        method: "append" leaves the old dims as they are; "refactor" replaces them and the new ones by the best balanced
            factors of the stepped product, for position-free heads. On a small GPT-2 that bought nothing: with a frozen
            base it ends .005 nats above "append", with one that trains .013 below it, level with no growth.
        update_existing: take the steepest step of the existing weights too; there it ends .015 nats above growth
            without it, frozen, and level with it where all weights train. This and "refactor" write old weights, so
            they are for plain storage only: not for frozen weights, nor under adapters.
        old_dims_train: that training will move the old dims too, itself or by adapters, so that new ones need not do
            what those can; False where the new dims train alone. None for what `requires_grad` says, block by block.
        ridge: fraction of the mean eigenvalue of the inputs' second moment that is added before whitening.
        oversampling: probe dims beyond the wanted ones in the sketch, half of them for either half of the batches.
        seed: of the sketch's random inputs.

    Raises:
        ValueError: an attribute is outside its range, or they contradict each other; the message names the fix.
    """

    qk_dims: int = 0
    v_dims: int = 0
    budget: int | float | None = None
    kinds: Sequence[str] = ("patterns", "messages")
    layers: Sequence[int] | None = None
    max_qk_head_dim: int | None = None
    max_v_head_dim: int | None = None
    multiple_of: int = 1
    method: str = "append"
    update_existing: bool = False
    old_dims_train: bool | None = None
    ridge: float = 0.05
    oversampling: int = 16
    seed: int = 0

    def __post_init__(self):
        least = {"qk_dims": 0, "v_dims": 0, "oversampling": 0, "multiple_of": 1}
        limits = {name: 1 for name in ("max_qk_head_dim", "max_v_head_dim") if getattr(self, name) is not None}
        for name, smallest in (least | limits).items():
            value = getattr(self, name)
            if type(value) is not int or value < smallest:
                raise ValueError(f"{name} must be a whole number, at least {smallest}; got {value!r}.")
        if self.budget is None and not self.qk_dims and not self.v_dims:
            raise ValueError("Nothing to grow: give qk_dims, v_dims or both, at least 1, or a budget such as 0.01.")
        if self.budget is not None:
            if self.qk_dims or self.v_dims:
                raise ValueError("Give a budget, or fixed widths by qk_dims and v_dims, not both.")
            whole, share = type(self.budget) is int, type(self.budget) is float
            if not ((whole and self.budget >= 1) or (share and 0 < self.budget < 1)):
                raise ValueError(
                    "budget must be a whole number of weights, or a share of the model's parameters between 0 and 1, "
                    f"such as 0.01; got {self.budget!r}."
                )
        if isinstance(self.kinds, str) or not self.kinds or not set(self.kinds) <= set(KINDS):
            raise ValueError(f"kinds must be a list of {', '.join(map(repr, KINDS))}; got {self.kinds!r}.")
        if self.layers is not None and not (isinstance(self.layers, Sequence) and len(self.layers)):
            raise ValueError(f"layers must be a list of at least one index, or None for all; got {self.layers!r}.")
        if self.method not in ("append", "refactor"):
            raise ValueError(f"method must be one of append, refactor; got {self.method!r}.")
        if self.update_existing and self.old_dims_train is False:
            raise ValueError("update_existing=True moves the old dims, and old_dims_train=False keeps them. Drop one.")
        if not self.ridge > 0:
            raise ValueError(f"ridge must be positive, such as 0.05; got {self.ridge!r}.")

    @property
    def chosen_kinds(self) -> list[Kind]:
        """The kinds to measure."""
        if self.budget is not None:
            return [KINDS[name] for name in KINDS if name in self.kinds]
        return [kind for kind, dims in ((PATTERNS, self.qk_dims), (MESSAGES, self.v_dims)) if dims]

    @property
    def moves_old_dims(self) -> bool:
        """Whether the existing weights take a step of their own."""
        return self.update_existing or self.method == "refactor"

    def most_dims(self, attention: GrowableAttention, kind: Kind) -> int:
        """The largest number of dims that this growth may add to one kind of a layer."""
        patterns = kind is PATTERNS
        width = attention.width_of(kind.shared)
        limit = self.max_qk_head_dim if patterns else self.max_v_head_dim
        # Beyond hidden_size the product gains no rank.
        room = max(min(limit or attention.shape.in_features, attention.shape.in_features) - width, 0)
        wanted = _CANDIDATES if self.budget is not None else (self.qk_dims if patterns else self.v_dims)
        wanted += -(width + wanted) % self.multiple_of if wanted else 0
        if wanted <= room:
            return wanted
        return max(room - (width + room) % self.multiple_of, 0)


def dims_worth_a_look(config: GrowthConfig, layers: Iterable[GrowableAttention], parameters: int) -> int:
    """How many directions of each layer and kind a budget may choose from: a small one buys few in each of many."""
    one_of_each = sum(parameters_of_a_dim(layer, kind) for layer in layers for kind in config.chosen_kinds)
    return max(math.ceil(_EVEN_SHARES * weights_of(config.budget, parameters) / one_of_each), config.multiple_of)


def candidates(config: GrowthConfig, gradients: list[Gradient]) -> list[Change]:
    """Return the most dims that the config allows in each block; a budget then chooses among them."""
    changes = []
    for gradient in gradients:
        dims = min(config.most_dims(gradient.block.attention, gradient.block.kind), gradient.sigma.shape[-1])
        changes.append(Change(gradient, dims, strength_of(gradient)[:dims]))
    return changes


def spend(config: GrowthConfig, changes: list[Change], prices: list[float], parameters: int) -> list[Change]:
    """Choose among the candidates what the budget buys.

    The n-th new dim of a layer and kind counts as the fourth root of all that growth promises there, over n. The gain
    itself overstates how much more one layer needs than another: its leading directions are learned within a few steps.

    Args:
        config: one with a budget.
        changes: the `candidates`; what is bought of them, which may be 0 dims, is returned.
        prices: for each change what a unit of `worth_of` is worth in its kind, which makes the kinds comparable.
        parameters: number of the model's weights, of which a fractional budget is a share.
    """
    budget = weights_of(config.budget, parameters)
    gains, costs, ends = [], [], []
    for change, price in zip(changes, prices):
        block, values = change.gradient.block, worth_of(change.gradient)
        width = block.attention.width_of(block.kind.shared)
        stops = [n for n in range(1, change.dims + 1) if (width + n) % config.multiple_of == 0]
        spans = list(zip([0, *stops], stops))
        promised = max(price * values.sum().item(), 0.0) ** 0.25
        shares = (values > 0) / torch.arange(1, len(values) + 1, device=values.device)
        gains.append([promised * shares[start:stop].sum().item() for start, stop in spans])
        costs.append([(stop - start) * parameters_of_a_dim(block.attention, block.kind) for start, stop in spans])
        ends.append([0, *stops])
    taken = F.allocate(gains, costs, budget)
    dims = [stops[count] for stops, count in zip(ends, taken)]
    return [Change(change.gradient, n, change.strength[:n]) for change, n in zip(changes, dims)]


def worth_of(gradient: Gradient) -> Tensor:
    """Decrease of the loss on unseen batches per unit of step of each dim, as it would be taken: (p,)."""
    return F.decreasing(gradient.validated) * strength_of(gradient)


def strength_of(gradient: Gradient) -> Tensor:
    """Share of each direction's gain that holds on the half it was not chosen from, between 0 and 1, (p,)."""
    own = torch.stack([sigma.square().sum(0) for _, sigma, _ in gradient.halves]).mean(0)
    held = F.decreasing(gradient.validated)  # one gain alone is mostly noise
    return (held / own.clamp_min(torch.finfo(own.dtype).tiny)).clamp(0, 1)


def weights_of(budget: int | float | None, parameters: int) -> int:
    """The number of weights that a budget allows in a model with this many parameters; 0 without a budget."""
    return budget if isinstance(budget, int) else int((budget or 0.0) * parameters)


def check_budget(config: GrowthConfig, layers: Iterable[GrowableAttention], parameters: int) -> None:
    """Raise a ValueError if a budget buys not even one more dim of the layers that may grow."""
    if config.budget is not None:
        costs = [parameters_of_a_dim(layer, kind) for layer in layers for kind in config.chosen_kinds]
        check_affordable(weights_of(config.budget, parameters), min(costs, default=0), parameters)


def check_affordable(bought: int, cheapest: int, parameters: int) -> None:
    """Raise a ValueError if the weights that a budget allows are fewer than the cheapest dim costs."""
    if bought < cheapest:
        raise ValueError(
            f"{bought:,} weights buy nothing: one more dim of a layer costs {cheapest:,}, "
            f"{cheapest / parameters:.2%} of this model. Choose a larger budget."
        )


def check_limits(config: GrowthConfig, layers: Iterable[GrowableAttention]) -> None:
    """Raise a ValueError if the widths that growth shall not exceed are exceeded by every layer that may grow."""
    chosen = [layer for layer in layers if config.layers is None or layer.layer in config.layers]
    for name, role in (("qk_head_dim", "key"), ("v_head_dim", "value")):
        limit, width = getattr(config, f"max_{name}"), min((layer.width_of(role) for layer in chosen), default=0)
        if limit is not None and limit < width:
            raise ValueError(
                f"max_{name}={limit} is below the present width: no layer has less than {name}={width}. The limit is "
                f"for the whole width of a head, not for what is added: choose at least {width + 1}, or leave it out."
            )

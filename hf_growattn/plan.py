"""What to grow: `GrowthConfig`, and how a budget is spent over layers, patterns and messages."""

from collections.abc import Sequence
from dataclasses import dataclass

from . import functional as F
from .estimators import ESTIMATORS
from .gradients import Block, Gradient
from .probe import MESSAGES, PATTERNS, Kind
from .trial import Change

KINDS = {kind.name: kind for kind in (PATTERNS, MESSAGES)}
_CANDIDATES = 16  # directions of a layer and kind that a budget chooses from in one growth


@dataclass(frozen=True)
class GrowthConfig:
    """What to grow, and how to measure. Give `budget`, or fixed widths by `qk_dims` and `v_dims`.

    Attributes:
        qk_dims: dims to add to the queries and keys of each head (patterns).
        v_dims: dims to add to the values of each head (messages).
        budget: weights to add at most: a whole number, or a share of the model's parameters such as 0.01. It is spent
            where the validated gain for a parameter is highest, and stays unspent where no gain holds.
        kinds: what a budget may buy, "patterns", "messages" or both.
        layers: indices of the layers to grow; None grows every layer.
        max_qk_head_dim, max_v_head_dim: widths that growth does not exceed; None means `hidden_size`.
        multiple_of: grown widths are rounded up to a multiple of this (8 suits tensor cores).
        method: "append" leaves the old dims as they are; "refactor" replaces them and the new ones by the best balanced
            factors of the stepped product, for position-free heads.
        update_existing: take the steepest step of the existing weights too.
        refine: search a step for each layer and kind after the common one.
        estimator: where directions come from. "whitened" is the method; the others are there to compare.
        ridge: fraction of the mean eigenvalue of the inputs' second moment that is added before whitening.
        oversampling: probe dims beyond the wanted ones in the sketch.
        seed: of the sketch's random inputs.

    Raises:
        ValueError: an attribute is out of its range, or they contradict each other; the message names the fix.
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
    refine: bool = False
    estimator: str = "whitened"
    ridge: float = 0.05
    oversampling: int = 8
    seed: int = 0

    def __post_init__(self):
        least = {"qk_dims": 0, "v_dims": 0, "multiple_of": 1, "oversampling": 0, "max_qk_head_dim": 1, "max_v_head_dim": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if not (name.startswith("max") and value is None) and (type(value) is not int or value < smallest):
                raise ValueError(f"{name} must be a whole number, at least {smallest}; got {value!r}.")
        if self.budget is None and not self.qk_dims and not self.v_dims:
            raise ValueError("Nothing to grow: give qk_dims, v_dims or both, at least 1, or a budget such as 0.01.")
        if self.budget is not None:
            if self.qk_dims or self.v_dims:
                raise ValueError("Give a budget, or fixed widths by qk_dims and v_dims, not both.")
            fits = self.budget >= 1 if type(self.budget) is int else 0 < self.budget < 1
            if type(self.budget) not in (int, float) or not fits:
                raise ValueError(
                    "budget must be a whole number of weights, or a share of the model's parameters between 0 and 1, "
                    f"such as 0.01; got {self.budget!r}."
                )
        if isinstance(self.kinds, str) or not self.kinds or not set(self.kinds) <= set(KINDS):
            raise ValueError(f"kinds must be a list of {', '.join(map(repr, KINDS))}; got {self.kinds!r}.")
        if self.layers is not None and not (isinstance(self.layers, Sequence) and len(self.layers)):
            raise ValueError(f"layers must be a list of at least one index, or None for all; got {self.layers!r}.")
        for name, known in (("method", ("append", "refactor")), ("estimator", ESTIMATORS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}.")
        if not self.ridge > 0:
            raise ValueError(f"ridge must be positive, such as 0.05; got {self.ridge!r}.")

    @property
    def chosen_kinds(self) -> list[Kind]:
        """The kinds to measure."""
        if self.budget is not None:
            return [KINDS[name] for name in KINDS if name in self.kinds]
        return [kind for kind, dims in ((PATTERNS, self.qk_dims), (MESSAGES, self.v_dims)) if dims]

    def most_dims(self, block: Block) -> int:
        """The largest number of dims that this growth may add to a block."""
        patterns = block.kind is PATTERNS
        width = block.attention.width(block.kind.shared)
        limit = self.max_qk_head_dim if patterns else self.max_v_head_dim
        # Beyond hidden_size the product gains no rank.
        room = max(min(limit or block.attention.config.hidden_size, block.attention.config.hidden_size) - width, 0)
        wanted = _CANDIDATES if self.budget is not None else (self.qk_dims if patterns else self.v_dims)
        wanted += -(width + wanted) % self.multiple_of if wanted else 0
        if wanted <= room:
            return wanted
        return max(room - (width + room) % self.multiple_of, 0)


def parameters_of_a_dim(block: Block) -> int:
    """Weights that one more dim of every head adds to a block."""
    stacked, shared = block.old_factors()
    return stacked.shape[0] * stacked.shape[1] + shared.shape[0] * shared.shape[1]


def plan(config: GrowthConfig, gradients: list[Gradient], parameters: int) -> list[Change]:
    """Decide how many dims each block gets, and which of its directions are grown.

    With fixed widths every block gets its dims, and directions whose gain does not hold start without effect. With a
    budget, chunks of `multiple_of` dims are bought by validated gain per weight; neighbouring directions whose gains are
    out of order share their mean, since one direction's measured gain is mostly noise.

    Args:
        parameters: number of the model's weights, of which a fractional budget is a share.
    """
    smooth = [F.decreasing(gradient.validated) for gradient in gradients]
    most = [config.most_dims(gradient.block) for gradient in gradients]
    if config.budget is None:
        dims = most
    else:
        budget = config.budget if isinstance(config.budget, int) else int(config.budget * parameters)
        chunks = [_chunks(g.block.attention.width(g.block.kind.shared), n, config.multiple_of) for g, n in zip(gradients, most)]
        gains = [[values[a:b].sum().item() for a, b in spans] for values, spans in zip(smooth, chunks)]
        costs = [[(b - a) * parameters_of_a_dim(g.block) for a, b in spans] for g, spans in zip(gradients, chunks)]
        taken = F.allocate(gains, costs, budget)
        dims = [spans[count - 1][1] if count else 0 for spans, count in zip(chunks, taken)]
    return [Change(gradient, n, values[:n] > 0) for gradient, n, values in zip(gradients, dims, smooth)]


def _chunks(width: int, most: int, multiple_of: int) -> list[tuple[int, int]]:
    """Spans of new dims that end at multiples: the first may be shorter."""
    ends = [n for n in range(1, most + 1) if (width + n) % multiple_of == 0]
    return list(zip([0, *ends], ends))

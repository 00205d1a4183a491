"""The ways to train a model that a race compares and `finetune --method` takes: what is added, and what trains."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from peft import LoraConfig
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from trl.trainer.sft_config import SFTConfig

from ..grow.again import Added
from ..grow.growth import Grower
from ..grow.plan import GrowthConfig, weights_of
from ..report.report import GrowthReport
from .quantized import add_adapter, grow_quantized, is_quantized


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        title: what people call it.
        growth: share of the budget that attention grows by at the start.
        lora: share of the budget that LoRA on all linear layers takes.
        base: whether all other weights train as well; the budget is growth's alone then.
        rates: learning rates that a race tries, times `hidden_size`: wider models take smaller steps.
    """

    title: str
    growth: float = 0.0
    lora: float = 0.0
    base: bool = False
    rates: tuple[float, ...] = (0.5, 1.5)

    def grown_share(self, width: int) -> float:
        """The learning rate of what grew, over that of LoRA beside it, in a model of some `hidden_size`; else 1.

        LoRA bears larger steps than whole weights do, and in wide models by far. Measured at 64, 128 and 576: see
        scripts/bench/results/mix_rates.md; what is wider takes the last of these.
        """
        return min(max((64 / width) ** 1.5, 1 / 30), 1.0) if self.growth and self.lora else 1.0

    @property
    def capital(self) -> str:
        """The title, as it begins a sentence."""
        return self.title[0].upper() + self.title[1:]

    @property
    def on_quantized(self) -> bool:
        """Whether quantized weights can be trained so: peft puts adapters of one kind beside them."""
        return not (self.base or (self.growth and self.lora))


_ALL_WEIGHTS = (0.1, 0.3)
METHODS = {
    "lora": Method("LoRA on all linear layers", lora=1),
    "growth": Method("growth", growth=1),
    "both": Method("1/3 growth, 2/3 LoRA", growth=1 / 3, lora=2 / 3),
    "full": Method("all weights", base=True, rates=_ALL_WEIGHTS),
    "full+growth": Method("all weights, grown first", growth=1, base=True, rates=_ALL_WEIGHTS),
}


@dataclass(frozen=True)
class Budget:
    """A number of weights that LoRA on all linear layers can have exactly, and growth nearly.

    Attributes:
        rank: of LoRA, if it takes all of the budget.
        of_a_rank: weights of LoRA at rank 1.
        width: the model's `hidden_size`.
    """

    rank: int
    of_a_rank: int
    width: int

    @classmethod
    def near(cls, model: PreTrainedModel, budget: int | float) -> "Budget":
        """The one nearest to a share of the model's weights, or to a number of them; LoRA's rank is at least 1."""
        linear = {module for module in model.modules() if isinstance(module, (nn.Linear, Conv1D))}
        linear.discard(model.get_output_embeddings())  # which peft leaves out as well
        # A quantized weight has the shape of what it is packed in.
        sizes = ((m.in_features, m.out_features) if isinstance(m, nn.Linear) else m.weight.shape for m in linear)
        of_a_rank = sum(map(sum, sizes))
        rank = max(round(weights_of(budget, model.num_parameters()) / of_a_rank), 1)
        return cls(rank, of_a_rank, model.config.get_text_config().hidden_size)

    @property
    def weights(self) -> int:
        """All of it."""
        return self.rank * self.of_a_rank

    def split(self, method: Method) -> tuple[int, int]:
        """The weights that growth gets, and LoRA's rank; what LoRA cannot take in whole ranks is growth's."""
        rank = round(method.lora * self.rank)
        left = (self.rank - rank) * self.of_a_rank
        # Each `width` weights of growth widen a linear layer by one, for which LoRA there needs one more for each rank.
        return int(left / (1 + rank / self.width)) if method.growth else 0, rank

    def admits(self, method: Method) -> bool:
        """Whether there is enough for both parts of a method: at rank 1 there is nothing to share."""
        weights, rank = self.split(method)
        return bool(weights) == bool(method.growth) and bool(rank) == bool(method.lora)


def rate_of(method: Method, config: PreTrainedConfig) -> float:
    """A learning rate where nobody chose one: between those that a race would try, for all weights TRL's own."""
    if method.base:
        return SFTConfig.learning_rate
    return readable(math.prod(method.rates) ** 0.5 / config.get_text_config().hidden_size)


def readable(rate: float) -> float:
    """A learning rate of two digits, as people write it."""
    return float(f"{rate:.1e}")


def started(
    model: PreTrainedModel,
    method: Method,
    budget: Budget,
    batches: list[dict],
    seed: int,
    loss_of: Callable[[nn.Module], Callable] | None = None,
    added: Added | None = None,
) -> tuple[nn.Module, GrowthReport | None]:
    """Make a patched model ready to be trained by a method; it is changed in place.

    Args:
        model: patched, not grown in this training.
        method: one of `METHODS`.
        budget: what growth and LoRA share.
        batches: to grow on, as for `Grower.grow`.
        seed: of LoRA's weights and of growth.
        loss_of: gives for what will train what growth lowers, as `loss` of `Grower`.
        added: what an earlier growth by the same method, budget, batches and seed has found, which takes no batches.

    Returns:
        What to train, the model or peft's wrapper of it, and what growth reports if there was one.

    Raises:
        ValueError: the model is quantized, and the method trains its weights, or grows beside LoRA.
    """
    weights, rank = budget.split(method)
    report = None
    if is_quantized(model) and not method.on_quantized:
        raise ValueError(f"Quantized weights cannot be trained by {method.title}: choose growth or LoRA alone.")
    model.requires_grad_(method.base)
    if weights and is_quantized(model):
        return grow_quantized(model, weights, batches, seed, loss_of)
    if weights and added:
        report = added.give(model)
    elif weights:
        # LoRA, too, moves the old dims: new ones need not do what those can.
        config = GrowthConfig(budget=weights, seed=seed, old_dims_train=method.base or rank > 0)
        report = Grower(model, config, loss=loss_of and loss_of(model)).grow(batches)
    if not rank:
        return model, report
    task = "CAUSAL_LM" if model.can_generate() else None  # an encoder has none that peft would have to know
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type=task)
    grown = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wrapped = add_adapter(config, model, seed)
    for parameter in grown:
        parameter.requires_grad_(True)  # peft has frozen all of the base, the new dims too
    return wrapped, report


def slow_what_grew(optimizer: Optimizer, model: nn.Module, share: float) -> None:
    """Let an optimizer that has not begun take smaller steps with everything but adapters, in groups of their own.

    Args:
        optimizer: changed in place.
        model: peft's wrapper of a model that grew.
        share: of the optimizer's learning rate; at 1 nothing changes.
    """
    if share == 1:
        return
    adapters = {parameter for name, parameter in model.named_parameters() if "lora_" in name}
    for group in list(optimizer.param_groups):
        grown = [parameter for parameter in group["params"] if parameter not in adapters]
        group["params"] = [parameter for parameter in group["params"] if parameter in adapters]
        if grown:
            optimizer.add_param_group(group | {"params": grown, "lr": share * group["lr"]})


def trained_weights(model: nn.Module) -> int:
    """How many weights a training moves: of parameters with frozen entries, the others."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [vars(p)["frozen_entries"].expand_as(p).sum() for p in trained if hasattr(p, "frozen_entries")]
    return sum(parameter.numel() for parameter in trained) - int(sum(frozen))

"""The ways to train that a race compares and `finetune --method` takes."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from peft import LoraConfig
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from trl.trainer.sft_config import SFTConfig

from ..grow.growth import Grower
from ..grow.plan import GrowthConfig, weights_of
from ..report.report import GrowthReport
from .quantized import add_adapter, grow_quantized, is_quantized


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        title: its name in sentences and tables.
        growth: share of the budget by which attention grows before the training.
        lora: share of the budget for LoRA on all linear layers.
        base: whether all other weights train as well.
        rates: learning rates that a race tries, times `hidden_size`: wider models take smaller steps.
    """

    title: str
    growth: float = 0.0
    lora: float = 0.0
    base: bool = False
    rates: tuple[float, ...] = (0.5, 1.5)

    def grown_share(self, width: int) -> float:
        """The learning rate of the grown dims, divided by that of LoRA in the same model.

        LoRA takes larger steps than whole weights do, above all in wide models. The share was measured at
        `hidden_size` 64, 128 and 576 (scripts/bench/results/mix_rates.md); wider models use the last one.
        """
        if not (self.growth and self.lora):
            return 1.0
        return min(max((64 / width) ** 1.5, 1 / 30), 1.0)


METHODS = {
    "lora": Method("LoRA on all linear layers", lora=1),
    "growth": Method("growth", growth=1),
    "both": Method("1/3 growth, 2/3 LoRA", growth=1 / 3, lora=2 / 3),
    "full": Method("all weights", base=True, rates=()),
}


@dataclass(frozen=True)
class Budget:
    """A number of weights that LoRA on all linear layers can have exactly.

    Attributes:
        rank: of LoRA with the whole budget.
        of_a_rank: weights of LoRA at rank 1.
        width: the model's `hidden_size`.
    """

    rank: int
    of_a_rank: int
    width: int

    @classmethod
    def near(cls, model: PreTrainedModel, budget: int | float) -> "Budget":
        """The budget nearest to a share of the model's weights, or to a number of weights."""
        linear = {module for module in model.modules() if isinstance(module, (nn.Linear, Conv1D))}
        linear.discard(model.get_output_embeddings())  # peft leaves it out as well
        # A quantized weight has the shape of its packed bytes.
        sizes = ((m.in_features, m.out_features) if isinstance(m, nn.Linear) else m.weight.shape for m in linear)
        of_a_rank = sum(map(sum, sizes))
        rank = max(round(weights_of(budget, model.num_parameters()) / of_a_rank), 1)
        return cls(rank, of_a_rank, model.config.get_text_config().hidden_size)

    @property
    def weights(self) -> int:
        """The weights that every method may train."""
        return self.rank * self.of_a_rank

    def split(self, method: Method) -> tuple[int, int]:
        """The weights of growth, and the rank of LoRA."""
        rank = round(method.lora * self.rank)
        if not method.growth:
            return 0, rank
        return (self.rank - rank) * self.of_a_rank, rank


def choose_rate(method: Method, config: PreTrainedConfig) -> float:
    """The default learning rate: between those of a race; TRL's for all weights."""
    if method.base:
        return SFTConfig.learning_rate
    return round_rate(math.prod(method.rates) ** 0.5 / config.get_text_config().hidden_size)


def round_rate(rate: float) -> float:
    """A learning rate with two digits."""
    return float(f"{rate:.1e}")


def prepare_model(
    model: PreTrainedModel,
    method: Method,
    budget: Budget,
    batches: list[dict],
    seed: int,
    loss_of: Callable[[nn.Module], Callable] | None = None,
) -> tuple[nn.Module, GrowthReport | None]:
    """The model to train by a method, and the report of its growth; changes it in place.

    Args:
        model: patched, not grown in this training.
        method: one of `METHODS`.
        budget: the weights that growth and LoRA share.
        batches: to grow on, as for `Grower.grow`.
        seed: of LoRA's weights and of growth.
        loss_of: gives for a model the loss that growth lowers, as `loss` of `Grower`.

    Returns:
        The model or peft's wrapper of it, and the report, or None without growth.

    Raises:
        ValueError: the model is quantized, and the method trains its weights.
    """
    weights, rank = budget.split(method)
    if is_quantized(model) and method.base:
        raise ValueError("Quantized weights do not train: choose growth, LoRA or both.")
    model.requires_grad_(method.base)
    if weights and not rank and is_quantized(model):  # which Trainer trains by adapters alone
        return grow_quantized(model, weights, batches, seed, loss_of)
    trained: nn.Module = model
    if rank:
        task = "CAUSAL_LM" if model.can_generate() else None  # peft knows no task of a bare encoder
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type=task)
        trained = add_adapter(lora, model, seed)
    if not weights:
        return trained, None
    # LoRA moves the old dims too, so the new ones need not do their work.
    config = GrowthConfig(budget=weights, seed=seed, old_dims_train=rank > 0)
    return trained, Grower(trained, config, loss=loss_of and loss_of(trained)).grow(batches)


def scale_grown_rates(optimizer: Optimizer, model: nn.Module, share: float) -> None:
    """Give all weights but adapters a share of the learning rate, in groups of their own, before the first step."""
    if share == 1:
        return
    adapters = {parameter for name, parameter in model.named_parameters() if "lora_" in name}
    for group in list(optimizer.param_groups):
        grown = [parameter for parameter in group["params"] if parameter not in adapters]
        group["params"] = [parameter for parameter in group["params"] if parameter in adapters]
        if grown:
            optimizer.add_param_group(group | {"params": grown, "lr": share * group["lr"]})


def count_trained_weights(model: nn.Module) -> int:
    """The number of weights that a training moves."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

"""The ways to train a few weights next to a frozen base, which a race compares."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel, set_seed
from transformers.pytorch_utils import Conv1D
from trl.trainer.sft_trainer import SFTTrainer

from ..grow.growth import Grower
from ..grow.plan import GrowthConfig, weights_of
from ..growable.projections import keep_unpacked
from ..interop.peft_method import GrowAttnConfig, initialize_growattn_weights
from ..report.report import GrowthReport
from .data import Prepared, without_training
from .recording import loss_of

RATES = (0.5, 1.5)  # learning rates that a race tries, times `hidden_size`: wider models take smaller steps


@dataclass(frozen=True)
class Method:
    """A way to spend a budget of weights."""

    title: str
    lora: float  # share of the budget for LoRA on all linear layers; by the rest, attention grows before the training

    def grown_share(self, width: int) -> float:
        """The learning rate of the grown dims, divided by that of LoRA in the same model of a `hidden_size`.

        Measured at `hidden_size` 64, 128 and 576 on 2026-11-24; wider models use the last one.
        """
        return min(max((64 / width) ** 1.5, 1 / 30), 1.0) if 0 < self.lora < 1 else 1.0


METHODS = {
    "lora": Method("LoRA on all linear layers", lora=1),
    "growth": Method("growth", lora=0),
    "both": Method("1/3 growth, 2/3 LoRA", lora=2 / 3),
}


def is_quantized(model: nn.Module) -> bool:
    """Whether a model, or what peft has wrapped, was loaded quantized."""
    return any(getattr(module, "is_quantized", False) for module in model.modules())


def move_to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on a device, to be trained; a quantized one stays where it was loaded."""
    keep_unpacked(model)
    return model if is_quantized(model) else model.to(device)


def weights_of_rank_one(model: PreTrainedModel) -> int:
    """The number of weights of LoRA with rank 1 on all linear layers, as peft means it."""
    linear = {module for module in model.modules() if isinstance(module, (nn.Linear, Conv1D))}
    linear.discard(model.get_output_embeddings())  # peft leaves it out as well
    # A quantized weight has the shape of its packed bytes.
    sizes = ((m.in_features, m.out_features) if isinstance(m, nn.Linear) else m.weight.shape for m in linear)
    return sum(map(sum, sizes))


def choose_rank(model: PreTrainedModel, budget: int | float) -> int:
    """The rank of LoRA on all linear layers that comes nearest to a share of the model's weights, or to a number."""
    return max(round(weights_of(budget, model.num_parameters()) / weights_of_rank_one(model)), 1)


def prepare_model(
    model: PreTrainedModel,
    method: Method,
    rank: int,
    batches: list[dict],
    seed: int,
    loss_of: Callable[[nn.Module], Callable] | None = None,
) -> tuple[nn.Module, GrowthReport | None]:
    """The patched model to train by a method, changed in place, and the report of its growth.

    LoRA of that rank on all linear layers has as many weights as growth and LoRA share. `loss_of` gives for a model the
    loss that growth lowers, as `loss` of `Grower`.
    """
    own_rank = round(method.lora * rank)
    weights = (rank - own_rank) * weights_of_rank_one(model)
    model.requires_grad_(False)
    torch.manual_seed(seed)
    if weights and not own_rank and is_quantized(model):  # which Trainer trains by adapters alone
        adapted = get_peft_model(model, GrowAttnConfig(budget=weights, task_type="CAUSAL_LM"))
        return adapted, initialize_growattn_weights(adapted, batches, loss=loss_of and loss_of(adapted))
    trained: nn.Module = model
    if own_rank:
        task = "CAUSAL_LM" if model.can_generate() else None  # peft knows no task of a bare encoder
        lora = LoraConfig(r=own_rank, lora_alpha=2 * own_rank, target_modules="all-linear", task_type=task)
        trained = get_peft_model(model, lora)
    if not weights:
        return trained, None
    # LoRA moves the old dims too, so the new ones need not do their work.
    config = GrowthConfig(budget=weights, seed=seed, old_dims_train=own_rank > 0)
    growth = Grower(trained, config, loss=loss_of and loss_of(trained)).find(batches)
    return trained, growth.keep()  # whether it holds or not: the race judges on rows of its own


def make_trainer(model: Any, rows: Prepared, grown_share: float = 1.0) -> SFTTrainer:
    """An SFTTrainer on prepared rows; grown dims take `grown_share` of the learning rate."""
    training = copy.copy(rows.training)
    training.dataset_kwargs, training.assistant_only_loss = {"skip_prepare_dataset": True}, False  # labels are masked
    set_seed(training.seed)  # adapters begin alike; TRL 1.14 leaves that to the caller
    unrounded = {parameter: parameter.data for parameter in model.parameters() if parameter.requires_grad}
    data = {"train_dataset": rows.train, "eval_dataset": rows.test, "processing_class": rows.tokenizer}
    trainer = SFTTrainer(model, training, **data)
    for parameter, values in unrounded.items():
        parameter.data = values  # TRL rounds adapters of quantized models to bf16, which takes large steps to move
    if grown_share < 1:
        scale_grown_rates(trainer.create_optimizer(), model, grown_share)
    return trainer


def make_sft_loss(model: nn.Module, rows: Prepared) -> Callable:
    """The loss that SFTTrainer lowers on prepared rows, for a growth before the training."""
    return loss_of(make_trainer(model, rows._replace(test=None, training=without_training(rows.training))))


def scale_grown_rates(optimizer: Optimizer, model: nn.Module, share: float) -> None:
    """Give all weights but adapters a share of the learning rate, in groups of their own, before the first step."""
    adapters = {parameter for name, parameter in model.named_parameters() if "lora_" in name}
    for group in list(optimizer.param_groups):
        grown = [parameter for parameter in group["params"] if parameter not in adapters]
        group["params"] = [parameter for parameter in group["params"] if parameter in adapters]
        if grown:
            optimizer.add_param_group(group | {"params": grown, "lr": share * group["lr"]})

"""`Method`: a way to train a model by few weights next to a frozen base. Races compare several of them."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import mode
from typing import Any

import torch
from accelerate.utils import send_to_device
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..grow.growth import Grower
from ..grow.plan import GrowthConfig, check_budget, read_batches, weights_of
from ..growable.attention import GrowableAttention
from ..growable.growths import check_kind, extra_parameters, growable_model
from ..growable.models import patch_inside
from ..growable.projections import is_quantized, keep_unpacked
from ..interop.peft_method import GrowAttnConfig, initialize_growattn_weights
from ..measure.passes import default_loss
from ..model.families import linear_sizes
from ..model.new_dims import NewDims
from ..report.comparison import TITLES
from ..report.words import why_not

GROWING, ALL_WEIGHTS = ("growth", "mix", "random", "all_growth"), ("all", "all_growth")
_SHARES_OF_LORA = {"lora": 1.0, "mix": 2 / 3}  # of the budget; growth gets the rest


@dataclass(frozen=True)
class Method:
    """A way to train: what is added to a model, what trains, and how fast.

    Attributes:
        name: "lora": LoRA on all linear layers; "growth": wider heads; "mix": a third of the budget for growth and two
            thirds for LoRA; "random": new dims in random directions, in the places and numbers that growth chose;
            "all": all weights that require gradients; "all_growth": these, and growth.
        budget: weights to add, as a share of the model's or as a number. It is rounded to a whole rank of LoRA.
        learning_rate: of AdamW. In a mix of a model that is wider than 64, new dims take smaller steps.
        modules_to_save: names of modules that train whole, outside of the budget, as peft matches them.
        growth_batches: how many batches a growth reads.
    """

    name: str
    budget: int | float = 0.02
    learning_rate: float = 1e-3
    modules_to_save: Sequence[str] = ()
    growth_batches: int = 16

    def __post_init__(self):
        if self.name not in TITLES:
            raise ValueError(f"There is no method {self.name!r}: choose one of {', '.join(TITLES)}.")
        if isinstance(self.modules_to_save, str):
            raise ValueError(f"modules_to_save must be a list of names, such as [{self.modules_to_save!r}].")
        check_budget(self.budget)

    def prepare(self, model: nn.Module, batches: Iterable = (), loss: Callable | None = None) -> tuple[Any, list[dict]]:
        """Add what the method adds, and freeze what it does not train.

        Args:
            model: a transformers model or a module with one in it, patched or not; it is changed in place.
            batches: to train on; a growth reads the first ones of them. LoRA needs none.
            loss: what to lower, a function of model and batch; by default what the model returns, as in `race`.

        Returns:
            The model to train, of peft where there is LoRA, and groups of parameters with their learning rates, for
            `torch.optim.AdamW(groups)`.

        Raises:
            ValueError: this model cannot be trained so; the message says why. It may be changed by then.
        """
        check_kind(model)
        saved = modules_to_train(model, self.modules_to_save)
        rank, cost = choose_rank(model, self.budget, saved), weights_of_rank_one(model, saved)
        lora_rank = round(_SHARES_OF_LORA.get(self.name, 0.0) * rank)
        if self.name == "mix" and lora_rank in (0, rank):
            raise ValueError(
                "the budget buys LoRA of rank 1, too little to share with growth. Choose a larger budget: rank 2 takes "
                f"{2 * cost:,} weights"
            )
        width, linear, trained = hidden_size(model), [*linear_layers(model, saved)], model
        if self.name not in ALL_WEIGHTS:
            model.requires_grad_(False)
        for module in saved.values():
            module.requires_grad_(True)
        if self.name in GROWING:
            patch_inside(model)
        if lora_rank:
            others = [*saved] or None
            lora = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules=linear, modules_to_save=others)
            try:
                trained: Any = get_peft_model(model, lora)  # pyright: ignore[reportArgumentType]  # takes any module
            except TypeError as error:
                raise ValueError(
                    f"peft takes modules_to_save={others} for modules of its own, whose names end alike, such as "
                    f"lora_dropout. Rename yours. {error}"
                ) from error
        if self.name in GROWING:
            device = next(model.parameters()).device
            read = [send_to_device(copy.copy(batch), device) for batch in islice(batches, self.growth_batches)]
            if loss is None and isinstance(model, PreTrainedModel):
                read = read_batches(read, model)  # also tensors of input_ids
            trained = self._grow(trained, cost * (rank - lora_rank), read, loss or default_loss)
        new = extra_parameters(growable_model(trained)) if self.name == "mix" else []
        new = [p for p in new if p.requires_grad]  # a former growth stays as it is
        others = [p for p in trained.parameters() if p.requires_grad and not any(p is each for each in new)]
        rates = [self.learning_rate, self.learning_rate * share_of_new_dims(width)]
        groups = [{"params": p, "lr": rate, "weight_decay": 0.0} for p, rate in zip([others, new], rates) if p]
        return trained, groups

    def _grow(self, model: Any, budget: int, batches: list, loss: Callable) -> Any:
        """Grow by a number of weights, whether that holds or not, and return the model that trains."""
        if self.name != "mix" and is_quantized(model):  # which Trainer trains by adapters alone
            config = GrowAttnConfig(budget=budget, modules_to_save=[*self.modules_to_save] or None)
            model = get_peft_model(model, config)
            report = initialize_growattn_weights(model, batches, loss=loss)
        else:
            # LoRA moves the old dims, too, so the new ones need not do their work.
            old_dims_train = None if self.name in ALL_WEIGHTS else self.name == "mix"
            growth = Grower(model, GrowthConfig(budget=budget, old_dims_train=old_dims_train), loss=loss).find(batches)
            if self.name == "random":
                point_at_random(growth.new_dims)
            report = growth.keep()
        if not report.kept:
            raise ValueError(why_not(report))
        return model


def modules_to_train(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """The modules whose names end so, as peft matches them; a ValueError if a name matches no module."""
    found = {name: module for name, module in model.named_modules() if name.endswith(tuple(names))}
    for wanted in names:
        if not any(name.endswith(wanted) for name in found):
            named = ", ".join(name for name, _ in model.named_children())
            raise ValueError(f"modules_to_save: {wanted!r} is no module of {type(model).__name__}, such as {named}.")
    return found


def linear_layers(model: nn.Module, saved: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The linear layers that LoRA adapts, by name: all but output embeddings and what trains whole."""
    left_out = {inside for module in saved.values() for inside in module.modules()}
    left_out |= {each.get_output_embeddings() for each in model.modules() if isinstance(each, PreTrainedModel)}
    named = model.named_modules()
    return {name: m for name, m in named if isinstance(m, (nn.Linear, Conv1D)) and m not in left_out}


def weights_of_rank_one(model: nn.Module, saved: Mapping[str, nn.Module]) -> int:
    """The number of weights of LoRA with rank 1 on all linear layers."""
    one = sum(map(sum, map(linear_sizes, linear_layers(model, saved).values())))
    if not one:
        raise ValueError(f"{type(model).__name__} has no linear layers for LoRA.")
    return one


def choose_rank(model: nn.Module, budget: int | float, saved: Mapping[str, nn.Module]) -> int:
    """The rank of LoRA on all linear layers that comes nearest to a budget; a ValueError if it buys none."""
    is_whole = isinstance(model, PreTrainedModel)
    parameters = model.num_parameters() if is_whole else sum(p.numel() for p in model.parameters())
    bought, cost = weights_of(budget, parameters), weights_of_rank_one(model, saved)
    rank = round(bought / cost)
    if rank < 1:
        raise ValueError(
            f"a budget of {bought:,} weights buys nothing: LoRA of rank 1 takes {cost:,}, {cost / parameters:.1%} of "
            "the model. Choose a larger budget, as a share such as 0.02 or as a number of weights"
        )
    return rank


def hidden_size(model: nn.Module) -> int:
    """The number of features that most linear layers read."""
    return mode(linear_sizes(layer)[0] for layer in linear_layers(model, {}).values())


def share_of_new_dims(width: int) -> float:
    """The learning rate of new dims divided by that of LoRA in the same model of a `hidden_size`.

    Measured at 64, 128 and 576 on 2026-11-24; wider models use the last one.
    """
    return min(max((64 / width) ** 1.5, 1 / 30), 1.0)


def move_to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on a device, to be trained; a quantized one stays where it was loaded."""
    keep_unpacked(model)
    return model if is_quantized(model) else model.to(device)


@torch.no_grad()
def point_at_random(new_dims: dict[GrowableAttention, NewDims]) -> None:
    """Draw new keys and values as large as the old ones, and let new queries and outputs be zero: nothing changes."""
    for attention, new in new_dims.items():
        for parameter in new.parameters():
            parameter.zero_()
        for role in ("key", "value"):
            weight = new.weight_of(role)
            weight.copy_(torch.randn_like(weight) * attention.weight_of(role).square().mean().sqrt())

"""The ways to train that benchmarks compare: what is added to a model, when, and what trains."""

from dataclasses import dataclass

import torch
from peft import LoraConfig, LoraGAConfig, get_peft_model, initialize_lora_eva_weights, preprocess_loraga
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_growattn import Grower, GrowthConfig
from hf_growattn.growable.attention import attentions
from hf_growattn.training import methods as library

ROLES = ("query", "key", "value", "output")
LORA = "LoRA on all linear layers"  # the row that every table has
ALL_LINEAR = "all-linear"  # as peft means it: the output embeddings are left out


@dataclass(frozen=True)
class Method:
    """What is added to a model, and what trains.

    Attributes:
        library: the name of a `Method` of hf_growattn, which then adds to the model; nothing below is needed.
        growth: arguments of `GrowthConfig`; without widths, what the adapter leaves of the budget.
        share: of the budget that growth takes.
        random: whether new dims point in random directions, in the places and numbers that growth chose.
        adapter: what peft calls it: "lora", "dora", "pissa", "lora_ga" or "eva".
        targets: roles of attention, names of modules, or `ALL_LINEAR`.
        rank: of the adapter; 0 for the whole ranks that the budget allows, after growth.
        base: whether all weights train.
        wide: whether the model has the grown widths from the start.
        at: share of the steps before the model changes; until then all weights train.
        rates: learning rates to sweep; a single one is not swept.
        trains: whether anything does.
    """

    library: str = ""
    growth: dict | None = None
    share: float = 1.0
    random: bool = False
    adapter: str = ""
    targets: tuple[str, ...] | str = ALL_LINEAR
    rank: int = 0
    base: bool = False
    wide: bool = False
    at: float = 0.0
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    trains: bool = True

    @property
    def grows(self) -> bool:
        """Whether heads get wider."""
        return self.growth is not None or self.library not in ("", "lora", "all")


NOTHING = Method(trains=False, rates=(0.0,))


def add_to_model(model: nn.Module, method: Method, task, batches: list[dict], seed: int, rate: float, optimizer):
    """Put on what a method adds.

    Args:
        model: patched; what requires gradients is what trains where all weights do.
        method: what to add.
        task: of the harness.
        batches: to grow on.
        seed: of growth and adapters.
        rate: of learning.
        optimizer: of a training under way, which new dims join; None where it begins.

    Returns:
        What trains, its optimizer (None where nothing trains), and figures for the row.
    """
    if not method.trains:
        return model, None, {}
    if method.library:
        return _add_as_library(model, method, task, batches, seed, rate)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    budget, figures = task.budget(model), {}
    if not method.base:
        model.requires_grad_(False)
        weights = []
    if method.growth is not None:
        figures |= _grow(model, method, task, budget, batches, seed, optimizer)
    trained = model
    if method.adapter:
        grown = [weight for weight in model.parameters() if weight.requires_grad]
        left = budget - figures.get("grown_weights", 0)
        trained = _adapt(model, method, task, left, batches, seed)
        figures["rank"] = next(iter(trained.peft_config.values())).r
        for weight in grown:
            weight.requires_grad_(True)  # peft has frozen all but its own
    if optimizer is None or method.adapter or not method.base:
        return trained, _continued(optimizer, trained, weights, rate), figures
    return trained, optimizer, figures


def _continued(optimizer, model: nn.Module, kept: list[nn.Parameter], rate: float):
    """An optimizer of what trains now; the base keeps the state that it had, if it goes on."""
    if optimizer is None or not kept:
        return make_optimizer(model, rate)
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    new = [weight for weight in model.parameters() if weight.requires_grad and id(weight) not in held]
    if new:
        optimizer.add_param_group({"params": new, "full_rate": rate})
    return optimizer


def make_optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer | None:
    """AdamW without decay over what requires gradients; None if nothing does."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if not weights:
        return None
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0)
    for group in optimizer.param_groups:
        group["full_rate"] = rate
    return optimizer


def _add_as_library(model: nn.Module, method: Method, task, batches: list[dict], seed: int, rate: float):
    """As a race of hf_growattn does it."""
    torch.manual_seed(seed)
    chosen = library.Method(method.library, task.budget(model), rate, growth_batches=len(batches))
    trained, groups = chosen.prepare(model, batches, task.loss)
    return trained, torch.optim.AdamW([group | {"full_rate": group["lr"]} for group in groups]), {}


def _grow(model: nn.Module, method: Method, task, budget: int, batches: list[dict], seed: int, optimizer) -> dict:
    """Grow by the real Grower; where chance is asked for, point the new dims in random directions."""
    options = dict(method.growth)
    if not options.keys() & {"qk_dims", "v_dims", "budget"}:
        spent = adapter_weights(model, method) if method.rank else 0
        options["budget"] = max(int(method.share * (budget - spent)), 1)
    old_dims_train = method.base or bool(method.adapter)  # LoRA moves the old dims, too
    config = GrowthConfig(seed=seed, **{"old_dims_train": old_dims_train, **options})
    growth = Grower(model, config, optimizer, loss=task.loss).find(batches)
    if method.random:
        torch.manual_seed(seed)
        library.point_at_random(growth.new_dims)
    report = growth.keep()
    widths = [[attention.width_of("query"), attention.width_of("value")] for attention in attentions(model)]
    return {"grown_weights": report.added_parameters if report.kept else 0, "widths": widths}


def targets_of(model: nn.Module, method: Method) -> dict[str, nn.Module]:
    """The layers that carry a method's adapter, by name."""
    if method.targets == ALL_LINEAR:
        return library.linear_layers(model, {})
    linear = {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
    roles = [role for role in method.targets if role in ROLES]
    chosen = {attention.projection_of(role) for attention in attentions(model) for role in roles}
    names = tuple(name for name in method.targets if name not in ROLES)
    return {name: m for name, m in linear.items() if m in chosen or (names and name.endswith(names))}


def adapter_weights(model: nn.Module, method: Method) -> int:
    """What an adapter of a given rank costs."""
    return method.rank * sum(sum(module.weight.shape) for module in targets_of(model, method).values())


def ranks_within(costs: dict[str, int], weights: int) -> tuple[int, dict[str, int]]:
    """The rank of LoRA on all of some layers that a number of weights allows, and the ranks that the rest raises.

    Args:
        costs: what one rank costs, by layer.
        weights: to spend; at least one rank is.
    """
    rank, raised = max(weights // sum(costs.values()), 1), {}
    left = weights - rank * sum(costs.values())
    for name, cost in sorted(costs.items(), key=lambda entry: -entry[1]):
        if cost <= left:
            raised[name], left = rank + 1, left - cost
    return rank, raised


def _adapt(model: nn.Module, method: Method, task, weights: int, batches: list[dict], seed: int) -> nn.Module:
    """The model with peft's adapter on it; alpha is twice the rank."""
    targets = targets_of(model, method)
    rank, raised = method.rank, {}
    if not rank:
        rank, raised = ranks_within({name: sum(module.weight.shape) for name, module in targets.items()}, weights)
    options = {"r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "rank_pattern": raised}
    options["alpha_pattern"] = {name: 2 * more for name, more in raised.items()}
    torch.manual_seed(seed)
    if method.adapter == "lora_ga":
        config = LoraConfig(init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig(), **options)
        preprocess_loraga(model, config, lambda: [task.loss(model, batch).backward() for batch in batches])
        return get_peft_model(model, config)
    starts = {"lora": True, "dora": True}
    start = starts.get(method.adapter, method.adapter)
    config = LoraConfig(init_lora_weights=start, use_dora=method.adapter == "dora", **options)
    adapted = get_peft_model(model, config)
    if method.adapter == "eva":
        initialize_lora_eva_weights(adapted, batches, show_progress_bar=False)
    return adapted

"""What to grow: `GrowthConfig`, what it needs of model and batches, how a budget is spent, and the report of it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import has_offloaded_params
from torch import nn
from transformers import PreTrainedModel

from ..growable.attention import GrowableAttention, attentions
from ..growable.growths import cache_bytes, growable_model, name_in_base
from ..growable.training_state import is_distributed
from ..measure import functional as F
from ..measure.bottlenecks import KINDS, Kind
from ..measure.directions import Directions
from ..report.report import GrowthReport, LayerGrowth
from .trial import Candidate, Trial, parameters_of_a_dim

_CANDIDATES = 16  # directions of a layer and kind that a budget chooses from in one growth
_EVEN_SHARES = 4  # times the even share of a budget: the most that one layer and kind gets


@dataclass
class AddedDims:
    """How many dims the heads get, and in which layers: what a growth and an adapter have in common.

    Attributes:
        qk_dims: dims to add to the queries and keys of each head.
        v_dims: dims to add to the values of each head, and to what the output projection reads.
        budget: weights to add at most, in place of the two: a whole number, or a share of the model's parameters such
            as 0.01. Layers and kinds get the more of it the more gain holds there on unseen batches.
        kinds: what a budget may buy: "qk" for queries and keys, "v" for values, or both.
        layers: indices of the layers, or a single one; None means every layer.

    Raises:
        ValueError: an attribute is outside its range, or they contradict each other; the message names the fix.
    """

    qk_dims: int = 0
    v_dims: int = 0
    budget: int | float | None = None
    kinds: Sequence[str] = ("qk", "v")
    layers: Sequence[int] | int | None = None

    def __post_init__(self):
        check_numbers(self, qk_dims=0, v_dims=0)
        if self.budget is None and not self.qk_dims and not self.v_dims:
            raise ValueError("Nothing to grow: give qk_dims, v_dims or both, at least 1, or a budget such as 0.01.")
        if self.budget is not None:
            if self.qk_dims or self.v_dims:
                raise ValueError("Give a budget, or fixed widths by qk_dims and v_dims, not both.")
            check_budget(self.budget)
        if isinstance(self.kinds, str) or not self.kinds or not set(self.kinds) <= set(KINDS):
            raise ValueError(f"kinds must be a list of {', '.join(map(repr, KINDS))}; got {self.kinds!r}.")
        listed = isinstance(self.layers, Sequence) and not isinstance(self.layers, str) and len(self.layers)
        if not (self.layers is None or type(self.layers) is int or listed):
            raise ValueError(f"layers must be an index, a list of indices, or None for all; got {self.layers!r}.")

    @property
    def chosen_layers(self) -> list[int] | None:
        """The indices of the layers; None for every layer."""
        layers = [self.layers] if isinstance(self.layers, int) else self.layers
        return None if layers is None else [*layers]

    @property
    def chosen_kinds(self) -> list[Kind]:
        """The kinds to measure."""
        if self.budget is not None:
            return [KINDS[name] for name in KINDS if name in self.kinds]
        return [kind for kind in KINDS.values() if getattr(self, kind.width)]


def check_budget(budget: Any) -> None:
    """Raise a ValueError if a budget is neither a number of weights nor a share of them."""
    if not ((type(budget) is int and budget >= 1) or (type(budget) is float and 0 < budget < 1)):
        raise ValueError(
            "budget must be a whole number of weights, or a share of the model's parameters between 0 and 1, such as "
            f"0.01; got {budget!r}."
        )


def check_numbers(config: Any, **least: int) -> None:
    """Raise a ValueError if one of these attributes is no whole number from its least value on."""
    for name, smallest in least.items():
        value = getattr(config, name)
        if type(value) is not int or not smallest <= value < 2**63:
            raise ValueError(f"{name} must be a whole number, at least {smallest}, below 2**63; got {value!r}.")


@dataclass
class GrowthConfig(AddedDims):
    """What to grow, and how to measure. Give `budget`, or fixed widths by `qk_dims` and `v_dims`.

    Attributes:
        qk_dims, v_dims, budget, kinds, layers: see `AddedDims`, also for errors.
        method: "append" leaves the old dims as they are; "refactor" replaces them and the new ones by the best balanced
            factors of the product after a step of both, for position-free heads.
        update_existing: take the steepest step of the existing weights too. This and "refactor" write old weights: they
            must be plain, and neither frozen nor under adapters. Neither bought anything on a small GPT-2.
        old_dims_train: that training will move the old dims too, itself or by adapters, so that new ones need not do
            what those can; False where the new dims train alone. None for what `requires_grad` says of each layer and
            kind.
        seed: of the sketch's random inputs.
    """

    method: str = "append"
    update_existing: bool = False
    old_dims_train: bool | None = None
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_numbers(self, seed=-(2**63))
        if self.method not in ("append", "refactor"):
            raise ValueError(f"method must be one of append, refactor; got {self.method!r}.")
        if self.update_existing and self.old_dims_train is False:
            raise ValueError("update_existing=True moves the old dims, and old_dims_train=False keeps them. Drop one.")

    @property
    def moves_old_dims(self) -> bool:
        """Whether the existing weights take a step of their own."""
        return self.update_existing or self.method == "refactor"

    def most_dims(self, attention: GrowableAttention, kind: Kind) -> int:
        """The largest number of dims that this growth may add to one kind of a layer."""
        width = attention.width_of(kind.shared)
        room = max(attention.shape.in_features - width, 0)  # beyond, the product gains no rank
        wanted = getattr(self, kind.width) if self.budget is None else _CANDIDATES
        return min(wanted, room)


def dims_worth_a_look(config: GrowthConfig, layers: Iterable[GrowableAttention], parameters: int) -> int:
    """How many directions of each layer and kind a budget may choose from: a small one buys few in each of many."""
    one_of_each = sum(parameters_of_a_dim(layer, kind) for layer in layers for kind in config.chosen_kinds)
    return max(math.ceil(_EVEN_SHARES * weights_of(config.budget, parameters) / one_of_each), 1)


def all_candidates(config: GrowthConfig, directions: list[Directions]) -> list[Candidate]:
    """Return the most dims that the config allows in each bottleneck; a budget then chooses among them."""
    candidates = []
    for found in directions:
        dims = min(config.most_dims(found.bottleneck.attention, found.bottleneck.kind), found.sigma.shape[-1])
        candidates.append(Candidate(found, dims, found.share_that_holds[:dims]))
    return candidates


def spend(
    config: GrowthConfig, candidates: list[Candidate], prices: dict[Kind, float], parameters: int
) -> list[Candidate]:
    """Return what the budget buys of each candidate, which may be 0 dims, by what a unit of worth buys in its kind.

    The n-th new dim of a layer and kind counts as the fourth root of the whole gain to expect there, over n. The gain
    itself overstates how much more one layer needs than another: its leading directions are learned within a few steps.
    """
    budget = weights_of(config.budget, parameters)
    gains, costs = [], []
    for candidate in candidates:
        bottleneck, worth = candidate.bottleneck, candidate.directions.worth[: candidate.dims]
        expected = max(prices.get(bottleneck.kind, 0.0) * candidate.directions.worth.sum().item(), 0.0) ** 0.25
        gains.append([expected / n if each > 0 else 0.0 for n, each in enumerate(worth.tolist(), 1)])
        costs.append(parameters_of_a_dim(bottleneck.attention, bottleneck.kind))
    dims = F.allocate(gains, costs, budget)
    return [replace(each, dims=n, share_that_holds=each.share_that_holds[:n]) for each, n in zip(candidates, dims)]


def weights_of(budget: int | float | None, parameters: int) -> int:
    """The number of weights that a budget allows in a model with this many parameters; 0 without a budget."""
    return budget if isinstance(budget, int) else int((budget or 0.0) * parameters)


def check_affordable(bought: int, cheapest: int, parameters: int) -> None:
    """Raise a ValueError if the weights that a budget allows are fewer than the cheapest dim costs."""
    if bought < cheapest:
        raise ValueError(
            f"{bought:,} weights buy nothing: one more dim of a layer costs {cheapest:,}, "
            f"{cheapest / parameters:.2%} of this model. Choose a larger budget."
        )


def _check_room(config: GrowthConfig, layer: GrowableAttention) -> None:
    """Raise a ValueError if fixed dims would make a layer's heads wider than their input."""
    for kind in KINDS.values():
        width, dims = layer.width_of(kind.shared), getattr(config, kind.width)
        if dims and width + dims > layer.shape.in_features:
            raise ValueError(
                f"Layer {layer.layer} has {kind.name}_head_dim={width}; {dims} more would exceed the input's "
                f"{layer.shape.in_features} features, beyond which a head gains no rank. Choose fewer {kind.width}, or "
                "other layers."
            )


def model_to_grow(model: nn.Module) -> PreTrainedModel:
    """The patched model that a module holds, or is; a ValueError if there is not one, or if peft adds prompts."""
    configs = (getattr(module, "peft_config", {}) for module in model.modules()) if isinstance(model, nn.Module) else ()
    for name, config in (entry for each in configs for entry in each.items()):
        if config.is_prompt_learning or config.is_adaption_prompt:
            raise ValueError(
                f"The adapter {name!r} ({type(config).__name__}) adds prompts, which growth cannot see. Use LoRA; or "
                "grow the model before get_peft_model, which prefix tuning does not allow."
            )
    return growable_model(model)


def layers_of(model: PreTrainedModel, chosen: Iterable[int] | None) -> list[GrowableAttention]:
    """The attention modules of these layers, or of all for None; a ValueError for an unknown layer."""
    by_layer = {attention.layer: attention for attention in attentions(model)}
    layers = by_layer if chosen is None else dict.fromkeys(chosen)
    for layer in layers:
        if layer not in by_layer:
            raise ValueError(f"There is no attention in layer {layer!r}: choose of {', '.join(map(str, by_layer))}.")
    return [by_layer[layer] for layer in layers]


def layers_to_grow(model: PreTrainedModel, config: GrowthConfig) -> list[GrowableAttention]:
    """The attention modules that a config chooses; a ValueError names the fix if one cannot grow as it says."""
    if torch.is_inference_mode_enabled():
        raise ValueError("Growth needs gradients: call it outside torch.inference_mode().")
    chosen = layers_of(model, config.chosen_layers)
    for attention in chosen:
        _check_room(config, attention)
        for name, parameter in attention.module.named_parameters():
            # Old weights of an offloaded module come from elsewhere for each call.
            owner = attention.module.get_submodule(name.rpartition(".")[0])
            offloaded = has_offloaded_params(owner) and not name.startswith("extra.")
            if parameter.is_inference() or (parameter.is_meta and not offloaded):
                state = "is on the meta device" if parameter.is_meta else "was made under torch.inference_mode()"
                raise ValueError(
                    f"{name} of layer {attention.layer} {state}: load the model onto a real device, and outside of "
                    "inference_mode."
                )
    if config.budget is not None:
        costs = [parameters_of_a_dim(attention, kind) for attention in chosen for kind in config.chosen_kinds]
        weights = model.num_parameters()
        check_affordable(weights_of(config.budget, weights), min(costs, default=0), weights)
    return chosen


def list_batches(batches: Any) -> list:
    """The batches as a list; a ValueError for what is a single batch, or holds none."""
    listed = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if hasattr(batches, "keys") or isinstance(batches, str) or not listed:
        raise ValueError(f"A list of batches is needed, not a {type(batches).__name__}: pass [batch] for a single one.")
    return [*batches]


def check_loss(loss: Any) -> None:
    """Raise a TypeError for a loss that is neither a function nor None."""
    if not (loss is None or callable(loss)):
        raise TypeError(f"loss must be a function of model and batch, and is a {type(loss).__name__}.")


def read_batches(batches: Iterable, model: PreTrainedModel) -> list[dict]:
    """Read the batches once: tensors of input_ids become causal LM batches; a ValueError names one that is none."""
    listed = []
    for index, batch in enumerate(list_batches(batches)):
        if torch.is_tensor(batch):
            batch = dict.fromkeys(("input_ids", "labels"), batch if batch.is_floating_point() else batch.long())
        if not hasattr(batch, "keys"):
            raise ValueError(
                f"Batch {index} is a {type(batch).__name__}; growth takes dicts for model(**batch), or tensors of "
                "input_ids."
            )
        ids: Any = batch.get("input_ids")
        good = torch.is_tensor(ids) and ids.dim() > 1 and ids.numel() and not ids.is_floating_point()
        if ids is not None and not good:
            found = f"{ids.dtype} of shape {tuple(ids.shape)}" if torch.is_tensor(ids) else f"a {type(ids).__name__}"
            raise ValueError(
                f"The input_ids of batch {index} are {found}, not a tensor of whole numbers (batch, tokens). Pass a "
                "list of batches, [batch] for a single one; a DataLoader makes them of the rows of a data set."
            )
        _check_tokens(index, batch, model)
        _check_lengths(index, batch, model)
        listed.append(dict(batch))
    if not listed and not is_distributed():
        raise ValueError("There are no batches; pass a few dozen of your training batches.")
    return listed


def _input_embeddings(model: PreTrainedModel) -> Any:
    """What takes tokens or patches in; None where transformers does not know, as for speech."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


def _check_tokens(index: int, batch: Mapping, model: PreTrainedModel) -> None:
    """Refuse tokens that a model does not know: it would fail by an index, or on a GPU lose all that is in memory."""
    head = model.get_output_embeddings()  # only where there is one are labels tokens
    tokens = getattr(_input_embeddings(model), "weight", None)  # images have patches, and no such weight
    counts = {"input_ids": None if tokens is None else len(tokens), "labels": getattr(head, "out_features", None)}
    for name, known in counts.items():
        ids: Any = batch.get(name)
        if known is None or not torch.is_tensor(ids) or ids.is_floating_point() or not ids.numel():
            continue
        lowest, highest = int(ids.min()), int(ids.max())
        if highest >= known or (lowest < 0 and name == "input_ids"):  # a negative label is one to ignore
            raise ValueError(
                f"Batch {index} has {name} from {lowest} to {highest}, and the tokens of this model go from 0 to "
                f"{known - 1}: tokenize with its own tokenizer, or resize_token_embeddings first."
            )


def _check_lengths(index: int, batch: Mapping, model: PreTrainedModel) -> None:
    """Refuse labels that are not one for each token, which the loss would refuse by their number alone."""
    ids: Any = batch.get("input_ids")
    labels: Any = batch.get("labels")
    of_tokens = model.get_output_embeddings() is not None and not model.config.is_encoder_decoder
    if of_tokens and torch.is_tensor(ids) and torch.is_tensor(labels) and ids.shape != labels.shape:
        raise ValueError(
            f"The labels of batch {index} are of shape {tuple(labels.shape)}, and its input_ids of {tuple(ids.shape)}: "
            "give each token a label, -100 for those that do not count."
        )


def growth_report(
    model: PreTrainedModel, candidates: list[Candidate], trial: Trial, steps: list[float], **figures
) -> GrowthReport:
    """The report of all candidates, of which the trial holds those that are not empty, with their steps.

    `figures` are the report's loss and verdict.
    """
    taken = dict(zip(trial.candidates, steps))
    added = [weight for new in trial.new_dims.values() for weight in new.parameters()]
    return GrowthReport(
        layers=[_layer_growth(model, candidate, taken.get(candidate, 0.0)) for candidate in candidates],
        added_parameters=sum(weight.numel() for weight in added),
        added_bytes=sum(weight.nbytes for weight in added),
        cache_bytes=(cache_bytes(model), cache_bytes(model, trial.new_dims)),
        parameters=model.num_parameters(),
        **figures,
    )


def _layer_growth(model: PreTrainedModel, candidate: Candidate, step: float) -> LayerGrowth:
    """The report of one candidate at the step that was taken."""
    bottleneck = candidate.bottleneck
    width = bottleneck.attention.width_of(bottleneck.kind.shared)
    return LayerGrowth(
        layer=bottleneck.attention.layer,
        name=name_in_base(model, bottleneck.attention.name),
        kind=bottleneck.kind.name,
        width=(width, width + candidate.dims),
        step_size=step,
        gain=candidate.gain if candidate.dims else candidate.directions.worth.sum().item(),
        out_of_reach=candidate.directions.out_of_reach,
    )

"""Measure, widen, try, and keep or roll back: `Grower`, its config and its report."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from . import functional as F
from .attention import GrowableAttention, Widening
from .modeling import GrowableModelMixin, attentions
from .optimizer import check_optimizer, swap_parameters
from .probe import (
    SKETCH_PASSES,
    PatternGradient,
    exact_gradients,
    mean_loss,
    sketched_gradients,
    undisturbed,
    whitenings,
)
from .report import GrowthReport, LayerGrowth

_TRAINABLE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MAX_DOUBLINGS = 200  # more than the exponents of fp32 span
_SMALLEST_PROMISE = 1e-7  # of the loss: below it, fp32 cannot tell an improvement from rounding


@dataclass(frozen=True)
class GrowthConfig:
    """What to grow, and how to measure.

    Attributes:
        qk_dims: dims to add to the queries and keys of each head.
        layers: indices of the layers to grow; None grows every layer.
        ridge: fraction of the mean eigenvalue of the inputs' second moment that is added before whitening.
        oversampling: probe dims beyond `qk_dims` in the sketch.
        seed: of the sketch's random inputs.
    """

    qk_dims: int
    layers: Sequence[int] | None = None
    ridge: float = 0.05
    oversampling: int = 8
    seed: int = 0

    def __post_init__(self):
        for name, value, least in (("qk_dims", self.qk_dims, 1), ("oversampling", self.oversampling, 0)):
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be a whole number, at least {least}; got {value!r}.")
        if not self.ridge > 0:
            raise ValueError(f"ridge must be positive, such as 0.05; got {self.ridge!r}.")
        if self.layers is not None and len(self.layers) == 0:
            raise ValueError("layers is empty; name at least one layer, or leave it None for all.")


class Grower:
    """Grows the attention of a patched model on batches of the user's own data.

    Args:
        model: a model that `patch_model` has seen, or one loaded from a grown checkpoint.
        config: what to grow.
        optimizer: the optimizer of the running training, if there is one: it keeps its groups, order and state.
        accelerator: the `accelerate.Accelerator` of the training, if there is one, to reach into what it has prepared.
            One process only; to grow for several, grow and save first, then launch them from the checkpoint.

    Raises:
        ValueError: the model is not patched, or several processes run.
    """

    def __init__(self, model: PreTrainedModel, config: GrowthConfig, optimizer=None, accelerator=None):
        if accelerator is not None:
            if accelerator.num_processes > 1:
                raise ValueError(
                    f"Growth runs in one process, and there are {accelerator.num_processes}. Grow and save the model "
                    "in one process, then launch the training from that checkpoint."
                )
            model = accelerator.unwrap_model(model)
        self.model = getattr(model, "_orig_mod", model)
        if not isinstance(self.model, GrowableModelMixin):
            raise ValueError(f"{type(self.model).__name__} is not growable yet: call patch_model(model) first.")
        self.config = config
        self.optimizer = getattr(optimizer, "optimizer", optimizer)

    def grow(self, batches: Iterable) -> "GrowthReport":
        """Widen the chosen layers along the best directions, by the step that lowers the loss of these batches most.

        If no step lowers it, and also after an exception, model and optimizer are as they were, to the bit. Gradients,
        training modes, `requires_grad` flags and the random state stay as they were in any case.

        Args:
            batches: dicts that `model(**batch).loss` accepts, or tensors of `input_ids` (batch, tokens), which are their
                own labels. They are read once, and kept for the passes over them.

        Raises:
            ValueError: no batches, no loss or none that is finite, weights that cannot be trained (frozen, quantized,
                on the meta device, inference tensors), an optimizer without the model's parameters, or a layer that
                does not exist or is as wide as it can be. The message names the fix.
        """
        chosen = self._chosen_layers()
        if self.optimizer is not None:
            check_optimizer(self.optimizer, self._parameters(chosen))
        batches = _as_dicts(batches)
        sketched = self.config.qk_dims + self.config.oversampling < self.model.config.hidden_size
        clock = _Clock()
        passes = 1 + (SKETCH_PASSES if sketched else 1)
        with undisturbed(self.model), tqdm(total=passes * len(batches), disable=None, leave=False) as bar:
            bar.set_description("growth: measuring")
            with clock.phase("moments"):
                roots, loss_before = whitenings(self.model, chosen, batches, self.config.ridge, bar.update)
            with clock.phase("probe"):
                arguments = (self.model, chosen, roots, batches, self.config.qk_dims)
                if sketched:
                    rest = (self.config.oversampling, self.config.seed, bar.update)
                    gradients = sketched_gradients(*arguments, *rest)
                else:
                    gradients = exact_gradients(*arguments, bar.update)
            trial = Trial(chosen, gradients)
            try:
                bar.set_description("growth: searching the step")
                with clock.phase("line_search"):
                    search = _LineSearch(trial, self.model, batches, loss_before, bar)
                    step, loss_after = search.run()
                if step > 0:
                    trial.take(step)
                    if self.optimizer is not None:
                        swap_parameters(self.optimizer, trial.resizes())
            except BaseException:
                trial.undo()
                raise
            if step == 0:
                trial.undo()
        self.model.sync_config()
        return GrowthReport(
            loss_before=loss_before,
            loss_after=loss_after,
            step_size=step,
            layers=[
                LayerGrowth(
                    layer=attention.layer_idx,
                    qk_head_dim=(widening.qk_before, attention.qk_head_dim),
                    v_head_dim=(widening.v_before, attention.v_head_dim),
                    slope=gradient.gain,
                    starvation=gradient.starvation,
                )
                for attention, widening, gradient in zip(chosen, trial.widenings, gradients)
            ],
            added_parameters=trial.added_parameters() if step > 0 else 0,
            line_search=search.tried,
            seconds=clock.seconds,
        )

    def _chosen_layers(self) -> list[GrowableAttention]:
        by_layer = {attention.layer_idx: attention for attention in attentions(self.model)}
        layers = list(by_layer) if self.config.layers is None else list(dict.fromkeys(self.config.layers))
        for layer in layers:
            if layer not in by_layer:
                raise ValueError(f"There is no layer {layer!r}: this model has the layers 0 to {max(by_layer)}.")
        chosen = [by_layer[layer] for layer in layers]
        if torch.is_inference_mode_enabled():
            raise ValueError("Growth needs gradients: call it outside torch.inference_mode().")
        for name, parameter in self._parameters(chosen).items():
            _check_trainable(name, parameter)
        for attention in chosen:
            widest = self.model.config.hidden_size
            if attention.qk_head_dim + self.config.qk_dims > widest:
                raise ValueError(
                    f"Layer {attention.layer_idx} has qk_head_dim={attention.qk_head_dim}; {self.config.qk_dims} more would "
                    f"exceed hidden_size={widest}, beyond which a pattern gains no rank. Choose fewer qk_dims or other layers."
                )
        return chosen

    def _parameters(self, chosen: list[GrowableAttention]) -> dict[str, nn.Parameter]:
        """The parameters that widening queries and keys resizes, by name."""
        parameters = {}
        for attention in chosen:
            for role in ("query", "key"):
                module, name = attention.projection(role), getattr(attention.architecture, role)
                if not isinstance(module, (nn.Linear, Conv1D)):
                    raise ValueError(
                        f"{name} of layer {attention.layer_idx} is a {type(module).__name__}, not a plain projection. "
                        "Merge adapters into the weights, and load the model without quantization."
                    )
                for part, parameter in module.named_parameters(recurse=False):
                    parameters[f"{name}.{part} of layer {attention.layer_idx}"] = parameter
        return parameters


class Trial:
    """New dims in place, with zero weights until `take` writes a step; `undo` puts the old parameters back."""

    def __init__(self, chosen: list[GrowableAttention], gradients: list[PatternGradient]):
        self.chosen, self.gradients = chosen, gradients
        self.widenings: list[Widening] = []
        try:
            for attention, gradient in zip(chosen, gradients):
                self.widenings.append(attention.widen(qk_dims=gradient.sigma.shape[-1]))
        except BaseException:
            self.undo()
            raise
        # Both sides scale with the square root of the step, so the factors are made once.
        self.factors = [
            F.pattern_factors(g.u, g.sigma, g.v, g.whitening.query_whitening, g.whitening.key_whitening, a.heads("query"))
            for a, g in zip(chosen, gradients)
        ]
        self.slope = sum(gradient.gain for gradient in gradients)

    def take(self, step: float) -> None:
        """Write the new weights for a step `gamma`; 0 makes them zero, which keeps the function."""
        for attention, factors in zip(self.chosen, self.factors):
            for role, new in zip(("query", "key"), factors):
                weight, bias = F.split_bias(new * step**0.5, self.chosen[0].config.hidden_size)
                dims = weight.shape[1]
                attention.weight(role)[:, -dims:] = weight.to(attention.weight(role).dtype)
                if bias is not None:
                    attention.bias(role)[:, -dims:] = bias.to(attention.bias(role).dtype)

    def undo(self) -> None:
        """Put the very same old parameters back."""
        for widening in self.widenings:
            widening.undo()

    def resizes(self) -> list:
        """Every parameter that changed its size."""
        return [resize for widening in self.widenings for resize in widening.resizes]

    def added_parameters(self) -> int:
        """Number of weights that the widening added."""
        return sum(resize.new.numel() - resize.old.numel() for resize in self.resizes())


class _LineSearch:
    """Geometric search for the step with the lowest loss, all layers at once, forward passes only."""

    def __init__(self, trial: Trial, model: nn.Module, batches: list[dict], loss_before: float, bar: tqdm):
        self.trial, self.model, self.batches, self.bar = trial, model, batches, bar
        self.loss_before = loss_before
        self.tried: dict[float, float] = {}

    def run(self) -> tuple[float, float]:
        """Return the best step and its loss; step 0 and the loss before if no step lowers it."""
        if not self.trial.slope > 0:
            return 0.0, self.loss_before
        step = 0.01 * abs(self.loss_before) / self.trial.slope  # promises 1 % of the loss
        while self._loss(step) >= self.loss_before:
            step /= 4
            if step * self.trial.slope < _SMALLEST_PROMISE * abs(self.loss_before):
                return 0.0, self.loss_before
        for factor in (4.0, 2.0, 2.0**0.5):
            step = self._climb(step, factor)
        return step, self.tried[step]

    def _climb(self, step: float, factor: float) -> float:
        """Multiply or divide the step by the factor for as long as that lowers the loss."""
        for ratio in (factor, 1 / factor):
            for _ in range(_MAX_DOUBLINGS):
                if not self._loss(step * ratio) < self._loss(step):
                    break
                step *= ratio
        return step

    def _loss(self, step: float) -> float:
        if step not in self.tried:
            self.trial.take(step)
            self.bar.total += len(self.batches)
            try:
                self.tried[step] = mean_loss(self.model, self.batches, self.bar.update)
            except FloatingPointError:
                self.tried[step] = float("inf")
        return self.tried[step]


@dataclass
class _Clock:
    """Seconds spent in each phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    def phase(self, name: str):
        return _Phase(self.seconds, name)


class _Phase:
    def __init__(self, seconds, name):
        self.seconds, self.name = seconds, name

    def __enter__(self):
        self.start = time.perf_counter()

    def __exit__(self, *exception):
        self.seconds[self.name] = time.perf_counter() - self.start


def _as_dicts(batches: Iterable) -> list[dict]:
    """Read the batches once: tensors of input_ids become causal LM batches."""
    listed = []
    for index, batch in enumerate(batches):
        if torch.is_tensor(batch):
            batch = {"input_ids": batch, "labels": batch}
        if not hasattr(batch, "keys"):
            raise ValueError(
                f"Batch {index} is a {type(batch).__name__}; growth takes dicts for model(**batch), or tensors of input_ids."
            )
        listed.append(dict(batch))
    if not listed:
        raise ValueError("There are no batches to grow on; pass a few dozen of your training batches.")
    return listed


def _check_trainable(name: str, parameter: nn.Parameter) -> None:
    """Raise a ValueError that names the fix if a parameter cannot be grown and trained."""
    if parameter.is_meta:
        raise ValueError(f"{name} is on the meta device: load the weights onto a real device before growing.")
    if parameter.is_inference():
        raise ValueError(f"{name} was made under torch.inference_mode(): load the model outside of it.")
    if parameter.dtype not in _TRAINABLE_DTYPES:
        raise ValueError(f"{name} has dtype {parameter.dtype}, so the model is quantized: load it in bf16 or fp32.")
    if not parameter.requires_grad:
        raise ValueError(f"{name} is frozen, so new dims could not be trained: call requires_grad_(True) on it first.")

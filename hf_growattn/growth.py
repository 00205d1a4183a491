"""Measure, widen, try, and keep or roll back: `Grower`, its config and its report."""

import contextlib
import io
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .attention import GrowableAttention
from .modeling import GrowableModelMixin, attentions
from .optimizer import check_optimizer, swap_parameters
from .probe import SKETCH_PASSES, PatternGradient, exact_gradients, sketched_gradients, undisturbed, whitenings
from .trial import StepSearch, Trial

_TRAINABLE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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
        if self.layers is not None and not (isinstance(self.layers, Sequence) and len(self.layers)):
            raise ValueError(f"layers must be a list of at least one index, or None for all; got {self.layers!r}.")


@dataclass(frozen=True)
class LayerGrowth:
    """One layer of a growth.

    Attributes:
        layer: index.
        qk_head_dim, v_head_dim: width before and after.
        predicted_gain: first-order decrease of the loss at the step that was taken, over all heads; 0 after a rollback.
        slope: the same per unit of step.
        starvation: share of the gradient, in the metric of the logits, that the old dims cannot follow (0 to 1).
    """

    layer: int
    qk_head_dim: tuple[int, int]
    v_head_dim: tuple[int, int]
    predicted_gain: float
    slope: float
    starvation: float


@dataclass(frozen=True)
class GrowthReport:
    """What a growth measured and did; prints as a table.

    Attributes:
        loss_before, loss_after: mean loss of the growth batches, in the loss's own unit; equal if nothing was kept.
        step_size: the common step `gamma` of all layers; 0 if everything was rolled back.
        layers: one entry for each layer that was measured.
        added_parameters: number of weights added.
        line_search: mean loss of the growth batches at every step that was tried.
        seconds: wall time of each phase.
    """

    loss_before: float
    loss_after: float
    step_size: float
    layers: list[LayerGrowth]
    added_parameters: int
    line_search: dict[float, float]
    seconds: dict[str, float]

    @property
    def applied(self) -> bool:
        """Whether the growth was kept."""
        return self.step_size > 0

    @property
    def predicted_gain(self) -> float:
        """First-order decrease of the loss at the step that was taken."""
        return sum(layer.predicted_gain for layer in self.layers)

    def __str__(self) -> str:
        table = Table("layer", "qk_head_dim", "v_head_dim", "starvation", "predicted gain")
        for layer in self.layers:
            table.add_row(
                str(layer.layer),
                _change(*layer.qk_head_dim),
                _change(*layer.v_head_dim),
                f"{layer.starvation:.2f}",
                f"{layer.predicted_gain:.4f}" if self.applied else "-",
            )
        if self.applied:
            outcome = (
                f"Loss {self.loss_before:.4f} -> {self.loss_after:.4f} on the growth batches "
                f"(first order promised {self.predicted_gain:.4f}), step size {self.step_size:.3g}, "
                f"{self.added_parameters:,} parameters added."
            )
        else:
            outcome = (
                f"Rolled back: no step lowers the loss of {self.loss_before:.4f} on the growth batches. "
                "The model is as it was."
            )
        timing = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.seconds.items())
        text = io.StringIO()
        Console(file=text, width=100).print(table)
        return f"{text.getvalue()}{outcome}\nTime: {timing}."


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
            batches: dicts that `model(**batch).loss` accepts, or tensors of `input_ids` (batch, tokens), which are
                their own labels. They are read once, and kept for the passes over them.

        Raises:
            ValueError: no batches, no loss or none that is finite, weights that cannot be trained (frozen, quantized,
                on the meta device, inference tensors), an optimizer without the model's parameters, or a layer that
                does not exist or is as wide as it can be. The message names the fix.
        """
        chosen = self._chosen_layers()
        if self.optimizer is not None:
            check_optimizer(self.optimizer, self._parameters(chosen))
        batches = _as_dicts(batches)
        seconds: dict[str, float] = {}
        with tqdm(desc="growth: measuring", total=0, disable=None, leave=False) as bar:
            loss_before, gradients = self._measure(chosen, batches, bar, seconds)
            bar.set_description("growth: searching the step")
            trial = Trial(chosen, gradients)
            search = StepSearch(trial, self.model, batches, loss_before, bar)
            try:
                with _timed(seconds, "line search"), undisturbed(self.model):
                    step, loss_after = search.run()
                if step == 0:
                    trial.undo()
                else:
                    trial.take(step)
                    self.model.sync_config()
                    if self.optimizer is not None:
                        swap_parameters(self.optimizer, trial.resizes())
            except BaseException:
                trial.undo()
                self.model.sync_config()
                raise
        return GrowthReport(
            loss_before=loss_before,
            loss_after=loss_after,
            step_size=step,
            layers=[
                LayerGrowth(
                    layer=attention.layer_idx,
                    qk_head_dim=(widening.qk_before, attention.qk_head_dim),
                    v_head_dim=(widening.v_before, attention.v_head_dim),
                    predicted_gain=step * gradient.gain,
                    slope=gradient.gain,
                    starvation=gradient.starvation,
                )
                for attention, widening, gradient in zip(chosen, trial.widenings, gradients)
            ],
            added_parameters=trial.added_parameters() if step > 0 else 0,
            line_search=search.tried,
            seconds=seconds,
        )

    def _measure(
        self, chosen: list[GrowableAttention], batches: list[dict], bar: tqdm, seconds: dict[str, float]
    ) -> tuple[float, list[PatternGradient]]:
        """Return the mean loss of the batches and what new dims of each chosen layer could do about it."""
        config = self.config
        sketched = config.qk_dims + config.oversampling < self.model.config.hidden_size
        bar.total = (1 + (SKETCH_PASSES if sketched else 1)) * len(batches)
        with undisturbed(self.model):
            with _timed(seconds, "moments"):
                roots, loss = whitenings(self.model, chosen, batches, config.ridge, bar.update)
            with _timed(seconds, "probe"):
                arguments = (self.model, chosen, roots, batches, config.qk_dims)
                if sketched:
                    gradients = sketched_gradients(*arguments, config.oversampling, config.seed, bar.update)
                else:
                    gradients = exact_gradients(*arguments, bar.update)
        return loss, gradients

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
                    f"Layer {attention.layer_idx} has qk_head_dim={attention.qk_head_dim}; {self.config.qk_dims} more "
                    f"would exceed hidden_size={widest}, beyond which a pattern gains no rank. Choose fewer qk_dims, "
                    "or other layers."
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


@contextlib.contextmanager
def _timed(seconds: dict[str, float], phase: str):
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start


def _as_dicts(batches: Iterable) -> list[dict]:
    """Read the batches once: tensors of input_ids become causal LM batches."""
    listed = []
    for index, batch in enumerate(batches):
        if torch.is_tensor(batch):
            batch = {"input_ids": batch, "labels": batch}
        if not hasattr(batch, "keys"):
            raise ValueError(
                f"Batch {index} is a {type(batch).__name__}; growth takes dicts for model(**batch), or tensors of "
                "input_ids."
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


def _change(before: int, after: int) -> str:
    return f"{before} -> {after}" if after != before else str(before)

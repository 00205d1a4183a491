"""Probes: temporary dims whose ordinary gradient is the statistic that growth needs.

Appending dims whose query weights are zero changes no logit, yet the gradient of those weights is `T Omega` if the
matching keys are `X Omega`. The mirror image, zero keys and fixed queries `X Psi`, gives `T^T Psi` in the same pass.
Messages are read the same way: values `X Omega` against output weights of zero, zero values against output weights
`Psi`. No T x T and no d x d matrix per head is formed, and any attention implementation, mask and precision works,
since a probe is nothing but a few more dims.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import functional as F
from .attention import GrowableAttention
from .ranks import together, total


@dataclass(frozen=True)
class Kind:
    """One of a head's two bottlenecks, by the roles of its two sides."""

    name: str
    stacked: str
    shared: str


PATTERNS = Kind("patterns", "query", "key")
MESSAGES = Kind("messages", "output", "value")


class _ZeroProjection(torch.autograd.Function):
    """`inputs @ weight` for a weight of zeros: nothing to compute forward, and the gradient of the weight backward."""

    @staticmethod
    def forward(ctx, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return inputs.new_zeros(()).expand(*inputs.shape[:-1], weight.shape[-1])

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (inputs,) = ctx.saved_tensors
        return None, inputs.flatten(0, -2).T @ gradient.flatten(0, -2)


class KindProbe(nn.Module):
    """The fixed and the zero weights that probe one kind of bottleneck of one attention module.

    Args:
        shared_probe: `Omega`, (G, b, r).
        stacked_probe: `Psi`, (H, a, r'); None probes one side only.
        heads, stacked_features: `H` and `a`, the shape of the zero weights of the stacked side.

    Attributes:
        zero_stacked: (H, a, r); after a backward pass its gradient is `T Omega`.
        zero_shared: (G, b, r'); its gradient is `T^T Psi`, summed over the heads of each group.
    """

    def __init__(self, shared_probe: Tensor, stacked_probe: Tensor | None, heads: int, stacked_features: int):
        super().__init__()
        self.shared_probe = shared_probe
        self.stacked_probe = (
            shared_probe.new_zeros(heads, stacked_features, 0) if stacked_probe is None else stacked_probe
        )
        zero = shared_probe.new_zeros(())  # one number in memory stands for all; the gradients have their full size
        self.zero_stacked = nn.Parameter(zero.expand(heads, stacked_features, shared_probe.shape[-1]))
        rank = self.stacked_probe.shape[-1]
        self.zero_shared = nn.Parameter(zero.expand(*shared_probe.shape[:2], rank), requires_grad=rank > 0)

    def stacked(self, inputs: Tensor) -> Tensor:
        """Project inputs by `[zeros | Psi]`: (batch, tokens, d) -> (batch, H, tokens, r + r')."""
        return torch.cat((_by_head(inputs, self.zero_stacked), _by_head(inputs, self.stacked_probe)), dim=-1)

    def shared(self, inputs: Tensor) -> Tensor:
        """Project inputs by `[Omega | zeros]`: (batch, tokens, d) -> (batch, G, tokens, r + r')."""
        return torch.cat((_by_head(inputs, self.shared_probe), _by_head(inputs, self.zero_shared)), dim=-1)

    def gather(self, added: Tensor) -> Tensor:
        """Bring attended values back by `[zeros | Psi]`: (batch, tokens, H, r + r') -> (batch, tokens, a)."""
        rank = self.zero_stacked.shape[-1]
        zero = self.zero_stacked.transpose(-1, -2).flatten(0, 1)  # (H r, a)
        fixed = self.stacked_probe.transpose(-1, -2).flatten(0, 1)
        return (
            _ZeroProjection.apply(added[..., :rank].flatten(-2).detach(), zero) + added[..., rank:].flatten(-2) @ fixed
        )


def _by_head(inputs: Tensor, factors: Tensor) -> Tensor:
    """(batch, tokens, d) times (heads, d or d + 1, r), whose last row is a bias -> (batch, heads, tokens, r)."""
    heads, features, rank = factors.shape
    weight = factors.transpose(0, 1).flatten(1)  # (d or d + 1, heads r)
    if factors.requires_grad:
        biased = F.augment(inputs) if features > inputs.shape[-1] else inputs
        projected = _ZeroProjection.apply(biased, weight)
    else:
        projected = inputs @ weight[: inputs.shape[-1]]
        if features > inputs.shape[-1]:
            projected = projected + weight[-1]
    return projected.unflatten(-1, (heads, rank)).transpose(1, 2)


class Probe(nn.Module):
    """An attention module's extension: a probe of its patterns, of its messages, or of both."""

    def __init__(self, patterns: KindProbe | None = None, messages: KindProbe | None = None):
        super().__init__()
        self.patterns, self.messages = patterns, messages

    def forward(self, hidden_states: Tensor, query: Tensor, key: Tensor, value: Tensor):
        """Lengthen queries (batch, H, tokens, d_k), keys (batch, G, tokens, d_k) and values (batch, G, tokens, d_v)."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            inputs = hidden_states.detach().to((self.patterns or self.messages).shared_probe.dtype)
            if self.patterns is not None:
                query = _lengthen(query, self.patterns.stacked(inputs))
                key = _lengthen(key, self.patterns.shared(inputs))
            if self.messages is not None:
                value = _lengthen(value, self.messages.shared(inputs))
        return query, key, value

    def output(self, added: Tensor) -> Tensor:
        """What the added value dims contribute, all of it zero: (batch, tokens, H, n) -> (batch, tokens, d)."""
        with torch.autocast(added.device.type, enabled=False):
            return self.messages.gather(added.to(self.messages.shared_probe.dtype)).to(added.dtype)


def _lengthen(states: Tensor, added: Tensor) -> Tensor:
    return torch.cat((states, added.to(states.dtype)), dim=-1)


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run passes whose only trace is what the caller reads: frozen parameters, no dropout, forked random state.

    On leaving, also by an exception, training modes, `requires_grad` flags, gradients, extensions and the random state
    are as they were.
    """
    training = [(module, module.training) for module in model.modules()]
    parameters = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    extensions = [(m, m.extension) for m in model.modules() if isinstance(m, GrowableAttention)]
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    # Probes would recompile a compiled model for a few passes; what attention itself compiles goes on being compiled.
    compiled = [(m, m._compiled_call_impl) for m in model.modules() if m._compiled_call_impl is not None]
    with torch.random.fork_rng(devices=[device.index for device in devices]):
        try:
            for module, _ in compiled:
                module._compiled_call_impl = None
            model.eval()
            model.requires_grad_(False)
            model.zero_grad(set_to_none=True)  # the user's gradients come back on leaving
            yield
        finally:
            for module, call in compiled:
                module._compiled_call_impl = call
            for module, mode in training:
                module.training = mode
            for parameter, requires_grad, gradient in parameters:
                parameter.requires_grad_(requires_grad)
                parameter.grad = gradient
            for attention, extension in extensions:
                set_extension(attention, extension)


@contextlib.contextmanager
def autocast_in_the_model_only(model: nn.Module) -> Iterator[None]:
    """Switch the caller's autocast off for all but the model's own forward: solving wants the statistics' precision."""
    kind = next(model.parameters()).device.type
    if not torch.is_autocast_enabled(kind):
        yield
        return
    own = vars(model).get("forward")
    with torch.autocast(kind, enabled=False):
        model.forward = torch.autocast(kind, torch.get_autocast_dtype(kind))(model.forward)
        try:
            yield
        finally:
            del model.forward
            if own is not None:
                model.forward = own


def set_extension(attention: GrowableAttention, extension: nn.Module | None) -> None:
    """Set or clear the extension; a module must leave `_modules` before None can take its name."""
    attention._modules.pop("extension", None)
    attention.extension = extension


def batch_loss(model: nn.Module, batch: dict[str, Tensor], index: int) -> Tensor:
    """Return the loss of one batch, a scalar.

    Raises:
        ValueError: the model returns no loss, or one that is NaN or infinite; the message names the batch and a fix.
    """
    loss = _loss(model, batch)
    if loss is None:
        raise ValueError(
            f"{type(model).__name__} returns no loss for batch {index} with the keys {sorted(batch)}. Growth needs a "
            'model with a head, and the targets in every batch: for a causal LM "labels", a copy of "input_ids".'
        )
    if not torch.isfinite(loss):
        raise ValueError(
            f"The loss of batch {index} is {loss.item()}. Look for labels that are all -100, for inputs that are not "
            "finite, or for a diverged model, and leave that batch out."
        )
    return loss


def mean_loss(model: nn.Module, batches: list[dict], tick: Callable[[], None] = lambda: None) -> float:
    """Return the mean of the batches' losses over all ranks, finite or not. Call inside `undisturbed`."""
    loss = 0.0
    with torch.no_grad(), together():
        for batch in batches:
            loss += _loss(model, batch).item()
            tick()
    loss, count = total(loss, len(batches))
    return loss / count


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor | None:
    device = model.get_input_embeddings().weight.device
    batch = {key: value.to(device) if torch.is_tensor(value) else value for key, value in batch.items()}
    outputs = model(**{"use_cache": False, **batch})
    return outputs.get("loss") if isinstance(outputs, dict) else outputs[0]


def backward(model: nn.Module, batches: list[dict], tick: Callable[[], None] = lambda: None) -> None:
    """Sum the gradients of this rank's batches into whatever asks for them: the installed probes.

    The loss is scaled up by a power of two for the way back, as fp16 needs it and as other types do not notice. Call
    inside `undisturbed`.

    Raises:
        ValueError: the gradients are not finite at any scale.
    """
    asked = [parameter for parameter in model.parameters() if parameter.requires_grad]
    scale = 2.0**16
    while scale >= 2.0**-16:
        for parameter in asked:
            parameter.grad = None
        with torch.enable_grad(), _recomputing(model), together():
            for index, batch in enumerate(batches):
                (batch_loss(model, batch, index) * scale).backward()
                tick()
        gradients = [parameter.grad for parameter in asked if parameter.grad is not None]
        (overflown,) = total(sum(not torch.isfinite(gradient).all().item() for gradient in gradients))
        if not overflown:
            for gradient in gradients:
                gradient /= scale
            return
        scale /= 16
    raise ValueError(
        "The loss is finite, but its gradients are not. Look for fully masked rows under eager attention, for diverged "
        "weights, or train in bf16 instead of fp16."
    )


@contextlib.contextmanager
def _recomputing(model: nn.Module) -> Iterator[None]:
    """Keep activation checkpointing at work where the user has it: its layers recompute in training mode only."""
    checkpointed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    if not checkpointed:
        yield
        return
    # Reentrant checkpoints drop gradients when no input asks for them, and the embeddings are frozen here.
    embeddings = model.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda module, args, output: output.requires_grad_())
    try:
        for module in checkpointed:
            module.training = True  # of this module alone: its children keep dropout off
        yield
    finally:
        hook.remove()
        for module in checkpointed:
            module.training = False

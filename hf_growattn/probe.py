"""Statistics of the loss that growth needs, read off ordinary backward passes.

Appending dims whose query weights are zero changes no logit, yet the gradient of those weights is `T Omega` if the
matching keys are `X Omega`, with `T = s sum_n X_n^T G_n X_n`. The mirror image, zero keys and fixed queries `X Psi`,
gives `T^T Psi` in the same pass. No T x T and no d x d matrix per head is formed, and any attention implementation,
mask and precision works, since the probe is nothing but a few more dims.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import functional as F
from .attention import GrowableAttention

SKETCH_PASSES = 3


class PatternProbe(nn.Module):
    """Temporary dims of one attention module: `[zero queries | X Psi]` against `[X Omega | zero keys]`.

    Args:
        key_probe: `Omega`, (G, b, r).
        query_probe: `Psi`, (H, a, r'); None probes one side only.
        heads, query_features: `H` and `a`, the shape of the zero query weights.
    """

    def __init__(self, key_probe: Tensor, query_probe: Tensor | None, heads: int, query_features: int):
        super().__init__()
        self.key_probe, self.query_probe = key_probe, query_probe
        self.zero_query = nn.Parameter(key_probe.new_zeros(heads, query_features, key_probe.shape[-1]))
        self.zero_key = None
        if query_probe is not None:
            self.zero_key = nn.Parameter(key_probe.new_zeros(*key_probe.shape[:2], query_probe.shape[-1]))

    def forward(self, hidden_states: Tensor, query: Tensor, key: Tensor, value: Tensor):
        """Lengthen queries (batch, H, tokens, d_k) and keys (batch, G, tokens, d_k); values stay."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            inputs = hidden_states.detach().to(self.key_probe.dtype)
            queries, keys = [_project(inputs, self.zero_query)], [_project(inputs, self.key_probe)]
            if self.query_probe is not None:
                queries.append(_project(inputs, self.query_probe))
                keys.append(_project(inputs, self.zero_key))
        query = torch.cat((query, *(q.to(query.dtype) for q in queries)), dim=-1)
        key = torch.cat((key, *(k.to(key.dtype) for k in keys)), dim=-1)
        return query, key, value


def _project(inputs: Tensor, factors: Tensor) -> Tensor:
    """(batch, tokens, d) times (heads, d or d + 1, r), whose last row would be a bias -> (batch, heads, tokens, r)."""
    weight, bias = F.split_bias(factors, inputs.shape[-1])
    projected = torch.einsum("btd,hrd->bhtr", inputs, weight)
    return projected if bias is None else projected + bias[:, None]


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run passes whose only trace is what the caller reads: frozen parameters, no dropout, forked random state.

    On leaving, also by an exception, training modes, `requires_grad` flags, extensions and the random state are as they
    were; gradients of the model's parameters are never written.
    """
    training = [(module, module.training) for module in model.modules()]
    requires_grad = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
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
            yield
        finally:
            for module, call in compiled:
                module._compiled_call_impl = call
            for module, mode in training:
                module.training = mode
            for parameter, flag in requires_grad:
                parameter.requires_grad_(flag)
            for attention, extension in extensions:
                _set_extension(attention, extension)


def _set_extension(attention: GrowableAttention, extension: nn.Module | None) -> None:
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
    """Return the mean of the batches' losses, finite or not, by forward passes only. Call inside `undisturbed`."""
    total = 0.0
    with torch.no_grad():
        for batch in batches:
            total += _loss(model, batch).item()
            tick()
    return total / len(batches)


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor | None:
    device = model.get_input_embeddings().weight.device
    batch = {key: value.to(device) if torch.is_tensor(value) else value for key, value in batch.items()}
    outputs = model(**{"use_cache": False, **batch})
    return outputs.get("loss") if isinstance(outputs, dict) else outputs[0]


@dataclass
class Whitening:
    """`C^(1/2)` and `C^(-1/2)` of one layer's ridged second moments: query side (a, a), key side (b, b)."""

    query_root: Tensor
    query_whitening: Tensor
    key_root: Tensor
    key_whitening: Tensor


def whitenings(
    model: nn.Module,
    attentions: list[GrowableAttention],
    batches: list[dict],
    ridge: float,
    tick: Callable[[], None] = lambda: None,
) -> tuple[list[Whitening], float]:
    """Pool the second moments of every attention's input over all tokens that are not padding.

    One forward pass over the batches. Queries and keys see the same tokens, so both sides share the moment, each with
    a constant feature where its projection has a bias. Call inside `undisturbed`.

    Args:
        batches: dicts for `model(**batch)`; a two-dimensional "attention_mask" tells padding.
        ridge: fraction of the mean eigenvalue to add.

    Returns:
        The roots, one layer each, and the mean loss of the batches.
    """
    sums: dict[GrowableAttention, Tensor | float] = dict.fromkeys(attentions, 0.0)
    mask: Tensor | None = None

    def add(module, args, kwargs):
        inputs = args[0] if args else kwargs["hidden_states"]
        sums[module] = sums[module] + F.moment_sum(F.augment(inputs.detach().to(_statistics_dtype(inputs))), mask)

    hooks = [attention.register_forward_pre_hook(add, with_kwargs=True) for attention in attentions]
    total = 0.0
    try:
        with torch.no_grad():
            for index, batch in enumerate(batches):
                mask = batch.get("attention_mask")
                total += batch_loss(model, batch, index).item()
                tick()
    finally:
        for hook in hooks:
            hook.remove()
    return [_whitening(attention, sums[attention], ridge) for attention in attentions], total / len(batches)


def _whitening(attention: GrowableAttention, moment_sum: Tensor, ridge: float) -> Whitening:
    moment = moment_sum / moment_sum[-1, -1]  # the constant feature has counted the tokens
    roots = {}
    for biased in {attention.bias("query") is not None, attention.bias("key") is not None}:
        roots[biased] = F.square_roots(F.ridged(moment if biased else moment[:-1, :-1], ridge))
    return Whitening(*roots[attention.bias("query") is not None], *roots[attention.bias("key") is not None])


def _statistics_dtype(tensor: Tensor) -> torch.dtype:
    """fp64 stays; everything else is measured in fp32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


@dataclass
class PatternGradient:
    """What new query/key dims of one layer could do, to first order.

    Attributes:
        u, sigma, v: whitened directions beyond the old dims, best first: (G, g a, p), (G, p), (G, b, p).
        whitening: the roots that take them back to weights.
        starvation: share of the whitened gradient that the old dims cannot follow, between 0 and 1.
    """

    u: Tensor
    sigma: Tensor
    v: Tensor
    whitening: Whitening
    starvation: float

    @property
    def gain(self) -> float:
        """First-order decrease of the loss per unit of step, over all heads of the layer."""
        return F.first_order_gain(self.sigma).sum().item()

    def factors(self, heads: int) -> tuple[Tensor, Tensor]:
        """New columns of `W_Q` (H, a, p) and `W_K` (G, b, p), bias last, for a step of size 1."""
        roots = self.whitening
        return F.pattern_factors(self.u, self.sigma, self.v, roots.query_whitening, roots.key_whitening, heads)


class _Layer:
    """One layer under the probe: whitened inputs go in, whitened products with the gradient come out."""

    def __init__(self, attention: GrowableAttention, whitening: Whitening):
        self.attention, self.whitening = attention, whitening
        self.heads, self.groups = attention.heads("query"), attention.heads("key")
        query = F.join_bias(attention.weight("query"), attention.bias("query")).to(whitening.query_root.dtype)
        key = F.join_bias(attention.weight("key"), attention.bias("key")).to(whitening.key_root.dtype)
        self.query_basis = F.column_basis(F.stack_groups(whitening.query_root @ query, self.groups))
        self.key_basis = F.column_basis(whitening.key_root @ key)

    def gaussian(self, side: str, rank: int, generator: torch.Generator) -> Tensor:
        """Random whitened inputs, (G, b, rank) on the key side and (G, g a, rank) on the query side."""
        shape = (*(self.key_basis if side == "key" else self.query_basis).shape[:2], rank)
        return torch.randn(shape, generator=generator, dtype=self.key_basis.dtype).to(self.key_basis.device)

    def insert(self, key_inputs: Tensor, query_inputs: Tensor | None) -> None:
        """Install a probe for `M key_inputs` and `M^T query_inputs`; with None for the second, the first alone."""
        key_probe, query_probe = self.whitening.key_whitening @ key_inputs, None
        if query_inputs is not None:
            query_probe = self.whitening.query_whitening @ F.unstack_groups(query_inputs, self.heads)
        self.probe = PatternProbe(key_probe, query_probe, self.heads, len(self.whitening.query_root))
        _set_extension(self.attention, self.probe)

    def read(self, batches: int) -> tuple[Tensor, Tensor | None]:
        """Return `M key_inputs` (G, g a, r) and `M^T query_inputs` (G, b, r'), of the mean loss over the batches."""
        products = self.whitening.query_whitening @ (self.probe.zero_query.grad / batches)
        mirrored = None
        if self.probe.zero_key is not None:
            mirrored = self.whitening.key_whitening @ (self.probe.zero_key.grad / batches)
        return F.stack_groups(products, self.groups), mirrored

    def gradient(self, directions: tuple[Tensor, Tensor, Tensor], residual: Tensor, total: Tensor) -> PatternGradient:
        """Wrap up directions, and the squared norms of the residual and of the whole whitened gradient."""
        share = (residual / total).clamp(0, 1).sqrt().item() if total > 0 else 0.0
        return PatternGradient(*directions, self.whitening, share)


def exact_gradients(
    model: nn.Module,
    attentions: list[GrowableAttention],
    whitenings: list[Whitening],
    batches: list[dict],
    dims: int,
    tick: Callable[[], None] = lambda: None,
) -> list[PatternGradient]:
    """Return every layer's best directions from its whole gradient, `r = d`, in one pass over the batches.

    Memory and time grow with `heads * hidden_size` per token: for small models, and as the test of the sketch. Call
    inside `undisturbed`.
    """
    layers = [_Layer(attention, whitening) for attention, whitening in zip(attentions, whitenings)]
    for layer in layers:
        identity = torch.eye(len(layer.whitening.key_root), dtype=layer.key_basis.dtype, device=layer.key_basis.device)
        layer.insert(identity.expand(layer.groups, -1, -1), None)
    _backward(model, batches, tick)
    gradients = []
    for layer in layers:
        whitened, _ = layer.read(len(batches))
        residual = F.bottleneck(whitened, layer.query_basis, layer.key_basis)
        directions = F.best_directions(residual, dims)
        gradients.append(layer.gradient(directions, residual.square().sum(), whitened.square().sum()))
    return gradients


def sketched_gradients(
    model: nn.Module,
    attentions: list[GrowableAttention],
    whitenings: list[Whitening],
    batches: list[dict],
    dims: int,
    oversampling: int,
    seed: int,
    tick: Callable[[], None] = lambda: None,
) -> list[PatternGradient]:
    """Return every layer's best directions from a randomized SVD with power iteration, `r = dims + oversampling`.

    Three passes over the batches, each probing both sides: the products of one pass are the inputs of the other side
    in the next. The first pass also estimates the norms behind the starvation, from its Gaussian inputs. Call inside
    `undisturbed`.

    Source: Halko, Martinsson, Tropp 2011, algorithms 4.3 and 4.4, with both sides iterated at once.
    """
    layers = [_Layer(attention, whitening) for attention, whitening in zip(attentions, whitenings)]
    rank, generator = dims + oversampling, torch.Generator().manual_seed(seed)
    inputs = []
    for layer in layers:
        query_inputs = F.project_out(layer.gaussian("query", rank, generator), layer.query_basis)
        inputs.append((layer.gaussian("key", rank, generator), query_inputs))
    known: list[list[tuple[Tensor, Tensor, Tensor, Tensor]]] = [[] for _ in layers]
    norms = []
    for sweep in range(SKETCH_PASSES):
        for layer, (key_inputs, query_inputs) in zip(layers, inputs):
            layer.insert(key_inputs, query_inputs)
        _backward(model, batches, tick)
        for index, layer in enumerate(layers):
            products, mirrored = layer.read(len(batches))
            residual = F.project_out(products, layer.query_basis), F.project_out(mirrored, layer.key_basis)
            if sweep == 0:
                norms.append((residual[1].square().sum() / rank, products.square().sum() / rank))
            else:
                known[index].append((inputs[index][0], residual[0], inputs[index][1], residual[1]))
            # The next inputs lie beyond the old dims, since both residuals do.
            inputs[index] = F.column_basis(residual[1]), F.column_basis(residual[0])
    return [layer.gradient(_better_side(products, dims), *norm) for layer, products, norm in zip(layers, known, norms)]


def _better_side(products: list[tuple[Tensor, Tensor, Tensor, Tensor]], dims: int) -> tuple[Tensor, Tensor, Tensor]:
    """Directions from the products with `R` or from those with `R^T`: for each group the side that gains more."""
    key_inputs, right, query_inputs, left = (torch.cat(tensors, dim=-1) for tensors in zip(*products))
    from_keys = F.directions_from_products(key_inputs, right, dims)
    v, sigma, u = F.directions_from_products(query_inputs, left, dims)
    better = F.first_order_gain(from_keys[1]) >= F.first_order_gain(sigma)
    chosen = (torch.where(better[:, None, None], from_keys[0], u), torch.where(better[:, None], from_keys[1], sigma))
    return *chosen, torch.where(better[:, None, None], from_keys[2], v)


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


def _backward(model: nn.Module, batches: Iterable[dict], tick: Callable[[], None]) -> None:
    """Sum the batches' gradients into the installed probes."""
    with torch.enable_grad(), _recomputing(model):
        for index, batch in enumerate(batches):
            batch_loss(model, batch, index).backward()
            tick()

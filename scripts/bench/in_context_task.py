"""The task of `in_context_regression.py`, its model, its two phases of training, and what phase two may change."""

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from compared import grower
from peft import LoraConfig, get_peft_model
from tasks import forward_ratio
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_growattn import GrowthConfig, patch_model
from hf_growattn.growable.models import attentions

STAY, GUIDED, RANDOM, SCRATCH = "stay narrow", "guided growth", "random growth", "wide heads from scratch"


@dataclass(frozen=True)
class Setting:
    """Sizes of the task, the model and the training; both phases have `steps`."""

    dims: int = 20
    points: int = 30
    d: int = 48
    layers: int = 2
    narrow: int = 2
    wide: int = 12
    steps: int = 500
    batch_size: int = 32
    growth_batches: int = 32
    held_out: int = 1024


def squared_error(logits: Tensor, labels: Tensor, **_) -> Tensor:
    """Mean over the queries, the even tokens."""
    return (logits[..., 0] - labels).square()[:, 0::2].mean()


def build(setting: Setting, wide: bool, seed: int) -> nn.Module:
    """A patched GPT-2 with d / r heads, a linear read-in and no positions: causality alone orders the examples."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=1,
        n_positions=2 * setting.points,
        n_embd=setting.d,
        n_layer=setting.layers,
        n_head=setting.d // setting.narrow,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        activation_function="gelu_pytorch_tanh",  # GPT-2's own, in one kernel
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    model.loss_function = squared_error
    model.read_in = nn.Linear(setting.dims + 2, setting.d)
    nn.init.normal_(model.read_in.weight, std=(setting.dims + 2) ** -0.5)
    for unused in (model.transformer.wte.weight, model.transformer.wpe.weight):
        unused.requires_grad_(False).zero_()
    patch_model(model)
    if wide:
        for attention in attentions(model):
            attention.widen(qk_dims=setting.wide - setting.narrow)
            for role in ("query", "key"):
                attention.weight_of(role)[:, setting.narrow :].normal_(std=config.initializer_range)
        model.sync_config()
    return model


def draw(setting: Setting, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (x, 0, 1) and (x, y, 0) of each point in turn, (rows, 2 N, dims + 2), and each one's y, (rows, 2 N).

    Values have unit variance, so a squared error is one over the number of dims in the units of Garg et al.
    """
    x = torch.randn(rows, setting.points, setting.dims, generator=generator)
    weight = torch.randn(rows, setting.dims, 1, generator=generator) / setting.dims**0.5
    y = x @ weight
    query = torch.cat((x, torch.zeros_like(y), torch.ones_like(y)), -1)
    example = torch.cat((x, y, torch.zeros_like(y)), -1)
    return torch.stack((query, example), 2).flatten(1, 2), y[..., 0].repeat_interleave(2, 1)


def forward_of(setting: Setting) -> float:
    """The time of a forward pass with wide heads, against narrow ones."""
    wide, narrow = (build(setting, wide, 0).eval() for wide in (True, False))
    with torch.no_grad():
        tokens = narrow.read_in(draw(setting, setting.batch_size, torch.Generator().manual_seed(0))[0])
    return forward_ratio(wide, narrow, {"inputs_embeds": tokens}, turns=101)


class Training:
    """A model, its optimizer and the stream of its batches; `copy` goes on separately from the same state."""

    def __init__(self, setting: Setting, wide: bool, seed: int, rate: float):
        self.setting, self.seed = setting, seed
        self.model = build(setting, wide, seed)
        self.read_in = self.model.read_in
        self.optimizer = adamw(self.model, rate)
        self.generator = torch.Generator().manual_seed(1000 + seed)
        self.step, self.curve = 0, []

    def copy(self) -> "Training":
        """Another training in the same state."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)
        other.read_in = other.model.read_in
        other.optimizer = adamw(other.model, 0.0)
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        other.generator = torch.Generator()
        other.generator.set_state(self.generator.get_state())
        other.curve = list(self.curve)
        return other

    def batch(self) -> dict[str, Tensor]:
        """Fresh functions and points, read in."""
        tokens, labels = draw(self.setting, self.setting.batch_size, self.generator)
        return {"inputs_embeds": self.read_in(tokens), "labels": labels}

    def growth_batches(self) -> list[dict[str, Tensor]]:
        """Batches that count as steps."""
        self.step += self.setting.growth_batches
        with torch.no_grad():
            return [self.batch() for _ in range(self.setting.growth_batches)]

    def train(self, steps: int, rate: float, schedule: Callable) -> None:
        """AdamW under one of transformers' schedules."""
        for group in self.optimizer.param_groups:
            group.update(lr=rate, initial_lr=rate)
        scheduler = schedule(self.optimizer)
        for step in range(1, steps + 1):
            self.model(**self.batch()).loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            scheduler.step()
            self.step += 1
            if step % max(steps // 10, 1) == 0:
                self.note(self.setting.held_out // 4)

    def note(self, rows: int) -> None:
        """Add the held-out error to the curve."""
        self.curve.append((self.step, statistics.fmean(self.errors(rows))))

    @torch.no_grad()
    def errors(self, rows: int) -> list[float]:
        """Held-out error by number of examples."""
        total = torch.zeros(self.setting.points)
        tokens, labels = draw(self.setting, rows, torch.Generator().manual_seed(2000 + self.seed))
        for some, targets in zip(tokens.split(self.setting.batch_size), labels.split(self.setting.batch_size)):
            found = self.model(inputs_embeds=self.read_in(some)).logits[..., 0]
            total += (found - targets).square()[:, 0::2].sum(0)
        return (total / rows).tolist()


def adamw(module: nn.Module, rate: float) -> torch.optim.AdamW:
    """The optimizer of all rows, over all that is not frozen."""
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=rate, weight_decay=0.0)


def stay(training: Training) -> dict:
    """Go on."""
    return {}


def grow(training: Training, estimator: str = "whitened") -> dict:
    """Widen the queries and keys of every head by the real Grower, with the optimizer that training goes on with."""
    setting = training.setting
    config = GrowthConfig(qk_dims=setting.wide - setting.narrow, seed=training.seed)
    start = time.perf_counter()
    report = grower(training.model, config, training.optimizer, estimator).grow(training.growth_batches())
    noted = {"growth_seconds": time.perf_counter() - start}
    return noted | ({"starvation": [layer.starvation for layer in report.layers]} if estimator == "whitened" else {})


def lora(training: Training, modules: list[str], frozen: bool) -> dict:
    """Adapters of the rank that has at most the parameters that growth adds; the base trains along unless frozen."""
    setting, d = training.setting, training.setting.d
    added = added_by_growth(setting)
    # Inputs and outputs: GPT-2 has q, k and v in one matrix.
    sizes = {"attn.c_attn": 4 * d, "attn.c_proj": 2 * d, "mlp.c_fc": 5 * d, "mlp.c_proj": 5 * d}
    rank = added // (setting.layers * sum(sizes[name] for name in modules))
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=modules, fan_in_fan_out=True)
    base = [p for p in training.model.parameters() if p.requires_grad]
    training.model = get_peft_model(training.model, config)
    adapters = [p for p in training.model.parameters() if p.requires_grad]
    if frozen:
        training.optimizer = adamw(training.model, 0.0)
    else:
        training.optimizer.add_param_group({"params": adapters})
        for parameter in base:
            parameter.requires_grad_(True)
    return {"rank": rank, "adapter_parameters": sum(p.numel() for p in adapters)}


def added_by_growth(setting: Setting) -> int:
    """Weights and biases of the new queries and keys."""
    return 2 * (setting.wide - setting.narrow) * (setting.d // setting.narrow) * (setting.d + 1) * setting.layers


QKV, QKVO = ["attn.c_attn"], ["attn.c_attn", "attn.c_proj"]
LINEAR = [*QKVO, "mlp.c_fc", "mlp.c_proj"]
CHANGES: dict[str, Callable[[Training], dict]] = {
    STAY: stay,
    GUIDED: grow,
    RANDOM: partial(grow, estimator="random"),
    "LoRA q,k,v; base trains along": partial(lora, modules=QKV, frozen=False),
    "LoRA q,k,v,o; base trains along": partial(lora, modules=QKVO, frozen=False),
    "LoRA q,k,v,o; base frozen": partial(lora, modules=QKVO, frozen=True),
    "LoRA on all linear layers; base trains along": partial(lora, modules=LINEAR, frozen=False),
    "LoRA on all linear layers; base frozen": partial(lora, modules=LINEAR, frozen=True),
}
LORA = [name for name in CHANGES if name.startswith("LoRA")]


@torch.no_grad()
def least_squares(setting: Setting, seed: int, rows: int) -> list[float]:
    """Error of the smallest exact or least-squares solution, by number of examples."""
    tokens, labels = draw(setting, rows, torch.Generator().manual_seed(2000 + seed))
    x, y = tokens[:, 0::2, : setting.dims].double(), labels[:, 0::2].double()
    errors = [y[:, 0].square().mean().item()]
    for count in range(1, setting.points):
        solution = torch.linalg.lstsq(x[:, :count], y[:, :count, None], driver="gelsd").solution
        errors.append(((x[:, count, None] @ solution)[:, 0, 0] - y[:, count]).square().mean().item())
    return errors

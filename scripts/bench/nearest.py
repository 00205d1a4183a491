"""The nearest neighbour: a real model of one attention layer, its data, and its training around a change.

Points on a sphere and queries on it; a query's target is the nearest point.
"""

import math
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from compared import grower
from peft import LoraConfig, get_peft_model
from tasks import forward_ratio
from transformers import SmolLM3Config, SmolLM3ForTokenClassification

from hf_growattn import GrowthConfig, patch_model
from hf_growattn.growable.models import attentions

LORA = {"q,k": ["q_proj", "k_proj"], "q,k,v,o": ["q_proj", "k_proj", "v_proj", "o_proj"]}


@dataclass(frozen=True)
class Row:
    """What is trained.

    Attributes:
        heads, width: heads, and how wide their queries and keys are at the start; values are `d` wide.
        change: what happens between the phases: an estimator of `Grower`, which widens queries and keys to `d`, or
            LoRA's targets; None for nothing.
        frozen: whether LoRA trains alone.
        first: share of the steps before the change.
        batches: what a growth measures, instead of as many training steps; random directions need none.
    """

    heads: int
    width: int
    change: str | None = None
    frozen: bool = False
    first: float = 0.5
    batches: int = 0


@dataclass(frozen=True)
class Setting:
    """The task and its training.

    Attributes:
        d, points: dims of a point, and how many there are in a sequence.
        queries: of a sequence, each on its own: they do not see one another.
        r: width of a head before growth; there are `d / r` heads.
        steps: optimizer steps in all, less the batches that a growth measured.
        sequences: in a batch.
        held_out: batches that no row trains on.
    """

    d: int = 64
    points: int = 16
    queries: int = 16
    r: int = 8
    steps: int = 2400
    sequences: int = 4
    held_out: int = 64


def build(setting: Setting, row: Row, seed: int) -> SmolLM3ForTokenClassification:
    """One SmolLM3 layer (Llama's, here without rotation) whose output is its attention's: no MLP, no final norm."""
    torch.manual_seed(seed)
    config = SmolLM3Config(
        vocab_size=1,
        hidden_size=setting.d,
        intermediate_size=1,
        num_hidden_layers=1,
        num_attention_heads=row.heads,
        num_key_value_heads=row.heads,
        no_rope_layers=[0],
        head_dim=setting.r,
        num_labels=setting.d,
        classifier_dropout=0.0,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",  # faster than sdpa on sequences this short
    )
    model = SmolLM3ForTokenClassification(config).requires_grad_(False)
    torch.nn.init.zeros_(model.model.layers[0].mlp.down_proj.weight)
    torch.nn.init.eye_(model.score.weight)
    model.model.norm = torch.nn.Identity()
    model.loss_function = loss_of_queries
    (attention,) = attentions(patch_model(model))
    attention.widen(qk_dims=row.width - setting.r, v_dims=setting.d - setting.r)
    model.sync_config()
    for role in ("query", "key", "value", "output"):
        torch.nn.init.normal_(attention.projection_of(role).weight, std=config.initializer_range)
    attention.requires_grad_(True)
    return model


def loss_of_queries(logits: torch.Tensor, labels: torch.Tensor, config=None) -> torch.Tensor:
    """Mean square error of a coordinate; the queries come last."""
    return torch.nn.functional.mse_loss(logits[:, -labels.shape[1] :], labels)


def draw(setting: Setting, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Points, then queries, which are no keys; the residual stream adds a query to the nearest point."""
    tokens = setting.points + setting.queries
    x = torch.randn(setting.sequences, tokens, setting.d, generator=generator)
    x *= setting.d**0.5 / x.norm(dim=-1, keepdim=True)  # what the RMS norm leaves as it is
    points, queries = x[:, : setting.points], x[:, setting.points :]
    nearest = (queries @ points.mT).argmax(-1, keepdim=True)
    mask = (torch.arange(tokens) < setting.points).long().expand(setting.sequences, -1)
    return {"inputs_embeds": x, "attention_mask": mask, "labels": points.take_along_dim(nearest, 1) + queries}


# Share of the learning rate at a share of all steps, with the change at another.
def one_cosine(done: float, change: float) -> float:
    """To zero at the end."""
    return (1 + math.cos(math.pi * done)) / 2


def cosine_a_phase(done: float, change: float) -> float:
    """To zero before the change and at the end."""
    return one_cosine(done / change if done < change else (done - change) / (1 - change), change)


SCHEDULES = {"one cosine": one_cosine, "a cosine a phase": cosine_a_phase}


def forward_of(setting: Setting, heads: int, width: int) -> float:
    """The time of a forward pass with so many heads of a width, against heads that stay at r."""
    batch = draw(setting, torch.Generator().manual_seed(0))
    model, narrow = (build(setting, Row(*sizes), 0) for sizes in ((heads, width), (setting.d // setting.r, setting.r)))
    return forward_ratio(model.eval(), narrow.eval(), batch, turns=101)


class Run:
    """One row with one seed: training, what happens to the model, training."""

    def __init__(self, setting: Setting, row: Row, seed: int, learning_rate: float, schedule: str):
        self.setting, self.row, self.seed = setting, row, seed
        self.learning_rate, self.schedule = learning_rate, SCHEDULES[schedule]
        self.model = build(setting, row, seed)
        self.optimizer = torch.optim.AdamW(self.trained(), weight_decay=0)
        self.generator = torch.Generator().manual_seed(1000 + seed)
        fresh = torch.Generator().manual_seed(2000 + seed)
        self.fresh = [draw(setting, fresh) for _ in range(setting.held_out)]
        self.step, self.curve = 0, []

    def trained(self) -> list[torch.nn.Parameter]:
        """What is not frozen."""
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    def batch(self) -> dict[str, torch.Tensor]:
        """A fresh batch; it counts as a step, trained on or measured."""
        self.step += 1
        return draw(self.setting, self.generator)

    @torch.no_grad()
    def error(self, batches: int) -> float:
        """Mean square error of a coordinate on held-out queries."""
        return statistics.fmean(self.model(**batch).loss.item() for batch in self.fresh[:batches])

    def train(self, last: int) -> None:
        """AdamW up to a step."""
        steps, every = self.setting.steps, max(self.setting.steps // 24, 1)
        while self.step < last:
            if self.step % every == 0:
                self.curve.append((self.step, self.error(2)))
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate * self.schedule(self.step / steps, self.row.first)
            self.model(**self.batch()).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.curve.append((self.step, self.error(self.setting.held_out)))

    def grow(self) -> dict:
        """Widen every head to `d` by the real Grower, with the optimizer that training goes on with."""
        setting, estimator = self.setting, self.row.change
        config = GrowthConfig(qk_dims=setting.d - setting.r, seed=self.seed)
        measured = [self.batch() for _ in range(max(self.row.batches, 1))]
        start = time.perf_counter()
        report = grower(self.model, config, self.optimizer, estimator).grow(measured)
        return {"report": asdict(report), "growth_seconds": time.perf_counter() - start}

    def adapt(self) -> dict:
        """Put LoRA on, with as many parameters as growth to width `d` would add."""
        setting, (attention,) = self.setting, attentions(self.model)
        sizes = [module.in_features + module.out_features for module in attention.children()]
        sizes = dict(zip((name for name, _ in attention.named_children()), sizes))
        targets = LORA[self.row.change]
        added = 2 * self.row.heads * (setting.d - setting.r) * setting.d
        rank = round(added / sum(sizes[name] for name in targets))
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets)
        self.model = get_peft_model(self.model, config)
        adapters = self.trained()
        if self.row.frozen:
            self.optimizer = torch.optim.AdamW(adapters, weight_decay=0)
        else:
            attention.requires_grad_(True)
            self.optimizer.add_param_group({"params": adapters})
        return {"rank": rank}


def measure(setting: dict, row: dict, seed: int, learning_rate: float, schedule: str, folder: Path) -> dict:
    """Run a row and return its figures.

    Args:
        setting: a `Setting` as a dict.
        row: a `Row` as a dict.
        seed: of the weights and the data.
        learning_rate: of the whole training.
        schedule: name of the learning rate's.
        folder: keeps what rows have in common, the training before the change.
    """
    of, chosen = Setting(**setting), Row(**row)
    change_at = round(of.steps * chosen.first)
    name = f"{of.d}-{chosen.heads}-{chosen.width}-{change_at}-{seed}-{learning_rate}-{schedule}.pt"
    shared, first_seconds, changed = folder / name, 0.0, {}
    if shared.exists():
        run, first_seconds = torch.load(shared, weights_only=False)
        run.row = chosen
    else:
        start = time.perf_counter()
        run = Run(of, chosen, seed, learning_rate, schedule)
        run.train(change_at)
        torch.save((run, time.perf_counter() - start), shared)
    (attention,) = attentions(run.model)
    if chosen.change:
        changed = {"before": run.curve[-1][1]}
        changed |= run.adapt() if chosen.change in LORA else run.grow()
        changed["at_change"] = run.error(of.held_out)
        run.curve.append((run.step, changed["at_change"]))
    run.train(of.steps)
    return changed | {
        "width": attention.qk_head_dim,
        "parameters": sum(weight.numel() for weight in attention.parameters()),
        "error": run.curve[-1][1],
        "first_seconds": first_seconds,
        "curve": run.curve,
    }

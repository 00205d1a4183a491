"""One run of `finetuning.py`: a row with one learning rate, one seed, one model and one text."""

import math
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path

import torch
from compared import grower, ranks_within
from peft import (
    AdaLoraConfig,
    LoraConfig,
    LoraGAConfig,
    get_peft_model,
    initialize_lora_eva_weights,
    preprocess_loraga,
)
from tasks import blocks_of, forward_ratio, held_out, texts_of
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from hf_growattn import GrowthConfig, freeze_old_dims, patch_model
from hf_growattn.growable.models import attentions, cache_bytes

ALL = ("query", "key", "value", "output")
LINEAR = (*ALL, "everything else that is linear")  # as peft's "all-linear": the output embeddings are left out


@dataclass(frozen=True)
class Row:
    """What is added, and how.

    Attributes:
        growths: after which shares of the tokens attention grows.
        share: of the budget that growth spends, in equal parts; an adapter gets the rest.
        config: of the growth, beside its budget; fixed widths in place of it where the estimator is random.
        adapter: which of peft's adapters; None for none.
        roles: the projections that carry it.
        aside: measure batches that training never sees, out of its own.
    """

    growths: tuple[float, ...] = ()
    share: float = 1.0
    config: dict = field(default_factory=dict)
    adapter: str | None = None
    roles: tuple[str, ...] = ALL
    aside: bool = False


@dataclass(frozen=True)
class Setting:
    """The size of everything.

    Attributes:
        steps: batches that every row sees.
        batch_size, block_size: of a batch.
        measured: batches that a row may measure: growth (all of a row's growths together), EVA, LoRA-GA.
        held_out: blocks that no row trains on.
        dims: of patterns and messages that a uniform growth adds to each head: what it costs is the budget.
        sweeps: sweep the learning rates, beyond `RATES` until the best has a worse one on either side.
    """

    steps: int = 150
    batch_size: int = 8
    block_size: int = 64
    measured: int = 6
    held_out: int = 128
    dims: int = 2
    sweeps: bool = True


SOURCES: dict[str, object] = {}  # what a name stands for: a model or its path, or the path of a text
CURVE = 4  # held-out passes over a training


def documents_of(path: str) -> list[str]:
    """The documents of a text file or Hub data set; from a file of JSON, all strings of a row one after the other."""
    if Path(path).suffix in (".json", ".jsonl"):
        from datasets import load_dataset

        rows = load_dataset("json", data_files=path, split="train")
        return ["\n".join(value for value in row.values() if value) for row in rows]
    return texts_of(path)


@lru_cache
def data(model: str, text: str, block_size: int) -> torch.Tensor:
    """Blocks of a text, (blocks, tokens), in the tokens of a model."""
    tokenizer = SOURCES[f"{model}'s tokenizer"]
    texts = SOURCES[text] if isinstance(SOURCES[text], list) else documents_of(SOURCES[text])
    return blocks_of(texts, tokenizer, block_size)


def fresh(name: str) -> nn.Module:
    """A patched copy of a model."""
    source = SOURCES[name]
    model = source() if callable(source) else AutoModelForCausalLM.from_pretrained(source)
    return patch_model(model).requires_grad_(False)


def projections(model: nn.Module, roles: tuple[str, ...]) -> dict[str, nn.Module]:
    """The projections of some roles, by name; a fused one counts once."""
    if roles == LINEAR:
        linear = {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
        return {name: module for name, module in linear.items() if module is not model.get_output_embeddings()}
    wanted = {attention.projection_of(role) for attention in attentions(model) for role in roles}
    return {name: module for name, module in model.named_modules() if module in wanted}


def budget_of(model: nn.Module, dims: int) -> int:
    """What a uniform growth adds."""
    before = model.num_parameters()
    widenings = [attention.widen(dims, dims) for attention in attentions(model)]
    after = model.num_parameters()
    for widening in widenings:
        widening.undo()
    return after - before


def as_batch(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tokens as their own labels."""
    return {"input_ids": rows, "labels": rows}


class Run:
    """One row with one learning rate and one seed."""

    def __init__(self, row: Row, full: bool, model: str, text: str, rate: float, seed: int, setting: Setting):
        self.setting, self.row, self.full, self.rate, self.seed = setting, row, full, rate, seed
        self.trains = full or bool(row.growths or row.adapter)
        torch.manual_seed(seed)
        self.name, self.model = model, fresh(model)
        blocks = data(model, text, self.setting.block_size)
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))
        aside = min(self.setting.held_out, len(blocks) // 4)
        self.fresh = [as_batch(rows) for rows in blocks[order[:aside]].split(self.setting.batch_size)]
        self.rows = blocks[order[aside:]]
        self.budget = budget_of(self.model, self.setting.dims)
        self.before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.at_once = max(self.setting.measured // max(len(self.row.growths), 1), 1)
        self.seen, self.curve, self.reports, self.optimizer = 0, [], [], None
        self.steps = 0
        self.trained = self.model  # the model, or peft's wrapper around it

    def batch(self) -> dict[str, torch.Tensor]:
        """The next rows of the text."""
        self.seen += 1
        return self.batch_at(self.seen - 1)

    def batch_at(self, place: int) -> dict[str, torch.Tensor]:
        """Rows of the text, from the start again after its end."""
        size = self.setting.batch_size
        return as_batch(self.rows[torch.arange(place * size, (place + 1) * size) % len(self.rows)])

    def measured(self) -> list[dict[str, torch.Tensor]]:
        """Batches to measure on: those that training saw last, at its start those that it will see first."""
        first = self.seen if self.row.aside else max(self.seen - self.at_once, 0)
        self.seen += self.at_once if self.row.aside else 0
        return [self.batch_at(place) for place in range(first, first + self.at_once)]

    def note(self) -> None:
        """A point of the curve: tokens so far, held-out loss."""
        tokens = self.seen * self.setting.batch_size * self.setting.block_size
        self.curve.append((tokens, held_out(self.model, self.fresh)))

    def grow(self) -> None:
        """One growth by the real Grower, with the defaults; with a frozen base only its new entries train."""
        row, number = self.row, len(self.row.growths)
        options = dict(row.config)
        estimator = options.pop("estimator", "whitened")
        if estimator == "random":
            wanted, batches = {"qk_dims": self.setting.dims, "v_dims": self.setting.dims}, self.measured()[:1]
        else:
            wanted, batches = {"budget": int(self.budget * row.share / number)}, self.measured()
        trains = {"old_dims_train": self.full or row.adapter is not None}  # LoRA moves the old dims
        config = GrowthConfig(**wanted, **trains | options, seed=self.seed)
        self.reports.append(grower(self.model, config, self.optimizer, estimator).grow(batches))
        self.note()

    def masks(self) -> dict[nn.Parameter, torch.Tensor]:
        """The new entries of every parameter that growth resized."""
        return dict(chain.from_iterable(attention.new_entries().items() for attention in attentions(self.model)))

    def adapt(self) -> None:
        """Put peft's adapter on, at the rank that comes nearest to the budget, by its own initialiser."""
        row, model = self.row, self.model
        targets = projections(model, row.roles)
        costs = {name: sum(module.weight.shape) for name, module in targets.items()}
        left = self.budget - sum(report.added_parameters for report in self.reports)
        rank, raised = max(round(left / sum(costs.values())), 1), {}
        if row.roles == LINEAR:  # a rank of all of them is dear
            rank, raised = ranks_within(costs, left)
        options = {"r": rank, "target_modules": list(targets), "rank_pattern": raised}
        steps = self.setting.steps
        if row.adapter == "AdaLoRA":
            phases = {"tinit": steps // 10, "tfinal": steps // 3, "total_step": steps}
            config = AdaLoraConfig(init_r=-(-3 * rank // 2), target_r=rank, target_modules=list(targets), **phases)
        elif row.adapter == "LoRA-GA":
            config = LoraConfig(init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig(), **options)
            batches = self.measured()
            preprocess_loraga(model, config, lambda: [model(**b, use_cache=False).loss.backward() for b in batches])
        elif row.adapter == "DoRA":
            config = LoraConfig(use_dora=True, **options)
        else:
            config = LoraConfig(init_lora_weights={"LoRA": True}.get(row.adapter, row.adapter.lower()), **options)
        self.trained = get_peft_model(model, config)
        if row.adapter == "EVA":
            initialize_lora_eva_weights(self.trained, self.measured(), show_progress_bar=False)
        if row.growths:
            freeze_old_dims(self.model)

    def weights(self) -> list[nn.Parameter]:
        """What the optimizer holds."""
        return [p for p in self.trained.parameters() if p.requires_grad]

    def run(self) -> dict:
        """Train the row on the tokens that all rows see."""
        growths = list(self.row.growths)
        if self.full:
            self.model.requires_grad_(True)
        while growths[:1] == [0.0]:
            growths.pop(0)
            self.grow()
        if self.row.adapter:
            self.adapt()
        if self.trains and (self.weights() or growths):  # a growth of a frozen base may have found nothing
            left = self.setting.steps - (self.at_once * len(growths) if self.row.aside else 0)
            self.optimizer = torch.optim.AdamW(self.weights(), lr=self.rate, weight_decay=0)
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, partial(cosine, left))
            for step in range(left):
                if growths and step >= growths[0] * left:
                    growths.pop(0)
                    self.grow()
                self.step(step)
                if (step + 1) % -(-left // CURVE) == 0 and step + 1 < left:
                    self.note()
        self.note()
        return self.figures()

    def step(self, step: int) -> None:
        """One step of AdamW."""
        self.trained.train()
        self.trained(**self.batch(), use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.steps += 1
        if self.row.adapter == "AdaLoRA":
            self.trained.base_model.update_and_allocate(step)
        self.optimizer.zero_grad()

    def figures(self) -> dict:
        """What the run found; with a frozen base the old entries must be what they were, to the bit."""
        if not self.full and not self.row.adapter:
            masks = self.masks()
            for name, parameter in self.model.named_parameters():
                old = parameter[~masks[parameter]] if parameter in masks else parameter
                assert torch.equal(old.flatten(), self.before[name].flatten()), f"{name} has moved"
        grown = sum(report.added_parameters for report in self.reports)
        adapters = sum(p.numel() for name, p in self.trained.named_parameters() if "lora_" in name)
        more = {"at_growth": self.curve[0][1]} if self.reports and self.row.growths[0] == 0 else {}
        stock = fresh(self.name)
        if grown and not adapters:  # an adapter would be merged before it serves
            more["forward"] = forward_ratio(self.model.eval(), stock.eval(), self.fresh[0] | {"use_cache": False})
        return {
            "cache": cache_bytes(self.model) / cache_bytes(stock) - 1,
            "added": grown + adapters,
            "tokens": self.curve[-1][0],
            "steps": self.steps,
            "loss": self.curve[-1][1],
            "growth_seconds": sum(sum(report.seconds.values()) for report in self.reports),
            "curve": self.curve,
            **more,
        }


def cosine(steps: int, step: int) -> float:
    """A twentieth of the steps up, then a cosine down to zero."""
    warm = max(steps // 20, 1)
    return min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / steps))

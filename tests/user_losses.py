"""Trainers with losses of their own, and a hand-written one; run by torchrun, both are grown by two processes.

Each checks what growth reports as the loss against what the trainer itself says.
"""

import copy
import sys
from pathlib import Path
from statistics import mean

import pytest
import torch
import torch.distributed as dist
from families import build, tokens, word_tokenizer
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel
from torchrun import leave
from training import Rows
from transformers import AutoModel, Trainer, TrainingArguments, set_seed

from hf_growattn import Grower, GrowthCallback, GrowthConfig, patch_model
from hf_growattn.growable.attention import attentions

CONFIG = GrowthConfig(qk_dims=2, v_dims=2)
ROUNDING = 2e-6  # of the loss: fp32, whose sums run over other batch sizes or in another order
QUIET = dict(
    max_steps=6, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=3, use_cpu=True, report_to="none",
    disable_tqdm=True, save_strategy="no",
)  # fmt: skip


class Uneven(Rows):
    """Rows of which some labels count not, each row another number of them."""

    def __getitem__(self, row: int) -> dict:
        labels = self.ids[row].clone()
        labels[: 1 + row % 7] = -100
        return {"input_ids": self.ids[row], "labels": labels}


class Witness(GrowthCallback):
    """Grows after step 4, and asks the trainer itself for the loss of the batches, and for what it notes."""

    def __init__(self, trainer):
        super().__init__(trainer, CONFIG, steps=[4], batches=4)

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        grower = self._grower
        grower.grow = lambda batches: grower.find(batches).keep()  # four small batches may not hold

    def on_step_end(self, args, state, control, **kwargs):
        trainer, before = self.trainer, notes(self.trainer)
        if state.global_step == 4 and not self.reports:
            own, trained = dict(vars(trainer)), trainer.model.training
            vars(trainer).update(notes(trainer))  # the test's own loss leaves no trace either
            trainer.model.eval()
            losses = []
            for batch in list(self._recording.inputs):
                items = (batch["labels"][:, 1:] != -100).sum() if trainer.compute_loss_func else None
                with torch.no_grad():
                    losses.append(trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=items).item())
            trainer.model.train(trained)
            vars(trainer).update(own)
            self.expected = over_ranks(mean(losses))
        super().on_step_end(args, state, control, **kwargs)
        assert notes(trainer) == before


def over_ranks(number: float) -> float:
    """The mean over the processes, if there are several."""
    if not dist.is_initialized():
        return number
    total = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def notes(trainer) -> dict:
    """What trainers of TRL and of sentence-transformers gather for their next log."""
    kept = ("_metrics", "_total_train_tokens", "accum_loss_components")
    return {name: copy.deepcopy(value) for name, value in vars(trainer).items() if name in kept}


def needy_loss(outputs, labels, num_items_in_batch):
    """A user's loss that cannot do without the number of items."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return cross_entropy(logits, targets, reduction="sum", label_smoothing=0.2) / num_items_in_batch


class Overridden(Trainer):
    """Two forward passes, the second on what the first one predicts; notes and logs what it computes."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        first = model(**inputs)
        second = model(input_ids=first.logits.argmax(-1), labels=inputs["labels"])
        self.log({"second": second.loss.item()})
        return (first.loss + second.loss, first) if return_outputs else first.loss + second.loss


def plain(folder, model, cls=Trainer, compute_loss_func=None, **options):
    arguments = TrainingArguments(str(folder), **(QUIET | options))
    return cls(
        model, arguments, train_dataset=Uneven(48), compute_loss_func=compute_loss_func,
    )  # fmt: skip


def preferences():
    from datasets import Dataset

    words = [" ".join(f"w{2 + (7 * row + step) % 90}" for step in range(12)) for row in range(16)]
    rows = [{"prompt": w[:20], "chosen": w[20:], "rejected": w[:2] * 4} for w in words]
    return Dataset.from_list([{key: value.strip() for key, value in row.items()} for row in rows])


def preferring(folder, model, reference=None, **options):
    trl = pytest.importorskip("trl")
    arguments = trl.DPOConfig(str(folder), bf16=False, **(QUIET | options))
    return trl.DPOTrainer(
        model, reference, arguments, train_dataset=preferences(), processing_class=word_tokenizer(),
    )  # fmt: skip


def save_encoder(folder: Path) -> Path:
    """Save a base model and its tokenizer, once."""
    source = folder / "encoder"
    if not source.exists():
        build("llama-2", AutoModel).save_pretrained(source)
        word_tokenizer().save_pretrained(source)
    return source


def embedding(folder, model, loss="MultipleNegativesRankingLoss", **options):
    st = pytest.importorskip("sentence_transformers")
    from datasets import Dataset
    from sentence_transformers.sentence_transformer import losses, modules

    source = save_encoder(folder)
    outer = st.SentenceTransformer(modules=[modules.Transformer(str(source)), modules.Pooling(48)], device="cpu")
    patch_model(outer[0].auto_model)
    rows = [dict(anchor=f"w{2 + r % 90} w{3 + r % 90}", positive=f"w{3 + r % 90} w{2 + r % 90} w8") for r in range(64)]
    loss = getattr(losses, loss)(outer, scale=5.0, **options)
    arguments = st.SentenceTransformerTrainingArguments(str(folder), **(QUIET | dict(per_device_train_batch_size=8)))
    return st.SentenceTransformerTrainer(
        outer, arguments, train_dataset=Dataset.from_list(rows), loss=loss,
    )  # fmt: skip


def lora(model):
    peft = pytest.importorskip("peft")
    set_seed(1)
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(model, config)


TRAINERS = {
    "a loss function": lambda *given: plain(*given, compute_loss_func=needy_loss),
    "checkpointing": lambda *given: plain(*given, cls=Overridden, gradient_checkpointing=True),
    "bf16": lambda *given: plain(*given, label_smoothing_factor=0.1, bf16=True),
    "LoRA": lambda folder, model: plain(folder, lora(model), label_smoothing_factor=0.1),
    "preferences": lambda folder, model: preferring(folder, model, copy.deepcopy(model)),
    "preferences, LoRA": lambda folder, model: preferring(folder, lora(model), precompute_ref_log_probs=True),
    "sentences": embedding,
    "sentences, gradient-cached": lambda *given: embedding(
        *given, loss="CachedMultipleNegativesRankingLoss", mini_batch_size=2
    ),
}


def trains_down(folder, make) -> None:
    """Train by a trainer, and check the growth on the way."""
    set_seed(0)
    trainer = make(folder, patch_model(build("llama-2")))
    growth = Witness(trainer)
    trainer.add_callback(growth)
    trainer.train()
    (report,) = growth.reports
    assert report.loss_before == pytest.approx(growth.expected, rel=ROUNDING)
    assert report.kept
    assert attentions(trainer.model)[0].width_of("value") > 16


class Encoder(nn.Module):
    """A user's own module around a model: the mean of its last states, through a head with dropout."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.inner, self.head, self.dropout = model, nn.Linear(48, 48, bias=False), nn.Dropout()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.inner(ids).last_hidden_state.mean(1)))


def encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder(patch_model(build("llama-2", AutoModel))).train()


def pairs(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of no dict: texts, and the same words in another order."""
    return [(ids, ids.flip(1)) for ids in tokens(8 * count, 5).split(8)]


def contrast(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return cross_entropy(5 * normalize(one) @ normalize(other).T, torch.arange(len(one)))


def contrastive(model, batch) -> torch.Tensor:
    """Two forward passes, one loss."""
    return contrast(*map(model, batch))


def contrastive_on_ranks(folder) -> None:
    """The loss gets the model, and another one calls the wrapper itself."""
    every = pairs(3) * 3  # one rank has a batch more; random texts, so only the same ones bear out a growth
    model = encoder()
    expected = mean(contrastive(copy.deepcopy(model).eval(), batch).item() for batch in every)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    for loss in (contrastive, lambda _, batch: contrastive(ddp, batch)):
        report = Grower(ddp, CONFIG, optimizer, loss=loss).measure(every[dist.get_rank() :: 2])
        assert report.loss_before == pytest.approx(expected, rel=ROUNDING) and report.holds
    assert Grower(ddp, CONFIG, optimizer, loss=loss).find(every[dist.get_rank() :: 2]).keep().kept
    contrastive(ddp, every[0]).backward()  # the wrapper is as it was, and knows the new parameters
    assert all(parameter.grad is not None for parameter in ddp.parameters())


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = {name: TRAINERS[name] for name in ("preferences", "sentences")}
    for name, make in chosen.items():
        trains_down(Path(sys.argv[1], name), make)
        print(name, flush=True)
    contrastive_on_ranks(None)
    print("contrastive", flush=True)
    leave()

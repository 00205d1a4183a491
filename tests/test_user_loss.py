"""What growth lowers is the user's own loss: what `compute_loss` of a trainer says, or a function of one's own."""

import copy
from contextlib import nullcontext
from statistics import mean

import peft
import pytest
import torch
from families import build, fingerprint, lm_batches, same, tokens, word_tokenizer
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from training import Rows
from transformers import AutoModel, Trainer, TrainingArguments, set_seed

from hf_growattn import (
    GrowAttnConfig,
    Grower,
    GrowthCallback,
    GrowthConfig,
    initialize_growattn_weights,
    patch_model,
)
from hf_growattn.growable.attention import attentions

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
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
            self.expected = mean(losses)
        super().on_step_end(args, state, control, **kwargs)
        assert notes(trainer) == before


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


def embedding(folder, model, loss="MultipleNegativesRankingLoss", **options):
    st = pytest.importorskip("sentence_transformers")
    from datasets import Dataset
    from sentence_transformers.sentence_transformer import losses, modules

    source = folder / "encoder"
    build("llama-2", AutoModel).save_pretrained(source)
    word_tokenizer().save_pretrained(source)
    outer = st.SentenceTransformer(modules=[modules.Transformer(str(source)), modules.Pooling(48)], device="cpu")
    patch_model(outer[0].auto_model)
    rows = [dict(anchor=f"w{2 + r % 90} w{3 + r % 90}", positive=f"w{3 + r % 90} w{2 + r % 90} w8") for r in range(64)]
    loss = getattr(losses, loss)(outer, scale=5.0, **options)
    arguments = st.SentenceTransformerTrainingArguments(str(folder), **(QUIET | dict(per_device_train_batch_size=8)))
    return st.SentenceTransformerTrainer(
        outer, arguments, train_dataset=Dataset.from_list(rows), loss=loss,
    )  # fmt: skip


def lora(model):
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


@pytest.mark.parametrize("make", TRAINERS.values(), ids=TRAINERS)
def test_growth_lowers_the_loss_of_the_trainer(tmp_path, make, kept_by_word):
    set_seed(0)
    trainer = make(tmp_path, patch_model(build("llama-2")))
    growth = Witness(trainer)
    trainer.add_callback(growth)
    trainer.train()
    (report,) = growth.reports
    assert report.loss_before == pytest.approx(growth.expected, rel=ROUNDING)
    assert report.kept
    assert attentions(trainer.model)[0].width_of("value") > 16


def test_a_loss_of_two_forward_passes():
    model = encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = fingerprint(model.inner, optimizer)
    expected = mean(contrastive(model.eval(), batch).item() for batch in pairs(6))
    grower = Grower(model.train(), CONFIG, optimizer, loss=contrastive)
    report = grower.measure(pairs(6))
    assert same(fingerprint(model.inner, optimizer), before) and model.dropout.training
    assert report.loss_before == pytest.approx(expected, rel=ROUNDING) and max(each.gain for each in report.layers) > 0
    assert grower.find(pairs(6)).keep().kept
    after = mean(contrastive(model.eval(), batch).item() for batch in pairs(6))
    assert after < expected  # now in the weights


def test_what_the_loss_trains_beside_the_model_keeps_its_gradients():
    model, head = patch_model(build("llama-2")), torch.nn.Linear(48, 97)
    head.weight.grad = kept = torch.ones_like(head.weight)

    def loss(model, batch):
        states = model.base_model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        return torch.nn.functional.cross_entropy(head(states[:, :-1]).flatten(0, 1), batch["labels"][:, 1:].flatten())

    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
    assert Grower(model, CONFIG, optimizer, loss=loss).find(lm_batches(4)).keep().kept
    assert head.weight.grad is kept and kept.eq(1).all() and head.bias.grad is None and head.weight.requires_grad


def test_guided_starts_take_a_loss_too():
    def loss(model, batch):
        return -model(**batch).loss  # backwards: what growth added only raises it

    model, batches = patch_model(build("llama-2")), lm_batches(4)
    assert Grower(model, CONFIG).find(batches).keep().kept
    reports = []
    for given in ({}, {"loss": loss}):
        adapted = peft.get_peft_model(patch_model(build("llama-2")), GrowAttnConfig(budget=0.05))
        reports.append(initialize_growattn_weights(adapted, batches, **given))
    assert reports[1].loss_before == pytest.approx(-reports[0].loss_before, rel=ROUNDING)
    assert all(report.kept for report in reports)


@pytest.mark.parametrize("other", [False, True], ids=["none", "other"])
def test_a_reference_under_other_adapters_or_none_is_refused_too(other):
    """As TRL's trainers take it from a peft model; new dims of the base would be part of both."""
    config = peft.LoraConfig(target_modules="all-linear")
    model = peft.get_peft_model(patch_model(build("llama-2")), config)
    model.add_adapter("other", config)

    def loss(model, batch):
        model.set_adapter("other" if other else "default")
        with nullcontext() if other else model.disable_adapter(), torch.no_grad():
            reference = model(**batch).loss
        model.set_adapter("default")
        return (model(**batch).loss - reference).exp()

    with pytest.raises(ValueError, match="compares the model with itself"):
        Grower(model, GrowthConfig(qk_dims=2), loss=loss).find(lm_batches(4)).keep()


def test_a_loss_gets_the_model_without_what_is_wrapped_around_it():
    model, given = patch_model(build("llama-2")), []
    wrapped = nn.DataParallel(torch.compile(model))
    Grower(wrapped, CONFIG, loss=lambda own, batch: given.append(own) or own(**batch).loss).measure(lm_batches(2))
    assert all(own is model for own in given) and given


def test_a_loss_may_be_a_tensor_of_one_number_in_any_shape():
    model, batches = patch_model(build("llama-2")), lm_batches(2)
    plain = Grower(model, CONFIG).measure(batches)
    shaped = Grower(model, CONFIG, loss=lambda model, batch: model(**batch).loss[None]).measure(batches)
    assert shaped.loss_before == pytest.approx(plain.loss_before, rel=ROUNDING)


def test_a_teacher_next_to_the_model_is_not_taken_for_one_around_it():
    both = nn.ModuleDict({"student": patch_model(build("llama-2")), "teacher": build("llama-2")})
    grower = Grower(both, CONFIG, loss=lambda model, batch: both["student"](**batch).loss)
    assert grower.grow(lm_batches(8)).kept

"""What growth lowers is the user's own loss: what `compute_loss` of a trainer says, or a function of one's own."""

from pathlib import Path
from statistics import mean

import pytest
import torch
from families import build, fingerprint, lm_batches, same
from user_losses import (
    CONFIG,
    ROUNDING,
    TRAINERS,
    contrastive,
    encoder,
    pairs,
    save_encoder,
    trains_down,
)  # fmt: skip

from hf_growattn import GrowAttnConfig, Grower, GrowthConfig, initialize_growattn_weights, patch_model

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")


@pytest.mark.parametrize("make", TRAINERS.values(), ids=TRAINERS)
def test_growth_lowers_the_loss_of_the_trainer(tmp_path, make):
    trains_down(tmp_path, make)


def test_two_processes_lower_the_loss_of_the_trainer_and_a_hand_written_one(forks, tmp_path):
    save_encoder(tmp_path / "sentences")
    done = forks.run(Path(__file__).with_name("user_losses.py"), tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(name in done.stdout for name in ("preferences", "sentences", "contrastive"))


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
    peft = pytest.importorskip("peft")
    reports = []
    for given in ({}, {"loss": loss}):
        adapted = peft.get_peft_model(patch_model(build("llama-2")), GrowAttnConfig(budget=0.05))
        reports.append(initialize_growattn_weights(adapted, batches, **given))
    assert reports[1].loss_before == pytest.approx(-reports[0].loss_before, rel=ROUNDING)
    assert all(report.kept for report in reports)


def test_a_reference_without_adapters_is_refused_too():
    """As TRL's trainers take it from a peft model; new dims of the base would be part of both."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(patch_model(build("llama-2")), peft.LoraConfig(target_modules="all-linear"))

    def loss(model, batch):
        with model.disable_adapter(), torch.no_grad():
            reference = model(**batch).loss
        return (model(**batch).loss - reference).exp()

    with pytest.raises(ValueError, match="compares the model with itself"):
        Grower(model, GrowthConfig(qk_dims=2), loss=loss).find(lm_batches(4)).keep()

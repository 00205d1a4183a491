"""What a growth in a training is measured on: the batches of that training, by its loss, with no trace of either."""

import copy
from collections import defaultdict

import pytest
import torch
from families import build
from test_trainer import CONFIG, Noting, grown_at, trainer
from training import Rows
from transformers import Trainer, TrainerCallback

from hf_growattn import Grower, GrowthCallback, patch_model


class Evaluates(TrainerCallback):
    """Evaluates after each step."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate = True


@pytest.fixture
def grown_on(monkeypatch):
    """What each growth was given, batch by batch."""
    given, find = [], Grower.find

    def noting(self, batches):
        given.append(copy.deepcopy(batches))
        return find(self, batches)

    monkeypatch.setattr(Grower, "find", noting)
    return given


def ids(batches) -> list[list]:
    return [batch["input_ids"].tolist() for batch in batches]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_last_batches_of_the_training_are_what_a_growth_reads(tmp_path, grown_on, accumulation):
    """Each of a step's, where they accumulate; and none of an evaluation between."""
    growth = dict(steps=[3, 5], batches=3)
    run = trainer(tmp_path, growth, cls=Noting, eval_strategy="steps", gradient_accumulation_steps=accumulation)
    run.callback_handler.callbacks.insert(0, Evaluates())
    run.train()
    trained = [batch.tolist() for batch, _ in run.trained]
    assert len(trained) == 6 * accumulation and len([e for e in run.state.log_history if "eval_loss" in e]) == 6
    assert [ids(batches) for batches in grown_on] == [
        trained[step * accumulation - 3 : step * accumulation] for step in (3, 5)
    ]
    assert grown_at(run.state) == [3, 5]


@pytest.mark.parametrize("options", [dict(label_smoothing_factor=0.1), dict(gradient_accumulation_steps=3)])
def test_the_loss_of_a_growth_is_that_of_the_training(tmp_path, options, grown_on):
    """Smoothed labels are taken out of the batch by compute_loss; accumulated steps count the items of all batches."""
    run = trainer(tmp_path, dict(steps=[2], batches=2), max_steps=3, learning_rate=0.0, **options)
    stock = trainer(tmp_path, None, model=build("llama-2"), **options)
    run.train()
    (batches,) = grown_on
    assert all("labels" in batch for batch in batches)
    stock.model.eval()
    expected = [stock.compute_loss(stock.model, dict(batch)).item() for batch in batches]
    assert run.growth.reports[0].loss_before == pytest.approx(sum(expected) / 2, rel=2e-6)


def test_a_growth_that_is_due_too_early_waits_and_says_so_once(tmp_path, grown_on):
    run = trainer(tmp_path, dict(steps=[1, 2], batches=4))
    with pytest.warns(UserWarning, match="due at step 1, and waits for 4 batches") as warned:
        run.train()
    assert len([each for each in warned if "waits for" in str(each.message)]) == 1
    assert grown_at(run.state) == [4] and len(grown_on[0]) == 4


@pytest.mark.parametrize("own", [False, True])
def test_nothing_is_left_on_the_trainer(tmp_path, own, kept_by_word):
    """Nor is a compute_loss that someone had put there before lost."""
    run = trainer(tmp_path, {})  # half-way, after step 3
    if own:
        run.compute_loss = mine = lambda model, inputs, **kwargs: Trainer.compute_loss(run, model, inputs, **kwargs)
    before = {*vars(run)}
    run.train()
    assert run.compute_loss == (mine if own else Trainer.compute_loss.__get__(run))
    assert not {name for name in {*vars(run)} - before if "loss" in name and not name.startswith("_t")}
    assert not run.growth._recording.inputs
    run.train()  # and again
    assert grown_at(run.state) == [3]


def test_a_training_that_was_cut_off_is_recorded_once(tmp_path, grown_on):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2 and not grown_on:
                raise KeyboardInterrupt

    run = trainer(tmp_path, dict(steps=[4], batches=4), cls=Noting)
    run.add_callback(fails := Fails())
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.remove_callback(fails)
    run.trained = []
    run.train()
    assert ids(grown_on[0]) == [batch.tolist() for batch, _ in run.trained[:4]]


class Counting(Trainer):
    """Keeps metrics in all ways that are known, in compute_loss itself, and logs there."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.means, self.sums, self.calls, self.seen = {"train": defaultdict(list)}, {"loss": torch.zeros(())}, 0, []

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.means["train"]["loss"].append(loss.item())
        self.sums["loss"] += loss.detach()
        self.calls += 1
        self.seen.append(loss.item())
        self.latest = loss.item()
        self.log({"own": loss.item()})
        return loss


def test_metrics_that_compute_loss_keeps_are_those_of_the_training(tmp_path):
    run, plain = (trainer(tmp_path, growth, cls=Counting, learning_rate=0.0) for growth in (dict(steps=[3]), None))
    means = run.means["train"]["loss"]
    run.train()
    plain.train()
    assert run.means["train"]["loss"] is means and len(means) == run.calls == len(run.seen) == 6
    assert means[:3] == plain.seen[:3] and run.sums["loss"].item() == pytest.approx(sum(means))
    assert run.latest == means[-1]
    assert len([entry for entry in run.state.log_history if "own" in entry]) == 6


def test_what_would_fail_in_a_growth_fails_in_the_first_steps(tmp_path):
    class Broken(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            return loss if model.training else loss.expand(2)

    run = trainer(tmp_path, dict(steps=[5]), cls=Broken)
    with pytest.raises(ValueError, match="A loss must be a tensor of one number"):
        run.train()
    assert run.state.global_step == 2


def test_a_model_that_is_made_by_the_trainer_grows(tmp_path, kept_by_word):
    arguments = trainer(tmp_path, None).args
    run = Trainer(model_init=lambda: patch_model(build("llama-2")), args=arguments, train_dataset=Rows(24))
    growth = GrowthCallback(run, CONFIG, steps=[3], batches=3)
    run.add_callback(growth)
    run.train()
    assert grown_at(run.state) == [3] and growth.reports[0].kept

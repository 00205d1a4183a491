"""What `GrowthCallback` does inside transformers' Trainer, and in TRL's."""

import shutil

import pytest
import torch
from families import build
from training import Rows
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments, set_seed

from hf_growattn import GrowthCallback, GrowthConfig, patch_model
from hf_growattn.growable.attention import attentions

CONFIG = GrowthConfig(qk_dims=1, v_dims=1)
pytestmark = pytest.mark.usefixtures("kept_by_word")  # what training does with a growth is asked here


def trainer(tmp_path, growth, model=None, data=None, optimizer=None, cls=Trainer, collate=None, **arguments):
    """A Trainer of a few steps; `growth` are the arguments of its GrowthCallback, `run.growth`, if it has one."""
    defaults = dict(
        output_dir=str(tmp_path),
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    set_seed(0)
    run = cls(
        model or patch_model(build("llama-2")),
        TrainingArguments(**(defaults | arguments)),
        train_dataset=data if data is not None else Rows(24),
        eval_dataset=Rows(8),
        optimizers=(optimizer, None),
        data_collator=collate,
    )
    if growth is not None:
        run.growth = GrowthCallback(run, **{"config": CONFIG, "batches": 2} | growth)
        run.add_callback(run.growth)
    return run


def grown_at(state) -> list[int]:
    return [entry["step"] for entry in state.log_history if "growth_added_parameters" in entry]


@pytest.mark.parametrize(
    "when, options, expected",
    [
        (dict(), {}, [3]),
        (dict(steps=[2, 5]), {}, [2, 5]),
        (dict(steps=range(2, 6, 2)), {}, [2, 4]),
    ],
)
def test_when_it_grows(tmp_path, when, options, expected):
    run = trainer(tmp_path, dict(batches=2) | when, **options)
    run.train()
    reports = run.growth.reports
    assert grown_at(run.state) == expected and len(reports) == len(expected)
    kept = [layer for report in reports if report.kept for layer in report.layers]
    for layer in attentions(run.model):
        for role, kind in (("query", "qk"), ("value", "v")):
            added = [each.width[1] - each.width[0] for each in kept if (each.layer, each.kind) == (layer.layer, kind)]
            assert layer.width_of(role) == 16 + sum(added) and sum(added)


def test_a_growth_is_logged(tmp_path):
    run = trainer(tmp_path, dict(steps=[3]))
    run.train()
    (logs,) = [logs for logs in run.state.log_history if "growth_fall" in logs]
    assert logs["growth_fall"] and logs["growth_error"] > 0 and logs["growth_holds"] in (0, 1)
    assert logs["growth_added_parameters"] > 0
    # None of the usual ones is lost.
    assert [logs["step"] for logs in run.state.log_history if "loss" in logs] == [1, 2, 3, 4, 5, 6]


class Read(Rows):
    """Rows that know which of them were read, in which order."""

    def __getitem__(self, row):
        self.read = [*getattr(self, "read", []), row]
        return super().__getitem__(row)


class Noting(Trainer):
    """Notes what it trains on, and draws a number at random for each batch."""

    def training_step(self, model, inputs, *args, **kwargs):
        self.trained = [*getattr(self, "trained", []), (inputs["input_ids"].clone(), torch.rand(1))]
        return super().training_step(model, inputs, *args, **kwargs)


def test_the_training_data_and_random_states_stay_as_they_are(tmp_path):
    """The losses up to the growth and the batches after it are those of a training without one."""
    runs = []
    for growth in (dict(steps=[3]), None):
        runs.append(trainer(tmp_path, growth, data=Read(24), cls=Noting))
        runs[-1].train()
    with_growth, without = runs
    assert with_growth.train_dataset.read == without.train_dataset.read  # nothing was read for the growth
    for one, other in zip(with_growth.trained, without.trained, strict=True):
        assert all(map(torch.equal, one, other))
    losses, plain = ([entry["loss"] for entry in run.state.log_history if "loss" in entry] for run in runs)
    assert losses[:3] == plain[:3] and losses[3:] != plain[3:]


def test_a_prebuilt_optimizer_follows_a_resumed_checkpoint_that_the_trainer_finds(tmp_path):
    for resumed in (None, True):
        model = patch_model(build("llama-2"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = trainer(tmp_path, dict(steps=[2]), model, optimizer=optimizer, save_strategy="steps", save_steps=4)
        run.train(resume_from_checkpoint=resumed)
        shutil.rmtree(tmp_path / "checkpoint-6", ignore_errors=True)  # of the end
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert held == {id(p) for p in model.parameters()}
        assert all(state["exp_avg"].shape == parameter.shape for parameter, state in optimizer.state.items())
        assert attentions(model)[0].width_of("query") == 17


def test_never_firing_is_said_at_the_end(tmp_path):
    strategies = dict(save_strategy="steps", eval_strategy="steps", save_steps=1, eval_steps=1)
    options = dict(load_best_model_at_end=True, metric_for_best_model="loss", **strategies)
    run = trainer(tmp_path, dict(steps=[4]), learning_rate=0.0, **options)
    run.add_callback(EarlyStoppingCallback())
    with pytest.warns(UserWarning, match="never fired"):
        run.train()


@pytest.mark.parametrize(
    "when, message",
    [
        (dict(steps=[2], batches=1), "batches must be a whole number, at least 2"),
        *((dict(steps=steps), "steps must be a list") for steps in ([], range(0), 5, iter([2]), [2, 0], [2.5])),
    ],
)
def test_bad_settings_are_refused(tmp_path, when, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, when)


def test_without_a_trainer_the_error_shows_the_line_to_write():
    line = r"trainer\.add_callback\(GrowthCallback\(trainer, GrowthConfig\(budget=0\.02\)\)\)"
    with pytest.raises(TypeError, match=line):
        GrowthCallback(CONFIG, steps=[500])


def test_a_callback_of_another_trainer_and_a_second_one_are_refused(tmp_path):
    run, other = (trainer(tmp_path, growth) for growth in (dict(steps=[2]), None))
    other.add_callback(run.growth)
    with pytest.raises(ValueError, match="made for another trainer"):
        other.train()
    run.add_callback(GrowthCallback(run, CONFIG, steps=[4]))
    with pytest.raises(ValueError, match="one GrowthCallback"):
        run.train()


NEVER = r"set for step \d+, but training ends at step \d+"


@pytest.mark.parametrize(
    "when, options, message",
    [
        ({}, dict(max_steps=1), NEVER),
        (dict(steps=[3, 6]), {}, NEVER),
        (dict(batches=6), {}, "last 6 batches, which are seen after step 6 at the earliest"),
    ],
)
def test_a_growth_that_can_never_come_is_refused_before_training(when, options, message, tmp_path):
    run = trainer(tmp_path, when, **options)
    with pytest.raises(ValueError, match=message):
        run.train()
    assert run.state.global_step == 0


def test_a_stock_model_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="call patch_model"):
        trainer(tmp_path, dict(steps=[2]), model=build("llama-2")).train()

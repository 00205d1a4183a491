"""Growth in TRL's GRPOTrainer, whose batches come to be in training."""

import pytest
import torch
from families import build, word_tokenizer
from test_losses import preferences
from test_trainer import CONFIG, grown_at

from hf_growattn import GrowthCallback, patch_model


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_policy_grows_where_its_loss_depends_on_the_model(tmp_path, iterations, kept_by_word):
    """Without old log-probabilities, the ratio of the loss is always 1, and no step lowers it."""
    trl = pytest.importorskip("trl")
    torch.manual_seed(0)
    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=4, num_generations=4, learning_rate=1e-2,
        max_completion_length=6, logging_steps=1, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
        save_strategy="no", num_iterations=iterations,
    )  # fmt: skip
    run = trl.GRPOTrainer(
        patch_model(build("llama-2")),
        lambda completions, **kwargs: [float(len(set(words.split()))) for words in completions],
        arguments,
        train_dataset=preferences().select_columns(["prompt"]),
        processing_class=word_tokenizer(),
    )
    growth = GrowthCallback(run, CONFIG, steps=[4], batches=4)
    run.add_callback(growth)
    run.train()
    assert grown_at(run.state) == [4]
    (report,) = growth.reports
    assert report.kept and [layer.width for layer in report.layers] == [(16, 17)] * 4
    # Rewards of four random texts teach nothing that holds on others, so what counts is whether a step was found.
    assert any(layer.step_size > 0 for layer in report.layers) == (report.fall != 0) == (iterations == 2)

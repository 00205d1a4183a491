"""scripts/evaluate.py: what it predicts, its paired error by hand, its table, and its refusals."""

import math
import sys

import evaluate
import pytest
import torch
from conftest import ROOT
from families import VOCABULARY, build, lm_batches, save_with_text, word_tokenizer

from hf_growattn import Grower, GrowthConfig, patch_model

SCRIPT = ROOT / "scripts" / "evaluate.py"


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder with `model`, `grown` from it, and `text.txt`."""
    folder = tmp_path_factory.mktemp("given")
    save_with_text(folder, words=100)
    model = patch_model(build("llama-2"))
    assert Grower(model, GrowthConfig(qk_dims=2, v_dims=2)).find(lm_batches()).keep().kept
    model.save_pretrained(folder / "grown")
    word_tokenizer().save_pretrained(folder / "grown")
    return folder


def test_the_scores_are_those_of_the_loss_whatever_the_batch():
    model = build("llama-2")
    blocks = evaluate.cut_blocks([2 + 5 * index % (VOCABULARY - 2) for index in range(30)], 8)
    scores = evaluate.score_blocks(model, blocks, batch_size=3)
    for block, score in zip(blocks, scores):
        ids = torch.tensor([block])
        loss = model(input_ids=ids, labels=ids).loss.item() * (len(block) - 1)
        assert score.item() == pytest.approx(loss, rel=1e-5)  # fp32, sums in another order


def test_the_command_compares_a_grown_checkpoint_with_its_base(given, forks):
    done = forks.run(
        SCRIPT, given / "model", given / "grown", given / "text.txt", "--max_length", 16, "--batch_size", 2
    )
    assert done.returncode == 0, done.stderr
    ids = word_tokenizer()((given / "text.txt").read_text())["input_ids"]
    blocks = evaluate.cut_blocks(ids, 16)
    counts = torch.tensor([len(block) - 1.0 for block in blocks], dtype=torch.float64)
    models = [evaluate.load_model(str(given / name), causal=True) for name in ("model", "grown")]
    base, grown = (evaluate.score_blocks(model, blocks, 2) for model in models)
    gap = grown - base
    mean = (gap.sum() / counts.sum()).item()
    residuals = gap - mean * counts
    error = math.sqrt(len(blocks) / (len(blocks) - 1) * sum(each**2 for each in residuals.tolist())) / counts.sum()
    assert f"{mean:+.4f} ± {error:.4f} nats a token, paired over {len(blocks)} blocks of 16 tokens." in done.stdout
    assert mean != 0
    for model, nats in zip(models, (base, grown)):
        assert f"{model.num_parameters():,}" in done.stdout
        assert f"{math.exp(nats.sum() / counts.sum()):.3f}" in done.stdout


def test_what_does_not_compare_is_refused(given, tmp_path, monkeypatch):
    build("llama-2").save_pretrained(tmp_path / "other")
    tokenizer = word_tokenizer()
    tokenizer.add_tokens("w1000")
    tokenizer.save_pretrained(tmp_path / "other")
    text = (given / "text.txt").read_text()
    same, other = str(given / "model"), str(tmp_path / "other")
    with pytest.raises(ValueError, match="have different tokenizers"):
        evaluate.compare([same, other], text, None, 4, "float32")
    with pytest.raises(ValueError, match="less than two blocks"):
        evaluate.compare([same, same], "w2 w3 w4", None, 4, "float32")
    with pytest.raises(ValueError, match=r"--max_length must be from 2 to"):
        evaluate.compare([same, same], text, 1, 4, "float32")
    monkeypatch.setattr(sys, "argv", ["evaluate.py", same, str(given / "nowhere"), str(given / "text.txt")])
    with pytest.raises(SystemExit, match=r"^Error: .*nowhere[^\n]*$"):
        evaluate.main()

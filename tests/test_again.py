"""What a growth added, given to another copy of the model: the same as growing that, without the search."""

import families
import pytest
import torch

from hf_growattn import patch_model
from hf_growattn.grow.again import Added
from hf_growattn.grow.growth import Grower
from hf_growattn.training.methods import METHODS, Budget, started, trained_weights


@pytest.mark.parametrize("variant", ["llama-5-bias", "gpt2-2", "qwen3"])
@pytest.mark.parametrize("name", ["growth", "both", "full+growth"])
def test_equals_the_growth_to_the_bit(variant, name, monkeypatch):
    """Values, widths, what trains of it, and where a training with weight decay takes it."""
    batches = families.lm_batches(4)
    grown, copy = (patch_model(families.build(variant)) for _ in range(2))
    budget = Budget.near(grown, 0.3)
    first, report = started(grown, METHODS[name], budget, batches, seed=0)
    assert report.applied
    added = Added.to(grown, report)
    monkeypatch.delattr(Grower, "grow")
    second, again = started(copy, METHODS[name], budget, [], seed=0, added=added)
    assert again is report and grown.config.to_dict() == copy.config.to_dict()
    assert trained_weights(first) == trained_weights(second) > 0
    before = {key: value.clone() for key, value in second.state_dict().items()}
    for model in (first, second):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)
        for batch in batches:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    one, other = first.state_dict(), second.state_dict()
    assert one.keys() == other.keys() and all(value.equal(other[key]) for key, value in one.items())
    moved = [key for key, value in before.items() if not value.equal(other[key])]
    assert moved and (len(moved) == len(before)) == (name == "full+growth")

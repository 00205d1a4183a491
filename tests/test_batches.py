"""What a growth takes as batches, beyond dicts of tokens and labels; what it refuses is in test_refusals.py."""

import pytest
import torch
from families import HEADS, build, lm_batches, tokens

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.grow.plan import read_batches

CONFIG = GrowthConfig(qk_dims=2)


def test_tensors_and_generators_are_batches():
    reports = [
        Grower(patch_model(build("llama-2")), CONFIG).find(batches).keep()
        for batches in (
            (tokens(seed=s) for s in range(2)),
            [{"input_ids": tokens(seed=s), "labels": tokens(seed=s)} for s in range(2)],
        )
    ]
    assert reports[0] == reports[1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_tokens_of_any_whole_numbers_grow_without_gradients_around(dtype):
    ids = tokens().to(dtype)
    with torch.no_grad():
        assert Grower(patch_model(build("llama-2")), CONFIG).find([ids, ids]).keep().loss_before > 0


def test_labels_of_detection_are_a_list_of_dicts():
    batch = {"pixel_values": torch.zeros(1, 3, 4, 4), "labels": [{"boxes": torch.zeros(1, 4)}]}
    assert read_batches([batch], patch_model(build("llama-2"))) == [batch]


def test_labels_of_other_heads_are_no_tokens():
    model = patch_model(build("llama-2", HEADS["sequence-classification"]))
    batch = {"input_ids": tokens(4), "labels": torch.tensor([0, 1, 1, 0])}
    assert Grower(model, CONFIG).measure([batch]).layers


def test_a_single_layer_may_be_chosen_by_its_number():
    report = Grower(patch_model(build("llama-2")), GrowthConfig(qk_dims=2, layers=1)).measure(lm_batches(2))
    assert {layer.layer for layer in report.layers} == {1}

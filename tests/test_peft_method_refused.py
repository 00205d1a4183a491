"""What `GrowAttnConfig` and its guided start refuse: an error that names the fix."""

import importlib.metadata
import sys

import pytest
import torch
from families import build
from test_peft_method import BATCHES, LLAMA, adapted, peft, pytestmark  # noqa: F401  the mark counts here too
from torch import nn
from transformers import FalconConfig, FalconModel

import hf_growattn
from hf_growattn import GrowAttnConfig, initialize_growattn_weights
from hf_growattn.interop.peft_method import adapter_layers

REFUSED = {
    "nothing to add": (lambda: adapted(LLAMA, qk_dims=0), ValueError, "give qk_dims, v_dims or both"),
    "no such layer": (
        lambda: adapted(LLAMA, v_dims=1, layers=[0, 2]),
        ValueError,
        "no attention in layer 2: choose of 0, 1",
    ),
    "another family": (
        lambda: peft.get_peft_model(
            FalconModel(FalconConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=97)),
            GrowAttnConfig(v_dims=1),
        ),
        ValueError,
        "New dims cannot join FalconModel: FalconAttention takes no",
    ),
    "no transformers model": (
        lambda: peft.get_peft_model(nn.Sequential(nn.Linear(2, 2)), GrowAttnConfig(v_dims=1)),
        TypeError,
        "needs a transformers model, not Sequential",
    ),
    "no such adapter": (
        lambda: initialize_growattn_weights(adapted(LLAMA), BATCHES, "other"),
        ValueError,
        "'other' is not one of default",
    ),
    "another method": (
        lambda: initialize_growattn_weights(peft.get_peft_model(build(LLAMA), peft.LoraConfig()), BATCHES),
        ValueError,
        "'default' is a LoraConfig",
    ),
    "merged": (lambda: initialize_growattn_weights(merged_for_a_while(), BATCHES), ValueError, "unmerge_adapter"),
    "not finite, in peft's own words": (
        lambda: broken().merge_and_unload(safe_merge=True),
        ValueError,
        "^NaNs detected in the merged weights. The adapter default seems to be broken",
    ),
}


def merged_for_a_while():
    model = adapted(LLAMA)
    model.merge_adapter()
    return model


def broken():
    model = adapted(LLAMA)
    adapter_layers(model)[0].growattn_in_proj["default"].weight.data[0, 0] = torch.nan
    return model


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_and_the_fix(case):
    attempt, kind, match = REFUSED[case]
    with pytest.raises(kind, match=match):
        attempt()


def test_a_refused_layer_leaves_a_stock_model_stock():
    model = build(LLAMA)
    kind = type(model)
    with pytest.raises(ValueError, match="no attention in layer 7"):
        peft.get_peft_model(model, GrowAttnConfig(v_dims=1, layers=[7]))
    assert type(model) is kind and not any(
        isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer) for m in model.modules()
    )


@pytest.mark.parametrize("version", ["0.17.1", None])
def test_a_peft_too_old_or_absent_is_named(version, monkeypatch):
    of = importlib.metadata.version

    def pretended(name):
        if name == "peft" and version is None:
            raise importlib.metadata.PackageNotFoundError
        return version if name == "peft" else of(name)

    monkeypatch.delitem(sys.modules, "hf_growattn.interop.peft_method")
    monkeypatch.setattr(importlib.metadata, "version", pretended)
    with pytest.raises(
        ImportError, match=r"peft>=0.18[\s\S]*GrowAttnConfig needs it; try: pip install -U 'peft>=0.18'"
    ):
        hf_growattn.GrowAttnConfig  # noqa: B018  the import is what is asked for

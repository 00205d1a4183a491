"""What the library refuses of peft's adapters and of its own, one line for each, as in tests/test_refusals.py."""

from functools import partial

import peft
import pytest
import torch
from families import build, lm_batches, tokens
from peft.utils.hotswap import hotswap_adapter
from test_refusals import BATCH, ROWS, check_refusal, pytestmark  # noqa: F401  the mark counts here, too
from torch import nn
from transformers import FalconConfig, FalconModel

from hf_growattn import GrowAttnConfig, Grower, GrowthConfig, initialize_growattn_weights, patch_model
from hf_growattn.growable.attention import attentions


def writes_under_adapters(given, **setting):
    model = peft.get_peft_model(patch_model(build("gpt2-2")), peft.LoraConfig(fan_in_fan_out=True))
    given.watch(model.get_base_model())
    Grower(model, GrowthConfig(qk_dims=2, **setting)).find(lm_batches(2))


def prompts(config, **options):
    model = peft.get_peft_model(patch_model(build("llama-2")), config(task_type="CAUSAL_LM", **options))
    Grower(model, GrowthConfig(qk_dims=2))


def merged(given):
    model = given.adapted()
    model.merge_adapter()
    given.watch(model.get_base_model())
    initialize_growattn_weights(model, lm_batches(2))


def broken(given):
    model = given.adapted()
    attentions(model)[0].extra.adapters.growattn_in_projection["default"].weight.data[0, 0] = torch.nan
    given.watch(model.get_base_model())
    model.merge_and_unload(safe_merge=True)


def hotswap(given):
    model = given.adapted()
    model.save_pretrained(given.folder)
    hotswap_adapter(model, given.folder, "default")


def hotswap_with_growth(given):
    grown = peft.get_peft_model(patch_model(build("llama-2")), peft.LoraConfig())
    Grower(grown, GrowthConfig(qk_dims=2)).find(ROWS).keep()
    grown.save_pretrained(given.folder)
    model = given.lora()
    hotswap_adapter(model, given.folder, "default")


def falcon(given):
    sizes = dict(hidden_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=97)
    peft.get_peft_model(given.watch(FalconModel(FalconConfig(**sizes))), GrowAttnConfig(v_dims=1))


def no_transformer(given):
    peft.get_peft_model(nn.Sequential(nn.Linear(2, 2)), GrowAttnConfig(v_dims=1))


def weighted(given):
    given.adapted().add_weighted_adapter(["default"], [1.0], "mean")


def on_stock(**options):
    return lambda given: peft.get_peft_model(given.stock(), GrowAttnConfig(**options))


def start(*name, **options):
    return lambda given: initialize_growattn_weights(given.adapted(**options), ROWS, *name)


BY_ROW = {"adapter_names": ["default"] * 3}
REFUSED = {
    "old dims under LoRA": (partial(writes_under_adapters, update_existing=True), ValueError, "merge_and_unload"),
    "refactored under LoRA": (partial(writes_under_adapters, method="refactor"), ValueError, "merge_and_unload"),
    "prompts": (
        lambda g: prompts(peft.PromptTuningConfig, num_virtual_tokens=4),
        ValueError,
        r"\(PromptTuningConfig\) adds prompts.*Use LoRA",
    ),
    "prompts within layers": (
        lambda g: prompts(peft.AdaptionPromptConfig, adapter_len=4, adapter_layers=1),
        ValueError,
        r"\(AdaptionPromptConfig\) adds prompts",
    ),
    "an adapter of nothing": (lambda g: g.adapted(qk_dims=0), ValueError, "give qk_dims, v_dims or both"),
    "an adapter's dims": (lambda g: g.adapted(dims={"0": [1]}), ValueError, "dims must have a form such as"),
    "an adapter's layer": (on_stock(v_dims=1, layers=[0, 2]), ValueError, "choose of 0, 1"),
    "an adapter's budget": (on_stock(budget=10), ValueError, "10 weights buy nothing"),
    "a budget and a width": (lambda g: GrowAttnConfig(budget=0.1, v_dims=2), ValueError, "budget, or fixed widths"),
    "a budget above one": (lambda g: GrowAttnConfig(budget=2.5), ValueError, "a whole number of weights, or a share"),
    "an adapter of another family": (falcon, ValueError, "New dims cannot join FalconModel: FalconAttention takes no"),
    "an adapter of no transformer": (no_transformer, TypeError, "not a Sequential"),
    "a start of data": (lambda g: initialize_growattn_weights(ROWS, g.adapted()), TypeError, "peft model is needed"),
    "no such adapter": (
        lambda g: initialize_growattn_weights(g.adapted(), ROWS, "other"),
        ValueError,
        "not one of default",
    ),
    "an adapter of LoRA": (lambda g: initialize_growattn_weights(g.lora(), ROWS), ValueError, "is a LoraConfig"),
    "a start of chosen dims": (
        lambda g: initialize_growattn_weights(g.adapted(dims={"1": [2, 0]}), ROWS),
        ValueError,
        "no guided start",
    ),
    "a merged adapter": (merged, ValueError, "unmerge_adapter"),
    "a broken adapter, in peft's own words": (broken, ValueError, "^NaNs detected"),
    "adapters by row": (lambda g: g.adapted()(**BATCH, **BY_ROW), ValueError, "not served by GrowAttn"),
    "adapters by row of a text": (
        lambda g: g.adapted().generate(input_ids=tokens(), **BY_ROW),
        ValueError,
        "not served by GrowAttn",
    ),
    "a weighted adapter": (
        weighted,
        NotImplementedError,
        "have no mean",
    ),
    "a hot swap": (hotswap, ValueError, r"'GROWATTN' cannot be hot-swapped.*set_adapter\(\"other\"\)"),
    "a hot swap of a growth": (hotswap_with_growth, ValueError, "'import hf_growattn to load LORA' cannot be hot-swa"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_the_fix_and_leaves_everything_as_it_was(case, tmp_path):
    check_refusal(*REFUSED[case], tmp_path)

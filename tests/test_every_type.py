"""Types of causal LMs keep their promises, or are refused by name: with `-m slow` all; here one for
each mechanism that no line of tests/models.py has."""

import pytest
from every_type import TYPES, check, run_stock

# What is special about the attention of each, and what is to be said of those that cannot grow.
GROW = {
    "doge": "values are projected once more after the cache",
    "gemma4_text": "the last layers reuse the keys of others; widths differ by layer",
    "glm4": "rotation in pairs",
    "glm_moe_dsa": "a latent, and an indexer that chooses tokens",
    "granitemoehybrid": "one layer is a state space model",
    "inkling2_text": "projections that are no linear layers",
    "lfm3": "one layer is a convolution",
    "mimo_v2_flash": "values of another width than keys, sinks, and windows",
    "olmo3": "norms over all heads",
    "qwen3_next": "a gate on the output, one layer of four",
}
REFUSED = {
    "bloom": "BloomAttention takes no attention function from transformers' table",
    "diffllama": "calls its attention function twice",
    "mamba": "has no attention module",
    "moshi": "has no linear projection",
}


@pytest.mark.parametrize("model_type", GROW)
def test_each_mechanism_grows(model_type):
    outcome = check(model_type)
    assert outcome.startswith("grows"), outcome


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_grow_is_refused_by_name(model_type):
    outcome = check(model_type)
    assert outcome.startswith("refused") and REFUSED[model_type] in outcome


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted({*TYPES} - GROW.keys() - REFUSED.keys()))
def test_every_other_type_too(model_type):
    try:
        run_stock(model_type)
    except Exception as error:  # each type has its own
        pytest.skip(f"stock cannot be built tiny: {type(error).__name__}: {error}")
    assert check(model_type).startswith(("grows", "refused"))

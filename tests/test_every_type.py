"""Types of causal LMs keep their promises, or are refused: one for each mechanism that tests/models.py lacks."""

import pytest
from every_type import check

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

"""Tests of the peers that ours cannot pass: reasons, each with the regular expressions that find its tests.

An expression is searched in lines such as "transformers llama patched test_config" and "peft methods grown
test_generate[LoraConfig-...]": whose tests, on what, and the test, as a run prints what is not listed.
"""

INHERENT = {
    "The test asks for GenerationMixin among a class's direct bases; ours inherit it by way of the stock class.": [
        "^transformers .* test_inherits_generation_mixin$",
    ],
    "The test takes weights away and expects random ones; ours refuse a checkpoint that lacks weights.": [
        "^transformers .* test_can_init_all_missing_weights$",
        "^transformers .* test_model_weights_reload_no_missing_tied_weights$",
    ],
    "Prefix tuning keeps its keys and values of all layers in one tensor, and so of one width in all layers.": [
        r"^peft methods grown .*\[PrefixTuningConfig-",
        "^peft methods grown test_prefix_tuning_",
    ],
    "ShadowConfig makes a model with fewer layers out of the same config, which names the new dims of all layers.": [
        r"^peft methods grown .*[\[-]ShadowConfig-",
    ],
}

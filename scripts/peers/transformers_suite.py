"""transformers' own tests of a model, on stock classes and on ours: a test class for each family and variant.

pytest runs this file beside the folder `tests` of transformers (see `sources.py`).
"""

import inspect
import unittest

import torch
import transformers
from models import NEW_DIMS, VARIANTS, config_of
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import ModelTesterMixin, global_rng, ids_tensor
from tests.test_training_mixin import TrainingTesterMixin
from transformers import CONFIG_MAPPING

from hf_growattn.growable.models import GrowableModelMixin
from hf_growattn.model.configuration import growable_config_class

# Sizes as transformers' own tests of small text models have them.
DEFAULTS = {
    "batch_size": 13,
    "seq_length": 7,
    "is_training": True,
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What the config of a family has besides transformers' own defaults for such tests.
FAMILIES = {"llama": {}, "gpt2": {}, "qwen3": dict(num_key_value_heads=1, attention_dropout=0.0), "gemma2": {}}
HEAD_DIM = DEFAULTS["hidden_size"] // DEFAULTS["num_attention_heads"]
CLASSES = {
    "base_model_class": "AutoModel",
    "causal_lm_class": "AutoModelForCausalLM",
    "sequence_classification_class": "AutoModelForSequenceClassification",
    "token_classification_class": "AutoModelForTokenClassification",
    "question_answering_class": "AutoModelForQuestionAnswering",
}


class Tester:
    """What transformers' tests ask of a family: its classes, a config, inputs, and the sizes of both."""

    def __init__(self, model_type: str, variant: str):
        self.__dict__.update(DEFAULTS, head_dim=HEAD_DIM, type_sequence_label_size=2, num_labels=3, num_choices=4)
        self.__dict__.update(FAMILIES[model_type])
        self._variant, self._stock_config_class = variant, CONFIG_MAPPING[model_type]
        mappings = {name: getattr(transformers, name)._model_mapping for name in CLASSES.values()}
        found = {name: mapping.get(self._stock_config_class, None) for name, mapping in mappings.items()}
        classes = {name: stock for name, stock in found.items() if stock is not None}
        self.config_class = self._stock_config_class
        if variant != "stock":
            classes = {name: GrowableModelMixin.mixed_into(stock) for name, stock in classes.items()}
            self.config_class = growable_config_class(self._stock_config_class)
        self.all_model_classes = tuple(classes.values())
        for attribute, auto_name in CLASSES.items():
            setattr(self, attribute, classes.get(auto_name))

    def get_config(self):
        """Return a new config, of the fields that the family's config class knows."""
        names = inspect.signature(self._stock_config_class.__init__).parameters
        common_names = {theirs: name for name, theirs in self._stock_config_class.attribute_map.items()}
        values = {name: getattr(self, common_names.get(name, name), None) for name in (*names, "pad_token_id")}
        known = {name: value for name, value in values.items() if value is not None}
        return config_of(self._stock_config_class(**known), self._variant)

    def prepare_config_and_inputs_for_common(self):
        """Return a config and inputs for the base model, (batch_size, seq_length)."""
        input_ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids).tril()}


class CommonTests(ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin):
    """All that transformers tests of every text model."""

    model_tester = None  # made for each test
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        """Make what the tests ask for everything, and the inputs the same every time."""
        global_rng.seed(0)
        self.model_tester = Tester(self.model_type, self.variant)
        self.all_model_classes = self.model_tester.all_model_classes
        self._torch_compile_train_cls = self.model_tester.causal_lm_class

    def _get_attention_shape(self, batch_size, seq_length, config):
        """Return the shapes of one layer's cached keys and values; most implementations take one width for both."""
        shapes = super()._get_attention_shape(batch_size, seq_length, config)
        if self.variant != "grown":
            return shapes
        widths = [shape[-1] + new for shape, new in zip(shapes, NEW_DIMS)]
        if config._attn_implementation not in ("eager", "flex_attention"):
            widths = [max(widths)] * 2
        return tuple((*shape[:-1], width) for shape, width in zip(shapes, widths))

    def test_config(self):
        """Run transformers' tests of a config."""
        ConfigTester(self, config_class=self.model_tester.config_class).run_common_tests()


for _model_type in FAMILIES:
    for _variant in VARIANTS:
        _attributes = {"model_type": _model_type, "variant": _variant, "__module__": __name__}
        _name = f"{_model_type}-{_variant}"
        globals()[_name] = type(_name, (CommonTests, unittest.TestCase), _attributes)

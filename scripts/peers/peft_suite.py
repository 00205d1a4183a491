"""peft's own tests of its methods on decoders and classifiers, with `GrowAttnConfig` as one method more.

pytest runs this file in a folder of models (see `models.py`), where their names lead to them instead of to the Hub.
"""

from dataclasses import dataclass

from models import CLASSIFIERS, MODELS
from peft import LoraConfig
from tests.test_decoder_models import TestDecoderModels  # noqa: F401  pytest finds them here
from tests.test_seq_classifier import TestSequenceClassificationModels  # noqa: F401
from torch import nn

import hf_growattn
from hf_growattn.interop.peft_method import GrowAttnModel
from tests import test_decoder_models, test_seq_classifier


@dataclass
class GrowAttnConfig(hf_growattn.GrowAttnConfig):
    """Ours, with what peft's tests ask of every method: a start that already has an effect."""

    init_weights: bool = True


def _create_and_replace(tuner, config, adapter_name, target, *args, create=GrowAttnModel._create_and_replace, **kwargs):
    create(tuner, config, adapter_name, target, *args, **kwargs)
    if not getattr(config, "init_weights", True):
        for held in (target.extra.adapters.growattn_in_projection, target.extra.adapters.growattn_out_projection):
            for weight in held[adapter_name].parameters() if adapter_name in held else ():
                nn.init.normal_(weight, std=0.3)


GrowAttnModel._create_and_replace = _create_and_replace
# In place: the tests' own marks hold these lists. Plain LoRA comes first, as what `GrowAttnConfig` is compared with.
for _suite, _task in ((test_decoder_models, "CAUSAL_LM"), (test_seq_classifier, "SEQ_CLS")):
    _plain = next(entry for entry in _suite.ALL_CONFIGS if entry[0] is LoraConfig)
    _suite.ALL_CONFIGS.remove(_plain)
    _suite.ALL_CONFIGS[:0] = [_plain, (GrowAttnConfig, dict(task_type=_task, qk_dims=3, v_dims=2))]
for _models in (test_decoder_models.PEFT_DECODER_MODELS_TO_TEST, test_seq_classifier.PEFT_SEQ_CLS_MODELS_TO_TEST):
    _models[:] = [name for name in _models if name in MODELS or name in CLASSIFIERS]

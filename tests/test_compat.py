"""Private names of other libraries that `compat.py` lists: each is there, and is used."""

import inspect
from types import SimpleNamespace

import peft.utils.transformers_weight_conversion as peft_conversion
import pytest
import torch
from conftest import ROOT
from families import build
from peft import PeftModel, PeftType
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch.distributed.fsdp import _flat_param
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    conversion_mapping,
)
from transformers import configuration_utils as configs
from transformers.models.auto import auto_factory, configuration_auto
from transformers.utils import output_capturing

import hf_growattn
from hf_growattn.model.compat import NAMES, SHARDING_MARKS, leave_out_of_checkpoints

# What has the attributes of each name's first part: an object, or a class or module whose code speaks of them.
OWNERS = {
    "_LazyAutoMapping": AutoModelForCausalLM._model_mapping,
    "_BaseAutoModelClass": AutoModelForCausalLM,
    "_LazyConfigMapping": CONFIG_MAPPING,
    "configuration_utils": configs,
    "conversion_mapping": conversion_mapping,
    "output_capturing": output_capturing,
    "PreTrainedModel": PreTrainedModel,
    "Trainer": Trainer,
    "PreTrainedConfig": PreTrainedConfig,
    "Module": torch.nn.Linear(1, 1)._replicate_for_data_parallel(),
    "OptimizedModule": torch.compile(torch.nn.Identity()),
    "PeftModel": PeftModel,
    "PeftType": PeftType,
    "BaseTuner": BaseTuner,
    "BaseTunerLayer": BaseTunerLayer,
    "transformers_weight_conversion": peft_conversion,
}
SOURCES = {"FlatParameter": _flat_param}


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield DistributedDataParallel(torch.nn.Linear(1, 1))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_still_there(name, request):
    owner, _, attribute = name.partition(".")
    assert NAMES[name], "the list says why"
    if not attribute:
        assert isinstance(OWNERS[owner], getattr(auto_factory, name))
    elif owner in SOURCES:
        assert attribute in inspect.getsource(inspect.getmodule(SOURCES[owner]))
    elif owner == "DistributedDataParallel":
        assert hasattr(request.getfixturevalue("ddp"), attribute)
    else:
        assert hasattr(OWNERS[owner], attribute)


def test_the_tables_are_of_the_classes_that_the_list_names():
    assert type(CONFIG_MAPPING) is configuration_auto._LazyConfigMapping
    assert issubclass(AutoModelForCausalLM, auto_factory._BaseAutoModelClass)
    assert "_fsdp_flattened" in SHARDING_MARKS


def test_what_a_class_leaves_out_of_checkpoints_stays_out():
    model = SimpleNamespace(_keys_to_ignore_on_save=["sinusoids"])
    leave_out_of_checkpoints(model, ["adapter"])
    assert {*model._keys_to_ignore_on_save} == {"sinusoids", "adapter"}


def test_add_adapter_of_transformers_leaves_its_mark():
    """By its text, since it asks for a newer peft than the lowest that we run with."""
    assert "self._hf_peft_config_loaded = True" in inspect.getsource(PreTrainedModel.add_adapter)
    assert not build("llama-2")._hf_peft_config_loaded


def test_every_name_of_the_list_is_used():
    code = "".join(path.read_text() for path in (ROOT / "hf_growattn").rglob("*.py") if path.name != "compat.py")
    code += inspect.getsource(hf_growattn.model.compat).partition("\n}\n")[2]
    assert not {name for name in NAMES if name.rpartition(".")[2] not in code}

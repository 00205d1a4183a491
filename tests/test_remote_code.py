"""The code that a checkpoint carries, as somebody sees it who asks whether to say `trust_remote_code=True`."""

import ast
import os
import subprocess
import sys

import pytest
from conftest import ROOT
from families import wide

MODEL = ROOT / "hf_growattn" / "model"
# Of the standard library: nothing that starts a process, opens a connection, or reads what a pickle holds.
HARMLESS = {"collections", "contextlib", "copy", "copyreg", "dataclasses", "functools", "importlib", "inspect"}
HARMLESS |= {"itertools", "json", "math", "pathlib", "re", "sys", "threading", "types", "typing"}
LOAD = """
import copy, sys
from collections import OrderedDict
import torch, transformers
from transformers.models.auto import auto_factory, configuration_auto, modeling_auto, tokenization_auto
from transformers import conversion_mapping
from transformers.utils import output_capturing

sys.modules["hf_growattn"] = None  # importing it raises ImportError
stock = [transformers.LlamaForCausalLM, transformers.Olmo2ForCausalLM]
PLACES = auto_factory, configuration_auto, modeling_auto, tokenization_auto, conversion_mapping, output_capturing

def state():
    tables = {f"{place.__name__}.{name}": copy.copy(table) for place in PLACES
              for name, table in vars(place).items() if type(table) in (dict, set, OrderedDict)}
    classes = {f"{module.__name__}.{name}": dict(vars(kind)) for model in stock
               for module in [sys.modules[model.__module__]] for name, kind in vars(module).items()
               if isinstance(kind, type)}
    return tables | classes

conversion_mapping.get_checkpoint_conversion_mapping("llama")  # which makes its table at the first call
before = state()
for folder in sys.argv[1:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model(torch.ones(1, 3, dtype=torch.long))
    assert type(model).__module__.startswith("transformers_modules.")
after, added = state(), set()
assert before.keys() == after.keys(), before.keys() ^ after.keys()
for name, old in before.items():
    new = after[name]
    if isinstance(old, dict):
        assert all(new[key] is value for key, value in old.items()), name
    added |= {f"{name}: {key}" for key in set(new) - set(old)}
print(*sorted(added), sep="\\n")
"""


@pytest.mark.parametrize("file", sorted(MODEL.glob("*.py")), ids=lambda file: file.name)
def test_it_calls_nothing_that_could_do_harm(file):
    """It reads its own files and writes them next to a config that it saves; otherwise it computes."""
    tree = ast.parse(file.read_text())
    nodes = list(ast.walk(tree))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    tops = {name.split(".")[0] for name in imported} - {"torch", "transformers"}
    assert tops <= HARMLESS
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"eval", "exec", "compile", "open", "__import__", "input"}
    methods = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    writing = methods & {"write_bytes", "write_text", "mkdir", "unlink", "rmdir", "rename", "replace", "touch", "chmod"}
    assert writing <= {"configuration.py": {"write_bytes", "mkdir"}, "compat.py": {"replace"}}.get(file.name, set())
    assert not methods & {"load_state_dict_from_url", "download_url_to_file", "hub", "system", "popen"}


def test_loading_it_changes_nothing_that_stock_models_use(tmp_path):
    """Tables gain entries under names of ours; no entry and no class that was there becomes another."""
    folders = []
    for variant in ("llama-2", "olmo2"):
        wide(variant, 2, 2).save_pretrained(tmp_path / variant)
        folders.append(str(tmp_path / variant))
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-c", LOAD, *folders]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    added = [line for line in done.stdout.splitlines() if line]
    assert added and all("growattn" in line.lower() for line in added), done.stdout

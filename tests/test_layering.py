"""Imports inside the package point one way, and the files that travel with a checkpoint stay self-contained."""

import ast
import sys

import pytest
from conftest import ROOT

MAY_IMPORT = {
    "functional": set(),
    "ranks": set(),
    "architectures": set(),
    "optimizer": {"ranks"},
    "adapters": set(),
    "widths": {"architectures", "adapters"},
    "attention": {"widths", "architectures"},
    "configuration": {"architectures"},
    "folders": set(),
    "modeling": {"configuration", "attention", "architectures", "folders"},
    "patch": {"modeling", "configuration", "attention", "architectures"},
    "views": {"modeling", "attention", "architectures", "functional"},
    "probe": {"attention", "functional", "ranks"},
    "trainable": {"probe", "attention", "adapters"},
    "blocks": {"probe", "attention", "functional", "ranks"},
    "gradients": {"blocks", "probe", "attention", "functional", "ranks"},
    "estimators": {"gradients", "blocks", "functional"},
    "trial": {"gradients", "probe", "attention", "widths", "functional", "ranks"},
    "plan": {"attention", "trial", "estimators", "gradients", "blocks", "probe", "functional"},
    "pictures": set(),
    "pages": {"pictures"},
    "report": {"pages", "pictures"},
    "sharding": set(),
    "batches": {"ranks"},
    "texts": set(),
    "growth": {
        *("report", "plan", "trial", "estimators", "gradients", "blocks", "probe", "batches"),
        *("trainable", "optimizer", "sharding", "modeling", "attention", "widths", "ranks"),
    },
    "stock": {"patch", "modeling", "configuration", "attention", "adapters"},
    "export": {"stock", "modeling", "configuration", "folders", "probe", "sharding"},
    "trim": {
        *("growth", "report", "plan", "blocks", "probe", "functional", "trainable", "optimizer", "sharding", "batches"),
        *("modeling", "configuration", "attention", "widths", "ranks"),
    },
    "trainer": {"growth", "plan", "report", "modeling", "adapters"},
    "peft_method": {
        *("growth", "plan", "report", "probe", "patch", "modeling", "attention", "adapters"),
    },
    "cards": {"report", "folders", "configuration"},
    "checkpoints": {"architectures", "cards", "export", "configuration", "report"},
    "inspection": {"report", "plan", "views", "modeling", "configuration"},
    "outcome": {"cards", "pictures", "report", "modeling"},
    "arguments": set(),
    "finetuning": {
        *("outcome", "checkpoints", "cards", "pages", "trainer", "patch", "plan", "texts", "arguments"),
    },
    "harness": {"checkpoints"},
    "evaluation": {"harness", "checkpoints", "texts"},
    "options": {"arguments"},
    "cli": {
        *("inspection", "finetuning", "evaluation", "outcome", "checkpoints", "cards", "export", "growth", "plan"),
        *("patch", "modeling", "texts", "options", "folders"),
    },
    "__main__": {"cli"},
    "__init__": {
        *("architectures", "attention", "cards", "export", "growth", "pages", "patch", "plan", "report"),
        *("trainer", "trim", "views"),
    },
}
TRAVELLING = ("adapters", "architectures", "attention", "configuration", "folders", "modeling", "widths")


def _imports(path):
    inside, outside = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1, f"{path.name} reaches above the package"
            inside |= {node.module} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            outside.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
    return inside, outside


def test_every_file_has_a_place():
    assert {path.stem for path in (ROOT / "hf_growattn").glob("*.py")} == set(MAY_IMPORT)


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_imports_point_one_way(name):
    inside, _ = _imports(ROOT / "hf_growattn" / f"{name}.py")
    assert inside <= MAY_IMPORT[name]


@pytest.mark.parametrize("name", TRAVELLING)
def test_travelling_files_need_torch_and_transformers_only(name):
    inside, outside = _imports(ROOT / "hf_growattn" / f"{name}.py")
    assert inside <= set(TRAVELLING)
    assert outside - set(sys.stdlib_module_names) <= {"torch", "transformers"}


def test_files_are_read_in_one_sitting():
    for path in (ROOT / "hf_growattn").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 400, path.name

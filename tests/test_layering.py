"""Imports between rooms point one way, and the room that travels with a checkpoint is self-contained."""

import ast
import graphlib
import sys

import pytest
from conftest import ROOT

PACKAGE = ROOT / "hf_growattn"
# From the lowest: a room imports those before it.
ROOMS = ("model", "growable", "report", "measure", "grow", "interop", "training", "cli")
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
TRAVELLING = sorted(path.stem for path in (PACKAGE / "model").glob("*.py") if path.name != "__init__.py")


def imports_of(file) -> tuple[set[str], set[str]]:
    """What a file imports of the package, as "room/file" or "room", and the packages that it imports from outside."""
    inside, outside = set(), set()
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            outside.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = file.parents[node.level - 1].parts + tuple(filter(None, (node.module or "").split(".")))
            places = [(*base, alias.name) for alias in node.names]
            known = [place for place in places if (PACKAGE.joinpath(*place)).with_suffix(".py").is_file()]
            inside |= {"/".join(place) for place in known or [base] if place}
    return inside, outside


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_room_imports_what_lies_below_it(file):
    room = file.parts[0].removesuffix(".py")
    below = ROOMS[: ROOMS.index(room) + 1] if room in ROOMS else ROOMS
    assert {place.split("/")[0] for place in imports_of(file)[0]} <= set(below)


def test_no_imports_go_in_circles():
    graph = {"/".join(file.with_suffix("").parts): imports_of(file)[0] for file in FILES}
    assert list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("name", TRAVELLING)
def test_what_travels_needs_torch_and_transformers_only(name):
    inside, outside = imports_of((PACKAGE / "model" / f"{name}.py").relative_to(PACKAGE))
    assert inside <= {f"model/{other}" for other in TRAVELLING}
    assert outside - set(sys.stdlib_module_names) <= {"torch", "transformers"}


def test_files_are_read_in_one_sitting():
    for file in FILES:
        assert len((PACKAGE / file).read_text().splitlines()) <= 400, file

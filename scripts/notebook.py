"""Make `scripts/tour.ipynb` of `scripts/tour.py`: `python scripts/notebook.py`, after every change of the tour.

The notebook stands alone: its first cells install this library where it is not, and hold what the tour imports from
`scripts/texts.py` and `scripts/passages.py`. A cell that ends by printing an object shows it as a notebook does.
Outputs are left out.
"""

import json
import re
from pathlib import Path

SCRIPTS = Path(__file__).parent
_OWN_IMPORT = r"^from (texts|passages) import .*\n"
_INSTALL = """
import importlib.util

if importlib.util.find_spec("hf_growattn") is None:
    %pip install --quiet hf_growattn matplotlib
"""


def cells(source: str, helpers: list[str]) -> list[tuple[str, str]]:
    """The cells of a script with `# %%` marks, as (type, text), the helpers that it imports first."""
    found = [("code", _INSTALL)]
    for helper in helpers:
        own = re.sub(r'\A""".*?"""', "", helper, flags=re.DOTALL)
        found.append(("code", re.sub(_OWN_IMPORT, "", own, flags=re.MULTILINE)))
    _, *parts = re.split(r"^# %%", source, flags=re.MULTILINE)
    for part in parts:
        head, _, text = part.partition("\n")
        if head.strip() == "[markdown]":
            found.append(("markdown", re.sub(r"^# ?", "", text, flags=re.MULTILINE)))
        else:
            text = re.sub(_OWN_IMPORT, "", text, flags=re.MULTILINE)
            found.append(("code", re.sub(r"^print\((\w+)\)\s*\Z", r"\1", text, flags=re.MULTILINE)))
    title = next(place for place, (kind, _) in enumerate(found) if kind == "markdown")
    found.insert(0, found.pop(title))  # what it is about comes before what it installs
    return [(kind, text.strip()) for kind, text in found]


def notebook(source: str, helpers: list[str]) -> str:
    """The notebook as JSON, format 4.5."""
    made = [
        {"cell_type": kind, "id": f"cell-{place}", "metadata": {}}
        | ({"execution_count": None, "outputs": []} if kind == "code" else {})
        | {"source": text.splitlines(keepends=True)}
        for place, (kind, text) in enumerate(cells(source, helpers))
    ]
    about = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return json.dumps({"cells": made, "metadata": about, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def tour() -> str:
    """The notebook of the tour as it is now."""
    names = ("tour.py", "texts.py", "passages.py")
    source, *helpers = ((SCRIPTS / name).read_text(encoding="utf-8") for name in names)
    return notebook(source, helpers)


if __name__ == "__main__":
    (SCRIPTS / "tour.ipynb").write_text(tour(), encoding="utf-8")

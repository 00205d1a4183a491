"""Tasks of the lm-evaluation-harness: by name, from its .yaml files, or from JSON lines."""

import json
import logging
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from transformers import set_seed

from ..interop.checkpoints import first_line

SEED = 1234  # the harness's own

# What the harness makes of lines of each type, by its own metrics for that, and which keys it reads.
_TASKS = {
    "loglikelihood": {"doc_to_text": "context", "doc_to_target": "{{' ' + continuation}}"},
    "multiple_choice": {"doc_to_text": "query", "doc_to_choice": "choices", "doc_to_target": "gold"},
}
_KEYS = {"loglikelihood": ("context", "continuation"), "multiple_choice": ("query", "choices", "gold")}


class _Refused(BaseException):
    """Code from the Hub, of a metric that a task wants; the harness goes on after any Exception."""


def line_task(path: Path) -> dict:
    """The harness's config of a task in JSON lines."""
    from datasets import Dataset

    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except ValueError as error:
        raise ValueError(f"{path} is not JSON lines: {error}") from error
    kind, *others = [_type_of(row) for row in rows] or [""]
    for number, found in enumerate((kind, *others), 1):
        if not found or found != kind:
            known = " or ".join(", ".join(keys) for keys in _KEYS.values())
            raise ValueError(
                f"{path}, example {number}: it has to be as --help shows, and as the first one; each line has to be an "
                f"object with the keys {known}."
            )
    data = Dataset.from_list([{key: row[key] for key in _KEYS[kind]} for row in rows])
    # No dataset_path of json: its reader takes texts that look like dates for dates.
    source = dict(custom_dataset=lambda **_: {"test": data}, test_split="test")
    return dict(task=path.stem, output_type=kind, **source, **_TASKS[kind])


def _type_of(row) -> str:
    """Of which type a line is; "" if it is of none."""
    match row:
        case {"context": str(), "continuation": str(text)} if text:
            return "loglikelihood"
        case {"query": str(), "choices": [*texts], "gold": gold} if type(gold) is int and gold in range(len(texts)):
            return "multiple_choice" if all(isinstance(text, str) and text for text in texts) else ""
    return ""


def load_tasks(names: list[str], trust: bool) -> dict:
    """Load tasks by the harness: a dict of its tasks and groups.

    Raises:
        ImportError: the harness is not installed.
        ValueError: a task is unknown, its data cannot be had, or it runs code.
    """
    if find_spec("lm_eval") is None:
        raise ImportError("Tasks need the lm-evaluation-harness: pip install 'hf_growattn[evaluate]', or lm-eval.")
    import evaluate

    def refuse(name, *_, **__):
        raise _Refused(f"The metric {name} is code from the Hub: say --trust_remote_code to run it.")

    if not trust:
        evaluate.load = refuse
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from lm_eval.tasks import TaskManager

    files = {name: Path(name) for name in names if Path(name).suffix in (".yaml", ".jsonl")}
    for path in files.values():
        if not path.is_file():
            raise ValueError(f"There is no file {path}.")
    manager = TaskManager(include_defaults=len(files) < len(names))  # to read the names takes a while
    loaded: dict[str, dict] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        if name not in files and name not in manager.all_tasks:
            near = get_close_matches(name, manager.all_tasks, n=5)
            meant = f" Did you mean {', '.join(near)}?" if near else " `lm-eval ls tasks` lists all."
            raise ValueError(f"The harness knows no task {name}.{meant} Files end in .yaml or .jsonl.")
        spec = line_task(Path(name)) if Path(name).suffix == ".jsonl" else name
        try:
            parts = manager.load([spec])
        except _Refused as refused:
            raise ValueError(str(refused)) from None
        except Exception as error:  # of the harness, datasets, the Hub or its HTTP library
            raise ValueError(
                f"The task {name} cannot be loaded. Harness tasks take their data from the Hub; without a network, use "
                f"a file (--help shows its form).\n{first_line(error)}"
            ) from error
        for task in parts["tasks"]:
            if task in loaded["tasks"]:
                raise ValueError(f"Two tasks are called {task}: name one of them, or rename a file.")
        for kind, part in parts.items():
            loaded[kind].update(part)
    unsafe = [name for name, task in loaded["tasks"].items() if getattr(task, "UNSAFE_CODE", False)]
    if unsafe:
        raise ValueError(f"{', '.join(unsafe)}: the harness would run code that the model writes; use lm-eval itself.")
    return loaded


def run(model, tokenizer, loaded: dict, batch_size: int, limit: int | None) -> dict[tuple[str, str], tuple]:
    """Run what `load_tasks` gave.

    Returns:
        For each task and metric its value, the function of a list that gave it, that list, and what tells its examples
        from others; the three are None for a group of tasks.
    """
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    set_seed(SEED)
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEED)
    harness_model = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)
    done = evaluate(harness_model, loaded, limit=limit, bootstrap_iters=0)
    figures: dict[tuple[str, str], tuple] = {}
    for name, results in done["results"].items():
        for key, value in results.items():
            metric, _, chosen_by = key.partition(",")
            if not chosen_by or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            samples = [s for s in done["samples"].get(name, []) if s["filter"] == chosen_by and metric in s]
            samples.sort(key=lambda sample: sample["doc_id"])
            figure = (value, None, None, None)
            if samples and metric in loaded["tasks"][name].aggregation():
                items, documents = [sample[metric] for sample in samples], [sample["doc_hash"] for sample in samples]
                figure = (value, loaded["tasks"][name].aggregation()[metric], items, tuple(documents))
            figures[name, metric if chosen_by == "none" else f"{metric}, {chosen_by}"] = figure
    return figures

"""Evaluation, by its command and in the library: figures are those of a plain loop, and errors name the fix."""

import importlib.util
import json
import math
import os
import random
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from families import VOCABULARY, word_tokenizer
from hub_server import Hub, Repository
from test_export import llama, widened
from transformers import AutoModelForCausalLM

from hf_growattn import export_model
from hf_growattn.__main__ import main
from hf_growattn.cli import evaluation, harness
from hf_growattn.interop.checkpoints import load_config, load_tokenizer
from hf_growattn.training.recipe import Training

BLOCK = 64  # what these models read at once; the text is longer
TEXT = " ".join(f"w{random.Random(1).randrange(2, VOCABULARY) if i % 7 else 2 + i % 90}" for i in range(301))
YAML = """
task: from_yaml
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{path}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: choices
doc_to_target: gold
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs the lm-evaluation-harness: pip install lm-eval"
)


def questions() -> list[dict]:
    draw = random.Random(0)
    words = [f"w{index}" for index in range(2, VOCABULARY)]
    return [
        {"query": " ".join(draw.choices(words, k=5)), "choices": draw.sample(words, 3), "gold": draw.randrange(3)}
        for _ in range(24)
    ]


def write_lines(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A stock model, the same grown and exported, a text, and tasks in both kinds of file."""
    folder = tmp_path_factory.mktemp("given")
    tokenizer = word_tokenizer()
    model = llama(max_position_embeddings=BLOCK)
    model.save_pretrained(folder / "base")
    model = widened(model)
    model.save_pretrained(folder / "grown")
    for name in ("base", "grown"):
        tokenizer.save_pretrained(folder / name)
    export_model(model, folder / "exported", tokenizer=tokenizer)
    for file in (folder / "grown").rglob("*.py"):
        file.write_text("raise SystemExit('The code of the checkpoint ran.')")
    (folder / "text.txt").write_text(TEXT)
    lines = write_lines(folder / "choose.jsonl", questions())
    (folder / "from.yaml").write_text(YAML.format(path=lines))
    told = [{"context": row["query"], "continuation": row["choices"][0]} for row in questions()]
    write_lines(folder / "go_on.jsonl", told)
    return folder


def evaluate(folder, *options, **more) -> dict:
    command = [sys.executable, "-m", "hf_growattn", "evaluate", *options, "--json"]
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    settings["PYTHONPATH"] = str(ROOT)
    settings |= more
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ids_of(text: str) -> list[int]:
    return word_tokenizer()(text, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def nats(model, context: list[int], following: list[int]) -> float:
    logits = model(torch.tensor([context + following])).logits[0, len(context) - 1 : -1]
    return F.cross_entropy(logits, torch.tensor(following), reduction="sum").item()


def choice_of(model, row: dict) -> int:
    scores = [nats(model, ids_of(row["query"]), ids_of(choice)) for choice in row["choices"]]
    return scores.index(min(scores))


@needs_harness
def test_stock_grown_and_exported_side_by_side(given):
    names = ["base", "grown", "exported"]
    tasks = ["choose.jsonl", "from.yaml", "go_on.jsonl"]
    told = evaluate(given, "grown", "exported", "--base", "base", "--text", "text.txt", "--task", *tasks)
    assert list(told["models"]) == names
    for name in names:
        model, figures = AutoModelForCausalLM.from_pretrained(given / name).eval(), told["models"][name]
        right = [choice_of(model, row) == row["gold"] for row in questions()]
        for task in ("choose", "from_yaml"):
            acc = figures[task]["acc"]
            assert acc["value"] == pytest.approx(sum(right) / len(right), abs=1e-12)
            expected = math.sqrt(acc["value"] * (1 - acc["value"]) / (len(right) - 1))
            assert acc["standard_error"] == pytest.approx(expected, rel=1e-6)
        loss = sum(nats(model, ids_of(row["query"]), ids_of(row["choices"][0])) for row in questions()) / len(right)
        assert figures["go_on"]["perplexity"]["value"] == pytest.approx(math.exp(loss), rel=1e-4)  # fp32, exponentiated
    grown, exported = (told["models"][name]["text.txt"]["nats a token"] for name in names[1:])
    assert grown["difference"] == pytest.approx(exported["difference"], abs=1e-5) and grown["difference"] != 0
    assert 0 < grown["difference_standard_error"] and told["models"]["grown"]["model"]["parameters"]["difference"] > 0


@torch.no_grad()
@pytest.mark.parametrize("prefix", [[], [1]])
@pytest.mark.parametrize("length", [9, 32, 151])
def test_every_token_of_a_text_is_scored_once(prefix, length):
    """A token's context starts with its block: half a block before the block's new tokens."""
    model, ids, block = llama(), ids_of(TEXT)[:length], 32
    expected, done, start = [], 0, 0
    body = min(block - len(prefix), length)
    while done < length:
        logits = model(torch.tensor([prefix + ids[start : start + body]])).logits[0]
        seen = len(prefix) - 1 - start  # where the prediction of a token lies
        expected += [
            F.cross_entropy(logits[t + seen], torch.tensor(ids[t])).item()
            for t in range(max(done, 0 if prefix else 1), start + body)
        ]
        done, start = start + body, min(start + body // 2, length - body)
    row = {"input_ids": prefix + ids, "labels": prefix + ids}
    scored = evaluation.block_nats(model, [row], *(prefix or [None]), block, batch_size=4)
    assert sum(count for _, count in scored) == len(expected) == length - (not prefix)
    assert sum(total for total, _ in scored) == pytest.approx(sum(expected), rel=1e-5)  # fp32


def test_other_tokenizers_compare_by_bytes():
    model, tokenizer = llama(), word_tokenizer()
    ids = [*ids_of(TEXT), tokenizer.eos_token_id]
    rows, training = [{"input_ids": ids, "labels": ids}], Training("unused")
    sizes = evaluation.sizes_of([{"text": TEXT}], training)
    one = evaluation.text_figures(model, tokenizer, rows, sizes, BLOCK, 8)
    other = {name: evaluation.Figure(figure.value + 1, figure.without, "other") for name, figure in one.items()}
    assert one["nats a byte"].value * len(TEXT) == pytest.approx(one["nats a token"].value * 301)  # of 302, "<eos>" too
    assert one["nats a word"].value == pytest.approx(one["nats a token"].value)
    assert evaluation.difference(other["nats a token"], one["nats a token"], "nats a token") is None
    more, error = evaluation.difference(other["nats a byte"], one["nats a byte"], "nats a byte")
    assert more == pytest.approx(1) and error == pytest.approx(one["nats a byte"].error * math.sqrt(2))


def test_errors_of_means_and_of_paired_differences():
    """The jackknife of a mean is the textbook's standard error, where each item is a group."""
    items = torch.randn(2, 50, dtype=torch.float64)
    items[1] += 10 * items[0]
    one, other = (evaluation.Figure.of(mean(row), mean, row, "same") for row in items.tolist())
    assert one.error == pytest.approx((items[0].std() / math.sqrt(50)).item())
    assert other.minus(one)[1] == pytest.approx(((items[1] - items[0]).std() / math.sqrt(50)).item())
    many = torch.randn(3000, dtype=torch.float64)
    grouped = evaluation.Figure.of(mean(many.tolist()), mean, many.tolist(), "same")
    assert grouped.error == pytest.approx((many.std() / math.sqrt(3000)).item(), rel=0.2)  # 200 groups: 5 % noise


def mean(items: list) -> float:
    return sum(items) / len(items)


def test_models_that_cannot_be_loaded(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere is not a folder here.*Check the name"):
        load_config(str(tmp_path / "nowhere"), False)
    with pytest.raises(ValueError, match=r"There is no checkpoint in .*config\.json"):
        load_config(str(tmp_path), False)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="merge_and_unload"):
        load_config(str(tmp_path), False)
    told = {"model_type": "somebodys", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    (tmp_path / "code.py").write_text("raise SystemExit('The code of the checkpoint ran.')")
    with pytest.raises(ValueError, match="comes with code of its own"):
        load_config(str(tmp_path), False)
    llama().save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="has no tokenizer that can be loaded: save the one of its base model"):
        load_tokenizer(str(tmp_path / "bare"), False)


def test_a_revision_is_that_of_the_model(given, tmp_path):
    def files(folder) -> dict:
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    with Hub("hf_token") as hub:
        hub.repositories["me/model"] = repository = Repository(False)
        repository.commit("main", files(given / "base"))
        repository.commit("wider", files(given / "exported"))
        there = dict(HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0", HF_HOME=str(tmp_path))
        words = ["me/model", "--text", str(given / "text.txt"), "--base", str(given / "base")]
        told = [evaluate(given, *words, *more, **there)["models"] for more in ((), ("--model_revision", "wider"))]
    sizes = [figures["me/model"]["model"]["parameters"]["value"] for figures in told]
    base, wider = (AutoModelForCausalLM.from_pretrained(given / name).num_parameters() for name in ("base", "exported"))
    assert sizes == [base, wider] and base < wider
    assert told[1][str(given / "base")]["model"]["parameters"]["value"] == base


@pytest.mark.parametrize("more", [["b"], ["--base", "a"]])
def test_a_revision_of_several_models_is_refused(capsys, monkeypatch, more):
    words = ["a", *more, "--text", "text.txt", "--model_revision", "old"]
    monkeypatch.setattr(sys, "argv", ["growattn", "evaluate", *words])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capsys.readouterr().err.count("Error: Of which model is old the revision?") == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?"}, "each line has to be an object with the keys context, continuation or query"),
        ({"query": "a", "choices": ["b", "c"], "gold": 2}, "example 1: it has to be as --help shows"),
        ({"context": "a", "continuation": ""}, "example 1"),
    ],
)
def test_lines_that_are_no_task(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        harness.line_task(write_lines(tmp_path / "task.jsonl", [row]))


def test_without_the_harness(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"pip install 'hf_growattn\[evaluate\]'"):
        harness.load_tasks(["arc_easy"], False)


@needs_harness
def test_tasks_that_cannot_be_loaded(monkeypatch, given, tmp_path):
    """The index of the harness's names is cut to one folder: all of them take seconds to read."""
    from lm_eval.tasks._index import TaskIndex

    load = harness.load_tasks
    monkeypatch.setattr(TaskIndex, "_iter_yaml_files", staticmethod(lambda root: root.glob("arc/*.yaml")))
    with pytest.raises(ValueError, match=r"knows no task arc_esay\. Did you mean arc_easy"):
        load(["arc_esay"], False)
    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"arc_easy cannot be loaded.*without a network, use a file"):
        load(["arc_easy"], False)
    with pytest.raises(ValueError, match=r"There is no file nowhere\.jsonl"):
        load(["nowhere.jsonl"], False)
    with pytest.raises(ValueError, match="Two tasks are called choose"):
        load([str(given / "choose.jsonl")] * 2, False)
    told = YAML.format(path="-").replace("metric: acc,", "metric: somebodys, hf_evaluate: true,")
    (tmp_path / "scored.yaml").write_text(told)
    with pytest.raises(ValueError, match="somebodys is code from the Hub: say --trust_remote_code"):
        load([str(tmp_path / "scored.yaml")], False)


def unreachable(*_, **__):
    raise ConnectionError("Couldn't reach the Hub")

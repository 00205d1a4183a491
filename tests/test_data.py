"""Data of every kind, joined, split and refused, as the commands read them."""

import json
from pathlib import Path

import datasets
import pytest
from families import build, word_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from hf_growattn.cli.data import TextData, first_rows, load_data, prepare_rows, read_rows
from hf_growattn.cli.measuring import prepare_growth

SMALL = {"max_length": 16, "batch_size": 5}
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }} <eos>"
    "{% endgeneration %}{% else %}{{ 'w90 ' + message.content + ' w91 ' }}{% endif %}{% endfor %}"
)
START = {"role": "user", "content": "w2 w3"}


def words(start: int, count: int = 12) -> str:
    ids = [2 + start % 90]
    for _ in range(count - 1):
        ids.append(2 + 5 * ids[-1] % 95)
    return " ".join(f"w{index}" for index in ids)


TEXTS = [words(start) for start in range(60)]
PAIRS = [{"prompt": "w9 " + words(start, 4), "completion": " " + words(start + 7, 5)} for start in range(60)]
CHATS = [{"messages": [START, {"role": "assistant", "content": words(start, 6)}]} for start in range(60)]


def chat_tokenizer():
    tokenizer = word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model whose tokenizer has a chat template, and the same rows in every kind of file."""
    folder = tmp_path_factory.mktemp("data")
    chat_tokenizer().save_pretrained(folder / "model")
    build("llama-2").save_pretrained(folder / "model")
    rows = datasets.Dataset.from_dict({"text": TEXTS, "number": list(range(60))})
    rows.to_csv(folder / "rows[1].csv")  # a pattern, unless it is escaped
    rows.to_csv(folder / "rows.csv")
    rows.to_json(folder / "rows.jsonl")
    rows.to_json(folder / "rows.json", lines=False)
    rows.to_parquet(folder / "rows.parquet")
    rows.rename_column("text", "said").to_csv(folder / "other.csv")
    for name, entries in (("pairs", PAIRS), ("chats", CHATS)):
        datasets.Dataset.from_list(entries).to_json(folder / f"{name}.jsonl")
    (folder / "rows.txt").write_text("\n".join(TEXTS))
    for name in ("texts/a", "texts/b", "tables", "mixed", "nothing"):
        (folder / name).mkdir(parents=True)
    (folder / "texts/a/one.txt").write_text(" ".join(TEXTS[::2]))
    (folder / "texts/b/two.txt").write_text(" ".join(TEXTS[1::2]))
    rows.select(range(40)).to_csv(folder / "tables" / "train.csv")
    rows.select(range(40, 60)).to_csv(folder / "tables" / "test.csv")
    (folder / "mixed/a.txt").write_text("w1 w2")
    (folder / "mixed/b.csv").write_text("text\nw1 w2")
    return folder


def data_of(folder: Path, names: str, **options) -> TextData:
    return TextData(f"{folder}/model", [f"{folder}/{name}" for name in names.split()], **SMALL | options)


@pytest.mark.parametrize(
    "names, options, count",
    [
        ("rows.txt", {}, 45),  # 60 x 12 words in rows of 16
        ("texts", {}, 46),
        ("texts/a/one.txt texts/b/two.txt", {}, 46),
        ("rows.csv", {}, 60),
        ("rows[1].csv rows.csv", {}, 120),
        ("rows.json", {}, 60),
        ("rows.json rows.jsonl", {}, 120),
        ("rows.parquet", {}, 60),
        ("other.csv", {"text_field": "said"}, 60),
        ("pairs.jsonl", {}, 60),
        ("chats.jsonl", {}, 60),
        ("tables", {}, 40),
        ("tables", {"split": "test"}, 20),
    ],
)
def test_what_is_measured_is_what_sft_trains(folder, names, options, count):
    """The rows that are drawn are those that TRL's own trainer makes of the same data."""
    data, tokenizer = data_of(folder, names, **options), chat_tokenizer()
    rows, test = load_data(data)
    is_text = "txt" in names or names == "texts"
    chosen = {"packing": is_text, "packing_strategy": "wrapped" if is_text else "bfd", "max_length": 16}
    chosen["dataset_text_field"] = options.get("text_field", "text")
    config = SFTConfig("unused", **chosen, max_steps=2, use_cpu=True, bf16=False)
    trainer = SFTTrainer(build("llama-2"), config, train_dataset=rows, processing_class=tokenizer)
    trained = {(tuple(row["input_ids"]), tuple(row["labels"])) for row in trainer.train_dataset}
    prepared = prepare_rows(data, rows, test, tokenizer)
    batches = prepared.draw_batches(40, seed=0)
    drawn = {
        (tuple(ids[mask].tolist()), tuple(labels[mask].tolist()))
        for batch in batches
        if "attention_mask" in batch
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"].bool())
    }
    if not is_text or names == "rows.txt":  # otherwise they begin elsewhere in another order
        assert drawn <= trained
    held_out = 20 if names == "tables" else max(count // 10, 8)
    assert (len(prepared.train), len(prepared.test)) == (count - held_out * (test is None), held_out)
    assert sum(len(batch["input_ids"]) for batch in batches) == len(prepared.train)


def test_a_growth_reads_rows_from_all_over_the_data():
    rows = datasets.Dataset.from_dict({"number": range(400)})
    first, other = (first_rows(rows, 20, seed)["number"] for seed in (0, 1))
    assert len({*first}) == 20 and max(first) > 200 and [*first] != [*other]
    assert len(first_rows(rows, 500, 0)) == 400


def test_rows_are_held_out(folder):
    data = data_of(folder, "rows.csv")
    prepared = prepare_rows(data, *load_data(data), word_tokenizer())
    assert (len(prepared.train), len(prepared.test)) == (52, 8)
    assert {row for part in (prepared.train, prepared.test) for row in part["number"]} == set(range(60))
    data = data_of(folder, "rows.csv", batch_size=100)  # more than there are rows: two batches all the same
    prepared = prepare_rows(data, *load_data(data), word_tokenizer())
    assert [len(batch["input_ids"]) for batch in prepared.draw_batches(4)] == [26, 26]


BAD = {
    "broken.jsonl": ('{"text": "w1"}\n{"text": w2}\n', ""),
    "binary.txt": (b"\xff\xfe\x00\xff", "UnicodeDecodeError"),
    "empty.txt": ("", "ValueError: The data give 0 rows of at most 16 tokens, too few"),
    "empty.jsonl": ("", "StopIteration: there are no rows"),
    "ragged.csv": ("text\nw1\nw2,w3,w4\n", "Expected 1 fields in line 3, saw 3"),
    "columns.csv": ("question,reply\nw1,w2\n", "KeyError: 'text'. The columns are question, reply. (See --text-field"),
    "gaps.jsonl": (json.dumps({"text": None}) + '\n{"text": "w1 w2"}', ""),
    "short.txt": (
        " ".join(TEXTS[:3]),
        "The data give 3 rows of at most 16 tokens, too few to hold any out",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_datasets_and_trl_say_is_passed_on_with_the_name(folder, tmp_path, name):
    content, said = BAD[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"{name} cannot be read by TRL\. ") as raised:
        read_rows(TextData(f"{folder}/model", [f"{tmp_path}/{name}"], **SMALL))
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "names, options, said",
    [
        ("rows.txt rows.csv", {}, "files of several kinds cannot be read together"),
        ("mixed", {}, "files of several kinds cannot be read together"),
        ("rows.csv tables", {}, "name files, or one folder or Hub id alone"),
        ("rows.csv other.csv", {}, "same columns"),
        ("nothing", {}, "nothing"),
        ("model", {}, "it is the folder of a model: name MODEL first, then DATA"),
        ("gone.csv", {}, "gone.csv"),
        ("rows.csv", {"split": "validation"}, "validation"),
        ("rows.csv", {"max_length": 4096}, "This model reads 128 tokens at once: choose --max-length from 2 to 128"),
        ("rows.csv", {"max_length": 0}, "choose --max-length from 2 to 128"),
    ],
)
def test_data_that_cannot_be_joined_or_found_are_refused(folder, names, options, said):
    with pytest.raises(ValueError) as raised:
        read_rows(data_of(folder, names, **options))
    assert said in str(raised.value)


def test_a_name_of_the_hub_that_does_not_load(folder, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"me/nowhere cannot be read by TRL\. "):
        read_rows(TextData(f"{folder}/model", ["me/nowhere"]))


def test_a_tokenizer_must_know_chats(folder, tmp_path):
    build("llama-2").save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"chats\.jsonl cannot .*chat_template is not set"):
        read_rows(TextData(f"{tmp_path}", [f"{folder}/chats.jsonl"], **SMALL))


def test_a_tokenizer_with_one_token_more_than_the_model_is_refused(folder, tmp_path):
    config = AutoConfig.from_pretrained(folder / "model")
    config.vocab_size = 96
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "rows.csv").write_text("text\n" + "w2 w96\n" * 40)
    with pytest.raises(ValueError, match="a token 96, which the model does not know"):
        read_rows(TextData(f"{tmp_path}", [f"{tmp_path}/rows.csv"], **SMALL))


@pytest.mark.parametrize("count, rows", [(3, 5), (2, 20)])
def test_a_growth_reads_the_batches_that_were_asked_for(count, rows, folder):
    grower, batches = prepare_growth(data_of(folder, "rows.csv", batch_size=rows), 2000, count, "bfloat16")
    assert [len(batch["input_ids"]) for batch in batches] == [rows] * count
    assert (grower.config.budget, str(grower.model.dtype)) == (2000, "torch.bfloat16")

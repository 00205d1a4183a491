"""Data of every kind, joined, split and refused, as the commands read them."""

import json
from pathlib import Path

import datasets
import pytest
from families import build, word_tokenizer
from trl import SFTConfig, SFTTrainer

from hf_growattn.cli.data import load_data, prepare_rows, read_rows
from hf_growattn.cli.measuring import prepare_growth
from hf_growattn.cli.options import read_recipe

SMALL = "--growth_batches 4 --per_device_train_batch_size 5 --max_length 16 --budget 0.05".split()
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


def recipe_of(folder: Path, names: str, options: str = ""):
    return read_recipe(
        "measure", [f"{folder}/model", *(f"{folder}/{n}" for n in names.split()), *SMALL, *options.split()]
    )


@pytest.mark.parametrize(
    "names, options, count",
    [
        ("rows.txt", "", 45),  # 60 x 12 words in rows of 16
        ("texts", "", 46),
        ("texts/a/one.txt texts/b/two.txt", "", 46),
        ("rows.csv", "", 60),
        ("rows[1].csv rows.csv", "", 120),
        ("rows.json", "", 60),
        ("rows.json rows.jsonl", "", 120),
        ("rows.jsonl", "--packing --packing_strategy wrapped", 49),  # an end of text for each row
        ("rows.parquet", "", 60),
        ("other.csv", "--dataset_text_field said", 60),
        ("pairs.jsonl", "", 60),
        ("chats.jsonl", "--assistant_only_loss", 60),
        ("tables", "", 40),
    ],
)
def test_what_is_measured_is_what_sft_trains(folder, names, options, count):
    """The rows that are drawn are those that TRL's own trainer makes of the same data."""
    recipe = recipe_of(folder, names, options)
    training, tokenizer = recipe.training, chat_tokenizer()
    rows, test = load_data(recipe)
    chosen = {key: getattr(training, key) for key in ("packing", "packing_strategy", "max_length")}
    chosen |= dict(assistant_only_loss="assistant" in options, dataset_text_field=training.dataset_text_field)
    config = SFTConfig("unused", **chosen, max_steps=2, use_cpu=True, bf16=False)
    trainer = SFTTrainer(build("llama-2"), config, train_dataset=rows, processing_class=tokenizer)
    trained = {(tuple(row["input_ids"]), tuple(row["labels"])) for row in trainer.train_dataset}
    prepared = prepare_rows(rows, test, tokenizer, training)
    batches = prepared.draw_batches(40, seed=0)
    drawn = {
        (tuple(ids[mask].tolist()), tuple(labels[mask].tolist()))
        for batch in batches
        if "attention_mask" in batch
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"].bool())
    }
    if training.packing_strategy != "wrapped" or names == "rows.txt":  # otherwise they begin elsewhere in another order
        assert drawn <= trained
    held_out = 20 if names == "tables" else max(count // 10, 8)
    assert (len(prepared.train), len(prepared.test)) == (count - held_out * (test is None), held_out)
    assert sum(len(batch["input_ids"]) for batch in batches) == len(prepared.train)


def test_a_mixture_as_trl_reads_it(folder, tmp_path):
    parts = [f"  - {{path: {kind}, data_files: {folder}/rows.{kind}, split: train, columns: [text], fraction: 0.5}}"
             for kind in ("json", "parquet")]  # fmt: skip
    lines = [f"model_name_or_path: {folder}/model", "max_length: 16", "test_split_size: 0.25", "datasets:", *parts]
    (tmp_path / "mixture.yaml").write_text("\n".join(lines))
    recipe = read_recipe("measure", ["--config", str(tmp_path / "mixture.yaml"), "--growth_batches", "2"])
    train, test = load_data(recipe)
    assert (len(train), len(test)) == (90, 30) and recipe.dataset == "json, parquet"
    assert train["text"] == load_data(recipe)[0]["text"]  # every process must split alike
    grower, batches = prepare_growth(recipe)
    assert len(batches) == 2 and grower.measure(batches).loss_before > 0


def test_rows_are_held_out(folder):
    recipe = recipe_of(folder, "rows.csv")
    rows, _ = load_data(recipe)
    prepared = prepare_rows(rows, None, word_tokenizer(), recipe.training)
    assert (len(prepared.train), len(prepared.test)) == (52, 8)
    assert {row for part in prepared[:2] for row in part["number"]} == set(range(60))


def test_only_replies_are_trained(folder):
    recipe = recipe_of(folder, "chats.jsonl", "--assistant_only_loss")
    prepared = prepare_rows(*load_data(recipe), chat_tokenizer(), recipe.training)
    for row in list(prepared.train)[:5]:
        trained = [label for label in row["labels"] if label != -100]
        assert row["labels"][:4] == [-100] * 4 and trained == row["input_ids"][4:]


BAD = {
    "broken.jsonl": ('{"text": "w1"}\n{"text": w2}\n', ""),
    "binary.txt": (b"\xff\xfe\x00\xff", "UnicodeDecodeError"),
    "binary.csv": (b"\xff\xfe\x00\xff", "UnicodeDecodeError"),
    "empty.txt": ("", "ValueError: The data give 0 rows of at most 16 tokens, too few"),
    "empty.jsonl": ("", "StopIteration: there are no rows"),
    "empty.csv": ("text\n", "no data"),
    "ragged.csv": ("text\nw1\nw2,w3,w4\n", "Expected 1 fields in line 3, saw 3"),
    "columns.csv": ("question,reply\nw1,w2\n", "KeyError: 'text'. The columns are question, reply. (See TRL's"),
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
        prepare_growth(read_recipe("measure", [f"{folder}/model", f"{tmp_path}/{name}", *SMALL]))
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "names, options, said",
    [
        ("rows.txt rows.csv", "", "files of several kinds cannot be read together"),
        ("mixed", "", "files of several kinds cannot be read together"),
        ("rows.csv tables", "", "name files, or one folder or Hub id alone"),
        ("rows.csv other.csv", "", "same columns"),
        ("nothing", "", "nothing"),
        ("model", "", "it is the folder of a model: name MODEL first, then DATA"),
        ("gone.csv", "", "gone.csv"),
        ("rows.csv", "--dataset_test_split validation", "validation"),
        ("rows.csv", "--dataset_train_split validation", "validation"),
        ("rows.csv", "--max_length 4096", "This model reads 128 tokens at once: choose --max_length from 2 to 128"),
        ("rows.csv", "--max_length 0", "choose --max_length from 2 to 128"),
        ("rows.csv", "--max_length -4", "choose --max_length from 2 to 128"),
        ("rows.csv", "--dataset_streaming", "cannot be streamed"),
    ],
)
def test_data_that_cannot_be_joined_or_found_are_refused(folder, names, options, said):
    with pytest.raises(ValueError) as raised:
        read_rows(recipe_of(folder, names, options))
    assert said in str(raised.value)


def test_a_name_of_the_hub_that_does_not_load(folder, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"me/nowhere cannot be read by TRL\. "):
        read_rows(read_recipe("measure", [f"{folder}/model", "me/nowhere", *SMALL]))


def test_a_tokenizer_must_be_the_models_own_and_know_chats(folder, tmp_path):
    build("llama-2").save_pretrained(tmp_path)
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text("w5 more " * 400)
    with pytest.raises(ValueError, match="save the model's own tokenizer"):
        read_rows(read_recipe("measure", [f"{tmp_path}", f"{tmp_path}/text.txt", *SMALL]))
    with pytest.raises(ValueError, match=r"chats\.jsonl cannot .*chat_template is not set.*--chat_template_path"):
        read_rows(read_recipe("measure", [f"{tmp_path}", f"{folder}/chats.jsonl", *SMALL]))


def test_the_attention_that_was_asked_for_runs(folder):
    grower, _ = prepare_growth(recipe_of(folder, "rows.txt", "--attn_implementation eager --growth_batches 2"))
    assert grower.model.config._attn_implementation == "eager"

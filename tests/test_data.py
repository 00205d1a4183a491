"""Data through the real command line, format by format; and each error that people meet, in one line with its fix."""

import itertools
import json
import logging
from pathlib import Path

import datasets
import pytest
import torch
from conftest import ROOT
from families import build, word_tokenizer
from test_cli import call, only_line
from trl import SFTConfig, SFTTrainer

from hf_growattn.training.data import Data, drawn, prepare_rows, split_rows
from hf_growattn.training.recipe import read

SMALL = "--growth_batches 4 --per_device_train_batch_size 5 --max_length 16 --budget 5%".split()
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model whose tokenizer has a chat template, and the same rows in every kind of file."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer = word_tokenizer()
    tokenizer.save_pretrained(folder / "bare")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    for name in ("bare", "model"):
        build("llama-2").save_pretrained(folder / name)
    rows = datasets.Dataset.from_dict({"text": TEXTS, "number": list(range(60))})
    rows.to_csv(folder / "rows.csv")
    rows.to_csv(folder / "rows.tsv", sep="\t")
    rows.to_json(folder / "rows.jsonl")
    rows.to_json(folder / "rows.json", lines=False)
    rows.to_parquet(folder / "rows.parquet")
    rows.rename_column("text", "said").to_csv(folder / "other.csv")
    for name, entries in (("pairs", PAIRS), ("chats", CHATS)):
        datasets.Dataset.from_list(entries).to_json(folder / f"{name}.jsonl")
    renamed = datasets.Dataset.from_list(PAIRS).rename_columns({"prompt": "question", "completion": "reply"})
    renamed.to_csv(folder / "questions.csv")
    (folder / "rows.txt").write_text("\n".join(TEXTS))
    for name in ("texts/a", "texts/in/b", "tables"):
        (folder / name).mkdir(parents=True)
    for name in ("a/one.txt", "in/b/two.TXT"):
        (folder / "texts" / name).write_text(" ".join(TEXTS[::2] if name[0] == "a" else TEXTS[1::2]))
    rows.select(range(40)).to_csv(folder / "tables" / "train.csv")
    rows.select(range(40, 60)).to_csv(folder / "tables" / "test.csv")
    parts = [f"  - {{path: {folder}/{name}, columns: [text], fraction: 0.5}}" for name in ("rows.csv", "rows.jsonl")]
    recipe = [f"model_name_or_path: {folder}/model", "max_length: 16", "budget: 0.05", "datasets:", *parts]
    (folder / "mixture.yaml").write_text("\n".join(recipe))
    return folder


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # TRL's own setting
@pytest.mark.parametrize(
    "name, options, rows",
    [
        ("rows.txt", "", 46),  # 60 x 12 words and the end of the text, in rows of 16
        ("texts", "", 46),
        ("rows.txt", "--packing False --max_length 128", None),
        ("rows.csv", "", 60),
        ("rows.tsv", "", 60),
        ("rows.json", "", 60),
        ("rows.jsonl", "--packing", None),
        ("rows.jsonl", "--packing --packing_strategy wrapped", 49),  # an end of text for each row
        ("rows.jsonl", "--dataset_streaming", 60),
        ("rows.parquet", "", 60),
        ("other.csv", "--dataset_text_field said", 60),
        ("pairs.jsonl", "", 60),
        ("questions.csv", "--dataset_columns prompt=question completion=reply", 60),
        ("chats.jsonl", "--assistant_only_loss", 60),
        ("tables", "", 40),
    ],
)
def test_what_is_measured_is_what_sft_trains(folder, name, options, rows):
    """The rows that are drawn are among those that TRL's own trainer makes of the same data; then measured for real."""
    given = [str(folder / "model"), str(folder / name), *SMALL, *options.split()]
    recipe = read(given, "")
    data, tokenizer = Data(recipe), word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    if name == "rows.txt" and "False" in options:
        with pytest.raises(ValueError, match="The data give 1 row of"):
            drawn(data, tokenizer, recipe.training, 4)
        return
    seen = {"train_dataset": data.train, "processing_class": tokenizer, "model": build("llama-2")}
    chosen = {key: getattr(recipe.training, key) for key in ("packing", "packing_strategy", "max_length")}
    chosen |= dict(assistant_only_loss="assistant" in options, dataset_text_field=recipe.training.dataset_text_field)
    config = SFTConfig("unused", **chosen, max_steps=2, use_cpu=True, bf16=False)
    trained = {(tuple(row["input_ids"]), tuple(row["labels"])) for row in SFTTrainer(args=config, **seen).train_dataset}
    batches, _ = drawn(data, tokenizer, recipe.training, 40)
    found = {
        (tuple(ids[mask].tolist()), tuple(labels[mask].tolist()))
        for batch in batches
        if "attention_mask" in batch
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"].bool())
    }
    if recipe.training.packing_strategy != "wrapped":  # those begin and end elsewhere in another order
        assert found <= trained
    if rows:
        assert sum(len(batch["input_ids"]) for batch in batches) in (rows, rows // 5 * 5)
    done = call("measure", *given, "--json")
    assert done.exit_code in (0, 3), done.output
    assert json.loads(done.stdout)["loss_before"] > 0


LOSSES = {
    "of the completions": "",
    "of all tokens": "--completion_only_loss False",
    "smoothed": "--label_smoothing_factor 0.1 --loss_type nll",
    "DFT": "--loss_type dft",
}


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # TRL's own settings
@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
def test_the_loss_that_grows_is_the_loss_that_trains(folder, tmp_path, monkeypatch, options):
    """What is measured, and lowered before and in a training, is what TRL's trainer says of the same rows."""
    monkeypatch.setattr("hf_growattn.training.finetuning.reloaded_difference", lambda *_: 0.0)
    given = [str(folder / "model"), str(folder / "pairs.jsonl"), *options.split(), "--max_length", "16"]
    given += "--budget 5% --per_device_train_batch_size 4 --growth_batches 13".split()  # all rows but those held out
    recipe = read(given, "")
    made = prepare_rows(Data(recipe).train, None, word_tokenizer(), recipe.training)

    def trained_on(rows) -> float:
        chosen = {name: getattr(recipe.training, name) for name in ("loss_type", "label_smoothing_factor")}
        config = SFTConfig(
            str(tmp_path), **chosen, per_device_eval_batch_size=4, use_cpu=True, bf16=False, report_to="none",
            dataset_kwargs={"skip_prepare_dataset": True},
        )  # fmt: skip
        trainer = SFTTrainer(
            build("llama-2"), config, train_dataset=rows, eval_dataset=rows, processing_class=word_tokenizer()
        )
        return trainer.evaluate()["eval_loss"]

    drawn_rows = list(
        itertools.islice(prepare_rows(Data(recipe).drawn_from(), None, word_tokenizer(), recipe.training).train, 52)
    )
    done = call("measure", *given, "--json")
    assert done.exit_code in (0, 3), done.output
    expected = trained_on(datasets.Dataset.from_list(drawn_rows))
    assert json.loads(done.stdout)["loss_before"] == pytest.approx(expected, rel=1e-5)
    training = "--learning_rate 1e-30 --max_steps 2 --save_strategy no --eval_strategy no".split()
    done = call("finetune", *given, *training, "-o", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    (growth,) = json.loads(done.stdout)["growths"]
    expected = trained_on(split_rows(made, recipe.training)[0])
    assert growth["growth_batches"][0] == pytest.approx(expected, rel=1e-5)
    lower, higher = growth["growth_batches"][::-1]
    assert lower < higher or ("dft" in options and lower == higher)  # DFT weighs by what its gradient does not follow


def test_masked_tokens_are_not_measured(folder):
    """Of a pair the completion alone has labels, of a chat the replies; all of them where that is asked for."""

    def labels(*options) -> torch.Tensor:
        recipe = read([str(folder / "model"), *options, "--max_length", "16"], "")
        tokenizer = word_tokenizer()
        tokenizer.chat_template = TEMPLATE
        row = prepare_rows(Data(recipe).train, None, tokenizer, recipe.training).train[0]
        return [token for token in row["labels"] if token != -100]

    end = word_tokenizer().eos_token_id
    reply = [int(word[1:]) for word in words(7, 5).split()]
    assert labels(str(folder / "pairs.jsonl")) == [*reply, end]
    assert len(labels(str(folder / "pairs.jsonl"), "--completion_only_loss", "False")) == 11
    assert labels(str(folder / "chats.jsonl"), "--assistant_only_loss") == [int(w[1:]) for w in words(0, 6).split()] + [
        end
    ]
    assert len(labels(str(folder / "chats.jsonl"))) == 11
    chatml = ("--assistant_only_loss", "--chat_template_path", str(ROOT / "scripts" / "recipes" / "chatml.jinja"))
    replies = labels(str(folder / "chats.jsonl"), *chatml)  # its marks are many words here, so that rows are cut
    assert replies == [int(word[1:]) for word in words(0, 3).split()]


def test_a_recipe_names_a_mixture(folder):
    """The same file of options for measuring, growing and training; the command line goes before it."""
    done = call("measure", "--config", folder / "mixture.yaml", "--json", "--growth_batches", 3)
    assert done.exit_code in (0, 3), done.output
    assert "Measuring on 24 rows of at most 16 tokens" in done.stderr
    (folder / "wrong.yaml").write_text("model_name_or_path: m\nmax_lenght: 3\n")
    done = call("measure", "--config", folder / "wrong.yaml")
    assert done.exit_code == 2 and "unknown: --max_lenght 3" in done.stderr


def test_a_dataset_of_the_hub_is_asked_for_as_named(folder, monkeypatch):
    asked = {}

    def load(**how):
        asked.update(how)
        return datasets.DatasetDict({"learn": datasets.Dataset.from_dict({"said": TEXTS})})

    monkeypatch.setattr("hf_growattn.training.data.load_dataset", load)
    options = "--dataset_config english --dataset_revision v2 --dataset_train_split learn --dataset_text_field said"
    done = call("measure", folder / "model", "me/words", *SMALL, *options.split())
    assert done.exit_code in (0, 3), done.output
    assert asked == dict(path="me/words", name="english", revision="v2", streaming=False)
    done = call("measure", folder / "model", "me/words", *SMALL)
    assert "me/words has the splits learn: name them by --dataset_train_split" in only_line(done)


def test_batches_come_from_all_over_a_long_text(tmp_path):
    """Of a text of 95 words, each in a stretch of its own, many are drawn though few tokens are."""
    (tmp_path / "long.txt").write_text(" ".join(f"w{index} " * 3000 for index in range(2, 97)))
    recipe = read(["m", str(tmp_path / "long.txt"), "--max_length", "128"], "")
    batches, ids = drawn(Data(recipe), word_tokenizer(), recipe.training, 8)
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(8, 128)] * 8
    assert len({token for row in ids for token in row}) >= 5


def test_a_tenth_is_held_out_where_no_split_is_given(folder):
    def sizes(*options) -> tuple:
        recipe = read([str(folder / "model"), *map(str, options), "--max_length", "16"], "")
        data = Data(recipe)
        rows, held_out = split_rows(
            prepare_rows(data.train, data.test, word_tokenizer(), recipe.training), recipe.training
        )
        texts = [{tuple(row["input_ids"]) for row in part} for part in (rows, held_out)]
        assert not texts[0] & texts[1]
        return tuple(map(len, texts))

    assert sizes(folder / "rows.csv") == (52, 8) and sizes(folder / "tables") == (40, 20)
    assert sizes(folder / "rows.csv", "--dataset_streaming", "--max_steps", 2) == (0, 60)  # at most 128 are held out


def test_evaluation_counts_what_training_does(folder):
    done = call("evaluate", folder / "model", "--text", folder / "pairs.jsonl", folder / "chats.jsonl", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)["models"][str(folder / "model")]
    pairs = told["pairs.jsonl"]
    assert pairs["nats a word"]["value"] == pytest.approx(
        pairs["nats a token"]["value"] * 6 / 5
    )  # the end of text, too
    assert told["chats.jsonl"]["perplexity"]["value"] > 1


def test_errors_of_data_name_the_fix(folder, tmp_path):
    lines = [json.dumps({"text": words(start)}) for start in range(2000)]
    files = {
        "column.csv": "id,said\n1,w2\n",
        "wide.csv": "text,id\n" + "w2 w3,1\n" * 7 + "w2, w3,1\n",
        "header.csv": "text\n",
        "empty.jsonl": "",
        "empty.txt": "",
        "broken.jsonl": "\n".join([*lines, "", "{'text': 'w2'}"]),
        "absent.jsonl": "\n".join([*lines, '{"words": "w2"}']),
        "list.JSON": '[\n{"text": "w2"},\n{"text": }\n]',
        "few.jsonl": "\n".join(lines[:15]),
        "number.jsonl": '{"text": 3}\n',
        "sheet.xlsx": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for name, told in {
        "column.csv": "has no column text, but id, said. Training reads one with text (--dataset_text_field COLUMN)",
        "wide.csv": "Expected 2 fields in line 9, saw 3. Put a text that has commas of its own in quotes",
        "header.csv": "header.csv is empty",
        "empty.jsonl": "empty.jsonl is empty",
        "empty.txt": "empty.txt is empty",
        "broken.jsonl": "broken.jsonl is not JSON in line 2,002: Expecting property name",
        "absent.jsonl": ", first in line 2,001: every row needs a text there",
        "list.JSON": "list.JSON is not JSON in line 3: Expecting value",
        "few.jsonl": "The data give 15 rows of at most 16 tokens, too few to hold any out: at least 20 are needed",
        "number.jsonl": "has numbers, not text, in the column text",
        "sheet.xlsx": "is a table of another program: save it as .csv or .parquet",
    }.items():
        for command in (["measure"], ["finetune", "-o", tmp_path / "out"]):
            done = call(command[0], folder / "model", tmp_path / name, *command[1:], *SMALL)
            assert told in only_line(done), (name, command)
    chats = call("measure", folder / "bare", folder / "chats.jsonl", *SMALL)
    assert "the tokenizer has no chat template: name one by --chat_template_path" in only_line(chats)
    (folder / "bare" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    chats = call("measure", folder / "bare", folder / "chats.jsonl", *SMALL, "--assistant_only_loss")
    assert "Name one by --chat_template_path FILE.jinja, or leave --assistant_only_loss out" in only_line(chats)
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # TRL's own setting
def test_a_text_longer_than_the_model_reads_is_cut_without_an_alarm(monkeypatch):
    """transformers would say that it leads to indexing errors, which it does not in rows."""
    said = []
    log = logging.getLogger("transformers.tokenization_utils_base")
    monkeypatch.setattr(log, "warning", lambda text, *_: said.append(text))
    tokenizer, text = word_tokenizer(), " ".join(TEXTS)
    tokenizer.model_max_length = 8
    options = dict(max_length=8, packing=True, packing_strategy="wrapped", bf16=False, use_cpu=True)
    rows = prepare_rows(datasets.Dataset.from_dict({"text": [text]}), None, tokenizer, SFTConfig(**options)).train
    assert len(rows) > 60 and max(map(len, rows["input_ids"])) == 8 and not said
    tokenizer(text)
    assert len(said) == 1  # whoever asks the tokenizer itself still hears it


RECIPES = {
    "chat": "chats.jsonl",
    "completions": "pairs.jsonl",
    "text": "rows.txt",
    "lora": "rows.csv",
    "growth": "chats.jsonl",
}


def test_every_recipe_has_a_test():
    assert {path.stem for path in (ROOT / "scripts" / "recipes").glob("*.yaml")} == RECIPES.keys()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own reading
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(recipe, folder, tmp_path, monkeypatch):
    """Each trains a tiny model on tiny data, and grows it; options of the command line go before it."""
    monkeypatch.setattr(
        "hf_growattn.training.finetuning.reloaded_difference", lambda *_: 0.0
    )  # test_finetune.py does it
    options = "--max_length 16 --max_steps 6 --growth_batches 4 --save_strategy no"
    if recipe != "growth":
        options += " --budget 5%"
    named = [
        folder / RECIPES[recipe],
        "-o",
        tmp_path / "out",
        "--config",
        ROOT / "scripts" / "recipes" / f"{recipe}.yaml",
    ]
    done = call("finetune", folder / "model", *named, "--json", *options.split())
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    (growth,) = told["growths"]
    assert growth["step"] == 3 and growth["held_out"][1] < growth["held_out"][0] and growth["added_parameters"] > 0
    assert told["with_growth"]["held_out"][-1][1] < told["with_growth"]["held_out"][0][1]
    assert (told["without_growth"] is not None) == (recipe == "growth")
    assert max(told["after"]["qk_head_dim"] + told["after"]["v_head_dim"]) > 16
    card = call("card", tmp_path / "out", "me/grown").stdout
    assert "## What grew" in card and RECIPES[recipe] in card

"""Training in which nothing grows: asked for, or because nothing was found; figures, page and card stay true."""

import json
import shlex

import pytest
from families import save_with_text
from safetensors.torch import load_file
from test_cli import call
from transformers import AutoModelForCausalLM, LlamaForCausalLM

OPTIONS = "--growth_batches 4 --max_steps 4 --save_steps 2 --max_length 16 --use_cpu".split()
SMALL = "--growth_batches 4 --per_device_train_batch_size 5 --max_length 16".split()


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder with a tiny model and its tokenizer, and a text in which each word has one successor."""
    folder = tmp_path_factory.mktemp("given here")  # to be quoted in a shell
    save_with_text(folder, words=1200)
    return folder


@pytest.fixture(scope="module")
def grown(given, tmp_path_factory):
    """What `growattn grow` left, and the command that it names at its end."""
    output = tmp_path_factory.mktemp("grown") / "out"
    done = call("grow", given / "model", given / "text.txt", "-o", output, "--budget", "5%", *SMALL)
    assert done.exit_code == 0, done.stderr
    (named,) = [line for line in done.stderr.splitlines() if line.startswith("Train it on: ")]
    return output, shlex.split(named.removeprefix("Train it on: "))


@pytest.fixture
def reloads_well(monkeypatch):
    monkeypatch.setattr(
        "hf_growattn.training.finetuning.reloaded_difference", lambda *_: 0.0
    )  # test_finetune.py does it


def test_the_command_that_grow_names_trains_what_grew(given, grown, tmp_path):
    folder, (program, *words) = grown
    assert program == "growattn" and words[-2:] == ["--max_growths", "0"]
    options = "--max_steps 4 --save_strategy no --use_cpu".split()
    done = call(*(str(tmp_path / "out") if word == "DIR" else word for word in words), *options)
    assert done.exit_code == 0, done.stderr
    told = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert told["before"] == told["after"] and max(told["after"]["v_head_dim"] + told["after"]["qk_head_dim"]) > 16
    assert told["growths"] == [] and told["with_growth"] is None and told["seconds"]["growing"] == 0
    assert told["without_growth"]["held_out"][0][0] == 0 and told["without_growth"]["held_out"][-1][0] == 4
    former, trained = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert former.keys() == trained.keys() and all(former[n].shape == trained[n].shape for n in former)
    assert not all(former[name].equal(trained[name]) for name in former)
    shown = done.stdout
    assert "Cost" not in shown and "Advice" not in shown and "Reloaded in a fresh process" in shown
    assert not {"report.html", "growth.png"} & {path.name for path in (tmp_path / "out").iterdir()}
    assert all(word not in shown for word in ("with growth ", "growing", "report.html", "after growth"))
    card = call("card", tmp_path / "out", "me/trained").stdout
    assert f"| Parameters | {told['after']['parameters']:,} |" in card and " before growth, " not in card
    first, last = (told["without_growth"]["held_out"][place][1] for place in (0, -1))
    assert f"before training, step 0 | {first:.4f}" in card and f"after training, step 4 | {last:.4f}" in card
    assert "without growth" not in card and "growth.png" not in card


@pytest.mark.parametrize("nothing", ["asked", "found"])
def test_what_did_not_grow_is_saved_as_a_stock_model(given, tmp_path, monkeypatch, reloads_well, nothing):
    if nothing == "found":
        monkeypatch.setattr(
            "hf_growattn.grow.growth.StepSearch.run", lambda s, *_, **__: ([0.0] * len(s.trial.changes), 9.0)
        )
    options = ["--max_growths", "0"] if nothing == "asked" else []
    done = call("finetune", given / "model", given / "text.txt", "-o", tmp_path / "out", *OPTIONS, *options)
    assert done.exit_code == 0, done.stderr
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "out")) is LlamaForCausalLM
    told = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert told["before"] == told["after"] and told["after"]["v_head_dim"] == [16, 16]
    assert [growth["layers"] for growth in told["growths"]] == ([] if nothing == "asked" else [[]])
    assert "after growth" not in done.stdout and "16 16 ->" not in done.stdout
    assert ("step 2, nothing grew" in done.stdout) == (nothing == "found")
    assert ((tmp_path / "out" / "report.html").exists()) == ("report.html" in done.stdout) == (nothing == "found")
    refused = call("card", tmp_path / "out", "me/trained")
    assert refused.exit_code == 1 and "which did not grow" in refused.stderr


def test_a_training_that_grew_goes_on_without_growing(given, tmp_path, reloads_well):
    words = ["finetune", given / "model", given / "text.txt", "-o", tmp_path / "out", *OPTIONS, "--v_dims", "4"]
    assert call(*words, "--grow_steps", "1").exit_code == 0
    done = call(*words, "--max_growths", "0", "--resume_from_checkpoint", tmp_path / "out" / "checkpoint-2")
    assert done.exit_code == 0, done.stderr
    told = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert told["after"]["v_head_dim"] == [20, 20] and [growth["step"] for growth in told["growths"]] == [1]
    assert told["with_growth"]["held_out"][-1][0] == 4 and told["without_growth"] is None


def test_comparing_with_no_growth_is_refused():
    done = call(*"finetune m d -o out --max_growths 0 --compare".split())
    assert done.exit_code == 2 and "--max_growths 0 grows nothing" in " ".join(done.stderr.replace("│", " ").split())
    done = call(*"finetune m d -o out --max_growths -1".split())
    assert done.exit_code == 2 and "max_growths must be" in done.stderr

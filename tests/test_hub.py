"""Model cards, and transformers' own push, which takes along what a grown model needs."""

import zipfile

import packages
import peft
import pytest
import torch
import transformers
from conftest import ROOT
from families import add_dims, build, lm_batches
from hub import Hub
from huggingface_hub import ModelCard, metadata_load
from packaging.version import Version
from test_layering import TRAVELLING
from transformers.integrations.peft import MIN_PEFT_VERSION

from hf_growattn import Grower, GrowthConfig, GrowthReport, patch_model, write_card
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import sync_config
from hf_growattn.report.words import summary_of

CODE = {f"growattn/{name}.py" for name in TRAVELLING}


@pytest.fixture(scope="module")
def grown():
    """A grown model and the report of its growth."""
    torch.manual_seed(0)
    model = patch_model(build("llama-2"))
    report = Grower(model, GrowthConfig(qk_dims=3, v_dims=2, layers=[1], oversampling=4)).find(lm_batches()).keep()
    assert report.kept
    return model, report


@pytest.fixture
def hub(monkeypatch):
    return Hub(monkeypatch)


def wide(variant: str, auto_class=transformers.AutoModelForCausalLM):
    model = patch_model(build(variant, auto_class))
    add_dims(attentions(model)[0], 4)
    sync_config(model)
    return model


def test_what_is_pushed_is_what_is_saved_with_its_code(hub, grown, tmp_path):
    model, _ = grown
    model.push_to_hub("grown", max_shard_size="50KB", private=True, tags=["mine"])
    model.save_pretrained(tmp_path / "m", max_shard_size="50KB")
    pushed = hub.files["me/grown"]
    assert hub.private == {"me/grown"} and "mine" in ModelCard(pushed.pop("README.md").decode()).data.tags
    assert {*pushed} >= {"model.safetensors.index.json"} | CODE
    assert pushed == {
        path.relative_to(tmp_path / "m").as_posix(): path.read_bytes()
        for path in (tmp_path / "m").rglob("*")
        if path.is_file()
    }


def test_a_save_that_pushes_keeps_its_own_options(hub, grown, tmp_path):
    half = {name: value.half() for name, value in grown[0].state_dict().items()}
    grown[0].save_pretrained(tmp_path / "m", push_to_hub=True, variant="fp16", state_dict=half)
    pushed = hub.files["me/m"]  # by default the folder's name
    assert "model.safetensors" not in pushed and {*pushed} >= {"config.json", *CODE}
    assert pushed["model.fp16.safetensors"] == (tmp_path / "m" / "model.fp16.safetensors").read_bytes()
    assert not (tmp_path / "m" / "README.md").exists()


@pytest.mark.skipif(Version(peft.__version__) < Version(MIN_PEFT_VERSION), reason="transformers asks for a newer peft")
def test_a_push_of_adapters_takes_the_new_dims_along(hub, tmp_path):
    model = wide("llama-2")
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "m", push_to_hub=True, repo_id="me/adapters")
    for name in ("adapter_model.safetensors", "growth/growth.safetensors"):
        assert hub.files["me/adapters"][name] == (tmp_path / "m" / name).read_bytes()


def test_a_sharded_model_is_not_pushed_while_it_is_saved(hub, tmp_path):
    """One process would wait for the others, which do not save a second time."""
    model = patch_model(build("llama-2"))
    model.lm_head.weight.ds_id = 0  # as DeepSpeed marks it
    with pytest.raises(ValueError, match="needs every weight whole"):
        model.save_pretrained(tmp_path / "m", push_to_hub=True)
    assert not (tmp_path / "m").exists() and not hub.files


def test_a_push_that_fails_leaves_the_save(hub, grown, tmp_path):
    hub.is_broken = True
    with pytest.raises(OSError, match="the server broke down"):
        grown[0].save_pretrained(tmp_path / "m", push_to_hub=True)
    assert (tmp_path / "m" / "model.safetensors").exists() and not hub.files["me/m"]


@pytest.mark.parametrize("patched", [True, False])
def test_no_card_says_that_a_model_grew_which_did_not(patched, tmp_path):
    model = build("llama-2")
    with pytest.raises(ValueError, match="has not grown"):
        write_card(patch_model(model) if patched else model, tmp_path)
    assert not list(tmp_path.iterdir())


def made_card(model, folder, *arguments) -> str:
    write_card(model, folder, *arguments)
    text = (folder / "README.md").read_text()
    assert "{{" not in text and "{%" not in text
    return text


def test_a_card_says_what_grew_and_how_to_load_it(grown, tmp_path):
    model, report = grown
    history = [{"step": 0, "eval_loss": 3.0}, {"step": 4, **report.figures()}, {"step": 8, "eval_loss": 2.0}]
    history += [{"step": 9, "eval_loss": float("nan")}]
    text = made_card(model, tmp_path, [report], "someone/base", "someone/words", history, "me/grown")
    data = metadata_load(tmp_path / "README.md")
    assert (data["base_model"], data["datasets"]) == ("someone/base", ["someone/words"])
    assert data["tags"] == ["hf_growattn", "growattn"] and data["library_name"] == "transformers"
    assert data["pipeline_tag"] == "text-generation" and "| 1 | 16 -> 19 | 16 -> 18 |" in text
    assert "| step 0 | 3.0000 |" in text and "| step 8 | 2.0000 |" in text and "| step 9 |" not in text
    assert f"Growth 1, at step 4. {' '.join(summary_of(report))}" in text
    assert text.count('from_pretrained("me/grown"') == 2 and '("me/grown", trust_remote_code=True)' in text
    assert "](growth.png)" in text and (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    alone = made_card(model, tmp_path, [], "", "", history[:1])
    assert alone.count('from_pretrained("you/your-model"') == 2 and alone.count("| step 0 |") == 1


def test_local_names_do_not_travel(grown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.txt").write_text("")
    text = made_card(grown[0], tmp_path, [], str(tmp_path), str(tmp_path / "secret.txt"))
    assert str(tmp_path) not in text and "secret" not in text and "base_model" not in text
    assert text.count("not recorded") == 2
    (tmp_path / "my" / "llama").mkdir(parents=True)  # looks like an id of the Hub
    for there in (True, False):
        assert ("base_model: my/llama" in made_card(grown[0], tmp_path, [], "my/llama")) != there
        (tmp_path / "my").rename(tmp_path / "elsewhere") if there else None


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification"])
def test_task_heads_and_a_growth_that_kept_nothing(task, tmp_path):
    model = wide("gpt2-2", getattr(transformers, f"AutoModelFor{task}"))
    text = made_card(model, tmp_path, [GrowthReport(1.0, 1.0, [], 0, {}, {})])
    assert f"AutoModelFor{task}.from_pretrained" in text and "| 0 | 16 -> 20 | 16 |" in text
    assert "Nothing was grown" in text and "growth.png" not in text


def test_a_wheel_carries_every_file_of_the_package(tmp_path):
    wheel = next(path for path in packages.build(tmp_path) if path.suffix == ".whl")
    parts = [path.relative_to(ROOT).as_posix() for path in (ROOT / "hf_growattn").rglob("*")]
    carried = {*zipfile.ZipFile(wheel).namelist()}
    assert {part for part in parts if part.endswith((".py", ".html", "card.md"))} <= carried

"""Model cards, and transformers' own push: huggingface_hub's client against a local server that stands for the Hub."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import peft
import pytest
import torch
import transformers
from conftest import ROOT
from families import build, lm_batches, wide
from hub_server import Hub
from huggingface_hub import metadata_load
from packaging.version import Version
from safetensors import safe_open
from test_layering import TRAVELLING
from transformers.integrations.peft import MIN_PEFT_VERSION

from hf_growattn import Grower, GrowthConfig, GrowthReport, patch_model, save_growth, write_card
from hf_growattn.report.words import summary_of

CODE = {f"growattn/{name}.py" for name in TRAVELLING}


@pytest.fixture(scope="module")
def grown():
    """A grown model and the report of its growth."""
    torch.manual_seed(0)
    model = patch_model(build("llama-2"))
    report = Grower(model, GrowthConfig(qk_dims=3, v_dims=2, layers=[1])).find(lm_batches()).keep()
    assert report.kept
    return model, report


@pytest.fixture
def hub(monkeypatch):
    """The server stands for the Hub in this process."""
    with Hub() as hub:
        constants = {"ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": True}
        constants["HUGGINGFACE_CO_URL_TEMPLATE"] = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in constants.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)  # made for the former
        monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
        yield hub


def test_what_is_pushed_is_what_was_saved(hub, grown, tmp_path):
    half = {name: value.half() for name, value in grown[0].state_dict().items()}
    grown[0].save_pretrained(tmp_path / "m", push_to_hub=True, variant="fp16", state_dict=half)
    pushed = hub.repositories["me/m"]  # by default the folder's name
    assert "model.safetensors" not in pushed and {*pushed} >= {"config.json", *CODE}
    assert pushed["model.fp16.safetensors"] == (tmp_path / "m" / "model.fp16.safetensors").read_bytes()
    assert not (tmp_path / "m" / "README.md").exists()
    grown[0].save_pretrained(tmp_path / "m", push_to_hub=True, repo_id="me/other")
    assert "model.safetensors" in hub.repositories["me/other"]


@pytest.mark.skipif(Version(peft.__version__) < Version(MIN_PEFT_VERSION), reason="transformers asks for a newer peft")
def test_a_push_of_adapters_takes_the_new_dims_along(hub, tmp_path):
    model = wide("llama-2")
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "m", push_to_hub=True, repo_id="me/adapters")
    for name in ("adapter_model.safetensors", "growth/growth.safetensors"):
        assert hub.repositories["me/adapters"][name] == (tmp_path / "m" / name).read_bytes()


def test_a_sharded_model_is_not_pushed_while_it_is_saved(hub, tmp_path):
    """One process would wait for the others, which do not save a second time."""
    model = patch_model(build("llama-2"))
    model.lm_head.weight.ds_id = 0  # as DeepSpeed marks it
    with pytest.raises(ValueError, match="needs every weight whole"):
        model.save_pretrained(tmp_path / "m", push_to_hub=True)
    assert not (tmp_path / "m").exists() and not hub.repositories


def test_a_push_that_fails_leaves_the_save(hub, grown, tmp_path):
    hub.is_broken = True
    with pytest.raises(Exception, match="the server broke down"):
        grown[0].save_pretrained(tmp_path / "m", push_to_hub=True)
    assert (tmp_path / "m" / "model.safetensors").exists() and not hub.repositories["me/m"]


def made_card(model, folder, *arguments) -> str:
    write_card(model, folder, *arguments)
    return (folder / "README.md").read_text()


def test_a_card_says_what_grew_and_how_to_load_it(grown, tmp_path):
    model, report = grown
    text = made_card(model, tmp_path, [report], "someone/base", "someone/words", "me/grown")
    data = metadata_load(tmp_path / "README.md")
    assert (data["base_model"], data["datasets"]) == ("someone/base", ["someone/words"])
    assert data["tags"] == ["hf_growattn", "growattn"] and data["library_name"] == "transformers"
    assert data["pipeline_tag"] == "text-generation" and "| 1 | 16 -> 19 | 16 -> 18 |" in text
    assert f"Growth 1. {' '.join(summary_of(report))}" in text
    assert text.count('from_pretrained("me/grown"') == 2 and '("me/grown", trust_remote_code=True)' in text
    assert made_card(model, tmp_path).count('from_pretrained("you/your-model"') == 2


def test_local_names_do_not_travel(grown, tmp_path, monkeypatch):
    (tmp_path / "base").mkdir()
    (tmp_path / "secret.txt").write_text("")
    text = made_card(grown[0], tmp_path, [], str(tmp_path / "base"), str(tmp_path / "secret.txt"))
    assert str(tmp_path) not in text and "secret" not in text and "base_model" not in text
    assert text.count("not recorded") == 2
    monkeypatch.chdir(tmp_path)
    Path("someone/base").mkdir(parents=True)  # named like a model of the Hub
    assert "base_model" not in made_card(grown[0], tmp_path, [], "someone/base")


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification"])
def test_task_heads_and_a_growth_that_kept_nothing(task, tmp_path):
    model = wide("gpt2-2", 4, auto_class=getattr(transformers, f"AutoModelFor{task}"))
    text = made_card(model, tmp_path, [GrowthReport(1.0, 1.0, [], 0, {}, {})])
    assert f"AutoModelFor{task}.from_pretrained" in text and "| 0 | 16 -> 20 | 16 |" in text
    assert "Nothing was grown" in text
    assert "{{" not in text and "{%" not in text


def test_the_cards_of_this_project():
    cards = [path for path in (ROOT / "model_cards").glob("*.md") if path.name != "README.md"]
    for path in cards:
        text = path.read_text()
        assert metadata_load(path)["tags"] and "## What grew" in text
        for picture in re.findall(r"!\[.*\]\((.*)\)", text):
            assert (path.parent / picture).exists(), picture
    assert "demo.md" in {path.name for path in cards}


def test_a_wheel_carries_every_file_of_the_package(tmp_path):
    pytest.importorskip("setuptools", minversion="77.0")
    source = tmp_path / "source"
    shutil.copytree(ROOT / "hf_growattn", source / "hf_growattn", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    build_wheel = "from setuptools import build_meta; build_meta.build_wheel('..')"
    subprocess.run([sys.executable, "-c", build_wheel], cwd=source, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    files = {path.relative_to(source).as_posix() for path in (source / "hf_growattn").rglob("*") if path.is_file()}
    assert files - {"hf_growattn/mathematics.md"} <= {*zipfile.ZipFile(wheel).namelist()}


def test_a_growth_and_a_card_name_the_base_that_grew(tmp_path):
    model = patch_model(build("llama-2"))
    model.name_or_path = model.config.name_or_path = "someone/base"
    Grower(model, GrowthConfig(qk_dims=1)).find(lm_batches(4)).keep()
    assert model.name_or_path == model.config.name_or_path == ""  # which it is no more
    save_growth(model, tmp_path)
    with safe_open(tmp_path / "growth.safetensors", "pt") as file:
        assert file.metadata()["base"] == "someone/base"
    write_card(model, tmp_path)
    assert metadata_load(tmp_path / "README.md")["base_model"] == "someone/base"
    write_card(model, tmp_path, base_model="another/name")
    assert metadata_load(tmp_path / "README.md")["base_model"] == "another/name"

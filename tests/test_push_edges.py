"""What a push takes along, and what it leaves: saving options, processors, tags of others, links out of the folder."""

import functools
import json

import pytest
import torch
from families import build, lm_batches, word_tokenizer
from modalities import build as build_other
from transformers import AutoFeatureExtractor, AutoImageProcessor, ViTImageProcessor, WhisperFeatureExtractor

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import sync_config
from hf_growattn.interop import cards
from hf_growattn.interop.checkpoints import write_publication

CONFIG = GrowthConfig(qk_dims=1, v_dims=1, oversampling=4)


@pytest.fixture
def grown():
    model = patch_model(build("llama-2"))
    Grower(model, CONFIG).find(lm_batches(2)).keep()
    return model


def test_what_is_pushed_is_what_was_saved(grown, tmp_path, monkeypatch):
    pushed = {}

    @functools.wraps(cards.push_folder)  # by whose signature options are told apart
    def note(model, folder, repo_id, **options):
        pushed.update({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}, **options)

    monkeypatch.setattr(cards, "push_folder", note)
    half = {name: value.half() for name, value in grown.state_dict().items()}
    options = dict(variant="fp16", state_dict=half, token="secret", private=True)
    grown.save_pretrained(tmp_path / "m", push_to_hub=True, **options)
    assert "model.safetensors" not in pushed and pushed["token"] == "secret" and pushed["private"]
    assert pushed["model.fp16.safetensors"] == (tmp_path / "m" / "model.fp16.safetensors").read_bytes()


def test_an_option_that_nobody_has_is_refused(grown):
    with pytest.raises(TypeError, match="no_such_option"):
        grown.push_to_hub("me/m", no_such_option=1)


def test_a_processor_goes_along_and_a_link_out_of_the_folder_does_not(tmp_path):
    model = patch_model(build_other("vit"))
    part = attentions(model)[0].add_new_dims("growth_1", 1, 1)
    torch.nn.init.normal_(part.in_proj.weight)
    sync_config(model)
    model.save_pretrained(tmp_path / "model")
    ViTImageProcessor(size={"height": 7, "width": 7}).save_pretrained(tmp_path / "model")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "model" / "README.md").symlink_to(tmp_path / "secret")
    (tmp_path / "out").mkdir()
    write_publication(tmp_path / "model", tmp_path / "out")
    assert AutoImageProcessor.from_pretrained(tmp_path / "out").size["height"] == 7
    assert not (tmp_path / "out" / "README.md").exists()


def test_a_feature_extractor_goes_along_with_a_tokenizer(tmp_path):
    model = patch_model(build_other("whisper"))
    attentions(model)[0].add_new_dims("growth_1", 1, 1)
    sync_config(model)
    for each in (model, word_tokenizer(), WhisperFeatureExtractor(hop_length=7)):
        each.save_pretrained(tmp_path / "model")
    (tmp_path / "out").mkdir()
    write_publication(tmp_path / "model", tmp_path / "out")
    assert AutoFeatureExtractor.from_pretrained(tmp_path / "out").hop_length == 7
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_a_chat_template_is_no_link_out_of_the_folder(grown, tmp_path):
    grown.save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "model" / "chat_template.jinja").symlink_to(tmp_path / "secret")
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"chat_template\.jinja is a link out of the folder: put the file itself"):
        write_publication(tmp_path / "model", tmp_path / "out")


@pytest.mark.parametrize("former, expected", [("null", []), ("mine", ["mine"]), ("[a, b]", ["a", "b"])])
def test_tags_of_a_card_may_have_any_form(former, expected, grown, tmp_path, monkeypatch):
    class Api:
        def __init__(self, token=None):
            pass

        def create_repo(self, repo_id, **options):
            return type("Repo", (), {"repo_id": repo_id})

        def list_repo_files(self, repo_id, revision=None):
            return []

        def create_commit(self, *args, **options):
            return None

    monkeypatch.setattr(cards, "HfApi", Api)
    (tmp_path / "README.md").write_text(f"---\ntags: {former}\n---\nMine.")
    cards.push_folder(grown, tmp_path, "me/m", tags=["new"])
    assert cards.metadata_load(tmp_path / "README.md")["tags"] == [*expected, "new"]


def test_the_report_of_a_damaged_config_is_not_about_code(grown, tmp_path):
    from hf_growattn.interop.checkpoints import load_config

    grown.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["extra_dims"] = {"0": {"trust_remote_code": 5}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"extra_dims in config\.json must have a form"):
        load_config(str(tmp_path))

"""Models around a language model: it grows in them, and they are saved and loaded as any other."""

import pytest
import torch
from families import VOCABULARY, add_dims, wide
from safetensors.torch import save_file
from transformers import (
    BertConfig,
    BertModel,
    Blip2QFormerConfig,
    Blip2QFormerModel,
    CLIPConfig,
    CLIPModel,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    LlamaModel,
    LlavaConfig,
    PreTrainedConfig,
)
from wrappers import WRAPPERS, batch, build

from hf_growattn import Grower, GrowthConfig, patch_model, unpatch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import is_grown, sync_config
from hf_growattn.model.families import growable_submodels

GROWTH = GrowthConfig(qk_dims=2, v_dims=2)
BERT = dict(hidden_size=32, intermediate_size=32, num_attention_heads=4, num_hidden_layers=2)


@torch.no_grad()
def logits(model, name: str) -> torch.Tensor:
    return model.eval()(**batch(name)).logits


def shared_configs(model) -> list[int]:
    """The configs that modules and configs of a model hold, each by the number of the first place that holds it."""
    holders = [module for module in model.modules() if isinstance(getattr(module, "config", None), PreTrainedConfig)]
    held = [config for each in [*holders, *(each.config for each in holders)] for config in vars(each).values()]
    ids = [id(config) for config in held if isinstance(config, PreTrainedConfig)]
    return [ids.index(each) for each in ids]


@pytest.mark.parametrize("name", WRAPPERS)
def test_configs_that_are_one_object_stay_one(name, tmp_path):
    model = build(name)
    configs = shared_configs(model)
    assert shared_configs(patch_model(model)) == configs
    model.save_pretrained(tmp_path)
    assert shared_configs(type(model).from_pretrained(tmp_path)) == configs
    assert shared_configs(unpatch_model(model)) == configs


def test_the_submodels_that_are_named_grow_and_travel_with_the_config(tmp_path):
    model = patch_model(build("llava"), submodels=["vision_tower"])
    assert patch_model(model, submodels=["vision_tower"]) is patch_model(model) is model
    with pytest.raises(ValueError, match="unpatch_model"):
        patch_model(model, submodels=["language_model"])
    wide(model, 3, 2)
    assert {type(attention.module).__name__ for attention in attentions(model)} == {"CLIPAttention"}
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, "llava"), logits(model, "llava"))
    assert loaded.config.growable_submodels == ["vision_tower"]


@pytest.mark.parametrize("submodels", [None, ["vision_tower"], ["vision_tower", "language_model"]])
def test_a_grown_model_becomes_a_part_of_another_one(submodels, tmp_path):
    """Each config keeps the layers of its own model, whatever grows in the model around it."""
    text = patch_model(build("llava").model.language_model)
    for attention in attentions(text):
        add_dims(attention, 2 + attention.layer, 1)
    sync_config(text)
    model = build("llava")
    model = type(model)(LlavaConfig(**model.config.to_dict() | {"text_config": text.config})).eval()
    model.model.language_model.load_state_dict(text.state_dict())
    before = logits(model, "llava")
    assert torch.equal(logits(patch_model(model, submodels), "llava"), before)
    for attention in attentions(model):
        for parameter in attention.add_new_dims("growth_2", 1, 1).parameters():
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path), "llava"), logits(model, "llava"))
    stock = unpatch_model(model, drop_growth=True)
    assert not any("extra" in name or "GrowAttn" in type(module).__name__ for name, module in stock.named_modules())


def test_an_encoder_decoder_begins_with_a_grown_encoder(tmp_path):
    """Its decoder gains cross-attention, which is new as a whole; a part of one that is missing is still refused."""
    encoder = patch_model(BertModel(BertConfig(vocab_size=64, **BERT))).eval()
    for attention in attentions(encoder):
        add_dims(attention, 2 + attention.layer, 1)
    encoder.save_pretrained(tmp_path)
    model = EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path, tmp_path).eval()
    for part in (model.encoder, model.decoder.bert):
        weights = part.state_dict()
        names = [name for name in encoder.state_dict() if "pooler" not in name or name in weights]
        assert sum(".extra." in name for name in names) == 6
        assert all(torch.equal(weights[name], encoder.state_dict()[name]) for name in names)
    ids, configs = torch.randint(64, (2, 5)), shared_configs(model)
    before = model(ids, decoder_input_ids=ids).logits
    model.save_pretrained(tmp_path / "whole")
    assert torch.equal(type(model).from_pretrained(tmp_path / "whole")(ids, decoder_input_ids=ids).logits, before)
    assert torch.equal(patch_model(model)(ids, decoder_input_ids=ids).logits, before)
    assert shared_configs(model) == configs

    state = {name: tensor for name, tensor in encoder.state_dict().items() if "layer.1.attention.self.key" not in name}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError, match=r"layer\.1\.attention\.self\.key\.bias is missing"):
        EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path, tmp_path)


def test_of_two_submodels_of_a_name_the_outer_one_is_meant():
    small = dict(hidden_size=32, intermediate_size=32, num_attention_heads=4, num_hidden_layers=1)
    bart = dict(model_type="bart", d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=32)
    config = EncoderDecoderConfig(encoder=small | {"model_type": "bert"}, decoder=bart | {"is_encoder_decoder": False})
    model = EncoderDecoderModel(config)
    assert growable_submodels(model, ["decoder"]) == [model.decoder] != [model.decoder.model.decoder]


def test_two_towers_grow_both():
    """The text side of CLIP writes nothing, so it is no language model that the other side serves."""
    sides = {f"{name}_config": dict(WRAPPERS["llava"]["vision_config"]) for name in ("text", "vision")}
    sides["text_config"] |= dict(model_type="clip_text_model", vocab_size=VOCABULARY, max_position_embeddings=32)
    model = patch_model(CLIPModel(CLIPConfig(**sides)))
    paths = {attention.name.partition(".")[0] for attention in attentions(model)}
    assert paths == {"text_model", "vision_model"} and len(attentions(model)) == 4


@torch.no_grad()
def test_keys_of_an_input_of_another_size_stay_as_they_are():
    """The new dims of a module have one input size, and this cross-attention reads wider states than its own."""
    small = dict(hidden_size=32, intermediate_size=32, num_attention_heads=4, num_hidden_layers=2)
    model = Blip2QFormerModel(Blip2QFormerConfig(**small, encoder_hidden_size=48, cross_attention_frequency=2)).eval()
    inputs = {"query_embeds": torch.randn(2, 3, 32), "encoder_hidden_states": torch.randn(2, 5, 48)}
    before = model(**inputs).last_hidden_state
    for attention in attentions(patch_model(model)):
        add_dims(attention, 3, 2)
    paths = [attention.name for attention in attentions(model)]
    assert paths == [f"encoder.layer.{index}.attention.attention" for index in (0, 1)]
    assert not torch.allclose(model(**inputs).last_hidden_state, before, atol=1e-2)


def test_submodels_that_cannot_grow_are_refused():
    model = build("llava")
    with pytest.raises(ValueError, match=r"no inner model 'tower': choose of .*model\.vision_tower"):
        patch_model(model, submodels=["tower"])
    assert type(model) is type(build("llava"))
    with pytest.raises(ValueError, match="too few batches"):  # the images of all rows are in one tensor
        Grower(patch_model(build("qwen3_vl")), GROWTH).find([batch("qwen3_vl")]).keep()
    images = patch_model(build("qwen3_vl"), submodels=["visual"])  # runs the patches of all images in one row
    with pytest.raises(ValueError, match=r"the shape \(12, 32\) instead of \(batch, tokens, features\)"):
        Grower(images, GROWTH).find([batch("qwen3_vl", seed=seed) for seed in range(2)]).keep()


def test_the_model_inside_does_not_grow_by_itself_in_a_model_whose_config_would_not_know():
    model = build("llava")
    inner = patch_model(model.model.language_model)
    with pytest.raises(ValueError, match=r"in a Llava.*call patch_model on the whole"):
        Grower(model, GROWTH).grow([batch("llava")])
    assert not is_grown(unpatch_model(inner)) and type(inner) is LlamaModel
    assert Grower(patch_model(model), GROWTH).find([batch("llava", seed=seed) for seed in range(2)]).keep().kept

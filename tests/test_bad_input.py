"""Bad input: a clear error that names the fix, and the model exactly as it was."""

import pytest
import torch
from families import HEADS, build, lm_batches, padded, tokens
from test_growth import fingerprint, same
from transformers import AlbertConfig, AlbertModel, AutoModel

from hf_growattn import Grower, GrowthConfig, attention_views, patch_model
from hf_growattn.grow.plan import read_batches
from hf_growattn.growable.attention import attentions

BATCH = lm_batches(1)[0]


def refused(model, batches, match, config=None, optimizer=None, error=ValueError):
    before = fingerprint(model, optimizer)
    with pytest.raises(error, match=match):
        Grower(model, config or GrowthConfig(qk_dims=4), optimizer).find(batches).keep()
    assert same(fingerprint(model, optimizer), before)


def test_attention_that_new_dims_cannot_join_is_named():
    model = AlbertModel(AlbertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32))
    with pytest.raises(ValueError, match=r"cannot join AlbertModel.*AlbertAttention"):
        patch_model(model)
    assert type(model) is AlbertModel and type(model.config) is AlbertConfig


def test_wrappers_are_refused_by_name():
    with pytest.raises(TypeError, match="unwrap_model"):
        patch_model(torch.nn.DataParallel(build("llama-2")))


def test_an_unpatched_model_is_refused():
    with pytest.raises(ValueError, match="patch_model"):
        Grower(build("llama-2"), GrowthConfig(qk_dims=4))


@pytest.mark.parametrize("batches", [[], iter([])])
def test_no_batches(batches):
    refused(patch_model(build("llama-2")), batches, "no batches")


def test_batches_of_the_wrong_kind():
    refused(patch_model(build("llama-2")), ["text"], "Batch 0 is a str")


@pytest.mark.parametrize(
    "batches, match",
    [
        (BATCH, r"a list of batches, and was given a dict: pass \[batch\]"),
        ("some text", "was given a str"),
        (None, "was given a NoneType"),
        (BATCH["input_ids"], r"int64 of shape \(17,\).*list of batches, \[batch\]"),
        ([{"input_ids": [[3, 4, 5]]}], "are a list, not a tensor"),
        ([{"input_ids": tokens(), "labels": tokens().tolist()}], "labels of batch 0 are a list: make them a tensor"),
        ([{"input_ids": tokens(), "labels": tokens().numpy()}], "labels of batch 0 are a ndarray: make them a tensor"),
        ([tokens().float()], "float32 of shape"),
        ([tokens()[:0]], r"shape \(0, 17\)"),
    ],
)
def test_what_is_no_list_of_batches(batches, match):
    refused(patch_model(build("llama-2")), batches, match)


def test_labels_of_detection_are_a_list_of_dicts():
    batch = {"pixel_values": torch.zeros(1, 3, 4, 4), "labels": [{"boxes": torch.zeros(1, 4)}]}
    assert read_batches([batch], patch_model(build("llama-2"))) == [batch]


def test_views_of_what_is_no_model():
    with pytest.raises(TypeError, match="needs a transformers model, not NoneType"):
        attention_views(None)


def test_a_config_and_an_optimizer_of_the_wrong_kind():
    model = patch_model(build("llama-2"))
    with pytest.raises(TypeError, match=r"such as GrowthConfig\(budget=0.02\)"):
        Grower(model, {"qk_dims": 2})
    with pytest.raises(TypeError, match="optimizer of torch, or a list of them"):
        Grower(model, GrowthConfig(qk_dims=2), torch.optim.AdamW).find(lm_batches()).keep()


def test_a_model_whose_loss_is_no_number():
    model = patch_model(build("llama-2", AutoModel))
    model.config.return_dict = False
    refused(model, [{"input_ids": tokens()}], r"loss must be a tensor of one number.*shape \(\d, 17, 48\)")


@pytest.mark.parametrize("head", HEADS)
def test_missing_labels(head):
    model = patch_model(build("llama-2", HEADS[head]))
    refused(model, [padded()], "no loss for batch 0.*labels")


def test_a_base_model_has_no_loss():
    refused(patch_model(build("llama-2", AutoModel)), [padded()], "model with a head")


def test_all_labels_ignored():
    bad = {**BATCH, "labels": torch.full_like(BATCH["labels"], -100)}
    refused(patch_model(build("llama-2")), [BATCH, bad], "batch 1 is nan.*-100")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite(value):
    model = patch_model(build("llama-2"))
    model.lm_head.weight.data[3, 3] = value
    with pytest.raises(ValueError, match=r"batch 0 is (nan|inf)"):
        Grower(model, GrowthConfig(qk_dims=4)).find([BATCH]).keep()
    assert [a.width_of("query") for a in attentions(model)] == [16, 16]


def test_frozen_weights():
    model = patch_model(build("llama-2"))
    for role in ("q_proj", "v_proj"):
        getattr(attentions(model)[1].module, role).requires_grad_(False)
    match = r"rewrites existing weights, and {}_proj of layer 1 is frozen.*requires_grad_\(True\)"
    refused(model, [BATCH], match.format("q"), GrowthConfig(qk_dims=2, update_existing=True))
    refused(model, [BATCH], match.format("v"), GrowthConfig(v_dims=2, method="refactor"))
    assert Grower(model, GrowthConfig(qk_dims=2, update_existing=True, layers=[0])).find([BATCH]).keep().kept


def test_inference_mode_and_inference_tensors():
    model = patch_model(build("llama-2"))
    with torch.inference_mode():
        refused(model, [BATCH], "outside torch.inference_mode")
        made_inside = patch_model(build("llama-2"))
    with pytest.raises(ValueError, match=r"was made under torch.inference_mode|is frozen"):
        Grower(made_inside, GrowthConfig(qk_dims=4)).find([BATCH]).keep()


def test_no_grad_is_no_obstacle():
    with torch.no_grad():
        assert Grower(patch_model(build("llama-2")), GrowthConfig(qk_dims=4)).find([BATCH]).keep().kept


def test_meta_device():
    with torch.device("meta"):
        model = patch_model(build("llama-2"))
    with pytest.raises(ValueError, match="meta device"):
        Grower(model, GrowthConfig(qk_dims=4)).find([BATCH]).keep()


def test_wrapped_projections_are_read_by_what_they_compute():
    model = patch_model(build("llama-2"))
    layer = attentions(model)[0]
    expected = layer.weight_of("query").clone()
    layer.module.q_proj = torch.nn.Sequential(layer.module.q_proj)
    torch.testing.assert_close(layer.weight_of("query"), expected)  # fp32


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"qk_dims": 0}, "qk_dims"),
        ({"qk_dims": -2}, "qk_dims"),
        ({"qk_dims": 2.5}, "qk_dims"),
        ({"qk_dims": True}, "qk_dims"),
        ({"qk_dims": 2, "ridge": 0.0}, "ridge"),
        ({"qk_dims": 2, "ridge": float("nan")}, "ridge"),
        ({"qk_dims": 2, "oversampling": -1}, "oversampling"),
        ({"qk_dims": 2, "layers": []}, "layers must be a list"),
        ({"qk_dims": 2, "layers": 3}, "layers must be a list"),
    ],
)
def test_config_values(arguments, match):
    with pytest.raises(ValueError, match=match):
        GrowthConfig(**arguments)


@pytest.mark.parametrize("layer", [2, -1, 99])
def test_layers_out_of_range(layer):
    config = GrowthConfig(qk_dims=2, layers=[layer])
    refused(patch_model(build("llama-2")), [BATCH], f"no attention in layer {layer}.*0, 1", config)


def test_more_dims_than_a_pattern_has_rank():
    refused(patch_model(build("llama-2")), [BATCH], "48 features", GrowthConfig(qk_dims=33))


def test_an_optimizer_of_another_model():
    model = patch_model(build("llama-2"))
    other = torch.optim.AdamW(build("llama-2").parameters())
    refused(model, [BATCH], "optimizer holds none", optimizer=other)


def test_batches_as_tensors_and_generators():
    model = patch_model(build("llama-2"))
    one = Grower(model, GrowthConfig(qk_dims=2)).find(tokens(seed=s) for s in range(2)).keep()
    other = patch_model(build("llama-2"))
    dicts = [{"input_ids": tokens(seed=s), "labels": tokens(seed=s)} for s in range(2)]
    assert Grower(other, GrowthConfig(qk_dims=2)).find(dicts).keep() == one

"""A checkpoint that is not whole is refused with the fix in the message, and nothing is half-loaded."""

import json
import os
import shutil
import tracemalloc

import encoders
import pytest
import torch
from families import tokens
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors.torch import load_file, save_file
from test_saving import grown
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_growattn import patch_model
from hf_growattn.growable.attention import attentions

VARIANTS = ["llama-2", "gpt2-2"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Each family twice, with 4 and with 9 dims more in layer 0: whole, and a shard for every weight."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for variant in VARIANTS:
        for dims in (4, 9):
            model = grown(dims, variant)
            model.save_pretrained(folder / f"{variant}-{dims}")
            model.save_pretrained(folder / f"{variant}-{dims}-shards", max_shard_size="1KB")
    return folder


@pytest.fixture
def checkpoint(saved, tmp_path):
    return lambda name: shutil.copytree(saved / name, tmp_path / name)


def edit(path, change, name="config.json"):
    content = json.loads((path / name).read_text())
    change(content)
    (path / name).write_text(json.dumps(content))


def shard_of(path, weight: str):
    return path / json.loads((path / "model.safetensors.index.json").read_text())["weight_map"][weight]


@pytest.mark.parametrize(
    "extra_dims",
    [
        {"-1": {"growth_1": [4, 0]}},
        {"first": {"growth_1": [4, 0]}},
        {"0": {"growth_1": 4}},
        {"0": 20},
        [{"growth_1": [4, 0]}],
        "20",
        *({"0": {"growth_1": dims}} for dims in ([0, 0], [-4, 4], [2.5, 0], ["4", 0], [None, 4], [True, 0], [4])),
    ],
)
def test_new_dims_that_cannot_be(checkpoint, extra_dims):
    path = checkpoint("llama-2-4")
    edit(path, lambda config: config.update(extra_dims=extra_dims))
    with pytest.raises(ValueError, match=r"extra_dims in config.json must have a form such as .*and is"):
        AutoConfig.from_pretrained(path)


def test_what_the_stock_config_refuses_is_refused(tmp_path):
    grown(4, "phi3").save_pretrained(tmp_path)
    edit(tmp_path, lambda config: config["rope_parameters"].update(rope_type="round"))
    with pytest.raises(StrictDataclassClassValidationError, match=r"must be one of.*got round"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize("dims", [[2, 0], [16, 0], [4, 1], None])
@pytest.mark.parametrize("variant", VARIANTS)
def test_new_dims_that_are_not_the_weights(checkpoint, variant, dims, ignore):
    path = checkpoint(f"{variant}-4")
    parts = {"growth_1": dims} if dims else {"growth_2": [4, 0]}
    edit(path, lambda config: config.update(extra_dims={"0": parts}))
    with pytest.raises(RuntimeError, match=r"\.0\..*attn.*extra.*config.json.*same save"):
        AutoModelForCausalLM.from_pretrained(path, ignore_mismatched_sizes=ignore)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_config_without_the_new_dims_loads_nothing(checkpoint, variant):
    path = checkpoint(f"{variant}-4")
    edit(path, lambda config: config.pop("extra_dims"))
    with pytest.raises((RuntimeError, ValueError)):
        AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("keep", [5, 0.5, -1])
def test_a_file_cut_short(checkpoint, keep):
    path = checkpoint("llama-2-4")
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    with pytest.raises(OSError, match=r"llama-2-4 is not whole.*Copy, download or save it again"):
        AutoModelForCausalLM.from_pretrained(path)


def test_a_shard_that_is_not_there(checkpoint):
    path = checkpoint("gpt2-2-4-shards")
    shard_of(path, "transformer.h.1.attn.c_attn.weight").unlink()
    with pytest.raises(OSError, match=r"is not whole.*safetensors.*again"):
        AutoModelForCausalLM.from_pretrained(path)


def test_an_index_that_names_no_file(checkpoint):
    path, weight = checkpoint("llama-2-4-shards"), "model.layers.1.self_attn.o_proj.weight"
    edit(
        path, lambda index: index["weight_map"].update({weight: "model-x.safetensors"}), "model.safetensors.index.json"
    )
    with pytest.raises(OSError, match=r"is not whole.*model-x.safetensors.*again"):
        AutoModelForCausalLM.from_pretrained(path)


def test_weights_that_someone_edits_load_as_they_are(checkpoint):
    path = checkpoint("llama-2-4")
    weights = {name: -value for name, value in load_file(path / "model.safetensors").items()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())


def test_an_extra_file_of_weights_is_not_read(saved, checkpoint):
    path = checkpoint("llama-2-4")
    shutil.copy(saved / "llama-2-9" / "model.safetensors", path / "model-00001-of-00001.safetensors")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(path).eval()(tokens()).logits, grown(4)(tokens()).logits)


@pytest.mark.parametrize("name", ["/{}", "../{}", "sub/../../{}", "..", "", "..\\{}", "C:{}"])
def test_an_index_that_names_files_elsewhere(saved, checkpoint, name):
    """The file is there, and it would fit."""
    path, weight = checkpoint("llama-2-4-shards"), "model.layers.1.self_attn.o_proj.weight"
    shard = shard_of(path, weight)
    outside = shutil.move(shard, path.parent / "outside.safetensors")
    name = name.format(str(outside).lstrip("/") if name == "/{}" else "outside.safetensors")
    (path / "sub").mkdir()
    edit(path, lambda index: index["weight_map"].update({weight: name}), "model.safetensors.index.json")
    with pytest.raises(OSError, match=r"index.json names .* which is not in its folder.*again"):
        AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "weights.safetensors"])
def test_what_is_no_ordinary_file_is_not_waited_for(checkpoint, name):
    """Opening a pipe waits for a writer. The last one is a shard, of a name that transformers would not give."""
    path = checkpoint("llama-2-4-shards")
    if name == "weights.safetensors":
        weight = WEIGHTS["llama-2"].format(0)
        edit(path, lambda index: index["weight_map"].update({weight: name}), "model.safetensors.index.json")
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    with pytest.raises(OSError, match=rf"{name} is not an ordinary file.*again"):
        AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("length", [2_900_000_000, 2**63, 100_000_001])
def test_a_false_header_is_not_read(checkpoint, length):
    """3 GB of nothing, whose first bytes say that nearly all of it is the header."""
    path = checkpoint("llama-2-4")
    with open(path / "model.safetensors", "wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(3_000_000_000)

    tracemalloc.start()
    with pytest.raises(OSError, match=r"is not whole.*[Hh]eader.*again"):
        AutoModelForCausalLM.from_pretrained(path)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


WEIGHTS = {"llama-2": "model.layers.{}.self_attn.k_proj.weight", "gpt2-2": "transformer.h.{}.attn.c_attn.weight"}
NEW = {
    variant: name.format(0).rsplit(".", 2)[0] + ".extra.growths.growth_1.in_proj.weight"
    for variant, name in WEIGHTS.items()
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_shard_of_another_model(saved, checkpoint, variant):
    path, weight = checkpoint(f"{variant}-4-shards"), NEW[variant]
    shutil.copy(shard_of(saved / f"{variant}-9-shards", weight), shard_of(path, weight))
    with pytest.raises(RuntimeError, match=rf"{weight} is \(.*same save"):
        AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_shard_that_holds_other_weights(checkpoint, variant):
    """transformers would start those that are missing at random, and only warn."""
    path, weight = checkpoint(f"{variant}-4-shards"), WEIGHTS[variant]
    shutil.copy(shard_of(path, weight.format(1)), shard_of(path, weight.format(0)))
    with pytest.raises(RuntimeError, match=f"{weight.format(0)} is missing.*same save"):
        AutoModelForCausalLM.from_pretrained(path)


def test_a_weight_outside_of_attention_is_missed(checkpoint):
    path = checkpoint("llama-2-4")
    weights = load_file(path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight is missing.*same save"):
        AutoModelForCausalLM.from_pretrained(path)


def test_a_task_head_may_be_new_or_of_another_size(saved, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(saved / "llama-2-4", num_labels=3)
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert again.score.weight.shape[0] == 5
    assert torch.equal(
        attentions(again)[0].growths["growth_1"].in_proj.weight,
        attentions(grown(4))[0].growths["growth_1"].in_proj.weight,
    )


@pytest.mark.parametrize(
    "name, head", [("bert", AutoModelForSequenceClassification), ("bert", AutoModel), ("vit", AutoModel)]
)
def test_a_pooler_may_be_new(name, head, tmp_path):
    """Masked language models and image classifiers save none, and models of other tasks have one."""
    model = patch_model(encoders.build(name))
    model.save_pretrained(tmp_path)
    again = head.from_pretrained(tmp_path).base_model
    assert again.pooler is not None
    for key, tensor in model.base_model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor)


def test_a_family_that_nobody_knows(checkpoint):
    path = checkpoint("llama-2-4")
    edit(path, lambda config: [config.update(model_type="growattn_nothing"), config.pop("auto_map")])
    with pytest.raises(ValueError, match="growattn_nothing"):
        AutoModelForCausalLM.from_pretrained(path)

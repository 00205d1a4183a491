"""Checkpoints and growths that are not whole, or of something else: an error that names the fix, nothing loaded."""

import json
import os
import shutil
import tracemalloc
from functools import partial

import pytest
import torch
from families import VARIANTS, build, fingerprint, same, wide
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_saving import grown
from transformers import AutoConfig, AutoModelForCausalLM

from hf_growattn import load_growth, patch_model, save_growth
from hf_growattn.growable.attention import attentions

FORM = "extra_dims in config.json must have a form such as"
INDEX = "model.safetensors.index.json"
WEIGHTS = {"llama-2": "model.layers.{}.self_attn.k_proj.weight", "gpt2-2": "transformer.h.{}.attn.c_attn.weight"}
NEW = {
    name: f"{key.format(0).rsplit('.', 2)[0]}.extra.growths.growth_1.in_projection.weight"
    for name, key in WEIGHTS.items()
}
LAST = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Each family twice, with 4 and with 9 dims more in layer 0: whole, and a shard for every weight."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for variant in WEIGHTS:
        for dims in (4, 9):
            model = grown(dims, variant)
            model.save_pretrained(folder / f"{variant}-{dims}")
            model.save_pretrained(folder / f"{variant}-{dims}-shards", max_shard_size="1KB")
    save_growth(grown(4), folder / "growth")
    return folder


def edit(path, change, name="config.json"):
    content = json.loads((path / name).read_text())
    change(content)
    (path / name).write_text(json.dumps(content))


def fields(**changed):
    return lambda path: edit(path, lambda config: config.update(changed))


def dims(extra_dims):
    return fields(extra_dims=extra_dims)


def without(field):
    return lambda path: edit(path, lambda config: config.pop(field))


def cut(keep, name="model.safetensors"):
    def change(path):
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])

    return change


def shard_of(path, weight):
    return path / json.loads((path / INDEX).read_text())["weight_map"][weight]


def without_shard(path):
    shard_of(path, WEIGHTS["gpt2-2"].format(1)).unlink()


def index_names(name, weight=LAST):
    return lambda path: edit(path, lambda index: index["weight_map"].update({weight: name}), INDEX)


def elsewhere(name):
    """The file is there, and it would fit."""

    def change(path):
        outside = shutil.move(shard_of(path, LAST), path.parent / "outside.safetensors")
        (path / "sub").mkdir()
        index_names(name.format(str(outside).lstrip("/") if name == "/{}" else "outside.safetensors"))(path)

    return change


def by_class(path):
    """transformers takes the defaults of the family if the config is no file."""
    return type(base()).from_pretrained(path)


def pipe(name):
    """Opening one waits for a writer. "weights" is a shard, of a name that transformers would not give."""

    def change(path):
        if name == "weights.safetensors":
            index_names(name, WEIGHTS["llama-2"].format(0))(path)
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)

    return change


def false_header(length):
    """3 GB of nothing, whose first bytes say that nearly all of it is the header."""

    def change(path):
        with open(path / "model.safetensors", "wb") as file:
            file.write(length.to_bytes(8, "little"))
            file.truncate(3_000_000_000)

    return change


def of_another_model(variant):
    def change(path):
        shutil.copy(shard_of(path.parent / f"{variant}-9-shards", NEW[variant]), shard_of(path, NEW[variant]))

    return change


def other_weights(variant):
    """transformers would start those that are missing at random, and only warn."""
    weight = WEIGHTS[variant]
    return lambda path: shutil.copy(shard_of(path, weight.format(1)), shard_of(path, weight.format(0)))


def load(path, **options):
    AutoModelForCausalLM.from_pretrained(path, **options)


def ignoring(path):
    load(path, ignore_mismatched_sizes=True)


NO_DIMS = [{"-1": {"growth_1": [4, 0]}}, {"first": {"growth_1": [4, 0]}}, {"0": {"growth_1": 4}}, {"0": 20}, "20"]
NO_DIMS += [[{"growth_1": [4, 0]}], *({"0": {name: [1, 1]}} for name in ("keys", "training", "a.b", "", "forward"))]
NO_SIZES = ([0, 0], [-4, 4], [2.5, 0], ["4", 0], [None, 4], [True, 0], [4], [10**8, 0], [10**30, 0], [float("nan"), 0])
WRONG_SIZES = [{"growth_1": [2, 0]}, {"growth_1": [16, 0]}, {"growth_1": [4, 1]}, {"growth_2": [4, 0]}]

# The checkpoint, what is done to it, how it is loaded, and what is said.
CHECKPOINTS = [
    *(("llama-2-4", dims(each), AutoConfig.from_pretrained, ValueError, FORM) for each in NO_DIMS),
    *(("llama-2-4", dims({"0": {"growth_1": n}}), AutoConfig.from_pretrained, ValueError, FORM) for n in NO_SIZES),
    ("gpt2-2-4", dims({"7": {"growth_1": [4, 0]}}), load, RuntimeError, "is not in config.json"),
    ("llama-2-4", fields(num_hidden_layers=0), load, ValueError, "names layer 0, whose attention cannot"),
    *(
        (f"{variant}-4", dims({"0": each}), way, RuntimeError, r"\.0\..*attn.*extra.*config.json.*same save")
        for variant in WEIGHTS
        for each in WRONG_SIZES
        for way in (load, ignoring)
    ),
    *((f"{variant}-4", without("extra_dims"), load, (RuntimeError, ValueError), "extra") for variant in WEIGHTS),
    *(
        ("llama-2-4", fields(growable_submodels=each), load, ValueError, "growable_submodels.*must be a list")
        for each in (5, "language_model", [1])
    ),
    *(("llama-2-4", cut(n), load, OSError, "is not whole.*Copy, download or save it again") for n in (0, 5, 0.5, -1)),
    ("gpt2-2-4-shards", without_shard, load, OSError, "is not whole.*safetensors.*again"),
    ("llama-2-4-shards", index_names("model-x.safetensors"), load, OSError, "is not whole.*model-x.safetensors.*again"),
    *(
        ("llama-2-4-shards", elsewhere(name), load, OSError, "index.json names .* which is not in its folder.*again")
        for name in ("/{}", "../{}", "sub/../../{}", "..", "", "..\\{}", "C:{}")
    ),
    *(
        ("llama-2-4-shards", pipe(name), load, OSError, f"{name} is not an ordinary file.*again")
        for name in ("model.safetensors", INDEX, "weights.safetensors")
    ),
    ("llama-2-4", pipe("config.json"), by_class, OSError, "config.json is not an ordinary file.*again"),
    *(
        ("llama-2-4", false_header(length), load, OSError, "is not whole.*[Hh]eader.*again")
        for length in (2_900_000_000, 2**63, 100_000_001)
    ),
    *((f"{v}-4-shards", of_another_model(v), load, RuntimeError, rf"{NEW[v]} is \(.*same save") for v in WEIGHTS),
    *(
        (f"{v}-4-shards", other_weights(v), load, RuntimeError, f"{WEIGHTS[v].format(0)} is missing.*same save")
        for v in WEIGHTS
    ),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CHECKPOINTS)))
def test_a_checkpoint_is_refused_without_reading_much(saved, tmp_path, number):
    name, damage, call, kind, word = CHECKPOINTS[number]
    for neighbour in {name, name.replace("-4", "-9")}:
        shutil.copytree(saved / neighbour, tmp_path / neighbour)
    damage(tmp_path / name)
    tracemalloc.start()
    with pytest.raises(kind, match=word):
        call(tmp_path / name)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30_000_000


def described(**changed):
    """Say something else in the metadata of a growth."""

    def change(path):
        file = path / "growth.safetensors"
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() | changed
        save_file(load_file(file), file, metadata={name: text for name, text in metadata.items() if text is not None})

    return change


def one_nan(path):
    model = wide("llama-2", 2, 2)
    next(iter(attentions(model)[1].growths.values())).in_projection.weight.data[0, 0] = torch.nan
    save_growth(model, path)


def patched(variant="llama-2", **config):
    return patch_model(AutoModelForCausalLM.from_config(AutoConfig.for_model(**VARIANTS[variant]().to_dict() | config)))


def base():
    return patch_model(build("llama-2"))


def tuned(place: str = "layers.1.self_attn.v_proj"):
    """A base of which one layer was trained by a little."""
    model = base()
    model.model.get_submodule(place).weight.data.mul_(1.05)
    return model


def whole(path):
    grown(4).save_pretrained(path)
    (path / "growth.safetensors").unlink()


def beside(path):
    save_growth(grown(4), path / "growth")
    (path / "growth.safetensors").unlink()


DAMAGED = "holds a damaged growth.*Copy or save it again"
GROWTHS = {
    "another family": (
        lambda path: None,
        lambda: patched("gpt2-2"),
        ValueError,
        "growth of a llama",
    ),
    "other sizes": (lambda path: None, lambda: patched(num_key_value_heads=1), ValueError, "a model of other sizes"),
    "another base": (described(base="you/base"), patched, ValueError, r"other weights \(you/base\).*strict=False"),
    "a base with another MLP": (
        lambda path: None,
        lambda: tuned("layers.0.mlp.up_proj"),
        ValueError,
        "other weights",
    ),
    **{
        f"a base with another {place}": (lambda path: None, partial(tuned, place), ValueError, "other weights")
        for place in ("embed_tokens", "layers.1.input_layernorm", "norm")
    },
    "a tuned base": (lambda path: None, tuned, ValueError, r"other weights\. .*strict=False"),
    **{
        f"dims of {text!s:.20}": (described(extra_dims=text), base, ValueError, DAMAGED)
        for text in ('{"0": 3}', "[", "3", "[" * 100_000 + "]" * 100_000, None)
    },
    **{
        f"a size of {size}": (described(extra_dims=f'{{"0": {{"growth_1": [{size}, 2]}}}}'), base, ValueError, DAMAGED)
        for size in ("1e30", "NaN", "-1", "1.5", str(10**8), str(10**30))
    },
    "one weight of NaN": (one_nan, base, ValueError, "damaged growth: its weights are not finite"),
    **{f"cut at {keep}": (cut(keep, "growth.safetensors"), base, ValueError, DAMAGED) for keep in (0, 100, -1)},
    "nothing there": (shutil.rmtree, base, FileNotFoundError, "holds no growth: name a folder that save_growth wrote"),
    "a whole checkpoint": (whole, base, FileNotFoundError, "a whole checkpoint, which from_pretrained loads"),
    "a folder of adapters": (beside, base, FileNotFoundError, "holds no growth: name the folder .*growth"),
}


@pytest.mark.parametrize("case", GROWTHS)
def test_a_growth_is_refused_and_the_model_stays(saved, tmp_path, case):
    damage, make, kind, word = GROWTHS[case]
    folder = shutil.copytree(saved / "growth", tmp_path / "growth")
    damage(folder)
    model = make()
    before = fingerprint(model)
    with pytest.raises(kind, match=word):
        load_growth(model, folder)
    assert same(fingerprint(model), before)

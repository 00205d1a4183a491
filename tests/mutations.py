"""What may happen to the folder of a checkpoint: each mutation by its name, for tests/test_fuzz.py.

A mutation is called with hypothesis' `draw`, the folder, a checkpoint of the same form from another training, and the
file that code from the checkpoint would make if it ran.
"""

import json
import pickle
import shutil
from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool)


def evil_text(marker: Path) -> str:
    """Python that leaves a trace."""
    return f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"


class _Touch:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def evil_pickle(marker: Path) -> Path:
    """A file of weights that leaves a trace when it is unpickled."""
    file = marker.with_name("evil.bin")
    torch.save({"model.norm.weight": _Touch(marker)}, file)
    return file


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors*"))


def _any_file(draw, folder: Path) -> Path:
    return draw(st.sampled_from(_files(folder)))


def _tensors(draw, folder: Path) -> tuple[Path, dict[str, torch.Tensor], str]:
    """A file of weights, its tensors, and the name of one of them."""
    file = draw(st.sampled_from(sorted(folder.glob("model*.safetensors"))))
    tensors = load_file(file)
    return file, tensors, draw(st.sampled_from(sorted(tensors)))


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    save_file({name: value.contiguous() for name, value in tensors.items()}, file, {"format": "pt"})


def _flipped(draw, folder, other, marker):
    """Bits flip, as often in the few bytes that say what is where as in the numbers."""
    file = _any_file(draw, folder)
    content = bytearray(file.read_bytes())
    near = draw(st.sampled_from([8, 200, len(content)]))
    for _ in range(draw(st.integers(1, 3))):
        content[draw(st.integers(0, min(near, len(content)) - 1))] ^= 1 << draw(st.integers(0, 7))
    file.write_bytes(content)


def _cut(draw, folder, other, marker):
    file = _any_file(draw, folder)
    content = file.read_bytes()
    file.write_bytes(content[: draw(st.integers(0, len(content) - 1))])


def _lengthened(draw, folder, other, marker):
    with open(_any_file(draw, folder), "ab") as file:
        file.write(b"\0" * draw(st.integers(1, 99)))


def _removed(draw, folder, other, marker):
    _any_file(draw, folder).unlink()


def _without_a_tensor(draw, folder, other, marker):
    file, tensors, name = _tensors(draw, folder)
    del tensors[name]
    _save(tensors, file)


def _renamed(draw, folder, other, marker):
    file, tensors, name = _tensors(draw, folder)
    tensors[draw(st.sampled_from([f"{name}s", name.replace("weight", "bias"), name.removeprefix("model.")]))] = (
        tensors.pop(name)
    )
    _save(tensors, file)


def _reshaped(draw, folder, other, marker):
    file, tensors, name = _tensors(draw, folder)
    value = tensors[name]
    ways = [
        value.flatten(),
        value[None],
        value[:-1],
        torch.cat([value, value[:1]]),
        value.mT if value.dim() > 1 else value,
    ]
    tensors[name] = draw(st.sampled_from(ways))
    _save(tensors, file)


def _of_another_type(draw, folder, other, marker):
    file, tensors, name = _tensors(draw, folder)
    kind = draw(st.sampled_from(DTYPES))
    for each in [name] if draw(st.booleans()) else list(tensors):
        tensors[each] = tensors[each].to(kind)
    _save(tensors, file)


def _changed(draw, folder, other, marker):
    """Numbers that are not finite, zeros, or those of another tensor of this shape."""
    file, tensors, name = _tensors(draw, folder)
    alike = [n for n, value in tensors.items() if value.shape == tensors[name].shape]
    partner = draw(st.sampled_from(alike))
    values = [tensors[partner].clone(), torch.full_like(tensors[name], torch.nan), torch.zeros_like(tensors[name])]
    tensors[name] = draw(st.sampled_from(values))
    _save(tensors, file)


def _with_one_more(draw, folder, other, marker):
    file, tensors, name = _tensors(draw, folder)
    tensors[draw(st.sampled_from(["x", f"{name}.lora_A", "model.layers.9.self_attn.q_proj.weight"]))] = torch.ones(3)
    _save(tensors, file)


def _mixed(draw, folder, other, marker):
    """A file of another training, of the same sizes."""
    file = _any_file(draw, folder)
    shutil.copy(other / file.name, file)


def _another_config(draw, folder, other, marker):
    """The new dims of another save."""
    config = json.loads((folder / "config.json").read_text())
    parts = draw(
        st.sampled_from([{"1": {"growth_1": [2, 2]}}, {"0": {"growth_1": [3, 2]}}, {}, {"1": {"growth_2": [3, 2]}}])
    )
    (folder / "config.json").write_text(json.dumps(config | {"extra_dims": parts}))


def _lying_index(draw, folder, other, marker):
    """An index that names other files, files outside, or one too many; where there was none, it makes one."""
    path = folder / INDEX
    index = json.loads(path.read_text()) if path.exists() else {"metadata": {}, "weight_map": {}}
    name = draw(st.sampled_from(sorted(index["weight_map"]) or ["lm_head.weight"]))
    shutil.copy(_files(other)[0], folder.parent / "outside.safetensors")
    lie = draw(st.sampled_from([..., "model-x.safetensors", "../outside.safetensors", "", 3, None, "config.json"]))
    if lie is ...:
        index["weight_map"].pop(name, None)
    else:
        index["weight_map"][name] = lie
    path.write_text(
        json.dumps(draw(st.sampled_from([index, index["weight_map"], [], {"weight_map": {}}, index, index])))
    )


def _with_code(draw, folder, other, marker):
    """Classes of the checkpoint's own, in its folder or in the place of the library's."""
    config = json.loads((folder / "config.json").read_text())
    for file in (folder / "evil.py", *(folder / "growattn").glob("*.py")):
        file.write_text(evil_text(marker))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(evil_text(marker))
    keys = ("AutoConfig", "AutoModelForCausalLM", "AutoModel")
    where = draw(st.sampled_from(["evil.", "growattn/modeling.", "someone/else--evil."]))
    config["auto_map"] = dict.fromkeys(keys, f"{where}GrowAttnLlamaForCausalLM")
    kind = draw(st.sampled_from([config["model_type"], config["model_type"], "evil", None]))
    config["model_type"] = kind
    for name in draw(st.sampled_from([(), ("attn_implementation",), ("_attn_implementation",)])):
        config[name] = "someone/kernel"
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def _with_a_pickle(draw, folder, other, marker):
    """Weights that would run code if they were unpickled: beside the others, instead of them, or under their name."""
    evil = evil_pickle(marker).read_bytes()
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "adapter_model.bin"):
        (folder / name).write_bytes(evil)
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model.bin"}}
    way = draw(st.sampled_from(["beside", "instead", "named", "indexed"]))
    if way != "beside":
        for file in _files(folder):
            file.unlink()
    if way == "named":
        content = draw(st.sampled_from([evil, pickle.dumps({"x": _Touch(marker)})]))
        (folder / "model.safetensors").write_bytes(content)
    if way == "indexed":
        (folder / INDEX).write_text(json.dumps(index))


MUTATIONS = {
    function.__name__.strip("_").replace("_", " "): function
    for function in (
        *(_flipped, _cut, _lengthened, _removed, _without_a_tensor, _renamed, _reshaped, _of_another_type, _changed),
        *(_with_one_more, _mixed, _another_config, _lying_index, _with_code, _with_a_pickle),
    )
}

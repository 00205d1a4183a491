"""A growth in a folder of its own: new dims alone, and by which old weights `load_growth` knows their base again."""

import json
from pathlib import Path

import torch
from accelerate.utils import align_module_device
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from ..model.configuration import check_extra_dims
from ..model.families import dims_of
from ..model.new_dims import NewDims, full_tensor
from .attention import attentions
from .fingerprint import fingerprint, is_of_another_base
from .folders import replacing
from .growths import Dims, check_saving, growable_model, is_grown, name_in_base, origin_of, set_dims
from .training_state import bare_optimizers, refuse_meta, warn_without_ddp

GROWTH_FILE = "growth.safetensors"  # its metadata say of which model type it is, and which new dims it holds
GROWTH = "growth"  # the folder next to the adapters of a peft model: the new dims of its base
GROWN_TYPE = "import hf_growattn to load "  # begins the type of such adapters: the KeyError of who loads them without


def save_growth(model: nn.Module, folder: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
    """Save the new dims of a grown model alone, without its base, as one file: `growth.safetensors`.

    Its metadata say which new dims they are, and by which old weights `load_growth` knows the base again.

    Args:
        model: a patched model, or a module with one in it, such as a peft model.
        folder: where to.
        state_dict: of `model`, if all ranks of a sharded one have gathered it.

    Raises:
        ValueError: the model is not patched, it has not grown, or its new dims hold no numbers.
    """
    inner = growable_model(model)
    start = next(name for name, module in model.named_modules() if module is inner)
    start = f"{start}." if start else ""
    named = {name: parameter for name, parameter in inner.named_parameters() if _is_new(name)}
    if not named:
        raise ValueError("This model has not grown, so it has no new dims to save.")
    state = {}
    for name in named:
        path, _, own = name.rpartition(".")
        with align_module_device(module := inner.get_submodule(path)):  # accelerate may have put it on the disk
            kept = getattr(module, own) if state_dict is None else state_dict[f"{start}{name}"]
            refuse_meta([(name, kept)])
            state[name_in_base(inner, name)] = full_tensor(kept.detach()).cpu().contiguous()
    metadata = {"format": "pt", "model_type": inner.config.model_type, "extra_dims": json.dumps(dims_of(inner))}
    metadata |= {"base": origin_of(inner), "old_weights": json.dumps(fingerprint(inner, state_dict, start))}
    metadata["trained"] = json.dumps(sorted({_growth_of(name) for name, new in named.items() if new.requires_grad}))
    with replacing(Path(folder).resolve()) as partial:
        save_file(state, partial / GROWTH_FILE, metadata=metadata)


def load_growth(model: nn.Module, folder: str | Path, optimizer=None, strict: bool = True) -> nn.Module:
    """Give a patched model the new dims that `save_growth` wrote, in place of those that it has.

    Args:
        model: a patched model, or a module with one in it, such as a peft model: pass the outermost.
        folder: where they are.
        optimizer: the optimizer that trains the model already, or a list of all of them, to take the new parameters.
        strict: refuse a base with other old weights than the growth was saved with; rounding is no difference.

    Returns:
        The same object.

    Raises:
        ValueError: the model is not patched; or the growth is damaged, of another model, or of another base.
        FileNotFoundError: the folder holds no growth.
    """
    inner = growable_model(model)
    check_saving(model)
    metadata, extra_dims, state = _read_growth(Path(folder))
    if metadata.get("model_type") != inner.config.model_type:
        raise ValueError(
            f"{folder} holds a growth of a {metadata.get('model_type')}, and this is a {inner.config.model_type}."
        )
    sizes = {}
    for attention in attentions(inner):
        for growth, dims in extra_dims.get(str(attention.layer), {}).items():
            new = NewDims(attention.shape, *dims, device="meta")
            place = f"{name_in_base(inner, attention.name)}.extra.growths.{growth}."
            sizes |= {place + own: parameter.shape for own, parameter in new.named_parameters()}
    if sizes != {name: tensor.shape for name, tensor in state.items()}:
        raise ValueError(f"{folder} holds a growth of a model of other sizes: load it onto the base that it grew on.")
    if strict and is_of_another_base(fingerprint(inner), json.loads(metadata.get("old_weights", "{}"))):
        name = f" ({metadata['base']})" if metadata.get("base") else ""
        raise ValueError(
            f"The growth in the folder {str(folder)!r} was found on a base with other weights{name}. Load it onto that "
            "base, as it was at the save. If the base has trained since, save the whole model instead. "
            "load_growth(..., strict=False) takes this base all the same."
        )
    if optimizer is not None:
        warn_without_ddp(model)
    refuse_meta(_new_parameters(inner).items())
    set_dims(model, extra_dims, bare_optimizers(optimizer))
    with torch.no_grad():
        for name, parameter in _new_parameters(inner).items():
            parameter.copy_(state[name])
    return model


def _read_growth(folder: Path) -> tuple[dict[str, str], Dims, dict[str, torch.Tensor]]:
    """What a folder says of a growth, its dims, and its weights by name."""
    path = folder / GROWTH_FILE
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{GROWTH_FILE} is not an ordinary file")  # opening a pipe waits for a writer
        with safe_open(path, "pt") as file:
            metadata, state = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}
        extra_dims = json.loads(metadata.get("extra_dims", ""))
        check_extra_dims(extra_dims)
        if not all(tensor.isfinite().all() for tensor in state.values()):
            raise ValueError("its weights are not finite")
    except (OSError, RecursionError, SafetensorError, ValueError) as error:
        if not isinstance(error, FileNotFoundError):
            raise ValueError(f"{folder} holds a damaged growth: {error}. Copy or save it again.") from error
        fix = "name a folder that save_growth wrote"
        if (folder / GROWTH / GROWTH_FILE).is_file():
            fix = f"name the folder {folder / GROWTH}"
        elif (folder / "config.json").is_file():
            fix = "it is a whole checkpoint, which from_pretrained loads"
        raise FileNotFoundError(f"{folder} holds no growth: {fix}.") from error
    return metadata, extra_dims, state


def load_growth_of_adapter(
    outer: nn.Module, model: PreTrainedModel, folder: Path, is_trainable: bool, alone: bool
) -> None:
    """Load the growth that an adapter was trained with into the patched `model` inside `outer`.

    Args:
        outer: the outermost model.
        model: the patched one.
        folder: where the growth is.
        is_trainable: let those new dims train that did when they were saved, and that the model does not have yet.
        alone: whether the model has no other adapter, so that new dims may change.

    Raises:
        ValueError: there is another adapter, and the model does not hold the very same new dims. Otherwise as
            `load_growth`.
    """
    metadata, _, state = _read_growth(folder)
    own = _new_parameters(model)
    same = own.keys() == state.keys() and all(torch.equal(own[n].cpu(), state[n].to(own[n].dtype)) for n in own)
    if not (alone or same):
        raise ValueError(
            f"Other adapters of this model were trained without the new dims in {folder}, which would change what they "
            "compute: load this one into a model of its own."
        )
    load_growth(outer, folder)
    trained = json.loads(metadata.get("trained", "[]"))
    for name, parameter in _new_parameters(model).items():
        if parameter is not own.get(name):
            parameter.requires_grad_(is_trainable and _growth_of(name) in trained)


def _new_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The parameters of new dims, by the names that they have in the base model, with or without a head around it."""
    return {name_in_base(model, name): parameter for name, parameter in model.named_parameters() if _is_new(name)}


def _is_new(name: str) -> bool:
    return ".extra.growths." in name


def _growth_of(name: str) -> str:
    return name.partition(".extra.growths.")[2].partition(".")[0]


def save_growth_beside(model: nn.Module, adapters: Path, state_dict: dict[str, torch.Tensor] | None) -> None:
    """Save a growth next to adapters, whose config then asks for it; otherwise remove that of a former save there."""
    if not is_grown(model):
        (adapters / GROWTH / GROWTH_FILE).unlink(missing_ok=True)
        return
    save_growth(model, adapters / GROWTH, state_dict)
    file = adapters / "adapter_config.json"
    config = json.loads(file.read_text())
    config["peft_type"] = GROWN_TYPE + config["peft_type"]
    config["base_model_name_or_path"] = config["base_model_name_or_path"] or origin_of(growable_model(model)) or None
    file.write_text(json.dumps(config, indent=2, sort_keys=True))

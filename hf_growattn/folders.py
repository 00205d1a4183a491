"""Folders of checkpoints: written whole or not at all, and told from those whose weights have changed since."""

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Lend an empty directory that takes the place of `target` at the end, and is gone after an exception.

    Files of `target` that it does not replace stay there.

    Raises:
        ValueError: `target` is a file.
        OSError: there is no room or no permission; `target` stays as it was.
    """
    if target.is_file():
        raise ValueError(f"{target} is a file; a checkpoint needs a directory.")
    partial = (target if _stays(target) else target.parent) / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        _take_place(partial, target)
    except Exception as error:
        if type(error).__name__ != "SafetensorError":  # which hides an OSError; these files may not import safetensors
            raise
        raise OSError(f"{target} was not written, and stays as it was: {error}. Make room there.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _stays(target: Path) -> bool:
    """Whether a directory cannot be exchanged for another: a mount, the current one, or one in one of others."""
    if not target.exists():
        return False
    return os.path.ismount(target) or Path.cwd().is_relative_to(target) or not os.access(target.parent, os.W_OK)


def _take_place(partial: Path, target: Path) -> None:
    if not target.exists():
        os.rename(partial, target)
        return
    replaced = {partial.name, *(entry.name for entry in partial.iterdir())}
    others = [entry for entry in target.iterdir() if entry.name not in replaced]
    if partial.parent == target:
        files = [path.relative_to(partial) for path in partial.rglob("*") if path.is_file()]
        for file in sorted(files, key=lambda file: not is_weights(file.name)):
            (target / file).parent.mkdir(exist_ok=True)
            os.replace(partial / file, target / file)
        for entry in filter(lambda entry: is_weights(entry.name), others):
            entry.unlink()
        return
    for entry in others:
        if is_weights(entry.name):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, partial / entry.name, copy_function=_link_or_copy, symlinks=True)
        else:
            _link_or_copy(entry, partial / entry.name)
    shutil.copymode(target, partial)
    _exchange(partial, target)


def is_weights(name: str) -> bool:
    """Weights of a former save, which must not survive beside new ones: shards and their index."""
    return name.startswith("model") and name.endswith((".safetensors", ".safetensors.index.json"))


def _link_or_copy(source, destination):
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, destination, follow_symlinks=False)


def _exchange(one: Path, other: Path) -> None:
    """Swap two directories; in one step on Linux, elsewhere in three renames of which none loses anything."""
    if sys.platform == "linux":
        at_fdcwd, rename_exchange = -100, 2
        libc = ctypes.CDLL(None)
        renameat2 = getattr(libc, "renameat2", None)
        if renameat2 and renameat2(at_fdcwd, bytes(one), at_fdcwd, bytes(other), rename_exchange) == 0:
            return
    aside = one.with_name(one.name + ".former")
    os.rename(other, aside)
    os.rename(one, other)
    os.rename(aside, one)


def note_sums(file: Path) -> None:
    """Write the checksums of the weights in the folder above a file's own into that file."""
    file.write_text(json.dumps(_sums(file.parents[1]), indent=2) + "\n")


def check_sums(file: Path) -> None:
    """Make sure that the weights are still those whose checksums `note_sums` wrote, if it did.

    Raises:
        OSError: they are not; the message names the fix.
    """
    if not file.is_file():
        return
    try:
        noted = dict(json.loads(file.read_bytes()))
    except (TypeError, ValueError):
        noted = {}
    found = _sums(file.parents[1])
    if found != noted:
        names = sorted(name for name in {*found, *noted} if found.get(name) != noted.get(name))
        raise OSError(
            f"The checkpoint {file.parents[1]} is not whole: {', '.join(names[:4])} is not what was saved. Copy, "
            f"download or save it again; or, if you changed the weights on purpose, delete {file}."
        )


def check_numbers(folder: Path) -> None:
    """Make sure that the weights in a folder are floating-point numbers: others would be cast, whatever they mean.

    Raises:
        OSError: some are not, and config.json says of no quantization; the message names one.
    """
    config = folder / "config.json"
    if not config.is_file() or b"quantization_config" in config.read_bytes():
        return
    for path in folder.glob("model*.safetensors"):
        with open(path, "rb") as file:
            try:
                size = min(int.from_bytes(file.read(8), "little"), path.stat().st_size)
                kinds = {
                    name: entry["dtype"] for name, entry in json.loads(file.read(size)).items() if "dtype" in entry
                }
            except (AttributeError, KeyError, TypeError, ValueError):
                continue  # no safetensors file, as its reader will say
        for name, kind in kinds.items():
            if name.endswith(("weight", "bias")) and "F" not in kind:
                raise OSError(
                    f"The checkpoint {folder} holds {name} as {kind}, and its config.json says of no quantization. "
                    "Copy, download or save it again, in fp32, bf16 or fp16."
                )


def check_index(folder: Path) -> None:
    """Make sure that an index of shards, if that is what a folder has, is one: transformers trusts its form.

    Raises:
        OSError: it is not; the message names the fix.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not index.is_file():
        return
    try:
        content = json.loads(index.read_bytes())
        files = [*content["weight_map"].values(), *content["metadata"]]
    except (AttributeError, KeyError, TypeError, ValueError):
        files = []
    if not files or not all(isinstance(name, str) for name in files):
        raise OSError(f"{index} is no index of weights. Copy, download or save the checkpoint again.")


def _sums(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file of weights in a folder."""
    files = sorted(path for path in folder.iterdir() if is_weights(path.name))
    with ThreadPoolExecutor() as pool:
        return dict(zip((path.name for path in files), pool.map(_sum, files)))


def _sum(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()

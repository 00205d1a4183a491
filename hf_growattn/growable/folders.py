"""Folders of checkpoints: written whole or not at all, and read as one save left them or refused."""

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")  # as save_pretrained names them
_AGAIN = "Copy, download or save it again"


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Lend an empty directory whose files move into `target` at the end, unless there is an exception.

    Other files of `target` stay, but for former weights that the new ones replace. The directory lies next to `target`,
    on the same disk. A process that is killed leaves it there, and amid the moves an interrupt does, too, under a name
    that says that it is complete, by which `loading` finds it.
    """
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; a checkpoint needs a directory.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        inside = os.path.ismount(target) or (target.exists() and not os.access(target.parent, os.W_OK))
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target if inside else target.parent))
        try:
            yield folder
            complete = folder.rename(folder.with_name(folder.name.replace(".partial-", ".complete-", 1)))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        _move_in(complete, target)
        shutil.rmtree(complete, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # the latter hides the former
        kind = type(error) if isinstance(error, OSError) else OSError
        raise kind(
            f"{target} cannot be written: {error}. Name a folder that you may write to, on a disk with room."
        ) from error


def find_replaced_weights(written: set[str], index: bytes | None) -> set[str]:
    """Return the former weights that loaders would read in place of the written ones, or along with them.

    transformers prefers one file of weights to an index; vLLM and llama.cpp read an index, or every shard in the folder
    without one. Variants, and files that the former `index` does not list, are not ours and stay.
    """
    if not written & {WEIGHTS, INDEX}:
        return set()
    former = {WEIGHTS, INDEX}
    if index is not None:
        with contextlib.suppress(ValueError):  # not an index
            former |= {name for name in _read_shards(index) if _SHARD.fullmatch(name)}
    return former - written


def _read_shards(index: bytes) -> set[str]:
    """Return the names of the files that an index of weights lists; a ValueError if it is none."""
    try:
        content = json.loads(index)
        dict(**content["metadata"])  # transformers reads it, too
        return {str(name) for name in content["weight_map"].values()}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{INDEX} is not an index of weights. {_AGAIN}.") from error


def _move_in(complete: Path, target: Path) -> None:
    """Move files into a directory, the config last: until the weights change, the former save loads from there."""
    target.mkdir(exist_ok=True)
    written = {str(path.relative_to(complete)) for path in complete.rglob("*") if path.is_file()}
    index = target / INDEX
    replaced = find_replaced_weights(written, index.read_bytes() if index.is_file() else None)
    if INDEX in written:  # former and new shards may have the same names, and must not be read as one save
        index.unlink(missing_ok=True)
    for parent in {Path(name).parent for name in written}:
        (target / parent).mkdir(parents=True, exist_ok=True)
    last = [name for name in (WEIGHTS, INDEX) if name in written]
    for name in [*written.difference((*last, CONFIG)), *last]:
        os.replace(complete / name, target / name)
    for name in replaced:  # while the config has not moved, loading finds that there is a rest
        (target / name).unlink(missing_ok=True)
    if CONFIG in written:
        os.replace(complete / CONFIG, target / CONFIG)


@contextlib.contextmanager
def loading(checkpoint: Path) -> Iterator[None]:
    """Make sure that a checkpoint in a folder is whole and of one save before it is loaded; an OSError otherwise."""
    _check_moves(checkpoint)
    _check_files(checkpoint)
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"The checkpoint {checkpoint} is not whole: {error}. {_AGAIN}.") from error


def _check_moves(folder: Path) -> None:
    """Raise an OSError that names the rest of a later save which never finished moving into a folder."""
    config = folder / CONFIG
    written = config.stat().st_mtime if config.is_file() else 0.0
    for rest in [*folder.parent.glob(f".{folder.name}.complete-*"), *folder.glob(f".{folder.name}.complete-*")]:
        has_files = any(path.is_file() for path in rest.rglob("*"))
        if has_files and rest.stat().st_mtime > written:  # an older one was saved over since
            raise OSError(
                f"A save into {folder} did not finish: the rest of its files is in {rest}. Move them into {folder}, "
                "or save it again."
            )


def _check_files(folder: Path) -> None:
    """Make sure that config and weights are ordinary files in the folder: transformers trusts an index, and pipes."""
    names, shards = [name for name in (CONFIG, WEIGHTS, INDEX) if (folder / name).exists()], set()
    if WEIGHTS not in names and (folder / INDEX).is_file():
        shards = _read_shards((folder / INDEX).read_bytes())
    for name in shards:
        if not re.fullmatch(r"[^/\\:]+\.safetensors", name):
            raise OSError(f"{folder / INDEX} names {name!r}, which is not in its folder, or is pickled. {_AGAIN}.")
    for name in [*names, *shards]:
        if not (folder / name).is_file():
            raise OSError(f"The checkpoint {folder} is not whole: {name} is not an ordinary file. {_AGAIN}.")

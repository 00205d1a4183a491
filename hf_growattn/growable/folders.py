"""Folders of checkpoints: written whole or not at all, and read as one save left them or refused."""

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from pickle import UnpicklingError

from safetensors import SafetensorError, safe_open

try:
    import fcntl
except ImportError:  # Windows has no such locks: savers of one folder do not wait for each other there
    fcntl = None

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")  # as save_pretrained names them
_AGAIN = "Copy, download or save it again"


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Lend an empty directory whose files move into `target` at the end, unless there is an exception.

    Other files of `target` stay, but for former weights that the new ones replace. Several processes may save there
    at once: the last one wins. A killed process leaves its directory next to `target`; nobody else removes it.

    Raises:
        ValueError: `target` is a file.
        OSError: room or permission is missing; `target` stays as it was.
    """
    if target.is_file():
        raise ValueError(f"{target} is a file; a checkpoint needs a directory.")
    target.parent.mkdir(parents=True, exist_ok=True)
    fixed = os.path.ismount(target) or (target.exists() and not os.access(target.parent, os.W_OK))
    try:
        with scratch(target if fixed else target.parent, target.name) as partial:
            yield partial
            _move_in(partial, target)
    except SafetensorError as error:  # which hides an OSError
        raise OSError(f"{target} was not written, and stays as it was: {error}. Make room there.") from error


@contextlib.contextmanager
def scratch(place: Path, name: str) -> Iterator[Path]:
    """Lend a directory of a name that no other process uses, and remove it at the end."""
    folder = place / f".{name}.partial-{secrets.token_hex(8)}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def find_replaced_weights(written: set[str], index: bytes | None) -> set[str]:
    """Return the former weights that loaders would read in place of the written ones, or along with them.

    transformers prefers one file of weights to an index; vLLM and llama.cpp read an index, or every shard in the folder
    without one. So a save of one of the two removes the other, and the shards that the former index lists. Variants,
    and files that the index does not list, are not ours and stay.

    Args:
        written: names of the new files.
        index: content of the former index, where there was one.
    """
    if not written & {WEIGHTS, INDEX}:
        return set()
    former = {WEIGHTS, INDEX}
    if index is not None:
        with contextlib.suppress(AttributeError, KeyError, RecursionError, TypeError, ValueError):  # not an index
            former |= {name for name in json.loads(index)["weight_map"].values() if _SHARD.fullmatch(name)}
    return former - written


def _move_in(partial: Path, target: Path) -> None:
    """Move files into a directory, the config last: until the weights change, the former save loads from there."""
    if not target.exists():
        with contextlib.suppress(OSError):  # another process was faster
            return os.rename(partial, target)
    with _lock(target):
        files = [path.relative_to(partial) for path in partial.rglob("*") if path.is_file()]
        index = target / INDEX
        written = {str(file) for file in files}
        replaced = find_replaced_weights(written, index.read_bytes() if index.is_file() else None)
        if INDEX in written:  # former and new shards may have the same names, and must not be read as one save
            index.unlink(missing_ok=True)
        config = [file for file in files if str(file) == "config.json"]
        others = [file for file in files if file not in config]
        for file in sorted(others, key=lambda file: file.name in (WEIGHTS, INDEX)):
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(partial / file, target / file)
        for name in replaced:
            (target / name).unlink(missing_ok=True)
        for file in config:
            os.replace(partial / file, target / file)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Let other processes of this machine that save into a directory wait."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a disk without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing leaves it locked where a fork has the descriptor too
        os.close(descriptor)


@contextlib.contextmanager
def loading(checkpoint: Path) -> Iterator[None]:
    """Make sure that a checkpoint is whole and of one save while it is loaded, and name the fix for a damaged one.

    A Hub id is not a folder, and nothing is known of it before it is loaded.

    Raises:
        OSError: weights are missing or damaged, or another process saved there meanwhile; the message names the fix.
    """
    before = _read_state(checkpoint)
    error = None
    try:
        _check_files(checkpoint)
        _check_numbers(checkpoint)
        yield
    except Exception as raised:
        error = raised
    if _read_state(checkpoint) != before:
        raise OSError(f"The checkpoint {checkpoint} was saved again while it was loaded. Load it again.") from error
    pickled = isinstance(error, UnpicklingError)
    absent = isinstance(error, FileNotFoundError) and ".safetensors" in str(error)
    if pickled or absent or isinstance(error, SafetensorError):
        reason = "it names pickled files, which may hold code" if pickled else error
        raise OSError(f"The checkpoint {checkpoint} is not whole: {reason}. {_AGAIN}.") from error
    if error is not None:
        raise error


def _read_state(folder: Path) -> dict[str, tuple]:
    """Return what identifies each file of weights, and config.json; another save changes it."""
    state = {}
    with contextlib.suppress(OSError):  # not a folder here, or a file that another process removes meanwhile
        for path in [folder / "config.json", *sorted(folder.glob("model*.safetensors*"))]:
            found = path.stat()
            state[path.name] = (found.st_ino, found.st_mtime_ns, found.st_size)
    return state


def _check_files(folder: Path) -> None:
    """Make sure that weights are ordinary files, and that an index of shards is one: transformers trusts both."""
    paths = [path for path in (folder / WEIGHTS, folder / INDEX) if path.exists()]
    if paths == [folder / INDEX] and paths[0].is_file():
        try:
            content = json.loads(paths[0].read_bytes())
            shards = sorted(set(content["weight_map"].values()))
            dict(**content["metadata"])
            # Windows knows the separators of all systems.
            astray = [name for name in shards if not name.strip(".") or PureWindowsPath(name).name != name]
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            shards = []
        if not shards:
            raise OSError(f"{paths[0]} is not an index of weights. {_AGAIN}.")
        if astray:
            raise OSError(f"{paths[0]} names {astray[0]!r}, which is not in its folder. {_AGAIN}.")
        paths += [folder / name for name in shards]
    for path in paths:
        if path.exists() and not path.is_file():  # reading a pipe would wait for ever
            raise OSError(f"{path} is not an ordinary file. {_AGAIN}.")


def _check_numbers(folder: Path) -> None:
    """Make sure that the weights in a folder are floating-point numbers: loading would cast integers silently."""
    config = folder / "config.json"
    if not config.is_file() or b"quantization_config" in config.read_bytes():
        return
    for path in filter(Path.is_file, folder.glob("model*.safetensors")):
        kinds = {}
        with contextlib.suppress(SafetensorError), safe_open(path, "pt") as file:  # its reader will report the damage
            kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}
        for name, kind in kinds.items():
            if name.endswith(("weight", "bias")) and "F" not in kind:
                raise OSError(
                    f"The checkpoint {folder} holds {name} as {kind}, but config.json does not mention quantization. "
                    f"{_AGAIN}, in fp32, bf16 or fp16."
                )

"""Folders of checkpoints: written whole or not at all, and read as one save left them or refused."""

import contextlib
import ctypes
import json
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from pickle import UnpicklingError

from safetensors import SafetensorError, safe_open

from ..model.configuration import CODE_FOLDER

try:
    import fcntl
except ImportError:  # Windows has no such locks: there, leftovers of killed processes stay, and savers do not wait
    fcntl = None

_INDEX = "model.safetensors.index.json"
_AGAIN = "Copy, download or save it again"


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Lend an empty directory that takes the place of `target` at the end, and is gone after an exception.

    Files of `target` that it does not replace stay there. Several processes may do so at once: each has a directory
    of its own, and the last one to end wins, whole.

    Raises:
        ValueError: `target` is a file.
        OSError: there is no room or no permission; `target` stays as it was.
    """
    if target.is_file():
        raise ValueError(f"{target} is a file; a checkpoint needs a directory.")
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        fixed = False
    else:
        fixed = os.path.ismount(target) or not os.access(target.parent, os.W_OK)
    try:
        with scratch(target if fixed else target.parent, target.name) as folder:
            partial = folder / target.name  # the scratch directory itself is locked, also against a save into it
            partial.mkdir()
            yield partial
            _take_place(partial, target, movable=not fixed)
    except SafetensorError as error:  # which hides an OSError
        raise OSError(f"{target} was not written, and stays as it was: {error}. Make room there.") from error


@contextlib.contextmanager
def scratch(place: Path, name: str) -> Iterator[Path]:
    """Lend a directory that no other process touches, and remove those that killed processes of this machine left.

    It is locked as long as its process lives. Other machines that share a disk do not see that, so its name tells ours.
    """
    prefix = f".{name}.partial-{platform.node()}-"
    for left in [place / entry for entry in os.listdir(place) if entry.startswith(prefix)]:
        with contextlib.suppress(OSError), _alone(left, wait=False) as dead:
            if dead:
                shutil.rmtree(left, ignore_errors=True)
    with contextlib.ExitStack() as end:
        locked = None
        while locked is None:
            folder = place / (prefix + secrets.token_hex(8))
            folder.mkdir()
            with contextlib.suppress(FileNotFoundError):  # another process removed it before it was locked
                locked = end.enter_context(_alone(folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _alone(folder: Path, wait: bool = True) -> Iterator[bool]:
    """Lock a directory against other processes of this machine, and say whether it is.

    It is not where the disk has no locks or, unless we wait, where another process has it.
    """
    locked = False
    with contextlib.ExitStack() as end:
        while fcntl and not locked:
            descriptor = os.open(folder, os.O_RDONLY)
            end.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except OSError:
                break
            end.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)  # closing leaves it locked where a fork holds it too
            locked = os.path.samestat(os.fstat(descriptor), os.stat(folder))  # another one may have taken its place
        yield locked


def _take_place(partial: Path, target: Path, movable: bool) -> None:
    """Put what is in one directory into the place of another: in one step, or else file by file."""
    try:
        if not target.exists():
            return os.rename(partial, target)
    except OSError:
        if not target.exists():
            raise  # else another process was faster
    with _alone(target):
        if movable and sys.platform == "linux" and not _is_here(target):
            _carry_over(target, partial, but=_is_of_one_save)
            shutil.copymode(target, partial)
            if _exchange(partial, target):
                return _carry_over(partial, target, but=_is_of_one_save)  # what others put there in the meantime
        files = [path.relative_to(partial) for path in partial.rglob("*") if path.is_file()]
        former = {entry.name for entry in target.iterdir() if is_weights(entry.name)} - {file.name for file in files}
        (target / _INDEX).unlink(missing_ok=True)  # so that nobody takes shards of two saves for one meanwhile
        for file in sorted(files, key=lambda file: (not is_weights(file.name), file.name == _INDEX)):
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(partial / file, target / file)
        for name in former:
            (target / name).unlink(missing_ok=True)


def is_weights(name: str) -> bool:
    """Weights of a former save, which must not survive beside new ones: shards and their index."""
    return name.startswith("model") and name.endswith((".safetensors", ".safetensors.index.json"))


def _is_of_one_save(name: str) -> bool:
    """What must not survive a save: its weights, and the code that loads them."""
    return is_weights(name) or name == CODE_FOLDER


def _is_here(target: Path) -> bool:
    """Whether this process works in a directory, and would find itself in a deleted one."""
    with contextlib.suppress(FileNotFoundError):  # it does already
        return Path.cwd().is_relative_to(target)
    return False


def _carry_over(former: Path | str, new: Path | str, but=lambda name: False) -> None:
    """Link or copy what one directory holds into another that lacks it, but for some names."""
    for entry in [entry for entry in os.scandir(former) if not but(entry.name)]:
        source, destination = entry.path, os.path.join(new, entry.name)
        with contextlib.suppress(FileNotFoundError):  # gone in the meantime
            if entry.is_dir(follow_symlinks=False):
                os.makedirs(destination, exist_ok=True)
                _carry_over(source, destination)
                shutil.copystat(source, destination)
            elif not os.path.lexists(destination):
                try:
                    os.link(source, destination, follow_symlinks=False)
                except OSError:  # a disk without links
                    shutil.copy2(source, destination, follow_symlinks=False)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories in one step, where Linux and the disk can."""
    at_fdcwd, rename_exchange = -100, 2
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    return bool(renameat2) and renameat2(at_fdcwd, bytes(one), at_fdcwd, bytes(other), rename_exchange) == 0


@contextlib.contextmanager
def loading(checkpoint: Path) -> Iterator[None]:
    """Make sure that a checkpoint is whole and of one save while it is loaded, and say of a damaged one what to do.

    It is a folder, or a Hub id, of which nothing is known before it is loaded.

    Raises:
        OSError: weights are missing or damaged, or another process saved there meanwhile; the message names the fix.
    """
    before, error = _state(checkpoint), None
    try:
        _check_files(checkpoint, {name for name in before if is_weights(name)})
        _check_numbers(checkpoint)
        yield
    except Exception as raised:
        error = raised
    if _state(checkpoint) != before:
        raise OSError(f"The checkpoint {checkpoint} was saved anew while it was loaded. Load it again.") from error
    pickled = isinstance(error, UnpicklingError)
    absent = isinstance(error, FileNotFoundError) and ".safetensors" in str(error)
    if pickled or absent or isinstance(error, SafetensorError):
        reason = "it names pickled files, which may hold code" if pickled else error
        raise OSError(f"The checkpoint {checkpoint} is not whole: {reason}. {_AGAIN}.") from error
    if error is not None:
        raise error


def _state(folder: Path) -> dict[str, tuple]:
    """What tells each file of weights, and config.json, from those that take its place."""
    with contextlib.suppress(OSError):  # not a folder here, or files are gone in the meantime, which is a state too
        entries = [entry for entry in os.scandir(folder) if is_weights(entry.name) or entry.name == "config.json"]
        stats = {entry.name: os.stat(entry.path) for entry in entries}
        return {name: (s.st_ino, s.st_mtime_ns, s.st_size) for name, s in stats.items()}
    return {}


def _check_files(folder: Path, names: set[str]) -> None:
    """Make sure that weights are ordinary files, and that an index of shards is one: transformers trusts both."""
    if _INDEX in names and not (folder / "model.safetensors").is_file() and (folder / _INDEX).is_file():
        try:
            content = json.loads((folder / _INDEX).read_bytes())
            shards, _ = set(content["weight_map"].values()), dict(**content["metadata"])
            # Windows knows the separators of all systems.
            astray = [name for name in shards if not name.strip(".") or PureWindowsPath(name).name != name]
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            shards = None
        if not shards:
            raise OSError(f"{folder / _INDEX} is not an index of weights. {_AGAIN}.")
        if astray:
            raise OSError(f"{folder / _INDEX} names {astray[0]!r}, which does not lie beside it. {_AGAIN}.")
        names |= shards
    for path in (folder / name for name in sorted(names)):
        if path.exists() and not path.is_file():  # reading a pipe would wait for ever
            raise OSError(f"{path} is not an ordinary file. {_AGAIN}.")


def _check_numbers(folder: Path) -> None:
    """Make sure that the weights in a folder are floating-point numbers: others would be cast, whatever they mean."""
    config = folder / "config.json"
    if not config.is_file() or b"quantization_config" in config.read_bytes():
        return
    for path in folder.glob("model*.safetensors"):
        kinds = {}
        with contextlib.suppress(SafetensorError), safe_open(path, "pt") as file:  # else its reader will say so
            kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}
        for name, kind in kinds.items():
            if name.endswith(("weight", "bias")) and "F" not in kind:
                raise OSError(
                    f"The checkpoint {folder} holds {name} as {kind}, but config.json does not mention quantization. "
                    f"{_AGAIN}, in fp32, bf16 or fp16."
                )

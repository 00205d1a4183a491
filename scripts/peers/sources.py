"""The tests of a peer library, as the package index and its public repository have them for the installed version."""

import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

CACHE = Path(__file__).parents[1] / "output" / "peers"  # git ignores it

# What transformers' source distribution lacks, and its common tests import; and where the whole is.
TRANSFORMERS = "https://github.com/huggingface/transformers"
LEFT_OUT = ("tests/generation", "tests/exporters")
# Without them the common tests still run, on nothing in the place of these classes. The last one is never fetched,
# since it imports half of the repository: it lists fields that every config takes.
STAND_INS = {
    "tests/generation/test_utils.py": "class GenerationTesterMixin: ...\n",
    "tests/exporters/test_export.py": "class ExportTesterMixin: ...\n",
    "tests/utils/test_configuration_utils.py": (
        'config_common_kwargs = {"return_dict": False, "output_hidden_states": True, "dtype": "float16"}\n'
    ),
}


def peft_tests() -> Path:
    """Return a folder with peft's `tests`."""
    return _unpacked("peft")


def transformers_tests() -> tuple[Path, bool]:
    """Return a folder with transformers' `tests`, and whether those of generation are among them."""
    root = _unpacked("transformers")
    whole = all((root / part).is_dir() for part in LEFT_OUT) or _add_from_repository(root)
    for name, text in STAND_INS.items():
        if not (root / name).exists():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    return root, whole


def _unpacked(name: str) -> Path:
    """Unpack the tests of a source distribution anew; the archive itself is kept."""
    version = importlib.metadata.version(name)
    root = CACHE / f"{name}-{version}"
    archive = CACHE / f"{name}-{version}.tar.gz"
    if not archive.exists():
        print(f"Taking the source distribution of {name} {version} ...", flush=True)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name]
        subprocess.run([*download, "--dest", CACHE, f"{name}=={version}"], check=True)
    shutil.rmtree(root, ignore_errors=True)
    with tarfile.open(archive) as tar:
        tests = [member for member in tar.getmembers() if member.name.startswith(f"{root.name}/tests/")]
        tar.extractall(CACHE, tests, filter="data")
    (root / "tests" / "__init__.py").touch()  # a package, or `tests` of this project would join it
    return root


def _add_from_repository(root: Path) -> bool:
    """Add what the distribution lacks from the tag of the same version, if the repository is in reach."""
    clone = root.with_name(f"{root.name}.git")
    if not clone.exists():
        partial = clone.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        tag = f"v{root.name.removeprefix('transformers-')}"
        shallow = ["--quiet", "--depth", "1", "--filter=blob:none", "--sparse", "-c", "advice.detachedHead=false"]
        for command in (
            ["git", "clone", *shallow, "--branch", tag, TRANSFORMERS, partial],
            ["git", "-C", partial, "sparse-checkout", "set", *LEFT_OUT],
        ):
            if subprocess.run(command).returncode:
                return False
        partial.rename(clone)
    for part in LEFT_OUT:
        shutil.copytree(clone / part, root / part, dirs_exist_ok=True)
    return True

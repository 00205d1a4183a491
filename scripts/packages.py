"""Build the wheel and the source distribution, and check what a package index would show: `python scripts/packages.py`.

A package index shows the README without the files beside it. So its relative links are made to lead to the address that
`[project.urls] Repository` of pyproject.toml names, in the built packages alone. Without that setting they stay as they
are, and lead nowhere on an index; `scripts/release.sh --upload` refuses.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(!?\[[^\]]*\]\(\s*)(?![a-z]+:|#)([^)\s]+)")


def repository(pyproject: str) -> str | None:
    """The address of the repository that a pyproject.toml names; Python 3.10 has no tomllib."""
    urls = re.search(r"^\[project\.urls\]$(.*?)(?=^\[|\Z)", pyproject, re.MULTILINE | re.DOTALL)
    found = re.search(r'^Repository\s*=\s*"(.+)"', urls[1], re.MULTILINE) if urls else None
    return found[1].rstrip("/") if found else None


def absolute_links(text: str, address: str, version: str) -> str:
    """A markdown text whose relative links lead to a version in a repository, those of pictures to raw files."""

    def lead(found: re.Match) -> str:
        view = "raw" if found[1].startswith("!") else "blob"
        return f"{found[1]}{address}/{view}/v{version}/{found[2]}"

    return _LINK.sub(lead, text)


def build(output: Path) -> list[Path]:
    """Build both packages from the files that git knows or would add, so that nothing else gets in; check them."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (Path(folder, name).parent).mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, Path(folder, name))
        readme, address = Path(folder, "README.md"), repository((ROOT / "pyproject.toml").read_text())
        (version,) = re.findall(r'__version__ = "(.+)"', (ROOT / "hf_growattn" / "__init__.py").read_text())
        if address:
            readme.write_text(absolute_links(readme.read_text(), address, version))
        command = ["-m", "build", "--no-isolation", "--outdir", str(output.resolve()), folder]
        made = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    if made.returncode:
        sys.exit(made.stdout + made.stderr)
    packages = sorted(output.glob(f"hf_growattn-{version}*"))
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *packages], check=True)
    return packages


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder for the packages")
    build(parser.parse_args().output)

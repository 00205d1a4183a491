"""What is published: links that work on a package index, and a release that refuses what would be half of one."""

import re
import shutil
import subprocess

import packages
import pytest
from conftest import ROOT

ADDRESS = "https://example.com/someone/hf_growattn"


def test_links_of_the_readme_lead_to_the_repository_once_it_has_an_address():
    text = (ROOT / "README.md").read_text()
    made = packages.absolute_links(text, ADDRESS, "1.2.3")
    before, after = (re.findall(r"(!?)\[[^\]]*\]\(\s*([^)\s]+)", each) for each in (text, made))
    assert len(before) == len(after) > 3
    for (picture, relative), (_, absolute) in zip(before, after):
        if "://" in relative or relative.startswith("#"):
            assert absolute == relative
        else:
            assert (ROOT / relative.split("#")[0]).exists(), relative
            assert absolute == f"{ADDRESS}/{'raw' if picture else 'blob'}/v1.2.3/{relative}"


def test_the_address_is_one_setting():
    urls = f'[project.urls]\nIssues = "{ADDRESS}/issues"\nRepository = "{ADDRESS}/"\n\n[tool.ruff]\nline-length = 1\n'
    assert packages.repository(f'[project]\nname = "x"\n\n{urls}') == ADDRESS
    assert packages.repository('[project.urls]\n\n[tool.x]\nRepository = "no"\n') is None


@pytest.fixture
def clone(tmp_path):
    """A repository that holds what a release reads, with everything committed."""
    for name in ("scripts/release.sh", "hf_growattn/__init__.py", ".github/CHANGELOG.md", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(folder, *words):
    name = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.com")
    subprocess.run(["git", *name, *words], cwd=folder, check=True, capture_output=True)


def commit(folder):
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "all")


def refusal(folder, *options) -> str:
    done = subprocess.run(["bash", "scripts/release.sh", *options], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr


def test_a_release_refuses_before_it_runs_anything(clone):
    """The steps after that need an environment: it ends where there is no setup.sh."""
    changelog, pyproject = clone / ".github" / "CHANGELOG.md", clone / "pyproject.toml"
    version = re.findall(r'__version__ = "(.+)"', (clone / "hf_growattn" / "__init__.py").read_text())[0]
    changelog.write_text(f"# Changelog\n\n## {version}, not released yet\n")
    assert "not committed" in refusal(clone)
    commit(clone)
    assert f"no heading '## {version}'" in refusal(clone)
    changelog.write_text(f"# Changelog\n\n## {version}\n")
    commit(clone)
    assert "setup.sh" in refusal(clone) and "--upload; got --push" in refusal(clone, "--push")
    if packages.repository(pyproject.read_text()) is None:
        assert "name the Repository" in refusal(clone, "--upload")
        pyproject.write_text(f'{pyproject.read_text()}\n[project.urls]\nRepository = "{ADDRESS}"\n')
        commit(clone)
    assert "setup.sh" in refusal(clone, "--upload")
    git(clone, "tag", f"v{version}")
    assert "tagged already" in refusal(clone)

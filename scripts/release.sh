#!/usr/bin/env bash
# A release of the version that hf_growattn/__init__.py names: all tests, the packages, and a tag. Nothing leaves this
# machine, unless `--upload` is given, which asks before it uploads the packages and pushes the tag.
set -euo pipefail
upload="${1:-}"
cd "$(dirname "$0")/.."
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' hf_growattn/__init__.py)
refuse() { echo "Error: $1" >&2; exit 1; }
[ -z "$upload" ] || [ "$upload" = "--upload" ] || refuse "the one option is --upload; got $upload."
[ -z "$(git status --porcelain)" ] || refuse "there are changes that are not committed."
git rev-parse -q --verify "refs/tags/v$version" > /dev/null && refuse "v$version is tagged already: raise __version__."
grep -q "^## $version\$" .github/CHANGELOG.md || refuse "the changelog has no heading '## $version'."
[ -z "$upload" ] || grep -q "^Repository = " pyproject.toml || refuse "name the Repository in [project.urls] first."
source scripts/setup.sh test
bash scripts/test.sh
bash scripts/test.sh --lowest
rm -rf dist
python scripts/packages.py
git tag -a "v$version" -m "hf_growattn $version"
echo "v$version is tagged, and its packages are in dist/."
if [ -n "$upload" ]; then
    read -r -p "Upload them to the package index, and push the tag? [y/N] " answer
    [ "$answer" = "y" ] || exit 0
    python -m twine upload dist/*
    git push origin "v$version"
fi

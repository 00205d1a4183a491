#!/usr/bin/env bash
# The tests, on the newest versions installed; `--lowest` runs them on the lowest that pyproject.toml admits.
lowest=""
if [ "${1:-}" = "--lowest" ]; then
    shift
    lowest=1
    export VENV="${VENV:-.venv-lowest}" CONSTRAINTS="scripts/lowest.txt"
fi
source "$(dirname "$0")/setup.sh" test
ruff check . && ruff format --check .
if [ -n "$lowest" ]; then
    python - <<'PY'
import tomllib, re, pathlib
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
lines = project["dependencies"] + sum(project["optional-dependencies"].values(), [])
ranges = {name: low for name, low in re.findall(r"([\w-]+)>=([\d.]+)", "\n".join(lines))}
for name, low in (line.split("==") for line in pathlib.Path("scripts/lowest.txt").read_text().split()):
    assert (low + ".").startswith(ranges[name] + "."), f"scripts/lowest.txt: {name} {low}, but pyproject.toml has {ranges[name]}"
PY
fi
exec python -m pytest -n "${WORKERS:-2}" "$@"

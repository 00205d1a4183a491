#!/usr/bin/env bash
# The tests, on the newest versions installed; `--lowest` runs them on the lowest that pyproject.toml admits.
if [ "${1:-}" = "--lowest" ]; then
    shift
    export VENV="${VENV:-.venv-lowest}" CONSTRAINTS="scripts/lowest.txt"
fi
source "$(dirname "$0")/setup.sh" test
if [ -z "${CONSTRAINTS:-}" ]; then
    ruff check . && ruff format --check .
    basedpyright  # types are those of the newest versions
    packages=$(mktemp -d)
    python scripts/packages.py --output "$packages"
    rm -r "$packages"
fi
exec python -m pytest -n "${WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"

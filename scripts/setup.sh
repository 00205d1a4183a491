# Sourced by the other scripts: makes a virtual environment if there is none, installs this project into it with the
# extras named in $1, and puts it first on PATH; run by itself, it only installs. VENV chooses the folder, also of an
# environment that is active; CONSTRAINTS a pip constraints file, and BASE another environment, whose packages serve
# where their versions meet the constraints.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV="${VENV:-.venv}"
wanted="$1 $(cat pyproject.toml "${CONSTRAINTS:-/dev/null}" | cksum)"
if [ "$(cat "$VENV/installed" 2>/dev/null || true)" != "$wanted" ]; then
    [ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV"
    echo "Installing hf_growattn[$1] into $VENV: PyTorch for CPUs, transformers, peft and TRL, at most 2 GB ..."
    packages='import site; print(site.getsitepackages()[0])'
    [ -z "${BASE:-}" ] || "$BASE/bin/python" -c "$packages" > "$("$VENV/bin/python" -c "$packages")/base.pth"
    # Only what is imported is ever compiled: the rest would take pip a minute.
    # The exact torch first: a looser range, asked for first, may pull gigabytes of accelerator libraries.
    "$VENV/bin/python" -c "import torch" 2>/dev/null || "$VENV/bin/pip" install --quiet --no-compile torch==2.13.0
    "$VENV/bin/pip" install --quiet --no-compile ${CONSTRAINTS:+--constraint "$CONSTRAINTS"} --editable ".[$1]"
    echo "$wanted" > "$VENV/installed"
fi
PATH="$PWD/$VENV/bin:$PATH"
case "$VENV" in /*) PATH="$VENV/bin:$PATH" ;; esac

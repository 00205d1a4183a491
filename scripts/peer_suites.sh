#!/usr/bin/env bash
# The own tests of transformers and peft, of the versions installed, on their classes and on ours, side by side.
# Not part of CI: it takes about 20 minutes, the package index and, for the tests of generation, transformers' repository.
source "$(dirname "$0")/setup.sh" test
python -m pip install --quiet diffusers parameterized pyyaml scikit-learn scipy  # what their tests import
exec python scripts/peers/run.py

#!/usr/bin/env bash
# The main job, a race of LoRA and growth, on text that every Python carries; the winner is saved. No download.
source "$(dirname "$0")/setup.sh" trl
exec python scripts/demo.py "$@"

#!/usr/bin/env bash
# The main job on text that every Python carries: train, grow half-way, train on, save. No download.
source "$(dirname "$0")/setup.sh" trl
exec python scripts/demo.py "$@"

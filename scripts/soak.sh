#!/usr/bin/env bash
# Disturbs training runs at random and checks that nothing is lost. dev/README.md describes it.
#
#   scripts/soak.sh [minutes] [--seed N] [--round K]      10 minutes of ./train_gpt, which make built last
#   TRAIN_GPT=build/cuda/train_gpt scripts/soak.sh 5      another build
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] || make venv >&2
export TRAIN_GPT=${TRAIN_GPT:-train_gpt}
exec .venv/bin/python scripts/soak.py "$@"

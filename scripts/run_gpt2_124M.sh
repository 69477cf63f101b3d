#!/usr/bin/env bash
# GPT-2 124M on 10 billion tokens, 524,288 a step: the usual benchmark of a GPT trainer.
#
#   scripts/run_gpt2_124M.sh                   all GPUs of this machine; run it again to resume
#   STEPS=1000 OUT=runs/short scripts/run_gpt2_124M.sh --eval-every 100
#
# TEXT, DATA, OUT, GPUS, STEPS, BATCH: see scripts/recipe.sh. At the 601,500 tokens/s of one H100 (docs/log/performance.md) it
# takes 4.6 hours. The step divides over 1, 2, 4 or 8 GPUs; for 16 set BATCH=32.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/recipe.sh

recipe gpt2-124M --model gpt2-124M --dtype bf16 --batch-size "${BATCH:-64}" --seq-len 1024 --total-batch-tokens 524288 \
    --steps "${STEPS:-18865}" --lr 6e-4 --warmup 700 --final-lr 0 --weight-decay 0.1 \
    --eval-every 250 --eval-tokens 10485760 --save-every 1000 "$@"

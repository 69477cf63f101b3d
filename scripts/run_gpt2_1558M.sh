#!/usr/bin/env bash
# GPT-2 1558M ("XL") on 32 billion tokens, 1,048,576 a step; optimizer state divided among the GPUs.
#
#   scripts/run_gpt2_1558M.sh                  all GPUs of this machine; run it again to resume
#
# TEXT, DATA, OUT, GPUS, STEPS, BATCH: see scripts/recipe.sh. At the 221,400 tokens/s of four H200 (docs/log/performance.md; there
# with 131,072 tokens a step) it takes 42 hours.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/recipe.sh

recipe gpt2-1558M --model gpt2-1558M --dtype bf16 --batch-size "${BATCH:-16}" --seq-len 1024 --total-batch-tokens 1048576 \
    --zero-stage 1 --steps "${STEPS:-32000}" --lr 6e-4 --warmup 700 --final-lr 0 --weight-decay 0.1 \
    --eval-every 250 --eval-tokens 10485760 --save-every 1000 "$@"

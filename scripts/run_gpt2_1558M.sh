#!/usr/bin/env bash
# GPT-2 1558M ("XL") on 32 billion tokens, 1,048,576 a step; optimizer state divided among the GPUs.
#
#   scripts/run_gpt2_1558M.sh                  all GPUs of this machine; run it again to resume
#
# TEXT, DATA, OUT, GPUS, STEPS, BATCH: see scripts/recipe.sh. Measured (docs/performance.md): two H200 with these options, but
# 131,072 tokens a step, 109,182 tokens/s and 61.7 GB each; one H100 with BATCH=8 and 16,384 tokens a step 49,245 tokens/s and
# 49.8 GB. At that rate one GPU takes 7.9 days, so use eight; more than two were not measured.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/recipe.sh

recipe gpt2-1558M --model gpt2-1558M --dtype bf16 --batch-size "${BATCH:-16}" --seq-len 1024 --total-batch-tokens 1048576 \
    --zero-stage 1 --steps "${STEPS:-32000}" --lr 6e-4 --warmup 700 --final-lr 0 --weight-decay 0.1 \
    --eval-every 250 --eval-tokens 10485760 --save-every 1000 "$@"

#!/usr/bin/env bash
# GPT-2 124M on 10 billion tokens, 524,288 a step: the usual benchmark of a GPT trainer.
#
#   scripts/run_gpt2_124M.sh                   all GPUs of this machine; run it again to resume
#   STEPS=1000 OUT=runs/short scripts/run_gpt2_124M.sh --eval-every 100
#
# TEXT, DATA, OUT, GPUS, STEPS, BATCH: see scripts/recipe.sh. Measured with these options (docs/performance.md): one H100
# 607,272 tokens/s and 23.6 GB, 4.5 hours in total; two H200 1,226,427 tokens/s; more GPUs not measured. The step divides over 1, 2, 4
# or 8 GPUs; for 16 set BATCH=32.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/recipe.sh

recipe gpt2-124M --model gpt2-124M --dtype bf16 --batch-size "${BATCH:-64}" --seq-len 1024 --total-batch-tokens 524288 \
    --steps "${STEPS:-18865}" --lr 6e-4 --warmup 700 --final-lr 0 --weight-decay 0.1 \
    --eval-every 250 --eval-tokens 10485760 --save-every 1000 "$@"

#!/usr/bin/env bash
# A GPT of today's recipe (modern-124M, Muon) on 1.7 billion tokens, 524,288 a step: the settings of modded-nanogpt's
# track 3, whose published runs reach the loss of GPT-2 124M after 10 billion tokens.
#
#   scripts/run_modern_124M.sh                 all GPUs of this machine; run it again to resume
#   STEPS=500 OUT=runs/short scripts/run_modern_124M.sh --eval-every 100
#
# TEXT, DATA, OUT, GPUS, STEPS, BATCH: see scripts/recipe.sh. The step divides over 1, 2, 4 or 8 GPUs; for 16 set BATCH=32.
# Track 3 sums the loss over the tokens of a step and adds 1e-10 to the root of the second moment; here the loss is a mean,
# so --adam-eps is 1e-10/524,288.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/recipe.sh

recipe modern-124M --model modern-124M --dtype bf16 --batch-size "${BATCH:-64}" --seq-len 1024 --total-batch-tokens 524288 \
    --steps "${STEPS:-3250}" --optimizer muon --lr 0.025 --embedding-lr 0.7 --head-lr 0.004 --vector-lr 0.015 \
    --schedule wsd --warmup 0 --decay-fraction 0.7 --final-lr 0 --weight-decay 0.05 --adam-weight-decay 0.001 \
    --beta1 0.8 --beta2 0.95 --adam-eps 1.9e-16 --momentum 0.95 --momentum-warmup 0 --grad-clip 0 \
    --eval-every 125 --eval-tokens 10485760 --save-every 500 "$@"

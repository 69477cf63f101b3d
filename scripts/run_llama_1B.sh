#!/usr/bin/env bash
# The shape of LLaMA 3.2 1B on 21 billion tokens, 524,288 a step; optimizer state divided among the GPUs.
#
#   scripts/run_llama_1B.sh                    all GPUs of this machine; run it again to resume
#   TOKENIZER=path/to/Llama-3.2-1B TEXT=... scripts/run_llama_1B.sh       with LLaMA 3's own 128,256 tokens
#
# TEXT, DATA, OUT, GPUS, STEPS, BATCH: see scripts/recipe.sh. These options as a whole were not measured. docs/log/performance.md
# has the shape on one H100 with BATCH=4 and 32,768 tokens a step: 69,600 tokens/s.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/recipe.sh

recipe llama-1B --model llama-1B --dtype bf16 --batch-size "${BATCH:-8}" --seq-len 2048 --total-batch-tokens 524288 \
    --zero-stage 1 --steps "${STEPS:-40000}" --lr 4e-4 --warmup 1000 --weight-decay 0.1 \
    --eval-every 500 --eval-tokens 10485760 --save-every 1000 "$@"

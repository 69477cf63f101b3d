#!/usr/bin/env bash
# The shape of LLaMA 3 8B, 2,097,152 tokens a step; weights, gradients and optimizer state divided among the GPUs.
#
#   scripts/run_llama_8B.sh                    all GPUs of this machine; run it again to resume
#   srun --ntasks-per-node=8 --gpus-per-node=8 scripts/run_llama_8B.sh     several machines (docs/use/multi_gpu.md)
#   TOKENIZER=path/to/Meta-Llama-3-8B TEXT=... scripts/run_llama_8B.sh     with LLaMA 3's own 128,256 tokens
#
# TEXT, DATA, OUT, GPUS, STEPS, BATCH: see scripts/recipe.sh. A weight takes 18 bytes in all, 144.5 GB together, so it needs 4
# GPUs of 80 GB at least; `train_gpt plan --model llama-8B --world 4 --zero-stage 3 ...` shows what is left for activations.
# Not measured as it stands. Eight H200 with BATCH=4, `--recompute none` and 262,144 tokens: 93,680 tokens/s and 63.3 GB each
# (docs/log/performance.md).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/recipe.sh

recipe llama-8B --model llama-8B --dtype bf16 --batch-size "${BATCH:-2}" --seq-len 2048 --total-batch-tokens 2097152 \
    --zero-stage 3 --recompute norms --steps "${STEPS:-50000}" --lr 3e-4 --warmup 2000 --weight-decay 0.1 \
    --eval-every 500 --eval-tokens 10485760 --save-every 500 "$@"

#!/usr/bin/env bash
# The quick start (make train): trains a small GPT on the quick-start corpus, evaluates it, plots the loss curve and
# samples text. After an interruption run it again to resume; a finished run only shows the results.
#
#   scripts/run_quickstart.sh [DRIVER]      STEPS=... OUT=runs/... GPUS=4
#
# On a CPU it trains modern-tiny with Muon in runs/quickstart, on a GPU gpt2-mini with AdamW in runs/quickstart-gpu.
# docs/understand/learning.md says how the options were chosen.
set -euo pipefail
# Threads spin for a few microseconds and then sleep. That is as fast on an idle machine as GNU OpenMP's default of
# several milliseconds, and many times faster on a busy one.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-20000}

driver=${1:-./train_gpt}
data=data/tokens/quickstart
python=.venv/bin/python

if [[ $("$driver" info) == "backend cuda"* ]]; then
    steps=${STEPS:-1500}
    out=${OUT:-runs/quickstart-gpu}
    options=(--model gpt2-mini --dtype bf16 --batch-size 32 --lr 2e-3)
else
    steps=${STEPS:-600}
    out=${OUT:-runs/quickstart}
    options=(--model modern-tiny --optimizer muon --batch-size 12 --beta1 0.8 --beta2 0.98
             --schedule wsd --warmup 0 --decay-fraction 0.6 --final-lr 0)
fi

# Names what begins, and says how long what came before took.
stage=''
begin() {
    [[ -z $stage ]] || echo "--- $stage: $((SECONDS - since)) s" >&2
    stage=$1 since=$SECONDS
    [[ -z $stage ]] || echo "--- $stage" >&2
}

begin "data"
$python data/quickstart.py

if [[ -n ${GPUS:-} ]]; then options+=(--gpus "$GPUS"); fi
resume=()
if compgen -G "$out/step_????????" >/dev/null; then resume=(--resume); fi
begin "training"
# The driver answers Ctrl-C by saving a checkpoint; this script must then stop instead of going on to the evaluation.
interrupted=
trap 'interrupted=1' INT TERM
"$driver" train "${options[@]}" --data "$data" --out "$out" --steps "$steps" --seq-len 256 \
    --eval-every 200 --sample-every 400 --save-every 200 "${resume[@]}"
trap - INT TERM
if [[ $interrupted ]]; then
    echo "Interrupted: the same command goes on from the checkpoint in $out." >&2
    exit 130
fi

begin "evaluation on the held-out text"
"$driver" eval --model "$out" --data "$data"
begin "loss curve"
$python scripts/plot_log.py "$out" || [[ $? == 3 ]]  # 3: no matplotlib, as it has said
begin "a sample"
"$driver" sample --model "$out" --prompt "ROMEO" --max-tokens 200 --temperature 0.8 --top-k 50
begin ""

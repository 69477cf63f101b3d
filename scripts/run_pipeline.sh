#!/usr/bin/env bash
# One model through every stage: finetuning, preferences (DPO), reinforcement learning, an int4 GGUF file, a server. After
# each stage it answers the same held-out sums of two numbers; a table of the accuracies is printed at the end.
#
#   scripts/run_pipeline.sh [MODEL]        default checkpoints/SmolLM2-135M-Instruct (make smollm2)
#   TINY=1 scripts/run_pipeline.sh         in seconds, with a model that it makes: whether everything works together
#
# Variables, and their defaults:
#   OUT=runs/pipeline    what is made; it may not exist
#   LARGEST=99           the largest number to add
#   HELD_OUT=200         sums that are asked
#   FINETUNE_STEPS=20 DPO_STEPS=40 RL_STEPS=60
#   DRIVER=./train_gpt PYTHON=.venv/bin/python
#
# The table is all that goes to stdout. How a stage is run by itself: docs/use/finetuning.md, preferences.md, rl.md,
# formats.md and serving.md.
set -euo pipefail
cd "$(dirname "$0")/.."

exec 3>&1 1>&2  # the table goes to 3
out=${OUT:-runs/pipeline}
driver=${DRIVER:-./train_gpt}
python=${PYTHON:-.venv/bin/python}
max_tokens=24
table=

stop() {
    echo "${0##*/}: $1"
    exit 1
}

make_tokens() {  # FILE NAME TOKENIZER
    "$python" data/make_data.py --text "$out/data/$1" --out "$out/data/$2" --tokenizer "$3" --val 0.05
}

# The checkpoint of a run, which has one.
checkpoint_in() {
    printf '%s\n' "$1"/step_????????
}

# The accuracy of $model; a line of the table that names the stage.
evaluate() {
    local accuracy
    accuracy=$("$driver" eval --model "$model" --answers "$out/data/held_out.jsonl" --max-tokens $max_tokens |
        sed -n 's/^accuracy *//p')
    add_line "$1" "$accuracy"
}

add_line() {
    local line
    line=$(LC_ALL=C printf '%-24s %.3f' "$1" "$2")
    table+=$line$'\n'
    echo "--- accuracy of $line"
}

[[ -x $driver ]] || stop "there is no $driver: run make first."
[[ ! -e $out ]] || stop "$out exists: remove it, or set OUT."
train=(--eval-every 0 --save-every 0)
if [[ -n ${TINY:-} ]]; then
    defaults=(3 4 30 2 2)
    finetune=(--batch-size 4 --seq-len 64 --lr 1e-2) dpo=(--batch-size 2 --seq-len 128) rl=(--prompts 4 --completions 4)
else
    defaults=(99 200 20 40 60)
    finetune=(--batch-size 8 --seq-len 256) dpo=(--batch-size 8 --seq-len 256) rl=()
fi
model=${1:-}
[[ -n $model || -n ${TINY:-} ]] || model=checkpoints/SmolLM2-135M-Instruct
[[ -z $model || -e $model ]] || stop "there is no $model: run \`make smollm2\`, or name a model directory."

"$python" scripts/sums_task.py make "$out/data" --largest "${LARGEST:-${defaults[0]}}" --held-out "${HELD_OUT:-${defaults[1]}}"
if [[ -z $model ]]; then
    make_tokens conversations.jsonl bytes byte
    "$driver" train --model llama-tiny --layers 2 --channels 64 --heads 2 --kv-heads 1 --data "$out/data/bytes" \
        --out "$out/base" --steps 2 --batch-size 4 --seq-len 64 "${train[@]}"
    model=$(checkpoint_in "$out/base")
fi
evaluate "the model itself"

make_tokens conversations.jsonl conversations "$model"
"$driver" train --model "$model" --data "$out/data/conversations" --out "$out/finetuned" \
    --steps "${FINETUNE_STEPS:-${defaults[2]}}" "${finetune[@]}" "${train[@]}"
model=$(checkpoint_in "$out/finetuned")
evaluate "finetuning"

make_tokens pairs.jsonl pairs "$model"
"$driver" train --loss dpo --model "$model" --data "$out/data/pairs" --out "$out/preferred" \
    --steps "${DPO_STEPS:-${defaults[3]}}" "${dpo[@]}" "${train[@]}"
model=$(checkpoint_in "$out/preferred")
evaluate "preferences (DPO)"

"$driver" rl --model "$model" --data "$out/data/prompts.jsonl" --out "$out/reinforced" \
    --steps "${RL_STEPS:-${defaults[4]}}" --max-tokens $max_tokens --save-every 0 "${rl[@]}"
model=$(checkpoint_in "$out/reinforced")
evaluate "reinforcement learning"

"$driver" convert "$model" "$out/model.gguf" --weights int4
model=$out/model.gguf
evaluate "int4 GGUF"

if "$driver" serve --help >/dev/null 2>&1; then
    served=$("$python" scripts/sums_task.py serve "$out/data" --model "$model" --max-tokens $max_tokens --driver "$driver")
    add_line "the server" "${served#accuracy }"
else
    echo "--- no server: this build has no libmicrohttpd"
fi
printf '%s' "$table" >&3

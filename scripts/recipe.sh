# Shared code of the recipes (run_gpt2_124M.sh and others), which source this file: data, resume, GPUs.
#
# Variables:
#   GPUS=all|N      GPUs of this machine (default all). Under torchrun, mpirun or srun the launcher's ranks count instead
#   TEXT=folder     text to tokenise if DATA does not exist: .parquet, .jsonl, .txt, .md
#   DATA=folder     tokens (default data/tokens/fineweb-<TOKENIZER>)
#   TOKENIZER=      gpt2 (default), or a directory with a tokenizer.json such as LLaMA 3's
#   OUT=folder      the run directory (default runs/<recipe>). If it exists the run resumes from its newest checkpoint
#   STEPS= BATCH=   override the recipe: total steps, sequences per GPU and micro-step
#   DRIVER=         default ./train_gpt
# Arguments are options of `train_gpt train` that the recipe does not set.

# recipe NAME OPTION...: trains with these options followed by those of the command line.
recipe() {
    local name=$1 driver=${DRIVER:-./train_gpt} out launch=() resume=()
    shift
    [[ -x $driver ]] || stop "there is no $driver: run make first."
    out=${OUT:-runs/$name}
    DATA=${DATA:-data/tokens/fineweb-$(basename "${TOKENIZER:-gpt2}")}
    if [[ -n ${RANK:-}${OMPI_COMM_WORLD_RANK:-}${MPI_LOCALRANKID:-} || ${SLURM_STEP_NUM_TASKS:-1} -gt 1 ]]; then
        [[ -e $DATA ]] || stop "there are no tokens in $DATA: make them before ranks are started (make data TEXT=...)."
    else
        launch=(--gpus "${GPUS:-all}")
        [[ -e $DATA ]] || tokens
    fi
    if compgen -G "$out/step_????????" >/dev/null; then resume=(--resume); fi
    exec "$driver" train --data "$DATA" --out "$out" "${launch[@]}" "${resume[@]}" "$@"
}

# Makes DATA from TEXT. 0.25% of a web corpus is enough for validation.
tokens() {
    [[ -n ${TEXT:-} ]] || stop "there are no tokens in $DATA: set DATA=folder of tokens, or TEXT=folder of text. FineWeb, 10 billion tokens of web pages: \`pip install huggingface_hub && hf download HuggingFaceFW/fineweb --repo-type dataset --include 'sample/10BT/*' --local-dir data/text/fineweb\`, then TEXT=data/text/fineweb."
    scripts/venv.sh
    .venv/bin/python data/make_data.py --text "$TEXT" --tokenizer "${TOKENIZER:-gpt2}" --val 0.0025 --out "$DATA"
}

stop() {
    echo "${0##*/}: $1" >&2
    exit 1
}

#!/usr/bin/env bash
# Whole training steps on the CPU, side by side with other programs on the same machine in the same run, and the memory
# plan against what a run really takes. Peers are given as paths; nothing is fetched or built but this project.
#
#   LLMC=/path/to/train_gpt2  TORCH="python torch_bench.py --device cpu --threads 2"  scripts/bench_cpu.sh [--repeats 3]
#
# docs/performance.md says how the peers are built. THREADS (default 2) goes to OMP_NUM_THREADS of all.
set -euo pipefail
cd "$(dirname "$0")/.."
make BACKEND=cpu all venv >&2
export OMP_NUM_THREADS=${THREADS:-2}
exec .venv/bin/python scripts/bench_cpu.py --driver build/cpu/train_gpt "$@"

#!/usr/bin/env bash
# Benchmarks whole training steps on the CPU, side by side with other programs in one run on one machine, and compares
# the memory plan with the memory that a run uses. Peers are given as paths; only this project is built.
#
#   LLMC=/path/to/train_gpt2  TORCH="python torch_bench.py --device cpu --threads 2"  dev/peers/bench_cpu.sh [--repeats 3]
#
# docs/log/performance.md says how to build the peers. THREADS (default 2) sets OMP_NUM_THREADS for all.
set -euo pipefail
cd "$(dirname "$0")/../.."
make BACKEND=cpu all venv >&2
export OMP_NUM_THREADS=${THREADS:-2}
exec .venv/bin/python dev/peers/bench_cpu.py --driver build/cpu/train_gpt "$@"

#!/usr/bin/env bash
# Builds, tests and benchmarks the CUDA kernels on this machine. Run it before you commit a change of a kernel.
#
#   scripts/check_gpu.sh [build] [test] [sanitize] [mutants] [bench]      all of them without arguments
#
#   test      every test of the CUDA set
#   sanitize  the kernels' tests under compute-sanitizer's memcheck and synccheck, a selection under racecheck and
#             initcheck; each with a time limit (LIMIT, 300 s), several programs in parallel
#   mutants   one-line mutations of the CUDA kernels (dev/mutants/cuda.txt): a test must fail for each
#   bench     every benchmark
# OUT (build/cuda/check) receives the logs. Exit status 1 if anything failed.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-build/cuda/check}
limit=${LIMIT:-300}
mkdir -p "$out"
failed=0
jobs=$(nproc)

build() {
    make BACKEND=cuda all test-binaries bench-binaries >"$out/build.log" 2>&1 || { tail -n 30 "$out/build.log"; exit 1; }
}

run_tests() {
    make test BACKEND=cuda || failed=1
}

# Runs one program under one tool and prints one line with the result.
check_one() {
    local tool=$1 program=$2 filter=$3 limit=$4 out=$5 log
    log=$out/$tool-$(basename "$program").log
    timeout "$limit" compute-sanitizer --tool "$tool" --error-exitcode 9 "$program" --gtest_filter="$filter" >"$log" 2>&1
    case $? in
        0) echo "$tool $(basename "$program"): clean ($(grep -c '\[       OK' "$log") tests)" ;;
        124) echo "$tool $(basename "$program"): no error in $limit s ($(grep -c '\[       OK' "$log") tests)" ;
             ! grep -q 'ERROR SUMMARY: [1-9]\|========= \(Invalid\|Race\|Uninit\)' "$log" ;;
        *) echo "$tool $(basename "$program"): FAILED, see $log"; grep -m 5 '=========' "$log"; return 1 ;;
    esac
}
export -f check_one

sanitize() {
    # Large shapes add nothing and take minutes under a sanitizer; some tests allocate too much memory on purpose.
    local small='-*Large*:*InSamples*:*Tuned*:*Tuning*:*FailedAllocation*' program
    {
        for program in $(scripts/kernel_tests.sh build/cuda); do
            printf '%s\n' "memcheck $program $small" "synccheck $program $small"
        done
        for program in softmax layernorm embedding global_norm adamw topk tensor_ops; do
            printf '%s\n' "racecheck build/cuda/dev/test_$program $small" "initcheck build/cuda/dev/test_$program $small"
        done
    } | xargs -P "$jobs" -L 1 bash -c "check_one \"\$1\" \"\$2\" \"\$3\" $limit '$out'" check_one || failed=1
}

bench() {
    local program
    for program in build/cuda/dev/bench_*; do
        [[ $program == *.* || ! -x $program ]] || { echo "--- $(basename "$program")"; "$program" || failed=1; }
    done | tee "$out/bench.txt"
}

for part in "${@:-build test sanitize mutants bench}"; do
    for step in $part; do
        echo "=== $step ($SECONDS s)"
        case $step in
            build) build ;;
            test) run_tests ;;
            sanitize) sanitize ;;
            mutants) python3 scripts/run_mutants.py --backend cuda --jobs "${MUTANT_JOBS:-8}" || failed=1 ;;
            bench) bench ;;
            *) echo "unknown part '$step'; see the head of $0" >&2; exit 2 ;;
        esac
    done
done
echo "=== done ($SECONDS s)"
exit $failed

#!/usr/bin/env bash
# Writes one Markdown file about this machine, to be pasted into an issue ("Report of a machine"): what it is, the tests
# of the kernels, its limits, and the tokens/s of two models. It downloads nothing and sends nothing.
#
#   scripts/report.sh [FILE]                  build/report.md
#   BACKEND=cpu LIMIT=120 scripts/report.sh
#
# First it builds what it needs; make's variables count. The rest takes at most LIMIT seconds (300): each part has a
# limit of its own, and a part that fails or does not end leaves a line that says so. Ctrl-C writes what there is.
# report.py measures.
set -uo pipefail
if [[ $# -gt 1 || ${1:-} == -* || ! ${LIMIT:=300} =~ ^[1-9][0-9]*$ ]]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
cd "$(dirname "$0")/.." # $OLDPWD is where FILE is relative to
out=build/report.md
case ${1:-} in
    "") ;;
    /*) out=$1 ;;
    *) out=$OLDPWD/$1 ;;
esac

log=build/report-build.log build=
mkdir -p build
echo "building; the log is $log"
if make all >"$log" 2>&1; then
    build=$(dirname "$(readlink train_gpt)")
    # With -k a library that is missing costs only the programs that need it.
    mapfile -t tests < <(scripts/kernel_tests.sh "$build")
    make -k "$build/dev/bench_matmul" "$build/test_gpt" "${tests[@]}" >>"$log" 2>&1 || true
fi
echo "built in $SECONDS s"
exec python3 scripts/report.py --build "$build" --build-log "$log" --build-seconds "$SECONDS" \
    --limit "$LIMIT" "$out"

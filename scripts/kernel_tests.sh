#!/usr/bin/env bash
# Prints the test programs of the kernels in a build's directory, built or not:
#
#   scripts/kernel_tests.sh build/cuda
#
# Each op is a header in kernels/ or one of its directories; norm.h has two tests.
set -euo pipefail
cd "$(dirname "$0")/.."
for op in kernels/*.h kernels/*/*.h layernorm rmsnorm; do
    name=test_$(basename "$op" .h)
    if [[ -e dev/tests/$name.cpp || -e dev/tests/$name.cu ]]; then echo "$1/dev/$name"; fi
done

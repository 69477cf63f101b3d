#!/usr/bin/env bash
# Installs scripts/requirements-cuda.txt (nvcc, the CUDA runtime, cuBLAS) into .venv, again whenever that file
# changes (1.5 GB in all). scripts/find_cuda.sh finds them there. With DEPS=no it installs nothing and fails if they are
# missing.
set -euo pipefail

stamp=.venv/installed-requirements-cuda.txt
cmp -s scripts/requirements-cuda.txt $stamp && exit 0

fail() {
    echo "$1" >&2
    exit 1
}

scripts/venv.sh
[[ ${DEPS:-} != no ]] || fail "DEPS=no, so the CUDA Toolkit is not installed."
echo "+ .venv/bin/python -m pip install -r scripts/requirements-cuda.txt"
.venv/bin/python -m pip install --quiet --disable-pip-version-check -r scripts/requirements-cuda.txt >.venv/pip-cuda.log 2>&1 ||
    fail "The CUDA Toolkit could not be installed from Python wheels (.venv/pip-cuda.log says why): install it from NVIDIA or the distribution."
cp scripts/requirements-cuda.txt $stamp

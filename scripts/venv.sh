#!/usr/bin/env bash
# Makes .venv, the project's Python environment, and installs scripts/requirements.txt into it: once, and again when
# that file changes. Where the package registry can't be reached it says so and leaves a working environment that sees
# the distribution's own Python packages. DEPS=no: no packages are installed.
set -euo pipefail

python=.venv/bin/python
stamp=.venv/installed-requirements.txt
cmp -s scripts/requirements.txt $stamp && [[ -x $python ]] && exit 0

if [[ ! -x $python ]]; then
    rm -rf .venv
    python3 -m venv --system-site-packages .venv 2>/dev/null || python3 -m venv --system-site-packages --without-pip .venv
fi
if [[ ${DEPS:-} == no ]]; then
    echo "DEPS=no, so .venv gets no packages: BPE tokenizers and plots may be missing." >&2
    exit 0
fi
echo "+ $python -m pip install -r scripts/requirements.txt"
if $python -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 15 -r scripts/requirements.txt >.venv/pip.log 2>&1; then
    cp scripts/requirements.txt $stamp
else
    echo "The Python packages could not be installed (.venv/pip.log says why): byte tokens are used, and plots need the distribution's matplotlib." >&2
fi

#!/usr/bin/env bash
# Creates the Python environment .venv and installs scripts/requirements.txt into it, again whenever that file changes.
# If the package registry cannot be reached it prints a warning and creates an environment that uses the distribution's
# Python packages. DEPS=no installs nothing.
set -euo pipefail

python=.venv/bin/python
PATH=$PATH:$PWD/.deps/usr/bin  # make deps without root
stamp=.venv/installed-requirements.txt
cmp -s scripts/requirements.txt $stamp && [[ -x $python ]] && exit 0

if [[ ! -x $python ]]; then
    rm -rf .venv
    if ! python3 -m venv --system-site-packages .venv 2>/dev/null; then
        python3 -m venv --system-site-packages --without-pip .venv
        for wheel in .deps/usr/share/python-wheels/pip-*.whl; do
            [[ ! -e $wheel ]] || $python "$wheel/pip" install --quiet --no-index "$wheel"
        done
    fi
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

#!/usr/bin/env bash
# Creates the Python environment .venv and installs scripts/requirements.txt into it; `scripts/venv.sh dev` installs
# scripts/requirements-dev.txt, too. A list that has changed is installed again. If the package registry cannot be reached
# it prints a warning and creates an environment that uses the distribution's Python packages. DEPS=no installs nothing.
set -euo pipefail

python=.venv/bin/python
PATH=$PATH:$PWD/.deps/usr/bin  # make deps without root
if [[ ! -x $python ]]; then
    rm -rf .venv
    if ! python3 -m venv --system-site-packages .venv 2>/dev/null; then
        python3 -m venv --system-site-packages --without-pip .venv
        for wheel in .deps/usr/share/python-wheels/pip-*.whl; do
            [[ ! -e $wheel ]] || $python "$wheel/pip" install --quiet --no-index "$wheel"
        done
    fi
fi
declare -A without=([requirements]="byte tokens are used, and plots need the distribution's matplotlib"
                    [requirements-dev]="tests and checks that need them are skipped")
for list in requirements ${1:+requirements-$1}; do
    ! cmp -s scripts/$list.txt .venv/installed-$list.txt || continue
    if [[ ${DEPS:-} == no ]]; then
        echo "DEPS=no, so .venv gets no packages: BPE tokenizers and plots may be missing." >&2
        exit 0
    fi
    echo "+ $python -m pip install -r scripts/$list.txt"
    # Python compiles what it imports; to compile all that is installed takes a third of the time.
    if $python -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 15 --no-compile -r scripts/$list.txt >.venv/pip.log 2>&1; then
        cp scripts/$list.txt .venv/installed-$list.txt
    else
        echo "The Python packages could not be installed (.venv/pip.log says why): ${without[$list]}." >&2
        exit 0
    fi
done

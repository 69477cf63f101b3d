#!/usr/bin/env bash
# Runs clang-tidy with the checks of .clang-tidy over the host sources. The version is pinned in scripts/requirements-dev.txt;
# without that version the script does nothing. kernels/ is left out: its vector code would take most of the time, and the
# tests against the oracle cover it.
#
#   scripts/tidy.sh [FILE...]      all .cpp files of driver, runtime, models, parallel, data, infer, commands, serve and rl without arguments
#   scripts/tidy.sh --last 100     those of them that the last 100 commits changed
set -euo pipefail
cd "$(dirname "$0")/.."

version=$(sed -n 's/^clang-tidy == \([0-9.]*\).*/\1/p' scripts/requirements-dev.txt)
tool=.venv/bin/clang-tidy
if ! "$tool" --version 2>/dev/null | grep -q "version $version"; then
    echo "clang-tidy $version is not installed (make venv installs it): the sources were not checked." >&2
    exit
fi
if (($# == 0)) || [[ $1 == --last ]]; then
    mapfile -t files < <(git ls-files 'driver/*.cpp' 'runtime/*.cpp' 'models/*.cpp' 'parallel/*.cpp' 'data/*.cpp' 'infer/*.cpp' 'commands/*.cpp' 'serve/*.cpp' 'rl/*.cpp' |
        grep -v -e comm_mpi -e device/device.cpp -e runtime/limits.cpp)  # they include headers of MPI or of GCC
    if (($#)); then
        changed=$(git log -n "${2:?a number of commits}" --name-only --format=)
        mapfile -t files < <(printf '%s\n' "${files[@]}" | grep -Fx "$changed")
    fi
    set -- "${files[@]}"
fi
# clang has no omp.h of its own here; GCC's serves.
OMP=$(${CXX:-g++} -print-file-name=include)
export OMP
printf '%s\n' "$@" | xargs -r -P "$(nproc)" -n 4 bash -c '"$0" --quiet "$@" -- -std=c++20 -I. -fopenmp -idirafter "$OMP" 2>/dev/null' "$tool"

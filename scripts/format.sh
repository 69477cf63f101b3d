#!/usr/bin/env bash
# Formats the C, C++ and CUDA sources with clang-format; --check only reports. The version is pinned in
# scripts/requirements-dev.txt, because versions differ in their output; without that version the script does nothing.
set -euo pipefail

mode=(-i)
[[ ${1:-} != --check ]] || mode=(--dry-run -Werror)
version=$(sed -n 's/^clang-format == \([0-9.]*\).*/\1/p' scripts/requirements-dev.txt)
for tool in .venv/bin/clang-format clang-format-"${version%%.*}" clang-format; do
    if command -v "$tool" >/dev/null && "$tool" --version | grep -q "version $version"; then
        git ls-files -z --cached --others --exclude-standard '*.c' '*.cpp' '*.cu' '*.cuh' '*.h' |
            xargs -0 "$tool" "${mode[@]}"
        exit
    fi
done
echo "clang-format $version is not installed (make venv installs it): the format was not checked." >&2

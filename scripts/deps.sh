#!/usr/bin/env bash
# Finds and installs the distribution packages that train_gpt needs.
#
#   scripts/deps.sh check JOB...    prints nothing if the packages for these jobs are there; else names the missing ones
#                                   and exits with status 1
#   scripts/deps.sh need JOB...     the same, but installs all packages if one of them is missing
#   scripts/deps.sh install         installs every package that is not installed yet (make deps)
#
# The jobs are build, test, bench, data, train, chat, serve and mutants. Each command is printed before it runs, and nothing asks
# for a password: for a user who is neither root nor may use sudo without one, the packages are unpacked into .deps, where
# the Makefile looks too. DEPS=no installs nothing. Debian 12 and 13 and Ubuntu 24.04 use the same package names.
set -euo pipefail

CXX=${CXX:-g++}
REQUIRED=(g++ libcli11-dev nlohmann-json3-dev libpcre2-dev libutf8proc-dev libgtest-dev libbenchmark-dev python3 python3-venv)
# Without oneDNN the built-in GEMM serves, without MPI there is one process (`train_gpt info` tells), without
# libmicrohttpd there is no `serve`.
OPTIONAL=(libdnnl-dev libopenmpi-dev openmpi-bin libmicrohttpd-dev)
PATH=$PATH:$PWD/.deps/usr/bin

fail() {
    echo "$1" >&2
    exit 1
}

# Prints the packages missing for the jobs named, one a line. One run of the preprocessor looks for all headers, so
# that headers outside /usr/include (CPATH) count as well.
missing() {
    local jobs=" $* " package version
    if command -v "$CXX" >/dev/null; then
        {
            header libcli11-dev CLI/CLI.hpp
            header nlohmann-json3-dev nlohmann/json.hpp
            header libpcre2-dev pcre2.h
            header libutf8proc-dev utf8proc.h
            if [[ $jobs =~ \ (test|mutants)\  ]]; then header libgtest-dev gtest/gtest.h; fi
            if [[ $jobs == *" bench "* ]]; then header libbenchmark-dev benchmark/benchmark.h; fi
            printf '#if __GNUC__ < 12 && !defined(__clang__)\nversion __GNUC__\n#endif\n'
        } | "$CXX" -std=c++20 -idirafter .deps/usr/include -E -P -x c++ - | while read -r package version; do
            [[ $package != version ]] || fail "$CXX is version $version, but 12 or newer is needed (as g++-12, say: make CXX=g++-12)."
            echo "$package"
        done
    elif [[ $CXX == g++ ]]; then
        echo g++
    else
        fail "There is no compiler '$CXX'."
    fi
    if [[ $jobs =~ \ (test|data|train|chat|serve|mutants)\  ]]; then
        if ! command -v python3 >/dev/null; then
            printf 'python3\npython3-venv\n'
        elif [[ ! -x .venv/bin/python ]]; then
            python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' ||
                fail "$(python3 --version) is too old: 3.9 or newer is needed."
            python3 -c 'import ensurepip' 2>/dev/null || compgen -G '.deps/usr/share/python-wheels/pip-*.whl' >/dev/null ||
                echo python3-venv
        fi
    fi
}

header() {
    printf '#if !__has_include(<%s>)\n%s\n#endif\n' "$2" "$1"
}

run() {
    echo "+ $*"
    "$@" </dev/null
}

install() {
    local packages=() as_root=() package
    command -v apt-get >/dev/null ||
        fail "There is no apt-get here: install ${REQUIRED[*]} and, for speed, ${OPTIONAL[*]} (Debian's names) yourself."
    for package in "${REQUIRED[@]}" "${OPTIONAL[@]}"; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || packages+=("$package")
    done
    [[ ${#packages[@]} -gt 0 ]] || return 0
    local install=(apt-get install -y --no-install-recommends)
    if [[ ${DEPS:-} == no ]]; then
        fail "DEPS=no, so nothing is installed. This would: ${install[*]} ${packages[*]}"
    elif [[ $(id -u) != 0 ]]; then
        if ! command -v sudo >/dev/null || ! sudo -n true 2>/dev/null; then
            unpack "${packages[@]}"
            return
        fi
        as_root=(sudo)
    fi
    run "${as_root[@]}" apt-get update || echo "apt-get update failed: going on with the package lists that are here." >&2
    available "${packages[@]}"
    [[ ${#wanted[@]} -eq 0 ]] || run "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive "${install[@]}" "${wanted[@]}" ||
        fail "The installation failed: see the lines above."
}

# Sets wanted to those of the packages that the distribution has. apt: options of apt.
apt=()
available() {
    local package
    wanted=()
    for package; do
        if [[ " ${REQUIRED[*]} " == *" $package "* ]] || [[ $(apt-cache "${apt[@]}" policy "$package") == *"Candidate: "[^\(]* ]]; then
            wanted+=("$package")
        else
            echo "This distribution has no $package: going on without it."
        fi
    done
}

# Without root: fetches the packages with all that they need and is not installed, with package lists of its own, and
# unpacks them into .deps. Without MPI, which looks for its parts where it was installed.
unpack() {
    local top=$PWD/.deps.new libraries package link target file
    [[ " $* " != *" libopenmpi-dev "* ]] || echo "Without root there is no MPI: the CPU build trains in one process."
    set -- $(printf '%s\n' "$@" | grep -v openmpi)
    [[ $# -gt 0 && "$(cat .deps/packages 2>/dev/null)" != "$*" ]] || return 0
    echo "Not root, and sudo would ask: unpacking into .deps what this system lacks (root installs it for everybody: make deps)."
    rm -rf "$top"
    mkdir -p "$top"/apt/{lists,archives}/partial "$top"/usr/{bin,sbin,lib,lib64}
    for link in bin sbin lib lib64; do ln -s "usr/$link" "$top/$link"; done
    apt=(-o Debug::NoLocking=1 -o Dir::State::lists="$top/apt/lists" -o Dir::Cache="$top/apt" -o Dir::Cache::archives="$top/apt/archives")
    run apt-get "${apt[@]}" -qq update || fail "The package lists could not be fetched: see the lines above."
    available "$@"
    # patchelf tells programs where their libraries lie.
    run apt-get "${apt[@]}" -qq -y --no-install-recommends --download-only install "${wanted[@]}" patchelf ||
        fail "The packages could not be fetched: see the lines above."
    for package in "$top"/apt/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$package" | tar x -C "$top" --keep-directory-symlink --no-same-owner
    done
    rm -rf "$top/apt"
    # A library whose run-time package is installed: its link leads there.
    find "$top" -xtype l | while read -r link; do
        target=$(realpath -ms "$(dirname "$link")/$(readlink "$link")")
        [[ ! -e /${target#"$top/"} ]] || ln -sfn "/${target#"$top/"}" "$link"
    done
    libraries=$(echo "$top"/usr/lib/*-linux-gnu)
    [[ ! -e $libraries/libc.so ]] || sed -i 's|/[^ ]*/\(libc_nonshared\.a\)|\1|' "$libraries/libc.so"
    if [[ -e $top/usr/bin/gcc ]]; then
        ln -sfn gcc "$top/usr/bin/cc"  # which alternatives would name
        # The C library's headers, in a directory that a GCC which was moved looks into.
        mkdir -p "$top/usr/${libraries##*/}/include"
        for file in "$top"/usr/include/"${libraries##*/}"/* "$top"/usr/include/*; do
            link=$top/usr/${libraries##*/}/include/${file##*/}
            [[ -e $link || ${file##*/} == c++ ]] || ln -snr "$file" "$link"
        done
    fi
    find "$top/usr" \( -path '*/bin/*' -o -path '*/gcc/*' \) -type f -perm -u+x | while read -r file; do
        [[ $(LC_ALL=C ldd "$file" 2>/dev/null) != *"not found"* ]] ||
            "$top/usr/bin/patchelf" --force-rpath --set-rpath "\$ORIGIN/$(realpath --relative-to="${file%/*}" "$libraries")" "$file"
    done
    echo "$*" >"$top/packages"
    rm -rf .deps
    mv "$top" .deps
}

case ${1:-} in
    check)
        shift
        list=$(missing "$@")
        [[ -z $list ]] || fail "Missing: ${list//$'\n'/ }. Run 'make deps' to install what is missing."
        ;;
    need)
        shift
        list=$(missing "$@")
        [[ -n $list ]] || exit 0
        echo "Missing: ${list//$'\n'/ }"
        install
        list=$(missing "$@")
        [[ -z $list ]] || fail "Still missing after the installation: ${list//$'\n'/ } (if $CXX does not look in /usr/include, set CPATH)."
        ;;
    install)
        install
        missing build test bench data >/dev/null  # versions
        ;;
    *)
        fail "usage: scripts/deps.sh check JOB... | need JOB... | install"
        ;;
esac

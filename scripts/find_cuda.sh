#!/usr/bin/env bash
# Finds what the CUDA build needs and prints it as KEY=VALUE, one a line (`make cuda-info` shows it):
#
#   scripts/find_cuda.sh          nvcc, version, arch (one line each), include and lib (likewise), nccl and nccl_include,
#                                 which are empty without NCCL
#   scripts/find_cuda.sh nvcc     only the compiler (fast; used to choose the backend)
#
# Environment variables:
#   NVCC, CUDA_HOME, CUDA_PATH    the compiler, or the toolkit that holds it as bin/nvcc; else PATH, the usual folders, wheels
#   CUBLAS_HOME, NCCL_HOME        folders with include/ and lib/; else the toolkit, wheels
#   ARCH                          architectures, as in "80 90a", or all: those of a release that this nvcc knows. Else those
#                                 of the GPUs here, else 90a
# Wheels are the nvidia-* packages in the Python environment that is active, or in .venv (`make cuda-toolkit`).
# If something is missing it prints one line with the remedy and exits with status 1.
set -euo pipefail
shopt -s nullglob

RELEASE_ARCHS="80 86 89 90a 100 120"

fail() {
    echo "CUDA build: $1" >&2
    exit 1
}

# Each wheel, or each major version's wheels together (nvidia/cu13), has its own include/ and lib/.
wheels=()
for environment in ${VIRTUAL_ENV:+"$VIRTUAL_ENV"} ${CONDA_PREFIX:+"$CONDA_PREFIX"} "$PWD/.venv"; do
    wheels+=("$environment"/lib/python3*/site-packages/nvidia/*/)
done
wheels=("${wheels[@]%/}")

find_nvcc() {
    local home candidate
    if [[ -n ${NVCC:-} ]]; then
        command -v "$NVCC" || fail "there is no compiler NVCC=$NVCC."
        return
    fi
    home=${CUDA_HOME:-${CUDA_PATH:-}}
    if [[ -n $home ]]; then
        [[ -x $home/bin/nvcc ]] || fail "there is no bin/nvcc in $home, which CUDA_HOME or CUDA_PATH names."
        echo "$home/bin/nvcc"
        return
    fi
    command -v nvcc && return
    for candidate in /usr/local/cuda/bin/nvcc /opt/cuda/bin/nvcc "${wheels[@]/%//bin/nvcc}"; do
        [[ ! -x $candidate ]] || { echo "$candidate"; return; }
    done
    fail "no nvcc found: install the CUDA Toolkit (12.4 or newer), set NVCC=/path/to/nvcc, or let \`make cuda-toolkit\` install it from Python wheels; \`make BACKEND=cpu\` needs none."
}

# find_library NAME HEADER VERSION PREFIX...: sets include and lib to the first prefix's folder and file that are both
# there. Wheels have no lib<name>.so, so the file with the version in its name counts as well.
find_library() {
    local name=$1 header=$2 version=$3 prefix file
    shift 3
    for prefix in "$@"; do
        for include in "$prefix"/include "$prefix"/targets/*/include; do
            [[ -e $include/$header ]] || continue
            for lib in "$prefix"/{lib64,lib,lib/*-linux-gnu,targets/*/lib}/lib"$name".so{".$version",}; do
                [[ ! -e $lib ]] || return 0
            done
        done
    done
    return 1
}

# The GPUs' architectures; sm_90 has instructions that only code for 90a may use.
gpu_archs() {
    nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d . | grep -x '[0-9]*' | sed 's/^90$/90a/' | sort -nu || true
}

nvcc=$(find_nvcc)
# nvcc does not find its own parts through a link to it; a link to ccache under its name must stay.
target=$(realpath "$nvcc")
[[ ${target##*/} != nvcc ]] || nvcc=$target
if [[ ${1:-} == nvcc ]]; then
    echo "nvcc=$nvcc"
    exit
fi

release=$("$nvcc" --version | sed -n 's/.*release \([0-9]*\.[0-9]*\).*/\1/p')
[[ -n $release ]] || fail "$nvcc --version names no release: is it NVIDIA's nvcc?"
major=${release%.*}
((major * 100 + ${release#*.} >= 1204)) || fail "$nvcc is of CUDA $release, but 12.4 or newer is needed."
known=$("$nvcc" --list-gpu-code | sed -n 's/^sm_//p')
knows() { grep -qx "${1%[af]}" <<<"$known"; }

if [[ ${ARCH:-} == all ]]; then
    archs=()
    for arch in $RELEASE_ARCHS; do
        if knows "$arch"; then archs+=("$arch"); fi
    done
else
    archs=(${ARCH:-$(gpu_archs)})
    [[ ${#archs[@]} -gt 0 ]] || archs=(90a)
fi
for arch in "${archs[@]}"; do
    [[ $arch =~ ^[0-9]+[af]?$ ]] || fail "ARCH=$arch is no architecture: say 80 or \"80 90a\" or all."
    ((${arch%[af]} >= 80)) || fail "sm_$arch is not supported: tensor cores with bf16 begin with sm_80 (\`make BACKEND=cpu\` builds for the CPU)."
    knows "$arch" || fail "$nvcc (CUDA $release) does not know sm_$arch: a newer CUDA Toolkit does."
done

# Where nvcc itself looks; a distribution's own package spreads over /usr.
top=$("$nvcc" --dryrun none.cu 2>&1 | sed -n 's/^#\$ TOP=//p')
toolkit=(${top:+"$(realpath "$top")"} "$(realpath "$(dirname "$nvcc")/..")")
[[ $nvcc != /usr/bin/* ]] || toolkit+=(/usr)

includes=() libs=()
find_library cudart cuda_runtime.h "$major" "${toolkit[@]}" "${wheels[@]}" ||
    fail "no CUDA runtime (cuda_runtime.h and libcudart) beside $nvcc: install the whole toolkit, or set NVCC to another one."
includes+=("$include") libs+=("$lib")
places=("${toolkit[@]}" "${wheels[@]}")
[[ -z ${CUBLAS_HOME:-} ]] || places=("$CUBLAS_HOME")
find_library cublasLt cublasLt.h "$major" "${places[@]}" ||
    fail "no cuBLAS for CUDA $major (cublasLt.h and libcublasLt)${CUBLAS_HOME:+ in CUBLAS_HOME=$CUBLAS_HOME}: install it with the toolkit or as the wheel nvidia-cublas, or set CUBLAS_HOME."
includes+=("$include") libs+=("$lib")

echo "nvcc=$nvcc"
echo "version=$release"
printf 'arch=%s\n' "${archs[@]}"
printf 'include=%s\n' "${includes[@]}" | awk '!seen[$0]++ && $0 != "include=/usr/include"'
printf 'lib=%s\n' "${libs[@]}"
places=("${toolkit[@]}" /usr "${wheels[@]}")
[[ -z ${NCCL_HOME:-} ]] || places=("$NCCL_HOME")
find_library nccl nccl.h 2 "${places[@]}" || include='' lib=''
printf 'nccl=%s\nnccl_include=%s\n' "$lib" "$include"

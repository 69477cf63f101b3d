// What the OpenMP kernels share: run-time dispatch to AVX-512, wide vectors, and float exp/tanh that compilers can
// vectorise. Not for .cu files.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// The build targets x86-64-v3 (AVX2 + FMA). A MULTIARCH function is compiled twice, and the loader picks the AVX-512
// version where the machine has it. Put it on leaf functions that work on a row or a tile: an OpenMP region's outlined
// body is not cloned, so the parallel loop calls a MULTIARCH function rather than being one.
// Helpers that a MULTIARCH function calls in its inner loop must be ALWAYS_INLINE, else they stay AVX2.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define MULTIARCH __attribute__((target_clones("arch=x86-64-v4", "default")))
#else
#define MULTIARCH
#endif
#define ALWAYS_INLINE inline __attribute__((always_inline))

// 16 floats: one AVX-512 register or two AVX2 registers. vec_load/vec_store take any alignment.
typedef float vec16 __attribute__((vector_size(64)));
typedef int32_t ivec16 __attribute__((vector_size(64)));

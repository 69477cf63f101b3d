// Run-time dispatch to AVX-512 for loops on the CPU. Not for .cu files.
#pragma once

// The build targets x86-64-v3 (AVX2 + FMA). A MULTIARCH function is compiled twice, and the loader picks the AVX-512
// version where the machine has it. Put it on leaf functions that work on a row or a tile: an OpenMP region's outlined
// body is not cloned, so the parallel loop calls a MULTIARCH function rather than being one.
// Helpers that a MULTIARCH function calls in its inner loop must be ALWAYS_INLINE, else they stay AVX2.
// -DNO_AVX512 builds the AVX2 versions alone, so that they can be tested on a machine with AVX-512.
//
// A few loops need another structure with AVX-512, not only another compilation. WITH_AVX512 marks the function to call
// if has_avx512().
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(NO_AVX512)
#define MULTIARCH __attribute__((target_clones("arch=x86-64-v4", "default")))
#define WITH_AVX512 __attribute__((target("arch=x86-64-v4")))
inline bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
}
#else
#define MULTIARCH
#define WITH_AVX512
inline bool has_avx512() {
    return false;
}
#endif
#define ALWAYS_INLINE inline __attribute__((always_inline))

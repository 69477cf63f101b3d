// GEMMs of small tiles that fit in the caches, for the OpenMP kernels of attention and linear attention, and the
// packing that they need. One thread calls them; cpu_tile.cpp picks AVX-512 or AVX2 at run time. Not for .cu files.
//
// All are outer-product GEMMs: scalars of A are multiplied with vectors of a row of B, and sums stay in registers. A
// may have any row stride; rows of B and C are whole vectors of 16.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/cpu.h"
#include "runtime/device/tensor.h"

constexpr int64_t LANES = 16;

inline int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// Code with vectors of sums is a template over the vector, vec16 for AVX-512 and vec8 for AVX2: GCC does not keep vec16
// sums in registers that are half as wide.
template <typename V>
ALWAYS_INLINE V load(const float* p) {
    V v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}

template <typename V>
ALWAYS_INLINE void store(float* p, V v) {
    std::memcpy(p, &v, sizeof(v));
}

template <typename V>
constexpr int64_t WIDTH = sizeof(V) / sizeof(float);

// How a GEMM stores its sums: over c; continuing the sums that c holds; or summed from zero and then added to c.
enum class Into { Overwritten, Continued, Added };

// c [M, vecs·16] = a·b with b [K, vecs·16], stored as `into` says. tile_AB: a is [M, K]. tile_AtB: a is stored as [K,
// M]. Each element of c is summed in the order of k, whatever the blocking.
void tile_AB(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t M, int64_t vecs,
             int64_t K, Into into);
void tile_AtB(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t M, int64_t vecs,
              int64_t K, Into into);

// dst [cols, rows] = scale · src [rows, cols] transposed.
void transpose(float* dst, int64_t ldd, const float* src, int64_t lds, int64_t rows, int64_t cols, float scale);
// dst [C, round16(rows)] = scale · srcᵀ; zeros in the lanes beyond rows. round16(n): n rounded up to a multiple of 16.
void pack_lanes(float* dst, int64_t ldd, const float* src, int64_t lds, int64_t rows, int64_t C, float scale);
// dst [rows, round16(C)] = scale · src; zeros in the columns beyond C.
void pack_rows(float* dst, const float* src, int64_t lds, int64_t rows, int64_t C, float scale);

// Row i of one head: data + i·stride.
struct HeadRows {
    float* data = nullptr;
    int64_t stride = 0;
    float* operator[](int64_t i) const { return data + i * stride; }
};

inline HeadRows head_rows(const Tensor& t, int64_t first_token, int64_t head) {
    return {static_cast<float*>(t.data) + first_token * t.stride[0] + head * t.stride[1], t.stride[0]};
}

inline void zero_rows(HeadRows rows, int64_t begin, int64_t end, int64_t C) {
    for (int64_t i = begin; i < end; i++) std::fill(rows[i], rows[i] + C, 0.0f);
}

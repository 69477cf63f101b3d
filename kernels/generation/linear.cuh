// Common code of the CUDA kernels of a linear layer: their parameters, and the functions that linear.cu chooses
// between. Each of those launches its kernel and returns true, or returns false where another one is faster or the
// shape is not supported.
#pragma once

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/generation/linear.h"

template <typename T>
struct LinearParams {
    const T *inp, *weight, *bias, *residual;  // weight: null if it is not in T
    T* out;
    const float *norm_weight, *norm_bias;
    int64_t inp_stride, weight_stride, residual_stride, out_stride;
    int64_t C, OC;
    int64_t columns;  // of out
    int N;            // rows of inp
    float eps;
    bool centred;
    bool aligned;  // inp, weight and the norm's vectors to 16 bytes
    Activation activation;
};

// UnscaledRows of a layer: the parts of inp's rows, whose norm is LinearParams'; rows and parts to make, and their
// norm. Null where the layer has none.
template <typename T>
struct UnscaledParams {
    const struct RowPart* parts;
    T* next_rows;
    RowPart* next_parts;
    const float* next_weight;
    bool next_centred;
};

constexpr int SMALL_BATCH_MAX_N = 64;

// GEMV (linear_gemv.cu): reads the weights once for up to 8 rows of inp. False where a row is too long for shared
// memory.
template <typename T>
bool linear_gemv(const char* op, const LinearParams<T>& p, Stream stream);

// The same for packed and for NF4 weights, with 16-bit elements (linear_packed_gemv.cu).
template <typename T>
bool linear_packed_gemv(const char* op, const LinearParams<T>& p, const struct PackedWeight& weight, Stream stream);
template <typename T>
bool linear_nf4_gemv(const char* op, const LinearParams<T>& p, const struct Nf4Matrix& weight, Stream stream);

// Small-batch GEMM of packed weights, up to 64 rows of inp of 16-bit elements, without a norm
// (linear_packed_small_batch.cu).
template <typename T>
bool linear_packed_small_batch(const char* op, const LinearParams<T>& p, const struct PackedWeight& weight,
                               Stream stream);

// The same by TMA and wgmma, on Hopper GPUs (linear_packed_hopper.cu).
template <typename T>
bool linear_packed_hopper(const char* op, const LinearParams<T>& p, const UnscaledParams<T>& unscaled,
                          const struct PackedWeight& weight, Stream stream);

// Small-batch GEMM of 16-bit elements, up to 64 rows of inp, by mma.sync (linear_small_batch.cu).
template <typename T>
bool linear_small_batch(const char* op, const LinearParams<T>& p, Stream stream);

// The same by TMA and wgmma in clusters, on Hopper GPUs (linear_hopper.cu). Builds that have it define HAVE_SM90A.
template <typename T>
bool linear_small_batch_hopper(const char* op, const LinearParams<T>& p, const UnscaledParams<T>& unscaled,
                               Stream stream);
// Whether it takes a matrix of this size, with a norm whose statistics are not known, and in one wave without.
bool small_batch_hopper_takes_norm(int64_t C, int64_t OC);
bool small_batch_hopper_takes_at_once(int64_t C, int64_t OC);

// The same for larger matrices, without a norm or behind an RMSNorm whose rows are unscaled, OC a multiple of 16
// (linear_dense_hopper.cu).
template <typename T>
bool linear_dense_hopper(const char* op, const LinearParams<T>& p, const UnscaledParams<T>& unscaled, Stream stream);
// Whether it takes a matrix of this size.
bool dense_hopper_takes(int64_t C, int64_t OC);

// The adapters of a linear layer whose rows use several (lora_rows.h).
template <typename T>
struct AdapterParams {
    const T *a, *b;  // [adapters, parts·R, C], [OC, adapters·R]
    const int32_t* adapter_of_row;
    T* low_rank;  // [N, parts, adapters·R]
    int adapters, parts, R;
    int part_ends[3];
};

// A linear layer without a norm and its adapters, on Hopper GPUs: up to 64 rows of inp of 16-bit elements, any C and OC
// (linear_adapters_hopper.cu). Two launches. False where the shape is not supported.
template <typename T>
bool linear_adapters_hopper(const char* op, const LinearParams<T>& p, const AdapterParams<T>& a, Stream stream);

// Brings a vector of n elements, or null, to L2.
template <int THREADS>
__device__ __forceinline__ void prefetch_vector(const float* data, int64_t n) {
    constexpr int PER_LINE = 128 / int(sizeof(float));
    if (!data) return;
    for (int64_t i = threadIdx.x * PER_LINE; i < n; i += THREADS * PER_LINE) prefetch_line(data + i);
}

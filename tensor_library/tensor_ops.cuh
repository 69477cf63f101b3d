// Operands of any dtype and the functions of tensor_ops.h, for its CUDA kernels.
//
// Kernels are not compiled for every mixture of dtypes. They load memory as bits, with a branch on the dtype that all
// threads take alike, and convert to floats later, so that the loads of all operands are in flight together.
#pragma once

#include "kernels/cuda/cuda_common.cuh"
#include "tensor_library/tensor_ops.h"

namespace tensor_detail {

constexpr int THREADS = 256;

struct Operand {
    void* data;
    int64_t stride[MAX_DIMS];
    DType dtype;
};

// W elements as stored: fp32 fills all words, 16-bit elements fill the first half in pairs. W = 8 is for 16-bit
// operands only.
template <int W>
struct alignas(W == 1 ? 4 : 16) Stored {
    uint32_t word[W == 8 ? 4 : W];
};

// The W elements from `at` on; or, if the operand repeats along the innermost dimension, W copies of the element at
// `at`.
template <int W>
__device__ __forceinline__ Stored<W> load_stored(const void* data, DType dtype, bool repeats, int64_t at) {
    Stored<W> s;
    if (W < 8 && dtype == DType::F32) {
        const uint32_t* p = static_cast<const uint32_t*>(data) + at;
        if (W == 1 || repeats) {
            const uint32_t word = *p;
#pragma unroll
            for (uint32_t& to : s.word) to = word;
        } else {
            *reinterpret_cast<uint4*>(s.word) = *reinterpret_cast<const uint4*>(p);
        }
    } else {
        const uint16_t* p = static_cast<const uint16_t*>(data) + at;
        if (W == 1 || repeats) {
            const uint32_t word = *p * 0x10001u;
#pragma unroll
            for (uint32_t& to : s.word) to = word;
        } else if (W == 4) {
            *reinterpret_cast<uint2*>(s.word) = *reinterpret_cast<const uint2*>(p);
        } else {
            *reinterpret_cast<uint4*>(s.word) = *reinterpret_cast<const uint4*>(p);
        }
    }
    return s;
}

template <int W>
__device__ __forceinline__ Floats<W> as_floats(const Stored<W>& s, DType dtype) {
    Floats<W> x;
    if (W < 8 && dtype == DType::F32) {
#pragma unroll
        for (int i = 0; i < W; i++) x[i] = __uint_as_float(s.word[W == 8 ? 0 : i]);
    } else if (dtype == DType::BF16) {
#pragma unroll
        for (int i = 0; i < W; i++) x[i] = __uint_as_float(i % 2 ? s.word[i / 2] & 0xffff0000u : s.word[i / 2] << 16);
    } else {
#pragma unroll
        for (int i = 0; i < W; i++) x[i] = as_float(fp16{uint16_t(s.word[i / 2] >> (i % 2 * 16))});
    }
    return x;
}

template <int W>
__device__ __forceinline__ void store_as(void* data, DType dtype, int64_t at, const Floats<W>& x) {
    if (W < 8 && dtype == DType::F32)
        store_floats<W>(static_cast<float*>(data) + at, x);
    else if (dtype == DType::BF16)
        store_floats<W>(static_cast<bf16*>(data) + at, x);
    else
        store_floats<W>(static_cast<fp16*>(data) + at, x);
}

template <TensorFunction F>
__device__ __forceinline__ float apply(float x, float y) {
    using Fn = TensorFunction;
    if constexpr (F == Fn::Id) return x;
    if constexpr (F == Fn::Neg) return -x;
    if constexpr (F == Fn::Inv) return 1 / x;
    if constexpr (F == Fn::Exp) return expf(x);
    if constexpr (F == Fn::Log) return logf(x);
    if constexpr (F == Fn::Sigmoid) {
        const float e = expf(-fabsf(x)), r = 1 / (1 + e);
        return x < 0 ? e * r : r;
    }
    if constexpr (F == Fn::Tanh) return tanhf(x);
    if constexpr (F == Fn::Relu) return nan_max(x, 0);
    if constexpr (F == Fn::Add) return x + y;
    if constexpr (F == Fn::Sub) return x - y;
    if constexpr (F == Fn::Mul) return x * y;
    if constexpr (F == Fn::Div) return x / y;
    if constexpr (F == Fn::Max) return nan_max(x, y);
    if constexpr (F == Fn::Pow) return powf(x, y);
    if constexpr (F == Fn::Lt) return x < y;
    if constexpr (F == Fn::Eq) return x == y;
    if constexpr (F == Fn::IsClose) return fabs(double(x) - double(y)) < 1e-2;
    if constexpr (F == Fn::InvBack) return -(y / x) / x;  // x² might overflow where the result does not
    if constexpr (F == Fn::LogBack) return y / x;
    if constexpr (F == Fn::ReluBack) return x > 0 ? y : 0;
}

// z = f(x, y). bf16: operands and result are bf16, so the special function unit may compute ln. Its error is up to 2⁻²¹
// between 1/2 and 2, and 3 units in the last place elsewhere. The bf16 number next to 1 is 1 − 2⁻⁸, so the error is at
// most 2⁻¹³ of a nonzero result, a sixteenth of half a bf16 unit. (With fp16, whose number next to 1 is 1 − 2⁻¹¹,
// results would be off by a unit.)
template <TensorFunction F, int W>
__device__ __forceinline__ Floats<W> apply_each(const Floats<W>& x, const Floats<W>& y, bool bf16) {
    Floats<W> z;
    if (F == TensorFunction::Log && bf16) {
#pragma unroll
        for (int i = 0; i < W; i++) z[i] = __logf(x[i]);
    } else {
#pragma unroll
        for (int i = 0; i < W; i++) z[i] = apply<F>(x[i], y[i]);
    }
    return z;
}

}  // namespace tensor_detail

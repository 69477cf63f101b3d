// Which instance of a kernel template is launched: by the dtype of the activations and by the width of vectors.
#pragma once

#include <initializer_list>
#include <type_traits>

#include "kernels/check.h"
#include "kernels/cuda/vector.cuh"

// Calls f(T{}) with the T of the dtype: dispatch_dtype(op, inp.dtype, [&](auto zero) { using T = decltype(zero); … }).
// Throws Error for other dtypes than fp32, bf16 and fp16.
template <typename F>
void dispatch_dtype(const char* op, DType dtype, F f) {
    switch (dtype) {
        case DType::F32:
            return f(float{});
        case DType::BF16:
            return f(bf16{});
        case DType::F16:
            return f(fp16{});
        default:
            throw Error(str(op, ": activations are ", dtype_name(dtype), ", expected fp32, bf16 or fp16"));
    }
}

// The same for fp32 and bf16. The caller has checked the dtype.
template <typename F>
void dispatch_fp32_or_bf16(DType dtype, F f) {
    if (dtype == DType::F32)
        f(float{});
    else
        f(bf16{});
}

// Calls f(std::integral_constant<int, W>): W is the full width of T, or 1 where the operands do not allow it.
template <typename T, typename F>
void dispatch_width(bool full, F f) {
    if (full)
        f(std::integral_constant<int, FULL_WIDTH<T>>{});
    else
        f(std::integral_constant<int, 1>{});
}

// Row stride of a matrix [N, C] in elements. The stride of a single row is not used, so it may have any value.
inline int64_t row_stride(const Tensor& t) {
    return t.shape[0] > 1 ? t.stride[0] : std::max<int64_t>(1, t.shape[1]);
}

// Whether every row of these matrices and vectors begins at a multiple of 16 bytes. Null tensors are ignored. The
// caller checks that the vector width divides the columns.
inline bool rows_aligned(std::initializer_list<Tensor> tensors) {
    for (const Tensor& t : tensors) {
        if (!t) continue;
        if (reinterpret_cast<uintptr_t>(t.data) % 16) return false;
        for (int i = 0; i + 1 < t.rank; i++)
            if (t.shape[i] > 1 && t.stride[i] * dtype_size(t.dtype) % 16) return false;
    }
    return true;
}

// The same for contiguous tensors that kernels read as one vector, such as RoPE's table [T, R/2, 2].
inline bool start_aligned(const Tensor& t) {
    return reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

// Rows of strided operands of any dtype, to and from floats, for the CPU kernels of tensor_ops.h.
#pragma once

#if defined(__AVX__) || defined(__F16C__)
#include <immintrin.h>
#endif

#include <algorithm>

#include "runtime/device/convert_dtype.h"
#include "tensor_library/strided.h"

namespace tensor_detail {

using Operand = StridedLoop::Operand;

inline void widened(const uint16_t* from, DType dtype, float* to, int64_t n) {
    int64_t i = 0;
#ifdef __F16C__
    if (dtype == DType::F16)
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
    for (; i < n; i++) to[i] = dtype == DType::BF16 ? to_float(bf16{from[i]}) : to_float(fp16{from[i]});
}

inline void narrowed(const float* from, DType dtype, uint16_t* to, int64_t n) {
    int64_t i = 0;
#ifdef __F16C__
    if (dtype == DType::F16)
        for (; i + 8 <= n; i += 8)
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                             _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++) to[i] = dtype == DType::BF16 ? to_bf16(from[i]).bits : to_fp16(from[i]).bits;
}

inline float load_one(const Operand& o, int64_t at) {
    if (o.dtype == DType::F32) return static_cast<const float*>(o.data)[at];
    float x;
    widened(static_cast<const uint16_t*>(o.data) + at, o.dtype, &x, 1);
    return x;
}

inline void store_one(const Operand& o, int64_t at, float x) {
    if (o.dtype == DType::F32)
        static_cast<float*>(o.data)[at] = x;
    else
        narrowed(&x, o.dtype, static_cast<uint16_t*>(o.data) + at, 1);
}

// Copies n elements, from `at` on and `stride` apart, into a buffer of floats.
inline void gather(const Operand& o, int64_t at, int64_t stride, int64_t n, float* to) {
    if (stride == 0) {
        std::fill_n(to, n, load_one(o, at));
    } else if (o.dtype == DType::F32) {
        const float* from = static_cast<const float*>(o.data) + at;
        if (stride == 1)
            std::copy_n(from, n, to);
        else
            for (int64_t i = 0; i < n; i++) to[i] = from[i * stride];
    } else if (stride == 1) {
        widened(static_cast<const uint16_t*>(o.data) + at, o.dtype, to, n);
    } else {
        for (int64_t i = 0; i < n; i++) to[i] = load_one(o, at + i * stride);
    }
}

// The reverse of gather().
inline void scatter(const Operand& o, int64_t at, int64_t stride, int64_t n, const float* from) {
    if (o.dtype == DType::F32) {
        float* to = static_cast<float*>(o.data) + at;
        if (stride == 1)
            std::copy_n(from, n, to);
        else
            for (int64_t i = 0; i < n; i++) to[i * stride] = from[i];
    } else if (stride == 1) {
        narrowed(from, o.dtype, static_cast<uint16_t*>(o.data) + at, n);
    } else {
        for (int64_t i = 0; i < n; i++) store_one(o, at + i * stride, from[i]);
    }
}

// The address of elements from `at` on if they are contiguous fp32, else null.
inline float* in_place(const Operand& o, int64_t at, int64_t stride) {
    return o.dtype == DType::F32 && stride == 1 ? static_cast<float*>(o.data) + at : nullptr;
}

// Walks the rows of a loop (all dimensions but the innermost) and gives the offset of an operand at each row.
class RowOffset {
  public:
    RowOffset(const StridedLoop& loop_, int operand, int64_t row) : loop(loop_), stride(loop.operand[operand].stride) {
        for (int d = loop.rank - 2; d >= 0; d--) {
            index[d] = row % loop.shape[d];
            row /= loop.shape[d];
            at += index[d] * stride[d];
        }
    }
    int64_t operator*() const { return at; }
    void operator++() {
        for (int d = loop.rank - 2; d >= 0; d--) {
            at += stride[d];
            if (++index[d] < loop.shape[d]) return;
            at -= index[d] * stride[d];
            index[d] = 0;
        }
    }

  private:
    const StridedLoop& loop;
    const int64_t* stride;
    int64_t index[MAX_DIMS] = {}, at = 0;
};

}  // namespace tensor_detail

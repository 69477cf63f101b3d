// The loops of the memory-bound OpenMP kernels: over a row in vectors, and over a matrix in chunks that threads share.
// Not for .cu files.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/cpu.h"
#include "runtime/device/tensor.h"

// Below this many elements a parallel region costs more than it saves.
constexpr int64_t PARALLEL_MIN = 1 << 14;

// Up to 16 floats; lanes beyond `lanes` are 0 (load) or unchanged (store). The test folds away if lanes is the constant
// 16, as in the loop of for_each_vector.
ALWAYS_INLINE vec16 vec_load_lanes(const float* p, int64_t lanes) {
    return lanes == 16 ? vec_load(p) : vec_load_partial(p, lanes);
}

ALWAYS_INLINE void vec_store_lanes(float* p, vec16 v, int64_t lanes) {
    if (lanes == 16)
        vec_store(p, v);
    else
        vec_store_partial(p, v, lanes);
}

// Calls body(i, lanes) for i = 0, 16, 32 … below n; lanes is 16 except at the end. Give the body the attribute
// always_inline (INLINE_LAMBDA), so that it is compiled for the instruction set of the surrounding MULTIARCH function.
#define INLINE_LAMBDA __attribute__((always_inline))
template <typename Body>
ALWAYS_INLINE void for_each_vector(int64_t n, Body body) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) body(i, int64_t(16));
    if (i < n) body(i, n - i);
}

ALWAYS_INLINE float vec_dot(const float* a, const float* b, int64_t n) {
    LaneSums sum;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) sum.add_products(a + i, b + i);
    if (i < n) {
        float last[2][16] = {};
        vec_store(last[0], vec_load_partial(a + i, n - i));
        vec_store(last[1], vec_load_partial(b + i, n - i));
        sum.add_products(last[0], last[1]);
    }
    return sum.sum();
}

// Row stride of a matrix [N, C] in elements. A single row may have any stride; libraries get a valid one.
inline int64_t row_stride(const Tensor& t) {
    return t.shape[0] > 1 ? t.stride[0] : std::max<int64_t>(1, t.shape[1]);
}

// Rows of an optional matrix: if it is null, every row is null.
template <typename T>
class Rows {
  public:
    explicit Rows(const Tensor& t) : data(t.as<float>()), stride(t ? row_stride(t) : 0) {}
    T* operator[](int64_t n) const { return data ? data + n * stride : nullptr; }

  private:
    T* data;
    int64_t stride;
};

// Calls body(row, begin, end) for chunks of up to 8192 columns that together cover [N, C], shared among threads. For
// elementwise work only: chunks end at multiples of 16 columns and every element is computed alike, so results do not
// depend on the chunks. flat: all operands are contiguous, and the matrix is walked as one long row.
template <typename Body>
void parallel_chunks(int64_t N, int64_t C, bool flat, Body body) {
    constexpr int64_t CHUNK = 8192;
    const int64_t rows = flat ? 1 : N, columns = flat ? N * C : C;
    const int64_t per_row = (columns + CHUNK - 1) / CHUNK;
#pragma omp parallel for schedule(static) if (N * C > PARALLEL_MIN)
    for (int64_t i = 0; i < rows * per_row; i++) {
        const int64_t row = i / per_row, begin = i % per_row * CHUNK;
        body(row, begin, std::min(begin + CHUNK, columns));
    }
}

// out[n, c] = f(inp0[n, c], …): calls row_function(out, inputs…, n) for chunks of n columns. out and inputs are
// matrices of one shape.
template <typename RowFunction, typename... Inputs>
void elementwise(RowFunction row_function, const Tensor& out, const Inputs&... inputs) {
    const bool flat = out.contiguous() && (inputs.contiguous() && ...);
    parallel_chunks(out.shape[0], out.shape[1], flat, [&](int64_t row, int64_t begin, int64_t end) {
        row_function(Rows<float>(out)[row] + begin, (Rows<const float>(inputs)[row] + begin)..., end - begin);
    });
}

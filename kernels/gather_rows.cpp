#include "kernels/gather_rows.h"

#include <algorithm>

#include "kernels/cpu/cpu_loops.h"
#include "kernels/gather_rows_check.h"

namespace {

// Checks all indices before the first is used.
void check_indices(const char* op, const Tensor& rows, int64_t N) {
    const int32_t* row = rows.as<int32_t>();
    for (int64_t i = 0; i < rows.shape[0]; i++)
        require(row[i] >= -1 && row[i] < N, op, ": rows[", i, "] is ", row[i], ", expected -1 … ", N - 1);
}

// to = scale·from
void copy_scaled(float* to, const float* from, int64_t C, float scale) {
    if (scale == 1) {
        std::copy_n(from, C, to);
        return;
    }
    for (int64_t c = 0; c < C; c++) to[c] = scale * from[c];
}

}  // namespace

void gather_rows(Tensor out, Tensor inp, Tensor rows, Stream, float scale) {
    const char* op = "gather_rows";
    check_rows(op, "out", out, "inp", inp, rows, DType::F32);
    check_indices(op, rows, inp.shape[0]);
    const int64_t n = out.shape[0], C = out.shape[1];
    const int32_t* row = rows.as<int32_t>();
    const Rows<float> to(out);
    const Rows<const float> from(inp);
#pragma omp parallel for schedule(static) if (n * C > PARALLEL_MIN)
    for (int64_t i = 0; i < n; i++) {
        if (row[i] < 0)
            std::fill_n(to[i], C, 0.0f);
        else
            copy_scaled(to[i], from[row[i]], C, scale);
    }
}

void scatter_rows(Tensor out, Tensor inp, Tensor rows, Stream, float scale) {
    const char* op = "scatter_rows";
    check_rows(op, "inp", inp, "out", out, rows, DType::F32);
    check_indices(op, rows, out.shape[0]);
    const int64_t N = out.shape[0], n = inp.shape[0], C = out.shape[1];
    const int32_t* row = rows.as<int32_t>();
    const Rows<float> to(out);
    const Rows<const float> from(inp);
#pragma omp parallel for schedule(static) if (N * C > PARALLEL_MIN)
    for (int64_t i = 0; i < N; i++) std::fill_n(to[i], C, 0.0f);
#pragma omp parallel for schedule(static) if (n * C > PARALLEL_MIN)
    for (int64_t i = 0; i < n; i++)
        if (row[i] >= 0) copy_scaled(to[row[i]], from[i], C, scale);
}

#include "kernels/embedding.h"

#include <algorithm>

#include "kernels/check.h"
#include "kernels/cpu/cpu_loops.h"
#include "kernels/cpu/packed_rows.h"
#include "kernels/packed_weight_check.h"

namespace {

// Checks ids before they are used: a bad id must be an error and not an access out of bounds.
void check_indices(const char* op, const char* name, const Tensor& t, int64_t rows) {
    const int32_t* index = t.as<int32_t>();
    for (int64_t n = 0; n < t.shape[0]; n++)
        require(index[n] >= 0 && index[n] < rows, op, ": ", name, "[", n, "] is ", index[n], ", expected 0 … ",
                rows - 1);
}

MULTIARCH void add_rows(float* out, const float* a, const float* b, int64_t C) {
    for_each_vector(C, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
        vec_store_lanes(out + c, vec_load_lanes(a + c, lanes) + vec_load_lanes(b + c, lanes), lanes);
    });
}

// table[index[n]] += dout[n] for all n in order. Threads own columns, so the work is balanced for any tokens, no two
// threads write the same element, and each sum has the order of n.
void scatter_add(const Tensor& table, const Tensor& dout, const int32_t* index, bool accumulate) {
    const int64_t N = dout.shape[0], C = dout.shape[1], V = table.shape[0];
    const int64_t st = row_stride(table), sd = row_stride(dout);
    float* t = table.as<float>();
    const float* d = dout.as<float>();
    if (!accumulate) {
#pragma omp parallel for schedule(static) if (V * C > PARALLEL_MIN)
        for (int64_t v = 0; v < V; v++) std::fill_n(t + v * st, C, 0.0f);
    }
    constexpr int64_t COLUMNS = 64;
#pragma omp parallel for schedule(static) if (N * C > PARALLEL_MIN)
    for (int64_t c = 0; c < C; c += COLUMNS) {
        const int64_t width = std::min(COLUMNS, C - c);
        for (int64_t n = 0; n < N; n++) {
            float* row = t + index[n] * st + c;
            add_rows(row, row, d + n * sd + c, width);
        }
    }
}

}  // namespace

namespace {

// wte_row(token, to) writes a token's row of wte.
template <typename WteRow>
void forward(const char* op, Tensor out, Tensor tokens, int64_t V, Tensor positions, Tensor wpe, WteRow wte_row) {
    const int64_t N = out.shape[0], C = out.shape[1];
    check_tensor(op, "tokens", tokens, DType::I32, {N});
    check_indices(op, "tokens", tokens, V);
    if (wpe) {
        check_matrix(op, "wpe", wpe);
        check_matrix(op, "wpe", wpe, wpe.shape[0], C);
        check_tensor(op, "positions", positions, DType::I32, {N});
        check_indices(op, "positions", positions, wpe.shape[0]);
    }
    const Rows<float> o(out);
    const Rows<const float> position_rows(wpe);
    const int32_t* token = tokens.as<int32_t>();
    const int32_t* position = wpe ? positions.as<int32_t>() : nullptr;
#pragma omp parallel for schedule(static) if (N * C > PARALLEL_MIN)
    for (int64_t n = 0; n < N; n++) {
        wte_row(token[n], o[n]);
        if (position) add_rows(o[n], o[n], position_rows[position[n]], C);
    }
}

}  // namespace

void embedding_forward(Tensor out, Tensor tokens, Tensor positions, Tensor wte, Tensor wpe, Stream) {
    const char* op = "embedding_forward";
    check_matrix(op, "out", out);
    check_matrix(op, "wte", wte);
    const int64_t C = out.shape[1];
    check_matrix(op, "wte", wte, wte.shape[0], C);
    const Rows<const float> rows(wte);
    forward(op, out, tokens, wte.shape[0], positions, wpe,
            [&](int32_t token, float* to) { std::copy_n(rows[token], C, to); });
}

void embedding_forward(Tensor out, Tensor tokens, Tensor positions, const PackedWeight& wte, Tensor wpe, Stream) {
    const char* op = "embedding_forward";
    check_matrix(op, "out", out);
    check_packed(op, wte, wte.rows.shape[0], out.shape[1]);
    forward(op, out, tokens, wte.rows.shape[0], positions, wpe,
            [&](int32_t token, float* to) { dequantise_row(to, wte, token); });
}

void embedding_backward(Tensor dwte, Tensor dwpe, Tensor dout, Tensor tokens, Tensor positions, Tensor scratch,
                        bool accumulate_wte, bool accumulate_wpe, Stream) {
    const char* op = "embedding_backward";
    check_matrix(op, "dout", dout);
    const int64_t N = dout.shape[0], C = dout.shape[1];
    // Checks both tables before either is written.
    if (dwte) {
        check_matrix(op, "dwte", dwte);
        check_matrix(op, "dwte", dwte, dwte.shape[0], C);
        check_tensor(op, "tokens", tokens, DType::I32, {N});
        check_indices(op, "tokens", tokens, dwte.shape[0]);
        check_scratch(op, scratch, embedding_backward_scratch(N, dwte.shape[0], C));
    }
    if (dwpe) {
        check_matrix(op, "dwpe", dwpe);
        check_matrix(op, "dwpe", dwpe, dwpe.shape[0], C);
        check_tensor(op, "positions", positions, DType::I32, {N});
        check_indices(op, "positions", positions, dwpe.shape[0]);
    }
    if (dwte) scatter_add(dwte, dout, tokens.as<int32_t>(), accumulate_wte);
    if (dwpe) scatter_add(dwpe, dout, positions.as<int32_t>(), accumulate_wpe);
}

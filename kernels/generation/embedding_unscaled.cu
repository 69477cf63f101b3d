// Embedding of a decode step's rows with the statistics of the norm that follows.
//
//   work a warp          a part of a row, 64 columns: two a lane
//   threads, registers   256, 23
//   shared memory        -
//
// GPT-2 124M, 64 sequences: 64 rows of 12 parts are 768 warps, 96 blocks. They read 98 KB of rows, 98 KB of positions
// and 3 KB of the norm's weight, and write 202 KB. A pass of the norm over the rows, 3 us, is not needed then.
#include "kernels/generation/embedding_unscaled.h"

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/pdl.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/row_statistics.cuh"

namespace {

constexpr int THREADS = 256;
static_assert(UNSCALED_COLUMNS == 2 * WARP);

// A table of rows; null: no row of it is added.
struct Table {
    const bf16* data;
    int64_t stride, rows;
};

// Columns c and c + 1 of a row; zeros if the index is outside the table.
__device__ __forceinline__ Floats<2> load_two(const Table& table, int32_t index, int64_t c) {
    return index >= 0 && index < table.rows ? as_floats(load_pack<2>(table.data + index * table.stride + c))
                                            : Floats<2>{};
}

struct Params {
    bf16 *out, *rows;
    RowPart* parts;
    const int32_t *tokens, *positions;
    Table wte, wpe;
    const float* weight;  // of the norm
    int64_t out_stride;
    int N, C, parts_of_row;
    bool centred;
};

__global__ void __launch_bounds__(THREADS) embedding_unscaled_kernel(const Params p) {
    pdl_launch_dependents();
    const int warp = int(blockIdx.x * THREADS + threadIdx.x) / WARP;
    const int row = warp / p.parts_of_row, part = warp % p.parts_of_row;
    if (row >= p.N) return;
    const int lane = int(threadIdx.x % WARP), c = part * int(UNSCALED_COLUMNS) + 2 * lane;
    const bool inside = c < p.C;
    Floats<2> x = {}, weight = {};
    if (inside) {
        const Floats<2> token = load_two(p.wte, p.tokens[row], c);
        const Floats<2> position = p.wpe.data ? load_two(p.wpe, p.positions[row], c) : Floats<2>{};
        weight = load_floats<2>(p.weight + c);
        // The norm is of the row as it is stored.
#pragma unroll
        for (int k = 0; k < 2; k++) x[k] = as_float(from_float<bf16>(token[k] + position[k]));
    }
    const float count = float(min(int(UNSCALED_COLUMNS), p.C - part * int(UNSCALED_COLUMNS)));
    const float mean = p.centred ? warp_sum(x[0] + x[1]) / count : 0.0f;
    const float m2 = warp_sum(inside ? add_squared_deviations(0.0f, x, mean) : 0.0f);
    if (lane == 0) p.parts[part * UNSCALED_MAX_ROWS + row] = {mean, m2};
    if (!inside) return;
    store_floats<2>(p.out + row * p.out_stride + c, x);
    store_floats<2>(p.rows + int64_t(row) * p.C + c, Floats<2>{x[0] * weight[0], x[1] * weight[1]});
}

}  // namespace

bool embedding_unscaled(Tensor out, const UnscaledRows& next, Tensor tokens, Tensor positions, Tensor wte, Tensor wpe,
                        Stream stream) {
    const char* op = "embedding_unscaled";
    const int64_t N = out.shape[0], C = out.shape[1];
    const auto check_bf16 = [&](const char* name, const Tensor& t, int64_t rows) {
        check_matrix(op, name, t, rows, C, Given::Required, DType::BF16);
    };
    check_bf16("out", out, N);
    check_tensor(op, "next.rows", next.rows, DType::BF16, {N, C});
    check_tensor(op, "next.parts", next.parts, DType::F32, {unscaled_parts(C), UNSCALED_MAX_ROWS, 2});
    check_tensor(op, "next.norm.weight", next.norm.weight, DType::F32, {C});
    check_tensor(op, "tokens", tokens, DType::I32, {N});
    check_bf16("wte", wte, wte.shape[0]);
    if (wpe) {
        check_bf16("wpe", wpe, wpe.shape[0]);
        check_tensor(op, "positions", positions, DType::I32, {N});
    }
    const auto pairs = [](const Tensor& t) {
        return !t || (reinterpret_cast<uintptr_t>(t.data) % 4 == 0 && row_stride(t) % 2 == 0);
    };
    if (N > UNSCALED_MAX_ROWS || C % 2 || !pairs(out) || !pairs(next.rows) || !pairs(wte) || !pairs(wpe)) return false;
    if (N == 0) return true;
    const auto table = [](const Tensor& t) { return t ? Table{t.as<bf16>(), row_stride(t), t.shape[0]} : Table{}; };
    const Params p{out.as<bf16>(),
                   next.rows.as<bf16>(),
                   reinterpret_cast<RowPart*>(next.parts.as<float>()),
                   tokens.as<int32_t>(),
                   wpe ? positions.as<int32_t>() : nullptr,
                   table(wte),
                   table(wpe),
                   next.norm.weight.as<float>(),
                   row_stride(out),
                   int(N),
                   int(C),
                   int(unscaled_parts(C)),
                   next.norm.centred};
    const int64_t warps = N * unscaled_parts(C);
    embedding_unscaled_kernel<<<unsigned(ceil_div(warps * WARP, THREADS)), THREADS, 0, cuda_stream(stream)>>>(p);
    check_launch(op, stream);
    return true;
}

#include "kernels/nf4.h"

#include "kernels/cuda/fp8_tile.cuh"
#include "kernels/nf4_check.h"
#include "kernels/nf4_values.h"

namespace {

// A thread makes 16 weights from one load of 8 bytes; 4 threads share a block. In bf16 a block is 128 bytes written and
// 33 read: the 218 million weights of a layer of LLaMA 8B take 0.55 GB, 0.18 ms at 3 TB/s.
constexpr int THREADS = 256, W = 16, WORDS = 4;  // words of 4 weights, each stored as a vector

struct Tables {
    float codes[16], absmax[256];
};

const Tables& host_tables() {
    static const Tables tables = [] {
        Tables t;
        std::copy(std::begin(NF4_VALUES), std::end(NF4_VALUES), t.codes);
        const std::array<float, 256> absmax = nf4_absmax_values();
        std::copy(absmax.begin(), absmax.end(), t.absmax);
        return t;
    }();
    return tables;
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    dequantise_kernel(T* out, const uint2* codes, const uint8_t* absmax_codes, const float* group_absmax,
                      const float* mean, int64_t n, const __grid_constant__ Tables tables) {
    __shared__ float values[16];  // lanes read different ones: shared memory serves 16 banks at once
    if (threadIdx.x < 16) values[threadIdx.x] = tables.codes[threadIdx.x];
    __syncthreads();
    const int64_t thread = blockIdx.x * int64_t(THREADS) + threadIdx.x, block = thread * W / NF4_BLOCK;
    if (thread * W >= n) return;
    const float absmax = nf4_absmax(tables.absmax[absmax_codes[block]], group_absmax[block / NF4_GROUP], *mean);
    const uint2 pairs = codes[thread];
#pragma unroll
    for (int word = 0; word < WORDS; word++) {
        const uint32_t two_bytes = (word < 2 ? pairs.x : pairs.y) >> (word % 2 * 16);
        Floats<4> w;
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = values[two_bytes >> (i / 2 * 8 + (i % 2 ? 0 : 4)) & 15] * absmax;
        store_floats<4>(out + thread * W + word * 4, w);
    }
}

}  // namespace

void nf4_dequantise(Tensor out, const Nf4Weights& weights, Stream stream) {
    const char* op = "nf4_dequantise";
    check_tensor(op, "out", out, check_activation_dtype(op, "out", out), {out.numel()});
    check_nf4(op, weights, out.numel());
    require(start_aligned(out) && start_aligned(weights.codes), op, ": out or codes is not aligned to 16 bytes");
    const int64_t n = out.numel();
    if (n == 0) return;
    const auto launch = [&](auto zero) {
        using T = decltype(zero);
        dequantise_kernel<T><<<grid_of(ceil_div(n / W, THREADS)), THREADS, 0, cuda_stream(stream)>>>(
            out.as<T>(), static_cast<const uint2*>(weights.codes.data), weights.absmax_codes.as<uint8_t>(),
            weights.group_absmax.as<float>(), weights.mean.as<float>(), n, host_tables());
    };
    if (out.dtype == DType::F32)
        launch(float{});
    else
        out.dtype == DType::F16 ? launch(fp16{}) : launch(bf16{});
    check_launch(op, stream);
}

namespace {

// A matrix of rows x C weights, C a multiple of 64: a thread's 8 columns are in one block, 4 bytes of codes in each of
// its rows. One of `rows` [rows, C] and `columns` [C, rows], whose rows are columns_stride apart, is null.
struct Fp8Arguments {
    uint8_t *rows, *columns;
    int64_t columns_stride;
    const uint32_t* codes;
    const uint8_t* absmax_codes;
    const float *group_absmax, *mean, *scale;
    int64_t N, C;
};

__global__ void __launch_bounds__(fp8_tile::THREADS)
    to_fp8_kernel(Fp8Arguments a, const __grid_constant__ Tables tables) {
    __shared__ fp8_tile::Tile tile;
    __shared__ float values[16];
    if (threadIdx.x < 16) values[threadIdx.x] = tables.codes[threadIdx.x];
    __syncthreads();
    const fp8_tile::Place at(a.C);
    const float scale = a.scale[FP8_SCALE];
    uint32_t codes[2][fp8_tile::ROWS] = {};
#pragma unroll
    for (int i = 0; i < fp8_tile::ROWS; i++) {
        if (at.n + i >= a.N || at.c >= a.C) continue;
        const int64_t first = (at.n + i) * a.C + at.c, block = first / NF4_BLOCK;
        const float absmax =
            nf4_absmax(tables.absmax[a.absmax_codes[block]], a.group_absmax[block / NF4_GROUP], *a.mean);
        const uint32_t pairs = a.codes[first / fp8_tile::W];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float w[4];
#pragma unroll
            for (int k = 0; k < 4; k++)
                w[k] = values[pairs >> (half * 16 + k / 2 * 8 + (k % 2 ? 0 : 4)) & 15] * absmax * scale;
            codes[half][i] = fp8_tile::encode_pair<Fp8Format::E4M3>(w[0], w[1]) |
                             fp8_tile::encode_pair<Fp8Format::E4M3>(w[2], w[3]) << 16;
        }
        if (a.rows) *reinterpret_cast<uint2*>(a.rows + first) = {codes[0][i], codes[1][i]};
    }
    if (!a.columns) return;
    fp8_tile::stage(tile, codes);
    __syncthreads();
    fp8_tile::store_columns(tile, a.columns, a.columns_stride, at, a.N, a.C);
}

}  // namespace

Tensor nf4_to_fp8(Tensor out, const Nf4Matrix& matrix, bool transposed, Stream stream) {
    const char* op = "nf4_to_fp8";
    check_nf4_to_fp8(op, out, matrix);
    require(start_aligned(out), op, ": out is not aligned to 16 bytes");
    const int64_t C = matrix.cols;
    uint8_t* const to = out.as<uint8_t>();
    for (const auto& [row, rows, weights] : matrix.parts) {
        require(start_aligned(weights.codes), op, ": codes is not aligned to 16 bytes");
        if (rows * C == 0) continue;
        const Fp8Arguments a{transposed ? nullptr : to + row * C,
                             transposed ? to + row : nullptr,
                             matrix.rows,
                             static_cast<const uint32_t*>(weights.codes.data),
                             weights.absmax_codes.as<uint8_t>(),
                             weights.group_absmax.as<float>(),
                             weights.mean.as<float>(),
                             matrix.fp8_scale.as<float>(),
                             rows,
                             C};
        to_fp8_kernel<<<fp8_tile::grid(rows, C), fp8_tile::THREADS, 0, cuda_stream(stream)>>>(a, host_tables());
    }
    check_launch(op, stream);
    const std::initializer_list<int64_t> shape = {transposed ? C : matrix.rows, transposed ? matrix.rows : C};
    return make_tensor(out.data, DType::U8, out.device, shape);
}

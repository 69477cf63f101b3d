// Quantisation to fp8 in both orientations, through the tiles of kernels/cuda/fp8_tile.cuh: 8.25 KiB of shared memory,
// for SwiGLU's gradient 16.5 KiB. A thread has 4 vectors of each input in flight.
//
// LLaMA 1B, N = 8192 tokens, C = 2048: 64 x 32 = 2048 blocks, 8 of which fit on an SM at once.
#include "kernels/fp8.h"

#include "kernels/cuda/fp8_tile.cuh"
#include "kernels/cuda/mlp_activation.cuh"
#include "kernels/fp8_check.h"

namespace {

using namespace fp8_tile;
using T = bf16;
static_assert(W == FULL_WIDTH<T>);

template <int INPUTS>
struct Arguments {
    const T* inp[INPUTS];  // [N, C]
    int64_t inp_stride[INPUTS];
    T* y = nullptr;                               // [N, OUTPUTS·C] or null
    uint8_t *rows = nullptr, *columns = nullptr;  // [N, OUTPUTS·C] and transposed, or null
    int64_t y_stride = 0, rows_stride = 0, columns_stride = 0;
    const float* scale = nullptr;
    unsigned* amax = nullptr;              // as bits, which order as the numbers do, NaN above all; or null
    unsigned long long* counts = nullptr;  // or null
    int64_t N = 0, C = 0;
};

// f of element k of each input.
template <int INPUTS, typename F>
__device__ __forceinline__ auto apply(const F& f, const Floats<W> (&x)[INPUTS], int k) {
    if constexpr (INPUTS == 1)
        return f(x[0][k]);
    else if constexpr (INPUTS == 2)
        return f(x[0][k], x[1][k]);
    else
        return f(x[0][k], x[1][k], x[2][k]);
}

struct Records {
    unsigned amax = 0, saturated = 0, underflowed = 0;
};

// The codes of 8 elements, the first in the lowest byte.
template <Fp8Format FORMAT>
__device__ __forceinline__ uint2 encode(const Floats<W>& y, float scale, Records& records) {
    // At most half of the smallest subnormal number rounds to 0.
    constexpr float LARGEST = fp8_max(FORMAT), ZERO = FORMAT == Fp8Format::E4M3 ? 0x1p-10f : 0x1p-17f;
    uint32_t pairs[W / 2];
#pragma unroll
    for (int k = 0; k < W; k += 2) {
        float scaled[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float x = y[k + i];
            records.amax = max(records.amax, __float_as_uint(x) & 0x7fffffffu);
            scaled[i] = fmaf(x, 0.0f, x * scale);  // NaN if x is infinite
            records.saturated += fabsf(scaled[i]) > LARGEST;
            records.underflowed += x != 0 && fabsf(scaled[i]) <= ZERO;
        }
        pairs[k / 2] = encode_pair<FORMAT>(scaled[0], scaled[1]);
    }
    return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}

// f maps an element of each input to OUTPUTS numbers: a float, or a float2. Output o has the columns from o·C on.
template <Fp8Format FORMAT, int OUTPUTS, int INPUTS, typename F>
__global__ void __launch_bounds__(THREADS) quantise_kernel(Arguments<INPUTS> a, F f) {
    __shared__ Tile tile[OUTPUTS];
    const Place at(a.C);
    const int64_t n = at.n, c = at.c;
    const float scale = a.scale[FP8_SCALE];
    // Elements beyond the matrix are 0, and so is their y.
    Pack<T, W> x[ROWS][INPUTS] = {};
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int k = 0; k < INPUTS; k++)
            if (n + i < a.N && c < a.C) x[i][k] = load_pack<W>(a.inp[k] + (n + i) * a.inp_stride[k] + c);

    Records records;
    uint32_t codes[OUTPUTS][2][ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        Floats<W> inputs[INPUTS], y[OUTPUTS];
#pragma unroll
        for (int k = 0; k < INPUTS; k++) inputs[k] = as_floats(x[i][k]);
#pragma unroll
        for (int k = 0; k < W; k++) {
            const auto result = apply(f, inputs, k);
            if constexpr (OUTPUTS == 1)
                y[0][k] = result;
            else {
                y[0][k] = result.x;
                y[1][k] = result.y;
            }
        }
        const bool inside = n + i < a.N && c < a.C;
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++) {
            const Pack<T, W> stored = as_pack<T>(y[o]);
            if (a.y && inside) store_pack(a.y + (n + i) * a.y_stride + o * a.C + c, stored);
            const uint2 row = encode<FORMAT>(as_floats(stored), scale, records);
            if (a.rows && inside) *reinterpret_cast<uint2*>(a.rows + (n + i) * a.rows_stride + o * a.C + c) = row;
            codes[o][0][i] = row.x;
            codes[o][1][i] = row.y;
        }
    }
    if (a.columns) {
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++) stage(tile[o], codes[o]);
        __syncthreads();
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++)
            store_columns(tile[o], a.columns + o * a.C * a.columns_stride, a.columns_stride, at, a.N, a.C);
    }

    // Maxima and sums of integers do not depend on their order.
    const bool first_lane = threadIdx.x % WARP == 0;
    if (a.amax) {
        const unsigned amax = __reduce_max_sync(ALL_LANES, records.amax);
        if (first_lane && amax > *reinterpret_cast<volatile unsigned*>(a.amax)) atomicMax(a.amax, amax);
    }
    if (a.counts) {
        const unsigned saturated = __reduce_add_sync(ALL_LANES, records.saturated);
        const unsigned underflowed = __reduce_add_sync(ALL_LANES, records.underflowed);
        if (first_lane && saturated) atomicAdd(a.counts + FP8_SATURATED, (unsigned long long)(saturated));
        if (first_lane && underflowed) atomicAdd(a.counts + FP8_UNDERFLOWED, (unsigned long long)(underflowed));
        if (blockIdx.x == 0 && threadIdx.x == 0)
            atomicAdd(a.counts + FP8_ELEMENTS, (unsigned long long)(OUTPUTS * a.N * a.C));
    }
}

struct Identity {
    __device__ float operator()(float x) const { return x; }
};

void check_aligned(const char* op, int64_t C, std::initializer_list<Tensor> tensors) {
    require(C % 16 == 0 && rows_aligned(tensors), op, ": ", C,
            " columns; their number must be a multiple of 16, and rows aligned to 16 bytes");
}

// inputs: [N, C] each. y: null, or what receives the unquantised outputs.
template <int OUTPUTS, typename F, typename... Inputs>
void launch(const char* op, const Fp8Output& out, const Tensor& y, int64_t N, int64_t C, F f, Stream stream,
            const Inputs&... inputs) {
    if (N * C == 0) return;
    constexpr int INPUTS = sizeof...(Inputs);
    Arguments<INPUTS> a{{inputs.template as<const T>()...}, {row_stride(inputs)...}};
    if (y) {
        a.y = y.as<T>();
        a.y_stride = row_stride(y);
    }
    if (out.rows) {
        a.rows = out.rows.as<uint8_t>();
        a.rows_stride = row_stride(out.rows);
    }
    if (out.columns) {
        a.columns = out.columns.as<uint8_t>();
        a.columns_stride = row_stride(out.columns);
    }
    a.scale = out.record.scale.as<float>();
    a.amax = static_cast<unsigned*>(out.record.amax.data);
    a.counts = static_cast<unsigned long long*>(out.record.counts.data);
    a.N = N;
    a.C = C;
    if (out.format == Fp8Format::E4M3)
        quantise_kernel<Fp8Format::E4M3, OUTPUTS><<<grid(N, C), THREADS, 0, cuda_stream(stream)>>>(a, f);
    else
        quantise_kernel<Fp8Format::E5M2, OUTPUTS><<<grid(N, C), THREADS, 0, cuda_stream(stream)>>>(a, f);
    check_launch(op, stream);
}

}  // namespace

void fp8_quantise(const Fp8Output& out, Tensor inp, Stream stream) {
    const char* op = "fp8_quantise";
    check_matrix(op, "inp", inp, DType::BF16);
    const int64_t N = inp.shape[0], C = inp.shape[1];
    check_fp8_output(op, out, N, C);
    check_aligned(op, C, {inp, out.rows});
    launch<1>(op, out, {}, N, C, Identity{}, stream, inp);
}

void fp8_activation_forward(const Fp8Output& out, Tensor act, Activation f, Tensor inp, Stream stream) {
    const char* op = "fp8_activation_forward";
    const int64_t I = check_activation_input(op, "inp", f, inp, DType::BF16), N = inp.shape[0];
    check_matrix(op, "act", act, N, I, Given::Optional, DType::BF16);
    check_fp8_output(op, out, N, I);
    check_aligned(op, I, {inp, act, out.rows});
    mlp_activation::dispatch<T>(f, [&](auto functions) {
        using Forward = typename decltype(functions)::Forward;
        if constexpr (mlp_activation::GATED<Forward>)
            launch<1>(op, out, act, N, I, Forward{}, stream, inp.columns(0, I), inp.columns(I, 2 * I));
        else
            launch<1>(op, out, act, N, I, Forward{}, stream, inp);
    });
}

void fp8_activation_backward(const Fp8Output& out, Tensor dinp, Activation f, Tensor dout, Tensor inp, Stream stream) {
    const char* op = "fp8_activation_backward";
    const int64_t I = check_activation_input(op, "inp", f, inp, DType::BF16), N = inp.shape[0], C = inp.shape[1];
    check_matrix(op, "dout", dout, N, I, Given::Required, DType::BF16);
    check_matrix(op, "dinp", dinp, N, C, Given::Optional, DType::BF16);
    check_fp8_output(op, out, N, C);
    check_aligned(op, I, {inp, dout, dinp, out.rows});
    mlp_activation::dispatch<T>(f, [&](auto functions) {
        using Functions = decltype(functions);
        using Backward = typename Functions::Backward;
        if constexpr (mlp_activation::GATED<typename Functions::Forward>)
            launch<2>(op, out, dinp, N, I, Backward{}, stream, dout, inp.columns(0, I), inp.columns(I, 2 * I));
        else
            launch<1>(op, out, dinp, N, I, Backward{}, stream, dout, inp);
    });
}

namespace {

__global__ void __launch_bounds__(THREADS)
    transpose_kernel(uint8_t* columns, int64_t columns_stride, const uint8_t* rows, int64_t rows_stride, int64_t N,
                     int64_t C) {
    __shared__ Tile tile;
    const Place at(C);
    uint32_t codes[2][ROWS] = {};
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        if (at.n + i >= N || at.c >= C) continue;
        const uint2 row = *reinterpret_cast<const uint2*>(rows + (at.n + i) * rows_stride + at.c);
        codes[0][i] = row.x;
        codes[1][i] = row.y;
    }
    stage(tile, codes);
    __syncthreads();
    store_columns(tile, columns, columns_stride, at, N, C);
}

}  // namespace

void fp8_transpose(Tensor columns, Tensor rows, Stream stream) {
    const char* op = "fp8_transpose";
    check_fp8_transpose(op, columns, rows);
    const int64_t N = rows.shape[0], C = rows.shape[1];
    check_aligned(op, C, {rows});
    if (N * C == 0) return;
    transpose_kernel<<<grid(N, C), THREADS, 0, cuda_stream(stream)>>>(columns.as<uint8_t>(), row_stride(columns),
                                                                      rows.as<uint8_t>(), row_stride(rows), N, C);
    check_launch(op, stream);
}

namespace {

__global__ void set_scale_kernel(float* scale, const float* amax, Fp8Format format, int margin) {
    fp8_store_scale(scale, fp8_scale_exponent(*amax, format, margin));
}

// One thread for each record.
__global__ void update_scales_kernel(float* scales, float* history, int64_t history_stride, const float* amaxes,
                                     int64_t amaxes_stride, int64_t S, int64_t H, int64_t ranks, Fp8Format format,
                                     int margin) {
    const int64_t s = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (s >= S) return;
    float newest = 0;
    for (int64_t r = 0; r < ranks; r++) newest = nan_max(newest, amaxes[r * amaxes_stride + s]);
    const bool finite = isfinite(newest);
    float largest = finite ? newest : history[(H - 1) * history_stride + s];
    for (int64_t i = H - 1; i > 0; i--) {
        const float older = history[(i - 1) * history_stride + s];
        largest = fmaxf(largest, older);
        if (finite) history[i * history_stride + s] = older;
    }
    if (finite) history[s] = newest;
    fp8_store_scale(scales + FP8_SCALE_FLOATS * s, fp8_scale_exponent(largest, format, margin));
}

// One thread for each sum.
__global__ void sum_counts_kernel(int64_t* totals, const int64_t* counts, int64_t S) {
    int64_t sum = 0;
    for (int64_t s = 0; s < S; s++) sum += counts[s * NUM_FP8_COUNTS + threadIdx.x];
    totals[threadIdx.x] = sum;
}

}  // namespace

void fp8_set_scale(const Fp8Record& record, Fp8Format format, int margin, Stream stream) {
    const char* op = "fp8_set_scale";
    check_fp8_slot(op, record);
    require(bool(record.amax), op, ": amax is missing");
    set_scale_kernel<<<1, 1, 0, cuda_stream(stream)>>>(record.scale.as<float>(), record.amax.as<float>(), format,
                                                       margin);
    check_launch(op, stream);
}

void fp8_update_scales(Tensor scales, Tensor history, Tensor amaxes, Fp8Format format, int margin, Stream stream) {
    const char* op = "fp8_update_scales";
    check_fp8_scales(op, scales, history, amaxes);
    const int64_t S = scales.shape[0];
    if (S == 0) return;
    update_scales_kernel<<<grid_of(ceil_div(S, 64)), 64, 0, cuda_stream(stream)>>>(
        scales.as<float>(), history.as<float>(), row_stride(history), amaxes.as<float>(), row_stride(amaxes), S,
        history.shape[0], amaxes.shape[0], format, margin);
    check_launch(op, stream);
}

void fp8_sum_counts(Tensor totals, Tensor counts, Stream stream) {
    const char* op = "fp8_sum_counts";
    check_fp8_counts(op, totals, counts);
    sum_counts_kernel<<<1, NUM_FP8_COUNTS, 0, cuda_stream(stream)>>>(totals.as<int64_t>(), counts.as<int64_t>(),
                                                                     counts.shape[0]);
    check_launch(op, stream);
}

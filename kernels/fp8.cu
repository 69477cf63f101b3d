// Quantisation to fp8 in both orientations, through tiles in shared memory.
//
//   tile                128 rows x 64 columns; a thread computes 4 rows x 8 columns: it reads vectors of 16 bytes, and
//                       the codes of its 4 rows of a column fill a word of the transposed tile
//   global memory       reads 128 bytes of a row, writes 64 of `rows` and 128 of `columns`
//   shared memory       64 rows of 33 words for each output: 8.25 KiB (SwiGLU's gradient 16.5 KiB). The odd pitch makes
//                       the transposed reads free of bank conflicts; writes have two-way ones
//   loads in flight     4 vectors of each input
//
// LLaMA 1B, N = 8192 tokens, C = 2048: 64 x 32 = 2048 blocks, 8 of which fit on an SM at once.
#include "kernels/fp8.h"

#include <cuda_fp8.h>

#include "kernels/cuda/mlp_activation.cuh"
#include "kernels/fp8_check.h"

namespace {

using T = bf16;
constexpr int THREADS = 256, TILE_ROWS = 128, TILE_COLUMNS = 64, W = FULL_WIDTH<T>, ROWS = 4;
constexpr int GROUPS = TILE_COLUMNS / W, PITCH = TILE_ROWS / ROWS + 1;
static_assert(THREADS == TILE_ROWS / ROWS * GROUPS);

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

template <Fp8Format FORMAT>
__device__ __forceinline__ uint32_t encode_pair(float low, float high) {
    constexpr __nv_fp8_interpretation_t KIND = FORMAT == Fp8Format::E4M3 ? __NV_E4M3 : __NV_E5M2;
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, KIND);
}

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

// Row i of the 4 x 4 bytes in x becomes column i.
__device__ __forceinline__ void transpose_bytes(uint32_t (&x)[4]) {
    const uint32_t a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[2], x[3], 0x5140);
    const uint32_t c = __byte_perm(x[0], x[1], 0x7362), d = __byte_perm(x[2], x[3], 0x7362);
    x[0] = __byte_perm(a, b, 0x5410);
    x[1] = __byte_perm(a, b, 0x7632);
    x[2] = __byte_perm(c, d, 0x5410);
    x[3] = __byte_perm(c, d, 0x7632);
}

// Writes the transposed tile: 16 rows of a column in one store where all of them exist and are aligned.
__device__ __forceinline__ void store_columns(const uint32_t (&tile)[TILE_COLUMNS][PITCH], uint8_t* columns,
                                              int64_t stride, int64_t n0, int64_t c0, int64_t N, int64_t C) {
    constexpr int CHUNK = 16, CHUNKS = TILE_ROWS / CHUNK;
    const bool aligned = (reinterpret_cast<uintptr_t>(columns) | uintptr_t(stride)) % CHUNK == 0;
    for (int item = threadIdx.x; item < TILE_COLUMNS * CHUNKS; item += THREADS) {
        const int column = item / CHUNKS, word = item % CHUNKS * (CHUNK / 4);
        const int64_t n = n0 + word * 4;
        if (c0 + column >= C || n >= N) continue;
        const uint4 codes = {tile[column][word], tile[column][word + 1], tile[column][word + 2],
                             tile[column][word + 3]};
        uint8_t* to = columns + (c0 + column) * stride + n;
        if (aligned && n + CHUNK <= N) {
            *reinterpret_cast<uint4*>(to) = codes;
        } else {
            for (int i = 0; i < min(int64_t(CHUNK), N - n); i++)
                to[i] = uint8_t(tile[column][word + i / 4] >> i % 4 * 8);
        }
    }
}

// f maps an element of each input to OUTPUTS numbers: a float, or a float2. Output o has the columns from o·C on.
template <Fp8Format FORMAT, int OUTPUTS, int INPUTS, typename F>
__global__ void __launch_bounds__(THREADS) quantise_kernel(Arguments<INPUTS> a, F f) {
    __shared__ uint32_t tile[OUTPUTS][TILE_COLUMNS][PITCH];
    const RowItem at = row_item(blockIdx.x, ceil_div(a.C, TILE_COLUMNS));
    const int quad = threadIdx.x / GROUPS, group = threadIdx.x % GROUPS;
    const int64_t n0 = at.row * TILE_ROWS, c0 = at.item * TILE_COLUMNS, n = n0 + quad * ROWS, c = c0 + group * W;
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
        for (int o = 0; o < OUTPUTS; o++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                transpose_bytes(codes[o][half]);
#pragma unroll
                for (int k = 0; k < 4; k++) tile[o][group * W + half * 4 + k][quad] = codes[o][half][k];
            }
        __syncthreads();
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++)
            store_columns(tile[o], a.columns + o * a.C * a.columns_stride, a.columns_stride, n0, c0, a.N, a.C);
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
    const dim3 grid = grid_of(ceil_div(N, TILE_ROWS) * ceil_div(C, TILE_COLUMNS));
    if (out.format == Fp8Format::E4M3)
        quantise_kernel<Fp8Format::E4M3, OUTPUTS><<<grid, THREADS, 0, cuda_stream(stream)>>>(a, f);
    else
        quantise_kernel<Fp8Format::E5M2, OUTPUTS><<<grid, THREADS, 0, cuda_stream(stream)>>>(a, f);
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

void fp8_activation_forward(const Fp8Output& out, Activation f, Tensor inp, Stream stream) {
    const char* op = "fp8_activation_forward";
    const int64_t I = check_activation_input(op, "inp", f, inp, DType::BF16), N = inp.shape[0];
    check_fp8_output(op, out, N, I);
    check_aligned(op, I, {inp, out.rows});
    mlp_activation::dispatch<T>(f, [&](auto functions) {
        using Forward = typename decltype(functions)::Forward;
        if constexpr (mlp_activation::GATED<Forward>)
            launch<1>(op, out, {}, N, I, Forward{}, stream, inp.columns(0, I), inp.columns(I, 2 * I));
        else
            launch<1>(op, out, {}, N, I, Forward{}, stream, inp);
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

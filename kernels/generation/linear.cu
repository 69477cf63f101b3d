// A few rows against a large matrix: what it costs is reading the weights once, so that everything is arranged around
// having their loads under way.
//
// A unit is a pair of rows of weight (for SwiGLU a row of gate and its row of up); warps own units, WK of them sharing
// one by parts of C where there are too few units to fill the GPU. A block begins by asking for its first weights,
// which no other kernel writes, and only then waits for the kernel before it (pdl.cuh), brings the rows of
// inp to shared memory and normalises them there: by the time the products can start, the weights have
// come.
//
// Every sum has one order, which follows from C and OC alone: lanes over C, a tree over lanes, the WK parts in order.
#include "kernels/generation/linear.h"

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/pdl.cuh"
#include "kernels/cuda/warp_tile.cuh"
#include "kernels/gelu.h"
#include "kernels/generation/linear.cuh"
#include "kernels/generation/linear_check.h"
#include "kernels/layernorm.h"
#include "kernels/matmul.h"
#include "kernels/relu2.h"
#include "kernels/rmsnorm.h"
#include "kernels/swiglu.h"

namespace {

constexpr int WARPS = 8, THREADS = WARPS * WARP, UNIT = 2;
constexpr int AHEAD = 4;                    // vectors of each row that a lane asks for at once
constexpr int64_t SHARED_BYTES = 64 << 10;  // for the rows of inp: two blocks fit on every SM

// A layer by units.
template <typename T>
struct Units : Layer<T> {
    int64_t units;
    int parts;  // WK
};

// The rows of inp as T in shared memory, normalised if there is a norm: NB teams of warps, a row each. Every lane reads
// again what it has written itself.
//
// A row's sums are those of 256 lanes, eight warps, added up in order: a team of fewer warps does the work of all
// eight, so that the bits don't depend on how many rows there are.
template <int W, int NB, typename T>
__device__ __forceinline__ void stage_rows(T* rows, const Layer<T>& a) {
    constexpr int TEAM = WARPS / NB;
    __shared__ float partial[NB][WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n = warp / TEAM;
    const T* const inp = a.inp + n * a.inp_stride;
    T* const x = rows + n * a.C;
    const int64_t end = n < a.N ? a.C : 0;
    // f(c, i) for this lane's vectors, as the lane of each of the NB warps that it stands for.
    const auto each = [&](auto f) {
        for (int64_t base = 0; base < end; base += THREADS * W) {
#pragma unroll
            for (int i = 0; i < NB; i++) {
                const int64_t c = base + ((warp % TEAM + i * TEAM) * WARP + lane) * W;
                if (c < end) f(c, i);
            }
        }
    };
    const auto total = [&](const float(&sums)[NB]) {
#pragma unroll
        for (int i = 0; i < NB; i++) {
            const float sum = warp_sum(sums[i]);
            if (lane == 0) partial[n][warp % TEAM + i * TEAM] = sum;
        }
        __syncthreads();
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += partial[n][w];
        __syncthreads();
        return sum;
    };
    const auto staged = [&](int64_t c) { return as_floats(*reinterpret_cast<const Pack<T, W>*>(x + c)); };

    float sums[NB] = {};
    each([&](int64_t c, int i) {
        const Pack<T, W> p = load_pack<W>(inp + c);
        *reinterpret_cast<Pack<T, W>*>(x + c) = p;
        const Floats<W> v = as_floats(p);
#pragma unroll
        for (int k = 0; k < W; k++) sums[i] += v[k];
    });
    if (!a.norm_weight) return;
    const float mean = a.centred ? total(sums) / float(a.C) : 0;
    float squares[NB] = {};
    each([&](int64_t c, int i) {
        const Floats<W> v = staged(c);
#pragma unroll
        for (int k = 0; k < W; k++) squares[i] += (v[k] - mean) * (v[k] - mean);
    });
    const float rstd = 1 / sqrtf(total(squares) / float(a.C) + a.eps);
    each([&](int64_t c, int) {
        Floats<W> v = staged(c);
        const Floats<W> w = load_floats<W>(a.norm_weight + c);
        Floats<W> shift = {};
        if (a.norm_bias) shift = load_floats<W>(a.norm_bias + c);
            // Spelt out, so that the compiler does not round the product in one team's code and not in another's.
#pragma unroll
        for (int k = 0; k < W; k++) v[k] = fmaf((v[k] - mean) * rstd, w[k], shift[k]);
        *reinterpret_cast<Pack<T, W>*>(x + c) = as_pack<T>(v);
    });
}

__device__ __forceinline__ void prefetch(const float* data, int64_t n) {
    if (!data) return;
    for (int64_t i = threadIdx.x * 32; i < n; i += THREADS * 32) prefetch_line(data + i);
}

// y: the unit's two sums for row n with their biases; residual: what is added to them.
template <typename T>
__device__ __forceinline__ void finish(const Layer<T>& a, int64_t unit, int n, const float (&y)[UNIT],
                                       const float (&residual)[UNIT]) {
    const auto store = [&](int64_t o, float x) { a.out[n * a.out_stride + o] = from_float<T>(x); };
    if (a.activation == Activation::SwiGLU) return store(unit, swiglu(y[0], y[1]));
#pragma unroll
    for (int r = 0; r < UNIT; r++) {
        const int64_t o = unit * UNIT + r;
        if (o >= a.columns) return;
        store(o, activate(a.activation, y[r]) + residual[r]);
    }
}

template <int W, int NB, typename T>
__global__ void __launch_bounds__(THREADS) few_rows_kernel(const Units<T> a) {
    extern __shared__ uint4 shared[];
    __shared__ float partial[WARPS][UNIT][NB];
    T* const x = reinterpret_cast<T*>(shared);  // [NB, C]
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int groups = WARPS / a.parts, group = warp / a.parts, part = warp % a.parts;
    const int64_t step = int64_t(a.parts) * WARP * W, first = (int64_t(part) * WARP + lane) * W;
    pdl_launch_dependents();

    bool staged = false;
    for (int64_t base = int64_t(blockIdx.x) * groups; base < a.units; base += int64_t(gridDim.x) * groups) {
        const int64_t unit = min(base + group, a.units - 1);
        const bool swiglu = a.activation == Activation::SwiGLU;
        // The unit's two rows of weight; an odd last one is its own partner.
        const int64_t o0 = swiglu ? unit : unit * UNIT, o1 = swiglu ? a.columns + unit : min(o0 + 1, a.columns - 1);
        const T *const row0 = a.weight + o0 * a.weight_stride, *const row1 = a.weight + o1 * a.weight_stride;
        Pack<T, W> w0[AHEAD] = {}, w1[AHEAD] = {};
        const auto load = [&](int64_t c) {
#pragma unroll
            for (int u = 0; u < AHEAD; u++, c += step) {
                if (c >= a.C) continue;
                w0[u] = load_pack<W>(row0 + c);
                w1[u] = load_pack<W>(row1 + c);
            }
        };
        load(first);
        const float bias[UNIT] = {a.bias ? as_float(a.bias[o0]) : 0.0f, a.bias ? as_float(a.bias[o1]) : 0.0f};
        if (!staged) {
            prefetch(a.norm_weight, a.C);
            prefetch(a.norm_bias, a.C);
            pdl_wait();
            stage_rows<W, NB>(x, a);
            __syncthreads();
            staged = true;
        }
        const bool finishes = part == 0 && lane < a.N && base + group < a.units;
        float residual[UNIT] = {};
        if (finishes && a.residual) {
            residual[0] = as_float(a.residual[lane * a.residual_stride + o0]);
            residual[1] = as_float(a.residual[lane * a.residual_stride + o1]);
        }

        float sum0[NB] = {}, sum1[NB] = {};
        for (int64_t c = first; c < a.C; c += AHEAD * step) {
            if (c != first) load(c);
#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                const int64_t at = c + u * step;
                if (at >= a.C) continue;
                const Floats<W> v0 = as_floats(w0[u]), v1 = as_floats(w1[u]);
#pragma unroll
                for (int n = 0; n < NB; n++) {
                    const Floats<W> in =
                        as_floats(*reinterpret_cast<const Pack<T, W>*>(x + min(n, a.N - 1) * a.C + at));
#pragma unroll
                    for (int k = 0; k < W; k++) {
                        sum0[n] = fmaf(in[k], v0[k], sum0[n]);
                        sum1[n] = fmaf(in[k], v1[k], sum1[n]);
                    }
                }
            }
        }
#pragma unroll
        for (int n = 0; n < NB; n++) {
            const float y0 = warp_sum(sum0[n]), y1 = warp_sum(sum1[n]);
            if (lane == 0) partial[warp][0][n] = y0, partial[warp][1][n] = y1;
        }
        // A warp that has its unit to itself need not wait for the others.
        if (a.parts > 1)
            __syncthreads();
        else
            __syncwarp();
        if (finishes) {
            float y[UNIT] = {};
            for (int p = 0; p < a.parts; p++) y[0] += partial[warp + p][0][lane], y[1] += partial[warp + p][1][lane];
            y[0] += bias[0], y[1] += bias[1];
            finish(a, unit, lane, y, residual);
        }
        if (a.parts > 1)
            __syncthreads();  // partial is written again
        else
            __syncwarp();
    }
}

// --- some rows of 16-bit numbers: more than the warps' ordinary units keep up with, too few for the library's tiles

// Sixteen (MT = 1) or 32 rows of weight against 32 texts, by eight warps that share C among them in chunks of 32:
// tensor cores read both operands from global memory, for no number is used by two warps. A lane loads 16 bytes of a
// row, the operands of two products of 16 columns; which columns these are does not matter as long as both sides agree.
// Like above a block asks for its first weights before it waits for the kernel before. The warps' sums are added up in
// order, so that a text's sums don't depend on how many texts there are. Before a norm the block brings its texts to
// shared memory and normalises them there, four rows a warp.
constexpr int MAX_SOME_ROWS = 64, SOME_TEXTS = 32;
constexpr int64_t MAX_SOME_WEIGHTS = 4 << 20;  // beyond, reading the weights takes longer than the library's launch

// From one text's row in shared memory to the next: 64 bytes beside a multiple of 128, so that the vectors that eight
// lanes read at a time, four each of two rows, lie in different banks.
__host__ __device__ inline int64_t some_pitch(int64_t C) {
    return (C + 31) / 64 * 64 + 32;
}

// Texts first … first + 31 into rows [32, pitch], normalised. A warp's rows at the same time, lane by lane; every lane
// reads again what it has written itself.
template <typename T>
__device__ __forceinline__ void normalise_texts(T* rows, const Layer<T>& a, int first) {
    constexpr int W = 8, EACH = SOME_TEXTS / WARPS;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t pitch = some_pitch(a.C);
    const auto row = [&](int i) { return rows + (warp * EACH + i) * pitch; };
    const auto staged = [&](int i, int64_t c) { return as_floats(*reinterpret_cast<const Pack<T, W>*>(row(i) + c)); };
    const auto total = [&](float(&sums)[EACH]) {
#pragma unroll
        for (int i = 0; i < EACH; i++) sums[i] = warp_sum(sums[i]);
    };
    float means[EACH] = {}, rstds[EACH] = {};
    for (int64_t c = lane * W; c < a.C; c += WARP * W) {
        Pack<T, W> x[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++)
            x[i] = load_pack<W>(a.inp + min(first + warp * EACH + i, a.N - 1) * a.inp_stride + c);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            *reinterpret_cast<Pack<T, W>*>(row(i) + c) = x[i];
            const Floats<W> v = as_floats(x[i]);
#pragma unroll
            for (int k = 0; k < W; k++) means[i] += v[k];
        }
    }
    total(means);
#pragma unroll
    for (int i = 0; i < EACH; i++) means[i] = a.centred ? means[i] / float(a.C) : 0.0f;
    for (int64_t c = lane * W; c < a.C; c += WARP * W) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const Floats<W> v = staged(i, c);
#pragma unroll
            for (int k = 0; k < W; k++) rstds[i] = fmaf(v[k] - means[i], v[k] - means[i], rstds[i]);
        }
    }
    total(rstds);
#pragma unroll
    for (int i = 0; i < EACH; i++) rstds[i] = 1 / sqrtf(rstds[i] / float(a.C) + a.eps);
    for (int64_t c = lane * W; c < a.C; c += WARP * W) {
        const Floats<W> w = load_floats<W>(a.norm_weight + c);
        Floats<W> shift = {};
        if (a.norm_bias) shift = load_floats<W>(a.norm_bias + c);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            Floats<W> v = staged(i, c);
#pragma unroll
            for (int k = 0; k < W; k++) v[k] = fmaf((v[k] - means[i]) * rstds[i], w[k], shift[k]);
            *reinterpret_cast<Pack<T, W>*>(row(i) + c) = as_pack<T>(v);
        }
    }
}

template <typename T, int MT, bool NORM>
__global__ void __launch_bounds__(THREADS, 2) some_rows_kernel(const Layer<T> a) {
    constexpr int NT = 4, TEXTS = 8 * NT, ROWS = 16 * MT, CHUNK = 32, CHUNKS_AHEAD = MT == 1 ? 3 : 2,
                  TEXTS_AHEAD = NORM || MT == 2 ? 0 : 1;
    static_assert(TEXTS == SOME_TEXTS);
    extern __shared__ uint4 shared[];
    __shared__ float sums[WARPS][TEXTS][ROWS + 1];
    pdl_launch_dependents();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const int first_text = int(blockIdx.x) * TEXTS, chunks = int(a.C) / CHUNK;
    const bool is_swiglu = a.activation == Activation::SwiGLU;
    // Tile m has rows 16m … 16m + 15, with SwiGLU eight of gate and the same eight of up.
    const int outputs = is_swiglu ? ROWS / 2 : ROWS;
    const int64_t first_output = int64_t(blockIdx.y) * outputs;
    const auto weight_row = [&](int m, int half) {
        const int64_t o = first_output + (is_swiglu ? 8 * m + g : 16 * m + 8 * half + g);
        return a.weight + (min(o, a.columns - 1) + (is_swiglu && half ? a.columns : 0)) * a.weight_stride + 8 * t;
    };
    using Vector = Pack<T, 8>;
    const T* rows[MT][2];
    Vector w[CHUNKS_AHEAD][MT][2];
    const auto load_weights = [&](Vector(&to)[MT][2], int chunk) {
        if (chunk >= chunks) return;
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) to[m][half] = load_pack<8>(rows[m][half] + chunk * CHUNK);
    };
#pragma unroll
    for (int m = 0; m < MT; m++) rows[m][0] = weight_row(m, 0), rows[m][1] = weight_row(m, 1);
#pragma unroll
    for (int s = 0; s < CHUNKS_AHEAD; s++) load_weights(w[s], warp + s * WARPS);
    // What this thread writes in the end: output `mine` of some texts.
    const int mine = int(threadIdx.x) % outputs, row = is_swiglu ? mine / 8 * 16 + mine % 8 : mine;
    const int64_t o = first_output + mine;
    const float bias0 = a.bias && o < a.columns ? as_float(a.bias[o]) : 0.0f,
                bias1 = a.bias && is_swiglu && o < a.columns ? as_float(a.bias[a.columns + o]) : 0.0f;
    if constexpr (NORM) {
        prefetch(a.norm_weight, a.C);
        prefetch(a.norm_bias, a.C);
    }
    pdl_wait();

    const T* x[NT];
    if constexpr (NORM) {
        T* const texts = reinterpret_cast<T*>(shared);
        normalise_texts(texts, a, first_text);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < NT; n++) x[n] = texts + (8 * n + g) * some_pitch(a.C) + 8 * t;
    } else {
#pragma unroll
        for (int n = 0; n < NT; n++) x[n] = a.inp + min(first_text + 8 * n + g, a.N - 1) * a.inp_stride + 8 * t;
    }
    Vector in[1 + TEXTS_AHEAD][NT];
    const auto load_texts = [&](Vector(&to)[NT], int chunk) {
        if (chunk >= chunks) return;
#pragma unroll
        for (int n = 0; n < NT; n++) to[n] = load_pack<8>(x[n] + chunk * CHUNK);
    };
    float sum[MT][NT][4] = {};
    const auto multiply = [&](const Vector(&weights)[MT][2], const Vector(&texts)[NT]) {
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int m = 0; m < MT; m++) {
                const Vector &upper = weights[m][0], &lower = weights[m][1];
                const uint32_t left[4] = {upper.word[2 * k], lower.word[2 * k], upper.word[2 * k + 1],
                                          lower.word[2 * k + 1]};
#pragma unroll
                for (int n = 0; n < NT; n++)
                    mma_m16n8k16<T>(sum[m][n], left, texts[n].word[2 * k], texts[n].word[2 * k + 1]);
            }
    };
    if (TEXTS_AHEAD) load_texts(in[0], warp);
    for (int base = warp; base < chunks; base += 2 * CHUNKS_AHEAD * WARPS) {
#pragma unroll
        for (int s = 0; s < 2 * CHUNKS_AHEAD; s++) {
            const int chunk = base + s * WARPS;
            if (chunk >= chunks) break;
            load_texts(in[(s + TEXTS_AHEAD) % (1 + TEXTS_AHEAD)], chunk + TEXTS_AHEAD * WARPS);
            multiply(w[s % CHUNKS_AHEAD], in[s % (1 + TEXTS_AHEAD)]);
            load_weights(w[s % CHUNKS_AHEAD], chunk + CHUNKS_AHEAD * WARPS);
        }
    }
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[warp][8 * n + 2 * t + i % 2][16 * m + i / 2 * 8 + g] = sum[m][n][i];
    __syncthreads();

    for (int text = int(threadIdx.x) / outputs; text < TEXTS; text += THREADS / outputs) {
        const int64_t n = first_text + text;
        if (n >= a.N || o >= a.columns) break;
        float y = 0, up = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) y += sums[i][text][row];
        y += bias0;
        if (is_swiglu) {
#pragma unroll
            for (int i = 0; i < WARPS; i++) up += sums[i][text][row + 8];
            y = swiglu(y, up + bias1);
        }
        y = activate(a.activation, y);
        if (a.residual) y += as_float(a.residual[n * a.residual_stride + o]);
        a.out[n * a.out_stride + o] = from_float<T>(y);
    }
}

// The least power of two of parts with which there are two blocks for every SM, but no more than there are
// vectors in a row.
int parts_of(int64_t units, int64_t C, int W) {
    int parts = 1;
    while (parts < WARPS && ceil_div(units, WARPS / parts) < 2 * num_sms() && parts * WARP * W < C) parts *= 2;
    return parts;
}

template <int W, typename T>
void launch_few_rows(const char* op, Units<T> a, Stream stream) {
    a.parts = parts_of(a.units, a.C, W);
    const int64_t blocks = std::min(ceil_div(a.units, WARPS / a.parts), 8 * num_sms());
    const size_t bytes = size_t(a.N) * size_t(a.C) * sizeof(T);
    const auto launch = [&](auto rows) {
        const auto kernel = few_rows_kernel<W, decltype(rows)::value, T>;
        if (bytes > (40 << 10))  // of the 48 KiB that need not be asked for, the kernel's own arrays take some
            cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)), op);
        launch_pdl(op, kernel, grid_of(blocks), THREADS, bytes, stream, a);
    };
    if (a.N == 1) return launch(std::integral_constant<int, 1>{});
    if (a.N == 2) return launch(std::integral_constant<int, 2>{});
    if (a.N <= 4) return launch(std::integral_constant<int, 4>{});
    launch(std::integral_constant<int, 8>{});
}

// Rows of inp that a launch can take; 0 if not even one fits.
int64_t rows_at_once(int64_t C, DType dtype) {
    const int64_t bytes = C * dtype_size(dtype);
    if (bytes <= SHARED_BYTES) return std::min(SHARED_BYTES / bytes, LINEAR_SMALL_N);
    return bytes + 2048 <= max_shared_bytes() ? 1 : 0;  // beside what the kernel has of its own
}

template <typename T>
void few_rows(const char* op, const Layer<T>& layer, int64_t N, bool aligned, Stream stream) {
    Units<T> a{layer, 0, 0};
    a.units = a.activation == Activation::SwiGLU ? a.columns : ceil_div(a.columns, UNIT);
    const int64_t step = rows_at_once(a.C, dtype_of<T>());
    for (int64_t n = 0; n < N; n += step) {
        a.N = int(std::min(step, N - n));
        dispatch_width<T>(aligned && a.C % FULL_WIDTH<T> == 0,
                          [&](auto width) { launch_few_rows<decltype(width)::value>(op, a, stream); });
        a.inp += step * a.inp_stride, a.out += step * a.out_stride;
        if (a.residual) a.residual += step * a.residual_stride;
    }
}

// Bytes of shared memory for the texts of a block; two blocks fit on every SM.
int64_t some_rows_bytes(int64_t C, DType dtype) {
    return SOME_TEXTS * some_pitch(C) * dtype_size(dtype);
}

bool takes_some_rows(int64_t N, int64_t C, int64_t OC, bool has_norm) {
    return N <= MAX_SOME_ROWS && C > 0 && C % 32 == 0 && C * OC <= MAX_SOME_WEIGHTS &&
           (!has_norm || some_rows_bytes(C, DType::BF16) <= max_shared_bytes() / 2 - (36 << 10));
}

template <typename T>
void some_rows(const char* op, const Layer<T>& a, int64_t OC, Stream stream) {
    const int64_t texts = ceil_div(a.N, SOME_TEXTS);
    const auto launch = [&](auto tiles) {
        constexpr int MT = decltype(tiles)::value;
        const dim3 grid(unsigned(texts), unsigned(ceil_div(OC, 16 * MT)));
        if (!a.norm_weight) return launch_pdl(op, some_rows_kernel<T, MT, false>, grid, THREADS, 0, stream, a);
        const int64_t bytes = some_rows_bytes(a.C, dtype_of<T>());
        const auto kernel = some_rows_kernel<T, MT, true>;
        cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)), op);
        launch_pdl(op, kernel, grid, THREADS, size_t(bytes), stream, a);
    };
    if (texts * ceil_div(OC, 32) >= num_sms())
        launch(std::integral_constant<int, 2>{});
    else
        launch(std::integral_constant<int, 1>{});
}

template <typename T>
Layer<T> layer_of(const LinearSizes& z, const Tensor& out, const Tensor& inp, const InputNorm& norm,
                  const Tensor& weight, const Tensor& bias, Activation activation, const Tensor& residual) {
    Layer<T> a{};
    a.inp = inp.as<T>(), a.inp_stride = row_stride(inp);
    a.weight = weight.as<T>(), a.weight_stride = row_stride(weight);
    a.out = out.as<T>(), a.out_stride = row_stride(out);
    if (bias) a.bias = bias.as<T>();
    if (residual) a.residual = residual.as<T>(), a.residual_stride = row_stride(residual);
    a.norm_weight = norm.weight.as<float>(), a.norm_bias = norm.bias.as<float>();
    a.C = z.C, a.columns = z.columns, a.N = int(z.N);
    a.eps = norm.eps, a.centred = norm.centred, a.activation = activation;
    return a;
}

// Whether one of the kernels here took the layer.
template <typename T>
bool linear_here(const char* op, const LinearSizes& z, const Layer<T>& a, bool aligned, bool batch_invariant,
                 Stream stream) {
    if ((z.N <= LINEAR_SMALL_N || batch_invariant) && z.C > 0 && rows_at_once(z.C, dtype_of<T>()) > 0) {
        few_rows(op, a, z.N, aligned, stream);
        return true;
    }
    if constexpr (sizeof(T) == 2) {
#ifdef HAVE_SM90A
        if (aligned && z.N <= MAX_SOME_ROWS && hopper_linear_takes(a)) {
            hopper_linear(op, a, stream);
            return true;
        }
#endif
        if (aligned && takes_some_rows(z.N, z.C, z.OC, a.norm_weight)) {
            some_rows(op, a, z.OC, stream);
            return true;
        }
    }
    return false;
}

}  // namespace

int64_t linear_scratch(int64_t N, int64_t C, int64_t OC, DType dtype) {
    return linear_normed_bytes(N, C, dtype) + N * OC * dtype_size(dtype);
}

void linear(Tensor out, Tensor inp, const InputNorm& norm, Tensor weight, Tensor bias, Activation activation,
            Tensor residual, Tensor scratch, bool batch_invariant, Stream stream) {
    const char* op = "linear";
    const DType dtype = check_activation_dtype(op, "inp", inp);
    const LinearSizes z = check_linear(op, dtype, out, inp, norm, weight, bias, activation, residual, scratch);
    if (z.N == 0 || z.OC == 0) return;
    bool done = false;
    dispatch_dtype(op, dtype, [&](auto zero) {
        done = linear_here(op, z, layer_of<decltype(zero)>(z, out, inp, norm, weight, bias, activation, residual),
                           rows_aligned({inp, weight, norm.weight, norm.bias}), batch_invariant, stream);
    });
    if (done) return;
    Tensor x = inp;
    if (norm.weight) {
        x = linear_normed(scratch, z, inp);
        if (norm.centred)
            layernorm_forward(x, {}, {}, {}, inp, {}, norm.weight, norm.bias, norm.eps, stream);
        else
            rmsnorm_forward(x, {}, {}, inp, {}, norm.weight, norm.eps, stream);
    }
    const Tensor y = linear_product(scratch, z, inp);
    switch (activation) {
        case Activation::None:
            if (!residual) return matmul_forward(out, x, weight, bias, stream);
            if (residual.data != out.data) {
                const size_t width = size_t(z.columns * dtype_size(dtype)), item = size_t(dtype_size(dtype));
                cuda_check(cudaMemcpy2DAsync(out.data, size_t(row_stride(out)) * item, residual.data,
                                             size_t(row_stride(residual)) * item, width, size_t(z.N),
                                             cudaMemcpyDeviceToDevice, cuda_stream(stream)),
                           op);
            }
            return matmul_forward_add(out, x, weight, bias, stream);
        case Activation::GELU:
            return matmul_forward_gelu(out, y, x, weight, bias, stream);
        case Activation::ReLU2:
            matmul_forward(y, x, weight, bias, stream);
            return relu2_forward(out, y, stream);
        case Activation::SwiGLU:
            matmul_forward(y, x, weight, bias, stream);
            return swiglu_forward(out, y, stream);
    }
}

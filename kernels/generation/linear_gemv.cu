// GEMV: 1 to 8 rows of inp against a large matrix. The time is that of reading the weights once, so the kernel keeps
// their loads in flight.
//
// Warps compute pairs of outputs, the dot products with two rows of weight (for SwiGLU a row of gate and its row of
// up). Where there are too few pairs to fill the GPU, several warps share one, each with a split of C. A block starts
// by loading its first weights, which no other kernel writes. Only then does it wait for the previous kernel (pdl.cuh),
// copy the rows of inp to shared memory and normalise them there. By the time the dot products start, the weights have
// arrived.
//
// Every sum has one order, which follows from C and OC alone: lanes over C, a tree over lanes, the splits in order.
//
//   T      rows of inp   registers   shared memory      blocks per SM
//   bf16   1             126         96 B + 2·C B       2
//   bf16   2             102         192 B + 4·C B      2
//   bf16   4             98          384 B + 8·C B      2
//   bf16   8             123         768 B + 16·C B     2
//
// (sm_90a, CUDA 13.0; 256 threads, each with 4 vectors of 16 bytes of two rows of weight in flight.)
//
// GPT-2 124M, the first MLP matrix at N = 1: C = 768, OC = 3072, so 1536 pairs. One warp a pair would make 1536/8 = 192
// blocks, fewer than two for each of an H100's 132 SMs; with two splits of C there are 384, and a block needs 1.5 KiB
// of shared memory for the row.
#include "kernels/cuda/mlp_activation.cuh"
#include "kernels/cuda/pdl.cuh"
#include "kernels/generation/linear_gemv_rows.cuh"

namespace {

using namespace gemv_rows;

constexpr int PAIR = 2;
constexpr int VECTORS_AHEAD = 4;  // of each row of weight that a lane loads together

template <typename T>
struct GemvParams : LinearParams<T> {
    int64_t pairs;
    int splits;  // of C
};

// Stores a pair of outputs of row n. y: the dot products with their biases.
template <typename T>
__device__ __forceinline__ void store_pair(const GemvParams<T>& p, int64_t pair, int n, const float (&y)[PAIR],
                                           const float (&residual)[PAIR]) {
    const auto store = [&](int64_t o, float x) { p.out[n * p.out_stride + o] = from_float<T>(x); };
    if (is_gated(p.activation)) return store(pair, activate(p.activation, y[0], y[1]));
#pragma unroll
    for (int r = 0; r < PAIR; r++) {
        const int64_t o = pair * PAIR + r;
        if (o >= p.columns) return;
        store(o, activate(p.activation, y[r]) + residual[r]);
    }
}

template <int W, int NB, typename T>
__global__ void __launch_bounds__(THREADS) gemv_kernel(const GemvParams<T> p) {
    extern __shared__ uint4 shared[];
    __shared__ float partial[WARPS][PAIR][NB];
    T* const x = reinterpret_cast<T*>(shared);  // [NB, C]
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int groups = WARPS / p.splits, group = warp / p.splits, split = warp % p.splits;
    const int64_t step = int64_t(p.splits) * WARP * W, first = (int64_t(split) * WARP + lane) * W;
    pdl_launch_dependents();

    bool rows_loaded = false;
    for (int64_t base = int64_t(blockIdx.x) * groups; base < p.pairs; base += int64_t(gridDim.x) * groups) {
        const int64_t pair = min(base + group, p.pairs - 1);
        const bool gated = is_gated(p.activation);
        // The pair's two rows of weight. With an odd number of outputs the last one is taken twice.
        const int64_t o0 = gated ? pair : pair * PAIR, o1 = gated ? p.columns + pair : min(o0 + 1, p.columns - 1);
        const T *const row0 = p.weight + o0 * p.weight_stride, *const row1 = p.weight + o1 * p.weight_stride;
        Pack<T, W> w0[VECTORS_AHEAD] = {}, w1[VECTORS_AHEAD] = {};
        const auto load_weights = [&](int64_t c) {
#pragma unroll
            for (int u = 0; u < VECTORS_AHEAD; u++, c += step) {
                if (c >= p.C) continue;
                w0[u] = load_pack<W>(row0 + c);
                w1[u] = load_pack<W>(row1 + c);
            }
        };
        load_weights(first);
        const float bias[PAIR] = {p.bias ? as_float(p.bias[o0]) : 0.0f, p.bias ? as_float(p.bias[o1]) : 0.0f};
        if (!rows_loaded) {
            prefetch_vector<THREADS>(p.norm_weight, p.C);
            prefetch_vector<THREADS>(p.norm_bias, p.C);
            pdl_wait();
            load_rows<W, NB>(x, p);
            __syncthreads();
            rows_loaded = true;
        }
        const bool stores = split == 0 && lane < p.N && base + group < p.pairs;
        float residual[PAIR] = {};
        if (stores && p.residual) {
            residual[0] = as_float(p.residual[lane * p.residual_stride + o0]);
            residual[1] = as_float(p.residual[lane * p.residual_stride + o1]);
        }

        float sum0[NB] = {}, sum1[NB] = {};
        for (int64_t c = first; c < p.C; c += VECTORS_AHEAD * step) {
            if (c != first) load_weights(c);
#pragma unroll
            for (int u = 0; u < VECTORS_AHEAD; u++) {
                const int64_t at = c + u * step;
                if (at >= p.C) continue;
                const Floats<W> v0 = as_floats(w0[u]), v1 = as_floats(w1[u]);
#pragma unroll
                for (int n = 0; n < NB; n++) {
                    const Floats<W> in =
                        as_floats(*reinterpret_cast<const Pack<T, W>*>(x + min(n, p.N - 1) * p.C + at));
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
            if (lane == 0) {
                partial[warp][0][n] = y0;
                partial[warp][1][n] = y1;
            }
        }
        // A warp that does not share its pair need not wait for the others.
        if (p.splits > 1)
            __syncthreads();
        else
            __syncwarp();
        if (stores) {
            float y[PAIR] = {};
            for (int s = 0; s < p.splits; s++) {
                y[0] += partial[warp + s][0][lane];
                y[1] += partial[warp + s][1][lane];
            }
            y[0] += bias[0];
            y[1] += bias[1];
            store_pair(p, pair, lane, y, residual);
        }
        if (p.splits > 1)
            __syncthreads();  // partial is written again
        else
            __syncwarp();
    }
}

// The least power of two of splits that gives two blocks for every SM, but no more than there are vectors in a row.
int splits_of(int64_t pairs, int64_t C, int W) {
    int splits = 1;
    while (splits < WARPS && ceil_div(pairs, WARPS / splits) < 2 * num_sms() && splits * WARP * W < C) splits *= 2;
    return splits;
}

template <int W, typename T>
void launch_gemv(const char* op, GemvParams<T> p, Stream stream) {
    p.splits = splits_of(p.pairs, p.C, W);
    const int64_t blocks = std::min(ceil_div(p.pairs, WARPS / p.splits), 8 * num_sms());
    const size_t bytes = size_t(p.N) * size_t(p.C) * sizeof(T);
    const auto launch = [&](auto rows) {
        const auto kernel = gemv_kernel<W, decltype(rows)::value, T>;
        request_shared_bytes(op, kernel, bytes);
        launch_pdl(op, kernel, grid_of(blocks), THREADS, bytes, stream, p);
    };
    if (p.N == 1) return launch(std::integral_constant<int, 1>{});
    if (p.N == 2) return launch(std::integral_constant<int, 2>{});
    if (p.N <= 4) return launch(std::integral_constant<int, 4>{});
    launch(std::integral_constant<int, 8>{});
}

}  // namespace

template <typename T>
bool linear_gemv(const char* op, const LinearParams<T>& layer, Stream stream) {
    const int64_t step = layer.C > 0 ? rows_per_launch(layer.C, dtype_of<T>()) : 0;
    if (step == 0) return false;
    GemvParams<T> p{layer, 0, 0};
    p.pairs = is_gated(p.activation) ? p.columns : ceil_div(p.columns, PAIR);
    for (int64_t n = 0; n < layer.N; n += step) {
        p.N = int(std::min(step, layer.N - n));
        dispatch_width<T>(p.aligned && p.C % FULL_WIDTH<T> == 0,
                          [&](auto width) { launch_gemv<decltype(width)::value>(op, p, stream); });
        p.inp += step * p.inp_stride;
        p.out += step * p.out_stride;
        if (p.residual) p.residual += step * p.residual_stride;
    }
    return true;
}

template bool linear_gemv(const char*, const LinearParams<float>&, Stream);
template bool linear_gemv(const char*, const LinearParams<bf16>&, Stream);
template bool linear_gemv(const char*, const LinearParams<fp16>&, Stream);

// Small-batch GEMM: up to 64 rows of inp, 16-bit elements, mma.sync. For matrices that are read in the time of a launch
// or two, where a library's large tiles leave most SMs idle.
//
// A block multiplies 32 rows of inp by 16 (MT = 1) or 32 rows of weight. Its eight warps share C in chunks of 32
// columns and read both operands from global memory to registers, because no element is used by two warps. A lane loads
// 16 bytes of a row, its operands of two mma instructions; which of the 32 columns these are does not matter as long as
// both operands agree. As in the GEMV a block loads its first weights before it waits for the previous kernel. The
// warps' sums are added in order, so that a row's result does not depend on the number of rows. With a norm the block
// first normalises its rows in shared memory, four rows a warp.
//
//   MT   norm   registers   shared memory           blocks per SM
//   1    no     128         17,408 B                2
//   1    yes    118         17,408 B + 64·pitch B   2
//   2    no     128         33,792 B                2
//   2    yes    128         33,792 B + 64·pitch B   2
//
// (sm_90a, CUDA 13.0; 256 threads; pitch: the smallest 64·n + 32 that is at least C. MT = 2 without a norm has 24 bytes
// of stack.)
//
// GPT-2 124M, 64 sequences, q, k and v: C = 768, OC = 2304. Two blocks of 32 rows times 2304/32 = 72 are 144, at least
// one for each of an A100's 108 SMs, so MT = 2. Pitch 800: 64·800 + 33,792 = 84,992 bytes of shared memory a block.
#include "kernels/cuda/mlp_activation.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/pdl.cuh"
#include "kernels/cuda/row_statistics.cuh"
#include "kernels/generation/linear.cuh"

namespace {

constexpr int WARPS = 8, THREADS = WARPS * WARP;
constexpr int BLOCK_N = 32, BLOCK_K = 32;          // rows of inp; columns of a chunk
constexpr int64_t MAX_WEIGHTS = 4 << 20;           // beyond, reading the weights takes longer than the library's launch
constexpr int64_t OUTPUT_SHARED_BYTES = 36 << 10;  // at most

// Elements from one row of inp in shared memory to the next: an odd multiple of 64 bytes, so that the vectors that
// eight lanes read together, four each of two rows, are in different banks.
__host__ __device__ inline int64_t row_pitch(int64_t C) {
    return (C + 31) / 64 * 64 + 32;
}

// Normalises rows first … first + 31 of inp into rows [32, pitch]. A warp processes its four rows together. A lane
// reads back only what it has written itself.
template <typename T>
__device__ __forceinline__ void normalize_rows(T* rows, const LinearParams<T>& p, int first) {
    constexpr int W = 8, EACH = BLOCK_N / WARPS;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t pitch = row_pitch(p.C);
    const auto row = [&](int i) { return rows + (warp * EACH + i) * pitch; };
    const auto loaded = [&](int i, int64_t c) { return as_floats(*reinterpret_cast<const Pack<T, W>*>(row(i) + c)); };
    const auto warp_sums = [&](float(&sums)[EACH]) {
#pragma unroll
        for (int i = 0; i < EACH; i++) sums[i] = warp_sum(sums[i]);
    };
    float means[EACH] = {}, rstds[EACH] = {};
    for (int64_t c = lane * W; c < p.C; c += WARP * W) {
        Pack<T, W> x[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++)
            x[i] = load_pack<W>(p.inp + min(first + warp * EACH + i, p.N - 1) * p.inp_stride + c);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            *reinterpret_cast<Pack<T, W>*>(row(i) + c) = x[i];
            means[i] = add_elements(means[i], as_floats(x[i]));
        }
    }
    warp_sums(means);
#pragma unroll
    for (int i = 0; i < EACH; i++) means[i] = p.centred ? means[i] / float(p.C) : 0.0f;
    for (int64_t c = lane * W; c < p.C; c += WARP * W) {
#pragma unroll
        for (int i = 0; i < EACH; i++) rstds[i] = add_squared_deviations(rstds[i], loaded(i, c), means[i]);
    }
    warp_sums(rstds);
#pragma unroll
    for (int i = 0; i < EACH; i++) rstds[i] = row_rstd(rstds[i], float(p.C), p.eps);
    for (int64_t c = lane * W; c < p.C; c += WARP * W) {
        const Floats<W> weight = load_floats<W>(p.norm_weight + c);
        Floats<W> bias = {};
        if (p.norm_bias) bias = load_floats<W>(p.norm_bias + c);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            *reinterpret_cast<Pack<T, W>*>(row(i) + c) =
                as_pack<T>(normalize(loaded(i, c), means[i], rstds[i], weight, bias));
    }
}

template <typename T, int MT, bool NORM>
__global__ void __launch_bounds__(THREADS, 2) small_batch_kernel(const LinearParams<T> p) {
    constexpr int NT = BLOCK_N / 8, BLOCK_OC = 16 * MT;
    constexpr int WEIGHTS_AHEAD = MT == 1 ? 3 : 2, ROWS_AHEAD = NORM || MT == 2 ? 0 : 1;  // chunks
    extern __shared__ uint4 shared[];
    __shared__ float sums[WARPS][BLOCK_N][BLOCK_OC + 1];
    pdl_launch_dependents();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const int first_row = int(blockIdx.x) * BLOCK_N, chunks = int(p.C) / BLOCK_K;
    const bool gated = is_gated(p.activation);
    // Tile m has rows 16m … 16m + 15 of weight, with SwiGLU eight of gate and the same eight of up.
    const int outputs = gated ? BLOCK_OC / 2 : BLOCK_OC;
    const int64_t first_output = int64_t(blockIdx.y) * outputs;
    const auto weight_row = [&](int m, int half) {
        const int64_t o = first_output + (gated ? 8 * m + g : 16 * m + 8 * half + g);
        return p.weight + (min(o, p.columns - 1) + (gated && half ? p.columns : 0)) * p.weight_stride + 8 * t;
    };
    using Vector = Pack<T, 8>;
    const T* weight_rows[MT][2];
    Vector w[WEIGHTS_AHEAD][MT][2];
    const auto load_weights = [&](Vector(&to)[MT][2], int chunk) {
        if (chunk >= chunks) return;
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) to[m][half] = load_pack<8>(weight_rows[m][half] + chunk * BLOCK_K);
    };
#pragma unroll
    for (int m = 0; m < MT; m++) {
        weight_rows[m][0] = weight_row(m, 0);
        weight_rows[m][1] = weight_row(m, 1);
    }
#pragma unroll
    for (int s = 0; s < WEIGHTS_AHEAD; s++) load_weights(w[s], warp + s * WARPS);
    // In the end this thread stores output `mine` of some rows.
    const int mine = int(threadIdx.x) % outputs, column = gated ? mine / 8 * 16 + mine % 8 : mine;
    const int64_t o = first_output + mine;
    const float bias0 = p.bias && o < p.columns ? as_float(p.bias[o]) : 0.0f,
                bias1 = p.bias && gated && o < p.columns ? as_float(p.bias[p.columns + o]) : 0.0f;
    if constexpr (NORM) {
        prefetch_vector<THREADS>(p.norm_weight, p.C);
        prefetch_vector<THREADS>(p.norm_bias, p.C);
    }
    pdl_wait();

    const T* x[NT];
    if constexpr (NORM) {
        T* const rows = reinterpret_cast<T*>(shared);
        normalize_rows(rows, p, first_row);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < NT; n++) x[n] = rows + (8 * n + g) * row_pitch(p.C) + 8 * t;
    } else {
#pragma unroll
        for (int n = 0; n < NT; n++) x[n] = p.inp + min(first_row + 8 * n + g, p.N - 1) * p.inp_stride + 8 * t;
    }
    Vector in[1 + ROWS_AHEAD][NT];
    const auto load_rows = [&](Vector(&to)[NT], int chunk) {
        if (chunk >= chunks) return;
#pragma unroll
        for (int n = 0; n < NT; n++) to[n] = load_pack<8>(x[n] + chunk * BLOCK_K);
    };
    float sum[MT][NT][4] = {};
    const auto multiply = [&](const Vector(&weights)[MT][2], const Vector(&rows)[NT]) {
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int m = 0; m < MT; m++) {
                const Vector &upper = weights[m][0], &lower = weights[m][1];
                const uint32_t a[4] = {upper.word[2 * k], lower.word[2 * k], upper.word[2 * k + 1],
                                       lower.word[2 * k + 1]};
#pragma unroll
                for (int n = 0; n < NT; n++)
                    mma_m16n8k16<T>(sum[m][n], a, rows[n].word[2 * k], rows[n].word[2 * k + 1]);
            }
    };
    if (ROWS_AHEAD) load_rows(in[0], warp);
    for (int base = warp; base < chunks; base += 2 * WEIGHTS_AHEAD * WARPS) {
#pragma unroll
        for (int s = 0; s < 2 * WEIGHTS_AHEAD; s++) {
            const int chunk = base + s * WARPS;
            if (chunk >= chunks) break;
            load_rows(in[(s + ROWS_AHEAD) % (1 + ROWS_AHEAD)], chunk + ROWS_AHEAD * WARPS);
            multiply(w[s % WEIGHTS_AHEAD], in[s % (1 + ROWS_AHEAD)]);
            load_weights(w[s % WEIGHTS_AHEAD], chunk + WEIGHTS_AHEAD * WARPS);
        }
    }
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[warp][8 * n + 2 * t + i % 2][16 * m + i / 2 * 8 + g] = sum[m][n][i];
    __syncthreads();

    for (int row = int(threadIdx.x) / outputs; row < BLOCK_N; row += THREADS / outputs) {
        const int64_t n = first_row + row;
        if (n >= p.N || o >= p.columns) break;
        float y = 0, up = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) y += sums[i][row][column];
        y += bias0;
        if (gated) {
#pragma unroll
            for (int i = 0; i < WARPS; i++) up += sums[i][row][column + 8];
            y = activate(p.activation, y, up + bias1);
        }
        y = activate(p.activation, y);
        if (p.residual) y += as_float(p.residual[n * p.residual_stride + o]);
        p.out[n * p.out_stride + o] = from_float<T>(y);
    }
}

// Shared memory for the normalised rows of a block.
int64_t rows_bytes(int64_t C, DType dtype) {
    return BLOCK_N * row_pitch(C) * dtype_size(dtype);
}

template <int MT, typename T>
void launch_small_batch(const char* op, const LinearParams<T>& p, Stream stream) {
    const dim3 grid(unsigned(ceil_div(p.N, BLOCK_N)), unsigned(ceil_div(p.OC, 16 * MT)));
    if (!p.norm_weight) return launch_pdl(op, small_batch_kernel<T, MT, false>, grid, THREADS, 0, stream, p);
    const int64_t bytes = rows_bytes(p.C, dtype_of<T>());
    const auto kernel = small_batch_kernel<T, MT, true>;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)), op);
    launch_pdl(op, kernel, grid, THREADS, size_t(bytes), stream, p);
}

}  // namespace

template <typename T>
bool linear_small_batch(const char* op, const LinearParams<T>& p, Stream stream) {
    if (!p.aligned || p.N > SMALL_BATCH_MAX_N || p.C == 0 || p.C % BLOCK_K != 0 || p.C * p.OC > MAX_WEIGHTS)
        return false;
    // Two blocks fit on every SM.
    if (p.norm_weight && rows_bytes(p.C, dtype_of<T>()) > max_shared_bytes() / 2 - OUTPUT_SHARED_BYTES) return false;
    if (ceil_div(p.N, BLOCK_N) * ceil_div(p.OC, 32) >= num_sms())
        launch_small_batch<2>(op, p, stream);
    else
        launch_small_batch<1>(op, p, stream);
    return true;
}

template bool linear_small_batch(const char*, const LinearParams<bf16>&, Stream);
template bool linear_small_batch(const char*, const LinearParams<fp16>&, Stream);

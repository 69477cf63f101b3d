// A matmul with a few output columns. A GEMM library would need a second kernel for the logarithm. On tensor cores,
// where T has 16 bits and rows are aligned, a warp takes 16 rows of inp and 16 heads at a time. Otherwise it takes 4
// rows and 4 heads with fused multiply-adds, its lanes side by side along the channels.
//
//   kernel                  threads   rows of a block   registers                      blocks per SM
//   tensor_forward_kernel     128           64          64 (8 bytes of stack)                8
//   forward_kernel            128           16          77 (fp32), 80 and 89 (W = 1)     6 (W = 1: 6, 5)
//   backward_kernel           256            -          16                                   8
//
// (sm_90a, CUDA 13.0; no shared memory.)
//
// GPT-2 124M with gated_linear attention (B=64, T=1024, C=768, 12 heads), bf16: 65,536 rows are 1,024 blocks, which an
// H100 (132·8 = 1,056) runs in one wave. The backward pass has 65,536·12 elements in 3,072 blocks.
#include "kernels/linear_attention/decay_gate.h"

#include "kernels/cuda/warp_tile.cuh"

namespace {

__device__ __forceinline__ float log_sigmoid(float x) {
    return fminf(x, 0.0f) - log1pf(expf(-fabsf(x)));
}

constexpr int WARPS = 4, ROWS = 4, HEADS = 4;

template <typename T>
struct Forward {
    float* gate;
    const T *inp, *weight;
    const float* bias;
    int64_t gate_stride, inp_stride, weight_stride, N, C, H;
};

template <int W, typename T>
__global__ void __launch_bounds__(WARPS* WARP) forward_kernel(const __grid_constant__ Forward<T> p) {
    const int lane = int(threadIdx.x) % WARP;
    const int64_t first_row = (blockIdx.x * int64_t(WARPS) + threadIdx.x / WARP) * ROWS;
    // Rows and heads beyond the end repeat the last one, and are not stored.
    const auto row = [&](int r) { return min(first_row + r, p.N - 1); };
    for (int64_t first_head = 0; first_head < p.H && first_row < p.N; first_head += HEADS) {
        const auto head = [&](int h) { return min(first_head + h, p.H - 1); };
        float sum[ROWS][HEADS] = {};
        for (int64_t c = lane * W; c < p.C; c += WARP * W) {
            Floats<W> w[HEADS];
#pragma unroll
            for (int h = 0; h < HEADS; h++) w[h] = load_floats<W>(p.weight + head(h) * p.weight_stride + c);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const Floats<W> x = load_floats<W>(p.inp + row(r) * p.inp_stride + c);
#pragma unroll
                for (int h = 0; h < HEADS; h++)
#pragma unroll
                    for (int k = 0; k < W; k++) sum[r][h] = fmaf(x[k], w[h][k], sum[r][h]);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                const float total = warp_sum(sum[r][h]);
                if (lane == r * HEADS + h && first_row + r < p.N && first_head + h < p.H) {
                    const float x = total + p.bias[first_head + h];
                    p.gate[(first_row + r) * p.gate_stride + first_head + h] = log_sigmoid(x);
                }
            }
        }
    }
}

// 16 rows and 16 heads at a time. For 16 channels mma.sync takes two pairs of a row's channels from each lane. Their
// order does not matter if the weights have the same, so a lane loads 8 adjacent channels at once, enough for two mma.
constexpr int TILE = 16;

template <typename T>
__global__ void __launch_bounds__(WARPS* WARP, 8) tensor_forward_kernel(const __grid_constant__ Forward<T> p) {
    constexpr int W = FULL_WIDTH<T>, STEP = 4 * W, UNROLL = 2;
    const int group = lane_id() / 4, quad_lane = lane_id() % 4;
    const int64_t first_row = (blockIdx.x * int64_t(WARPS) + threadIdx.x / WARP) * TILE + group;
    // Rows and heads beyond the end repeat the last one, and are not stored; channels beyond it are zeros.
    const auto pack_of = [&](const T* rows, int64_t stride, int64_t row, int64_t count, int64_t c) {
        return c < p.C ? load_pack<W>(rows + min(row, count - 1) * stride + c) : Pack<T, W>{};
    };
    for (int64_t first_head = 0; first_head < p.H; first_head += TILE) {
        float sum[2][4] = {};
        for (int64_t start = 0; start < p.C; start += UNROLL * STEP) {
            Pack<T, W> x[UNROLL][2], w[UNROLL][2];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int64_t c = start + u * STEP + quad_lane * W;
                    x[u][half] = pack_of(p.inp, p.inp_stride, first_row + half * 8, p.N, c);
                    w[u][half] = pack_of(p.weight, p.weight_stride, first_head + group + half * 8, p.H, c);
                }
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
#pragma unroll
                for (int k = 0; k < 4; k += 2) {
                    const uint32_t left[4] = {x[u][0].word[k], x[u][1].word[k], x[u][0].word[k + 1],
                                              x[u][1].word[k + 1]};
#pragma unroll
                    for (int n = 0; n < 2; n++) mma_m16n8k16<T>(sum[n], left, w[u][n].word[k], w[u][n].word[k + 1]);
                }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int64_t row = first_row + i / 2 % 2 * 8, head = first_head + i / 4 * 8 + quad_lane * 2 + i % 2;
            if (row < p.N && head < p.H)
                p.gate[row * p.gate_stride + head] = log_sigmoid(sum[i / 4][i % 4] + p.bias[head]);
        }
    }
}

constexpr int THREADS = 256;

template <typename T>
__global__ void __launch_bounds__(THREADS)
    backward_kernel(T* dx, int64_t dx_stride, const float* dgate, int64_t dgate_stride, const float* gate,
                    int64_t gate_stride, int64_t N, int64_t H) {
    const int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x;
    if (i >= N * H) return;
    const RowItem at = row_item(i, H);
    dx[at.row * dx_stride + at.item] =
        from_float<T>(-dgate[at.row * dgate_stride + at.item] * expm1f(gate[at.row * gate_stride + at.item]));
}

}  // namespace

void decay_gate_forward(Tensor gate, Tensor inp, Tensor weight, Tensor bias, Stream stream) {
    const char* op = "decay_gate_forward";
    const DType dtype = check_activation_dtype(op, "inp", inp);
    check_matrix(op, "inp", inp, dtype);
    check_matrix(op, "weight", weight, dtype);
    const int64_t N = inp.shape[0], C = inp.shape[1], H = weight.shape[0];
    check_matrix(op, "weight", weight, H, C, Given::Required, dtype);
    check_tensor(op, "bias", bias, DType::F32, {H});
    check_matrix(op, "gate", gate, N, H);
    if (N * H == 0) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        const Forward<T> p{gate.as<float>(),
                           inp.as<T>(),
                           weight.as<T>(),
                           bias.as<float>(),
                           row_stride(gate),
                           row_stride(inp),
                           row_stride(weight),
                           N,
                           C,
                           H};
        const bool full = C % FULL_WIDTH<T> == 0 && rows_aligned({inp, weight});
        const auto with_width = [&](auto width) {
            forward_kernel<decltype(width)::value>
                <<<grid_of(ceil_div(N, WARPS * ROWS)), WARPS * WARP, 0, cuda_stream(stream)>>>(p);
        };
        if constexpr (std::is_same_v<T, float>)
            dispatch_width<T>(full, with_width);
        else if (full)
            tensor_forward_kernel<<<grid_of(ceil_div(N, WARPS * TILE)), WARPS * WARP, 0, cuda_stream(stream)>>>(p);
        else
            with_width(std::integral_constant<int, 1>{});
        check_launch(op, stream);
    });
}

void decay_gate_backward(Tensor dx, Tensor dgate, Tensor gate, Stream stream) {
    const char* op = "decay_gate_backward";
    const DType dtype = check_activation_dtype(op, "dx", dx);
    check_matrix(op, "gate", gate);
    const int64_t N = gate.shape[0], H = gate.shape[1];
    check_matrix(op, "dx", dx, N, H, Given::Required, dtype);
    check_matrix(op, "dgate", dgate, N, H);
    if (N * H == 0) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        backward_kernel<<<grid_of(ceil_div(N * H, THREADS)), THREADS, 0, cuda_stream(stream)>>>(
            dx.as<T>(), row_stride(dx), dgate.as<float>(), row_stride(dgate), gate.as<float>(), row_stride(gate), N, H);
        check_launch(op, stream);
    });
}

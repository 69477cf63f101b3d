// One token for each sequence: the states are updated in place and read once.
//
// Resources (sm_90a, CUDA 13.0): 256 threads, 64 registers, 14,352 bytes of shared memory, 4 blocks per SM.
//
// 64 sequences, 12 heads of 64: 64·12 = 768 blocks, of which an H100 holds 132·4 = 528 at once. Each reads and writes a
// state of 64·64·4 bytes = 16 KiB.
#include "kernels/linear_attention/linear_attention.cuh"
#include "kernels/linear_attention/linear_attention.h"
#include "kernels/linear_attention/linear_attention_check.h"

namespace linear_attention {

namespace {

constexpr int THREADS = 256, WARPS = THREADS / WARP, QUERY_HEADS = 4, MAX_SIZE = int(LINEAR_ATTENTION_MAX_SIZE);

template <typename T>
struct DecodeParams {
    Heads<T> q, k, v, out;  // [S, heads, size]
    const float* gate;      // [S, NKV] or null
    int64_t gate_stride;
    float *s, *z;         // [R, NKV, E, M]; [R, NKV, E] or null
    const int32_t* rows;  // [S] or null
    int64_t num_rows;
    int64_t NH, NKV;
    int E, M;
    bool elu;
};

// A block updates the state of one sequence and KV head: each warp has every WARPS-th row, each lane a column.
// QUERY_HEADS query heads read the state at a time; the first of them also update it.
template <typename T>
__global__ void __launch_bounds__(THREADS) decode_kernel(const __grid_constant__ DecodeParams<T> p) {
    __shared__ float k[MAX_SIZE], q[QUERY_HEADS][MAX_SIZE], norm[QUERY_HEADS], sums[WARPS][QUERY_HEADS][WARP];
    const int64_t s = blockIdx.x / p.NKV, kv = blockIdx.x % p.NKV, group = p.NH / p.NKV;
    const int warp = threadIdx.x / WARP, lane = lane_id();
    const int64_t row = state_row(p.rows, p.num_rows, s), at = row * p.NKV + kv;
    if (row < 0) {
        for (int64_t i = threadIdx.x; i < group * p.M; i += THREADS) p.out.at(s, kv * group + i / p.M)[i % p.M] = T{};
        return;
    }
    float *state = p.s + at * p.E * p.M, *z = p.z ? p.z + at * p.E : nullptr;
    const float decay = p.gate ? expf(p.gate[s * p.gate_stride + kv]) : 1.0f;
    const auto phi = [&](T x) { return p.elu ? feature<float>(as_float(x)) : as_float(x); };
    for (int e = threadIdx.x; e < p.E; e += THREADS) {
        k[e] = phi(p.k.at(s, kv)[e]);
        if (z) z[e] = fmaf(z[e], decay, k[e]);
    }
    for (int64_t first = 0; first < group; first += QUERY_HEADS) {
        const int heads = int(min(int64_t(QUERY_HEADS), group - first));
        __syncthreads();
        for (int i = threadIdx.x; i < QUERY_HEADS * p.E; i += THREADS) {
            const int h = i / p.E, e = i % p.E;
            q[h][e] = h < heads ? phi(p.q.at(s, kv * group + first + h)[e]) : 0.0f;
        }
        __syncthreads();
        if (z && warp < heads) {
            float sum = 0;
            for (int e = lane; e < p.E; e += WARP) sum = fmaf(q[warp][e], z[e], sum);
            sum = warp_sum(sum);
            if (lane == 0) norm[warp] = sum + LINEAR_ATTENTION_EPS;
        }
        for (int m0 = 0; m0 < p.M; m0 += WARP) {
            const int m = m0 + lane;
            float o[QUERY_HEADS] = {};
            if (m < p.M) {
                const float v = as_float(p.v.at(s, kv)[m]);
                for (int e = warp; e < p.E; e += WARPS) {
                    float x = state[int64_t(e) * p.M + m];
                    if (first == 0) {
                        x = fmaf(x, decay, k[e] * v);
                        state[int64_t(e) * p.M + m] = x;
                    }
#pragma unroll
                    for (int h = 0; h < QUERY_HEADS; h++) o[h] = fmaf(q[h][e], x, o[h]);
                }
            }
#pragma unroll
            for (int h = 0; h < QUERY_HEADS; h++) sums[warp][h][lane] = o[h];
            __syncthreads();
            if (warp < heads && m < p.M) {
                float sum = 0;
                for (int w = 0; w < WARPS; w++) sum += sums[w][warp][lane];
                p.out.at(s, kv * group + first + warp)[m] = from_float<T>(z ? sum / norm[warp] : sum);
            }
            __syncthreads();
        }
    }
}

}  // namespace

}  // namespace linear_attention

void linear_attention_decode(Tensor out, const LinearAttentionState& state, Tensor q, Tensor k, Tensor v, Tensor gate,
                             const LinearAttentionType& type, Stream stream) {
    using namespace linear_attention;
    const char* op = "linear_attention_decode";
    const DType dtype = check_dtype(op, q);
    const LinearAttentionSizes z = check_linear_attention_decode(op, dtype, out, state, q, k, v, gate, type);
    dispatch(dtype, [&](auto zero) {
        using T = decltype(zero);
        DecodeParams<T> p{};
        p.q = heads_of<T>(q);
        p.k = heads_of<T>(k);
        p.v = heads_of<T>(v);
        p.out = heads_of<T>(out);
        if (gate) {
            p.gate = gate.as<float>();
            p.gate_stride = gate.stride[0];
        }
        p.s = state.s.as<float>();
        if (type.normalise) p.z = state.z.as<float>();
        if (state.rows) {
            p.rows = state.rows.as<int32_t>();
            p.num_rows = state.s.shape[0];
        }
        p.NH = z.NH;
        p.NKV = z.NKV;
        p.E = int(z.E);
        p.M = int(z.M);
        p.elu = type.features == FeatureMap::EluPlusOne;
        launch(op, decode_kernel<T>, p, z.S * z.NKV, THREADS, 0, stream);
    });
}

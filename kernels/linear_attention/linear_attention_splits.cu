// The values that pass between the splits of a sequence: the state that each split begins with, and the gradient of the
// decay gate, whose running sum starts again at the end of each split.
//
//   kernel                           threads   registers   shared memory   blocks per SM
//   state_passing_kernel, W = 4        256        109            0 B             2
//   state_passing_kernel, W = 1        256         62            0 B             4
//   gate_gradient_kernel               256         32           64 B             8
//
// (sm_90a, CUDA 13.0.)
//
// One launch: B = 8, T = 4096, 12 heads of 64, 4 splits of 1,024 tokens. State passing, attention type linear: a state
// has 64·64 + 64 = 4,160 elements, five blocks of 256·4, so 8·12·5 = 480 blocks. The gradient of the gate
// (gated_linear): (8 + 1)·12·4 = 432 blocks, of which 384 scan 1,024 tokens in four rounds.
#include "kernels/cuda/block_scan.cuh"
#include "kernels/cuda/pdl.cuh"
#include "kernels/linear_attention/linear_attention.cuh"

namespace linear_attention {

namespace {

constexpr int THREADS = 256;

// Block x handles a sequence and head, a thread W elements of its states. They are loaded BATCH splits at a time,
// because each split's state depends on the previous one.
template <int W>
__global__ void __launch_bounds__(THREADS) state_passing_kernel(const __grid_constant__ StatePassingParams p) {
    pdl_wait();
    pdl_launch_dependents();
    const int64_t at = blockIdx.x, s = at / p.NKV, kv = at % p.NKV;
    const int64_t i = (int64_t(blockIdx.y) * THREADS + threadIdx.x) * W;
    if (i >= p.size) return;
    const int count = min(p.splits, (sequence_of(p.cum, s, p.N).length + p.split_length - 1) / p.split_length);
    const auto state_index = [&](int n) {
        return (s * (p.splits + 1) + (p.reversed ? count - 1 - n : n)) * p.NKV + kv;
    };
    const int64_t step = p.reversed ? -p.NKV : p.NKV;
    const float* decays = p.decays ? p.decays + state_index(0) : nullptr;
    float* states = p.states + state_index(0) * p.size + i;
    const bool in_matrix = i < p.matrix;
    Floats<W> x = {};
    if (p.initial)
        x = load_floats<W>(in_matrix ? p.initial + at * p.matrix + i
                                     : p.initial_z + at * (p.size - p.matrix) + i - p.matrix);
    constexpr int BATCH = 8;
    const int summed = !p.has_sums ? 0 : p.has_last_sum ? count : count - 1;
    for (int n = 0; n < count; n += BATCH) {
        Floats<W> sum[BATCH];
        float decay[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            sum[b] = n + b < summed ? load_floats<W>(states + (n + b) * step * p.size) : Floats<W>{};
            decay[b] = n + b < summed && decays ? decays[(n + b) * step] : 1.0f;
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            if (n + b >= count) break;
            store_floats<W>(states + (n + b) * step * p.size, x);
#pragma unroll
            for (int j = 0; j < W; j++) x[j] = fmaf(x[j], decay[b], sum[b][j]);
        }
    }
    if (!p.reversed) store_floats<W>(states + count * step * p.size, x);
    const int64_t row = state_row(p.rows, p.num_rows, s), to = row * p.NKV + kv;
    if (row < 0) return;
    if (in_matrix && p.final) store_floats<W>(p.final + to * p.matrix + i, x);
    if (!in_matrix && p.final_z) store_floats<W>(p.final_z + to * (p.size - p.matrix) + i - p.matrix, x);
}

// ⟨S, R⟩ at the end of the task's split, the same value in every thread; 0 where no gradient flows through it.
__device__ __forceinline__ float gradient_at_end(const GateGradientParams& p, const Task& task, int end, int length) {
    const auto state = [&](const float* states, int split) {
        return states + ((task.sequence * (p.splits + 1) + split) * p.NKV + task.head) * p.size;
    };
    const float *key = state(p.key_states, task.split + 1), *query = state(p.query_states, task.split);
    float sum = 0;
    for (int64_t i = threadIdx.x; i < p.size; i += THREADS) sum = fmaf(key[i], query[i], sum);
    return block_sum<THREADS>(sum);
}

// dg_t = ⟨S, R⟩ at the end of t's split, plus φ(q)·dφ(q) − φ(k)·dφ(k) of the split's tokens from t on. Rounding errors
// therefore accumulate over one split, not over the sequence.
__global__ void __launch_bounds__(THREADS) gate_gradient_kernel(const __grid_constant__ GateGradientParams p) {
    __shared__ float warp_sums[THREADS / WARP];
    const Task task = task_of(1, p.NKV, p.splits);
    const int64_t kv = task.head;
    if (task.sequence == p.S) {
        for (int64_t token = max(0, p.cum[p.S]) + int64_t(task.split) * THREADS + threadIdx.x; token < p.N;
             token += int64_t(p.splits) * THREADS)
            p.dgate[token * p.stride + kv] = 0;
        return;
    }
    const Sequence seq = sequence_of(p.cum, task.sequence, p.N);
    const int begin = task.split * p.split_length, end = min(begin + p.split_length, seq.length);
    if (begin >= end) return;
    float later = 0;
    if (p.key_states && (end < seq.length || p.has_dfinal)) later = gradient_at_end(p, task, end, seq.length);
    const int64_t group = p.NH / p.NKV;
    for (int last = end; last > begin; last -= THREADS) {
        const int t = last - 1 - int(threadIdx.x);
        float x = 0;
        if (t >= begin) {
            const int64_t token = seq.first + t;
            for (int block = 0; block < p.query_blocks; block++)
                for (int64_t h = kv * group; h < (kv + 1) * group; h++)
                    x += p.query_dots[(block * p.NH + h) * p.N + token];
            for (int block = 0; block < p.key_blocks; block++) x -= p.key_dots[(block * p.NKV + kv) * p.N + token];
        }
        const BlockScan<float> scan = block_scan<THREADS>(x, warp_sums);
        __syncthreads();
        if (t >= begin) p.dgate[(seq.first + t) * p.stride + kv] = later + scan.inclusive();
        later += scan.total;
    }
}

template <int W>
void launch_width(const char* op, const StatePassingParams& p, int64_t S, Stream stream) {
    const int64_t blocks = ceil_div(p.size, THREADS * W);
    launch_pdl(op, state_passing_kernel<W>, dim3(unsigned(S * p.NKV), unsigned(blocks)), THREADS, 0, stream, p);
}

}  // namespace

void launch_state_passing(const char* op, const StatePassingParams& p, int64_t S, bool aligned, Stream stream) {
    if (S * p.NKV == 0) return;
    if (aligned)
        launch_width<4>(op, p, S, stream);
    else
        launch_width<1>(op, p, S, stream);
}

void launch_gate_gradient(const char* op, const GateGradientParams& p, Stream stream) {
    launch(op, gate_gradient_kernel, p, (p.S + 1) * p.NKV * p.splits, THREADS, 0, stream);
}

}  // namespace linear_attention

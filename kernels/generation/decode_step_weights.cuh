// The weight stream of the fused decode step. One warp loads the block's share of all weights, in the order of their
// use, through a ring of stages in shared memory (cp.async.bulk). It never reads an activation. Where the computing
// warps wait for other blocks, loading goes on until the ring is full.
#pragma once

#include "kernels/cuda/tma.cuh"
#include "kernels/generation/decode_step.cuh"

namespace fused_decode {

// Like MbarrierRing, with a number of stages that is known at launch.
struct Ring {
    Mbarrier *full, *empty;
    char* memory;
    int stages, stage_bytes;
    int stage = 0, parity = 0;

    __device__ __forceinline__ char* current() const { return memory + stage * stage_bytes; }
    __device__ __forceinline__ void advance() {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
    __device__ __forceinline__ void wait_full() const { mbarrier_wait(full + stage, parity); }
    // Called by one thread: waits until the stage is free, to be filled with `bytes`.
    __device__ __forceinline__ char* acquire(int bytes) const {
        mbarrier_wait(empty + stage, parity ^ 1);
        mbarrier_arrive_expect_tx(full + stage, bytes);
        return current();
    }
};

__device__ __forceinline__ PairRange pairs_of_block(const MatrixPlan& p) {
    const int64_t pairs = p.pairs;
    return {int(pairs * blockIdx.x / gridDim.x), int(pairs * (blockIdx.x + 1) / gridDim.x)};
}

// Called by one thread. A norm is one stage: its weights, then its biases. A stage of a matrix has the rows of up to
// 1 << log_per_stage pairs in order, with SwiGLU first those of gate and then those of up.
template <typename T, bool PACKED>
__device__ void stream_weights(const Arguments<T>& a, const Layer* layers, const PairRange* pairs, Ring ring) {
    const auto stream_norm = [&](const float* weight, const float* bias) {
        const int bytes = a.C * int(sizeof(float));
        char* const to = ring.acquire(bias ? 2 * bytes : bytes);
        bulk_load(to, weight, bytes, ring.full + ring.stage);
        if (bias) bulk_load(to + bytes, bias, bytes, ring.full + ring.stage);
        ring.advance();
    };
    const auto stream_dense = [&](const MatrixPlan& p, const PairRange& range, const T* weight, bool swiglu) {
        const int end = range.end, per_stage = 1 << p.log_per_stage;
#pragma unroll 1
        for (int pair = range.first; pair < end; pair += per_stage) {
            const int64_t K = p.K;
            const int bytes = min(per_stage, end - pair) * 2 * p.K * int(sizeof(T));
            char* const to = ring.acquire(swiglu ? 2 * bytes : bytes);
            bulk_load(to, weight + pair * 2 * K, bytes, ring.full + ring.stage);
            if (swiglu)
                bulk_load(to + bytes, weight + (int64_t(p.pairs) + pair) * 2 * K, bytes, ring.full + ring.stage);
            ring.advance();
        }
    };
    // Of packed weights; a stage holds their rows at a pitch of their own.
    const auto stream_rows = [&](char* to, const char* from, int rows, const MatrixPlan& p) {
        if (p.pitch == p.row_bytes) return bulk_load(to, from, rows * p.row_bytes, ring.full + ring.stage);
#pragma unroll 1
        for (int r = 0; r < rows; r++)
            bulk_load(to + r * p.pitch, from + r * p.row_bytes, p.row_bytes, ring.full + ring.stage);
    };
    const auto stream_matrix = [&](int which, const void* matrix, bool swiglu) {
        const MatrixPlan& p = a.plans[which];
        if constexpr (!PACKED) return stream_dense(p, pairs[which], static_cast<const T*>(matrix), swiglu);
        const char* const weight = static_cast<const char*>(matrix);
        const int end = pairs[which].end, per_stage = 1 << p.log_per_stage;
        const int64_t pair_bytes = 2 * p.row_bytes;
#pragma unroll 1
        for (int pair = pairs[which].first; pair < end; pair += per_stage) {
            const int rows = min(per_stage, end - pair) * 2;
            char* const to = ring.acquire((swiglu ? 2 : 1) * rows * p.row_bytes);
            stream_rows(to, weight + pair * pair_bytes, rows, p);
            if (swiglu) stream_rows(to + rows * p.pitch, weight + (p.pairs + pair) * pair_bytes, rows, p);
            ring.advance();
        }
    };
#pragma unroll 1
    for (int i = 0; i <= LAYER_MATRICES * a.num_layers; i++) {
        const int l = i / LAYER_MATRICES;
        const bool head = l == a.num_layers;
        const int which = head ? int(HEAD) : i % LAYER_MATRICES;
        const Layer& layer = layers[head ? 0 : l];
        if (head || which == QKV || which == FC) {
            stream_norm(head ? a.normf_weight : layer.norm_weight[which == FC],
                        head ? a.normf_bias : layer.norm_bias[which == FC]);
        }
        stream_matrix(which, head ? a.head : layer.weight[which], which == FC && is_gated(a.activation));
    }
}

}  // namespace fused_decode

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
    // For the stage that many ahead.
    __device__ __forceinline__ void wait_full(int ahead) const {
        const bool wrapped = stage + ahead >= stages;
        mbarrier_wait(full + stage + ahead - (wrapped ? stages : 0), parity ^ int(wrapped));
    }
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

// Called by one thread, or for packed weights by a warp. A norm is one stage: its weights, then its biases. A stage of
// a matrix has the rows of up to 1 << log_per_stage pairs in order, with SwiGLU first those of gate and then those of
// up.
template <typename T, int BITS>
__device__ void stream_weights(const Arguments<T>& a, const Layer* layers, const PairRange* pairs, Ring ring) {
    const int lane = int(threadIdx.x) % WARP;
    const auto stream_norm = [&](const float* weight, const float* bias) {
        const int bytes = a.C * int(sizeof(float));
        if (lane == 0) {
            char* const to = ring.acquire(bias ? 2 * bytes : bytes);
            bulk_load(to, weight, bytes, ring.full + ring.stage);
            if (bias) bulk_load(to + bytes, bias, bytes, ring.full + ring.stage);
        }
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
    // A stage holds the rows at a pitch of their own, so each is a copy, by a lane of its own.
    const auto stream_packed = [&](const MatrixPlan& p, const PairRange& range, const char* weight, bool swiglu) {
        const int end = range.end, per_stage = 1 << p.log_per_stage, row_bytes = p.row_bytes, pitch = p.pitch;
        const int64_t to_up = int64_t(p.pairs) * 2 * row_bytes;
#pragma unroll 1
        for (int pair = range.first; pair < end; pair += per_stage) {
            const int rows = min(per_stage, end - pair) * 2, all_rows = swiglu ? 2 * rows : rows;
            if (lane == 0) ring.acquire(all_rows * row_bytes);
            __syncwarp();
            const bool up = lane >= rows;
            const int64_t row = pair * 2 + lane - (up ? rows : 0);
            if (lane < all_rows)
                bulk_load(ring.current() + lane * pitch, weight + row * row_bytes + (up ? to_up : 0), row_bytes,
                          ring.full + ring.stage);
            ring.advance();
        }
    };
    const auto stream_matrix = [&](int which, const void* weight, bool swiglu) {
        if constexpr (BITS > 0)
            stream_packed(a.plans[which], pairs[which], static_cast<const char*>(weight), swiglu);
        else
            stream_dense(a.plans[which], pairs[which], static_cast<const T*>(weight), swiglu);
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

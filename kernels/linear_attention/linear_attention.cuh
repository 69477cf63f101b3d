// What the kernels of linear attention share: those of linear_attention.cu, for every GPU, and those of
// linear_attention_hopper.cu, which do the same products of bf16 with Hopper's instructions.
#pragma once

#include "kernels/cuda/heads.cuh"
#include "kernels/cuda/warp_tile.cuh"
#include "kernels/linear_attention/linear_attention_check.h"

namespace linear_attention {

using Role = LinearAttentionRole;

constexpr int MAX_CHUNK = 64;

// One launch. Of the product's own sizes: a and b have E numbers, c and out M.
template <typename T>
struct Product {
    Heads<T> a, b, c, out;
    Heads<T> inputs;       // DQ, DK: what dq or dk is the gradient of, for φ'
    Heads<T> forward_out;  // DQ: for δ
    const float* gate;     // [N, NKV] or null
    int64_t gate_stride;
    float* norm;  // [NH, N] or null
    int64_t norm_stride;
    float* delta;  // [NH, N]
    float* dots;   // [parts, heads, N] or null: sums of φ·dφ over a block's columns
    // [S, segments + 1, NKV, state_size]: s [E, M] of the pass, then z [E] or r. Element (e, m) of this product's state
    // lies at e·state_row + m·state_column, its vector at state_vector.
    float *states, *decays;  // decays [S, segments + 1, NKV]: of a segment's tokens
    int64_t state_size, state_row, state_column, state_vector;
    const int32_t* cum;
    int64_t S, N, NH, NKV;
    int E, M;
    int segments, segment_length, parts;
    bool elu, normalise, aligned;
    bool has_states;    // each segment begins with its state, else with zeros
    bool all_segments;  // KeyState, QueryState: also the last one, which no other begins with
};

struct Sequence {
    int64_t first;
    int length;
};

// Whatever cum holds, a sequence lies within the tensors.
__device__ __forceinline__ Sequence sequence_of(const int32_t* cum, int64_t s, int64_t N) {
    const auto clamp = [&](int64_t i) { return max(int64_t(0), min(int64_t(cum[i]), N)); };
    const int64_t first = clamp(s);
    return {first, int(max(int64_t(0), clamp(s + 1) - first))};
}

struct Task {
    int part, segment;
    int64_t head, sequence;
};

__device__ __forceinline__ Task task_of(int parts, int64_t heads, int segments) {
    unsigned rest = blockIdx.x;
    Task task;
    task.part = int(rest % unsigned(parts)), rest /= unsigned(parts);
    task.head = int64_t(rest % unsigned(heads)), rest /= unsigned(heads);
    task.segment = int(rest % unsigned(segments));
    task.sequence = int64_t(rest / unsigned(segments));
    return task;
}

// elu + 1: exp(0) + x above 0, exp(x) + 0 below.
template <typename T>
__device__ __forceinline__ float feature(float x) {
    return exp_for<T>(fminf(x, 0.0f)) + fmaxf(x, 0.0f);
}

__host__ __device__ constexpr bool is_reversed(Role role) {
    return role == Role::DV || role == Role::DK || role == Role::QueryState;
}
constexpr bool state_only(Role role) {
    return role == Role::KeyState || role == Role::QueryState;
}

// ---- the kernels for Hopper GPUs, of bf16. Builds that have them define HAVE_SM90A.

// Columns of a head that they can be compiled for: 64 or 128; 0 where they do not take a pass: neither of the two kinds
// that models have, rows that are not aligned, heads beyond 128, another GPU.
int hopper_columns(const Product<bf16>& p);
// Of Out, DQ, KeyState and QueryState.
void hopper_product(const char* op, Role role, const Product<bf16>& p, int64_t blocks, Stream stream);
// DV and DK in one.
void hopper_key_gradients(const char* op, const Product<bf16>& dv, const Product<bf16>& dk, int64_t blocks,
                          Stream stream);

}  // namespace linear_attention

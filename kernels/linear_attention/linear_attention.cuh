// Common code of the CUDA kernels of linear attention: their parameters, the work of a block, and the launchers that
// linear_attention.cu calls.
//
//   linear_attention.cu           launch: scratch, the split over T, the order of kernels
//   linear_attention_chunked.cu   chunks of 64 tokens as matmuls (mma.sync; fp32 with fused multiply-adds)
//   linear_attention_hopper.cu    the same in bf16 with Hopper's wgmma
//   linear_attention_splits.cu    what passes between splits: states, and the gradient of the decay gate
//   linear_attention_scan.cu      token by token, for heads of any size
//   linear_attention_decode.cu    one token for each sequence
//
// A split is a range of tokens of one sequence that one block processes: sequences are split over T where there are
// too few heads and sequences to fill the GPU.
#pragma once

#include "kernels/check.h"
#include "kernels/cuda/heads.cuh"
#include "kernels/cuda/warp_tile.cuh"
#include "kernels/linear_attention/linear_attention_common.h"
#include "kernels/linear_attention/linear_attention_types.h"

namespace linear_attention {

using Result = LinearAttentionResult;

constexpr int MAX_CHUNK = 64;

// One launch. E and M are the sizes of this result's operands: a and b have E elements, c and out M.
template <typename T>
struct Params {
    Heads<T> a, b, c, out;
    Heads<T> inputs;       // DQ, DK: q or k, for φ'
    Heads<T> forward_out;  // DQ: out of the forward pass, for δ
    const float* gate;     // [N, NKV] or null
    int64_t gate_stride;
    float* norm;  // [NH, N] or null
    int64_t norm_stride;
    float* delta;  // [NH, N]
    float* dots;   // [column blocks, heads, N] or null: φ·dφ summed over a block's columns
    // [S, splits + 1, NKV, state_size]: s [E, M] in the layout of the forward pass, then z [E] or r. Element (e, m) of
    // this result's state is at e·state_row + m·state_column, its vector at state_vector.
    float *states, *decays;  // decays [S, splits + 1, NKV]: of all tokens of a split
    int64_t state_size, state_row, state_column, state_vector;
    const int32_t* cum;
    int64_t S, N, NH, NKV;
    int E, M;
    int splits, split_length, column_blocks;
    bool elu, normalise, aligned;
    bool has_states;       // a split begins with its state in `states`, else with zeros
    bool with_last_split;  // KeyState, QueryState: also the state of the last split, which no other split begins with
};

struct Sequence {
    int64_t first;
    int length;
};

// Clamped, so that a sequence lies within the tensors for any contents of cum.
__device__ __forceinline__ Sequence sequence_of(const int32_t* cum, int64_t s, int64_t N) {
    const auto clamp = [&](int64_t i) { return max(int64_t(0), min(int64_t(cum[i]), N)); };
    const int64_t first = clamp(s);
    return {first, int(max(int64_t(0), clamp(s + 1) - first))};
}

// The work of a block. sequence == S: the tokens after the last sequence, which get zeros.
struct Task {
    int column_block, split;
    int64_t head, sequence;
};

__device__ __forceinline__ Task task_of(int column_blocks, int64_t heads, int splits) {
    unsigned rest = blockIdx.x;
    Task task;
    task.column_block = int(rest % unsigned(column_blocks));
    rest /= unsigned(column_blocks);
    task.head = int64_t(rest % unsigned(heads));
    rest /= unsigned(heads);
    task.split = int(rest % unsigned(splits));
    task.sequence = int64_t(rest / unsigned(splits));
    return task;
}

// φ = elu + 1: exp(0) + x above 0, exp(x) + 0 below.
template <typename T>
__device__ __forceinline__ float feature(float x) {
    return exp_for<T>(fminf(x, 0.0f)) + fmaxf(x, 0.0f);
}

__host__ __device__ constexpr bool is_reversed(Result result) {
    return result == Result::DV || result == Result::DK || result == Result::QueryState;
}
constexpr bool state_only(Result result) {
    return result == Result::KeyState || result == Result::QueryState;
}

template <typename Arguments>
void launch(const char* op, void (*kernel)(Arguments), const Arguments& arguments, int64_t blocks, int threads,
            int shared_bytes, Stream stream) {
    require(blocks < int64_t(1) << 31, op, ": ", blocks,
            " blocks are more than one launch can hold; use fewer or shorter sequences");
    if (blocks == 0) return;
    if (shared_bytes > 0)
        cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), op);
    kernel<<<unsigned(blocks), unsigned(threads), size_t(shared_bytes), cuda_stream(stream)>>>(arguments);
    check_launch(op, stream);
}

// q's dtype: fp32 or bf16.
inline DType check_dtype(const char* op, const Tensor& q) {
    require(bool(q), op, ": q is missing");
    require(q.dtype == DType::F32 || q.dtype == DType::BF16, op, ": q is ", dtype_name(q.dtype), " ", shape_string(q),
            ", expected fp32 or bf16");
    return q.dtype;
}

// f(T{})
template <typename F>
void dispatch(DType dtype, F f) {
    if (dtype == DType::F32)
        f(float{});
    else
        f(bf16{});
}

// ---- linear_attention_chunked.cu, T = float and bf16

// How a result's columns are divided: blocks that share them, and sums of φ·dφ for each row that these blocks write.
struct ColumnBlocks {
    int64_t blocks, dots;
};
template <typename T>
ColumnBlocks chunked_column_blocks(int64_t E, int64_t M);

template <typename T>
void launch_chunked(const char* op, Result result, const Params<T>& p, int64_t blocks, Stream stream);

// ---- linear_attention_hopper.cu, bf16; builds that contain it define HAVE_SM90A

// The head size that the kernels are compiled for, 64 or 128; 0 where they do not support the pass: an attention type
// other than linear and gated_linear, rows that are not aligned, heads above 128, another GPU.
int hopper_columns(const Params<bf16>& p);
// Out, DQ, KeyState or QueryState.
void launch_hopper(const char* op, Result result, const Params<bf16>& p, int64_t blocks, Stream stream);
// DV and DK in one kernel.
void launch_hopper_dv_dk(const char* op, const Params<bf16>& dv, const Params<bf16>& dk, int64_t blocks, Stream stream);

// ---- linear_attention_splits.cu

struct StatePassingParams {
    float* states;        // [S, splits + 1, NKV, size]: in, the sum of each split; out, the state it begins with
    const float* decays;  // [S, splits + 1, NKV], or null
    const float *initial, *initial_z;
    float *final, *final_z;
    const int32_t* rows;  // of final and final_z, or null
    int64_t num_rows;
    const int32_t* cum;
    int64_t N, NKV, size, matrix;  // size: matrix = E·M, plus E where there is a vector
    int splits, split_length;
    bool reversed;
    bool has_sums, has_last_sum;  // `states` holds the splits' sums; also that of the last split in this direction
};
// Of S sequences. aligned: all tensors of states allow loads of 16 bytes.
void launch_state_passing(const char* op, const StatePassingParams& p, int64_t S, bool aligned, Stream stream);

struct GateGradientParams {
    float* dgate;  // [N, NKV]
    int64_t stride;
    const float *query_dots, *key_dots;      // [query_blocks, NH, N], [key_blocks, NKV, N]
    const float *key_states, *query_states;  // or null: no gradient flows between splits
    const int32_t* cum;
    int64_t S, N, NH, NKV, size;
    int splits, split_length, query_blocks, key_blocks;
    bool has_dfinal;  // a gradient flows through the end of the sequence
};
void launch_gate_gradient(const char* op, const GateGradientParams& p, Stream stream);

// ---- linear_attention_scan.cu, T = float and bf16

// Params of the result with the states of the whole sequence.
template <typename T>
struct ScanParams {
    Params<T> p;
    Result result;
    LinearAttentionState initial, final;  // reversed: dfinal and dinitial
    float* end_state;                     // DQ: states, whose second one of a sequence receives the final state
};
template <typename T>
void launch_scan(const char* op, ScanParams<T> scan, Stream stream);

// φ(x)·dφ of each token and head.
template <typename T>
struct DotParams {
    float* dots;  // [heads, N]
    Heads<T> gradient, inputs;
    int64_t N, heads;
    int size;
    bool elu;
};
template <typename T>
void launch_dots(const char* op, const DotParams<T>& p, Stream stream);

}  // namespace linear_attention

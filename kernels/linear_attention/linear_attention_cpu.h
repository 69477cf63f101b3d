// Common code of the CPU's source files of linear attention. A thread computes one result (linear_attention_common.h)
// for one sequence and head, with its state in the caches:
//
//   linear_attention_scan.cpp      token by token: state = decay·state + b cᵀ, and the row is aᵀ·state
//   linear_attention_chunked.cpp   32 tokens at a time as four matmuls: scores = A·Bᵀ, masked;
//                                  O = A·state + scores·C; state += Bᵀ·C. The state is read and written once for each
//                                  chunk, in the scan once for each token
//   linear_attention_decode.cpp    one token for each sequence
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/cpu/cpu_loops.h"
#include "kernels/cpu/cpu_tile.h"
#include "kernels/linear_attention/linear_attention_common.h"
#include "kernels/linear_attention/linear_attention_types.h"

namespace linear_attention {

using Result = LinearAttentionResult;

constexpr int64_t BLOCK =
    32;  // terms of a single running sum: longer sums of one sign lose digits (docs/understand/numerics.md)
constexpr int64_t MAX_SIZE = LINEAR_ATTENTION_MAX_SIZE, MAX_CHUNKED = LINEAR_ATTENTION_MAX_CHUNKED_SIZE;

inline int64_t round_up(int64_t n) {
    return ceil_div(n, LANES) * LANES;
}

// y = φ(x) = elu(x) + 1, n floats.
void apply_features(float* y, const float* x, int64_t n);
float dot(const float* a, const float* b, int64_t n);
// y = scale·y and y += scale·x, n floats; n is rounded up to whole vectors of 16.
void scale_row(float* y, float scale, int64_t n);
void add_row(float* y, float scale, const float* x, int64_t n);

// How a computation reads the rows of an operand: x; φ(x); ĝ = x/d.
enum class Use { AsStored, Features, Gradient };

struct Operand {
    Tensor rows;  // [N, heads, size]
    Use use = Use::AsStored;
};

// All tensors of a forward or backward pass. delta [NH, N]: δ. For the gradient of the gate: query_dots [NH, N] and
// key_dots [NKV, N], φ(q)·dφ(q) and φ(k)·dφ(k), and end_dots, ⟨S_T, dS_T⟩ + z_T·dz_T (null without dfinal).
struct Pass {
    LinearAttentionSizes z;
    LinearAttentionType type;
    const int32_t* cum;
    Tensor q, k, v, gate, out, norm, dout, dq, dk, dv, dgate;
    LinearAttentionState initial, final, dinitial, dfinal;
    float *delta = nullptr, *query_dots = nullptr, *key_dots = nullptr, *end_dots = nullptr;  // end_dots [S, NKV]

    Use features() const { return type.features == FeatureMap::EluPlusOne ? Use::Features : Use::AsStored; }
    Use gradient() const { return type.normalise ? Use::Gradient : Use::AsStored; }
    float* norm_of(int64_t h) const { return norm.as<float>() + h * norm.stride[0]; }
};

inline int64_t state_row_of(const LinearAttentionState& state, int64_t sequence) {
    return state.rows ? state_row(state.rows.as<int32_t>(), state.s.shape[0], sequence) : sequence;
}

// The operands of one result: the table of linear_attention_common.h.
struct Operands {
    Operand a, b, c;
    Tensor out, inputs;  // inputs: of dq and dk, for φ'
    int64_t E, M;
    bool reversed;
};

Operands operands_of(const Pass& p, Result result);

// n rows of one head from `token` on, `width` floats apart, the rest of each row zero.
void load_rows(float* dst, int64_t width, const Pass& p, const Operand& x, int64_t token, int64_t n, int64_t head);

// The state of one sequence and head: rows [E, width], of which M columns are used, and the vector.
struct State {
    float *rows, *vector;
    int64_t E, M, width, vector_size;

    // From s [E, M] and z, or their transpose: DQ has Sᵀ, DK Rᵀ.
    void load(const LinearAttentionState& from, int64_t sequence_head, bool transposed) {
        std::fill(rows, rows + E * width, 0.0f);
        std::fill(vector, vector + round_up(vector_size), 0.0f);
        if (!from.s) return;
        const float* s = from.s.as<float>() + sequence_head * E * M;
        for (int64_t e = 0; e < E; e++)
            for (int64_t m = 0; m < M; m++) rows[e * width + m] = transposed ? s[m * E + e] : s[e * M + m];
        if (from.z && vector_size) std::copy_n(from.z.as<float>() + sequence_head * vector_size, vector_size, vector);
    }
    void store(const Tensor& s, int64_t sequence_head) const {
        for (int64_t e = 0; e < E; e++) std::copy_n(rows + e * width, M, s.as<float>() + (sequence_head * E + e) * M);
    }
    void store_vector(const Tensor& z, int64_t sequence_head) const {
        std::copy_n(vector, vector_size, z.as<float>() + sequence_head * vector_size);
    }
};

// One result for one sequence and one head of its rows.
class HeadPass {
  public:
    HeadPass(const Pass& pass, Result result_, int64_t sequence_, int64_t row_head_, State& state_)
        : p(pass),
          result(result_),
          x(operands_of(pass, result_)),
          sequence(sequence_),
          row_head(row_head_),
          state(state_) {
        const int64_t group = p.z.NH / p.z.NKV;
        kv = x.reversed ? row_head : row_head / group;
        first_head = x.reversed ? kv * group : kv;
        heads = x.reversed ? group : 1;
        token0 = p.cum[sequence];
        length = p.cum[sequence + 1] - token0;
        // The vector: z over b's columns for Out, z or r over c's for DQ and DK.
        state.E = x.E;
        state.M = x.M;
        state.width = round_up(x.M);
        state.vector_size = !p.type.normalise || result == Result::DV ? 0 : result == Result::Out ? x.E : x.M;
        state.load(x.reversed ? p.dfinal : p.initial, sequence * p.z.NKV + kv,
                   result == Result::DQ || result == Result::DK);
    }

    void recurrent();
    void chunked();

    // Stores the state after the last token (reversed: the gradient of the state before the first).
    void finish() const;

  private:
    float gate(int64_t t) const { return p.gate ? p.gate.as<float>()[(token0 + t) * p.gate.stride[0] + kv] : 0.0f; }
    // δ of tokens [t, t + n) of a query head: by DQ from ĝ, for DK from memory.
    float* delta(int64_t head, int64_t t) const { return p.delta + head * p.z.N + token0 + t; }
    void set_delta(const float* gradient, int64_t width, int64_t t, int64_t n) const {
        const HeadRows out = head_rows(p.out, token0 + t, row_head);
        for (int64_t i = 0; i < n; i++) delta(row_head, t)[i] = -dot(gradient + i * width, out[i], x.E);
    }
    // Row t of the result from o.
    void store(const float* o, int64_t t, float norm) const;

    const Pass& p;
    const Result result;
    const Operands x;
    const int64_t sequence, row_head;
    int64_t kv, first_head, heads, token0, length;
    State& state;
};

}  // namespace linear_attention

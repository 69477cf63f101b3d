// Checks of linear attention's arguments that do not read the contents of tensors. Both backends make them.
#pragma once

#include "kernels/check.h"
#include "kernels/linear_attention/linear_attention_common.h"
#include "kernels/linear_attention/linear_attention_types.h"

// The names of a state's tensors in an error message. String literals, because a training step must not allocate.
struct StateNames {
    const char *rows, *s, *z;
};

inline void check_state(const char* op, const StateNames& name, const LinearAttentionState& state,
                        const LinearAttentionSizes& z, bool normalise, Given given, bool may_have_rows = false) {
    require(!state.rows || (may_have_rows && state.s.rank == 4), op, ": ", name.rows, " must not be given here");
    check_tensor(op, name.rows, state.rows, DType::I32, {z.S}, Given::Optional);
    const int64_t R = state.rows ? state.s.shape[0] : z.S;
    check_tensor(op, name.s, state.s, DType::F32, {R, z.NKV, z.E, z.M}, given);
    check_contiguous(op, name.s, state.s);
    require(!state.z || normalise, op, ": ", name.z, " is given, but nothing is normalised");
    if (!state.s || !normalise) {
        require(!state.z, op, ": ", name.z, " is given without ", name.s);
        return;
    }
    check_tensor(op, name.z, state.z, DType::F32, {R, z.NKV, z.E});
    check_contiguous(op, name.z, state.z);
}

inline LinearAttentionSizes check_linear_attention(const char* op, DType dtype, const Tensor& q, const Tensor& k,
                                                   const Tensor& v, const Tensor& gate,
                                                   const LinearAttentionType& type) {
    require(q && q.rank == 3, op, ": q is ", shape_string(q), ", expected [N, NH, E]");
    require(k && k.rank == 3, op, ": k is ", shape_string(k), ", expected [N, NKV, E]");
    require(v && v.rank == 3, op, ": v is ", shape_string(v), ", expected [N, NKV, M]");
    LinearAttentionSizes z{q.shape[0], 0, q.shape[1], k.shape[1], q.shape[2], v.shape[2], 0};
    check_tensor(op, "q", q, dtype, {z.N, z.NH, z.E});
    check_tensor(op, "k", k, dtype, {z.N, z.NKV, z.E});
    check_tensor(op, "v", v, dtype, {z.N, z.NKV, z.M});
    check_tensor(op, "gate", gate, DType::F32, {z.N, z.NKV}, Given::Optional);
    require(z.NKV > 0 && z.NH % z.NKV == 0, op, ": ", z.NKV, " KV heads do not divide ", z.NH, " heads");
    const int64_t limit =
        type.form == LinearAttentionType::Form::Chunked ? LINEAR_ATTENTION_MAX_CHUNKED_SIZE : LINEAR_ATTENTION_MAX_SIZE;
    require(z.E >= 1 && z.E <= limit && z.M >= 1 && z.M <= limit, op, ": heads of ", z.E, " x ", z.M,
            " lie outside [1, ", limit, "]");
    require(!type.normalise || type.features == FeatureMap::EluPlusOne, op,
            ": the normaliser needs positive features, those of elu + 1");
    return z;
}

inline LinearAttentionSizes check_linear_attention(const char* op, DType dtype, const Tensor& q, const Tensor& k,
                                                   const Tensor& v, const Tensor& gate,
                                                   const LinearAttentionState& initial,
                                                   const LinearAttentionSequences& sequences,
                                                   const LinearAttentionType& type) {
    LinearAttentionSizes z = check_linear_attention(op, dtype, q, k, v, gate, type);
    z.S = sequences.cum.rank == 1 ? sequences.cum.shape[0] - 1 : -1;
    require(z.S >= 0, op, ": cum is ", shape_string(sequences.cum), ", expected [sequences + 1]");
    check_tensor(op, "cum", sequences.cum, DType::I32, {z.S + 1});
    z.max_length = sequences.max_length;
    z.states = bool(initial.s);
    check_state(op, {"initial.rows", "initial.s", "initial.z"}, initial, z, type.normalise, Given::Optional);
    return z;
}

// The arguments that only the forward or only the backward pass has.
inline void check_linear_attention_forward(const char* op, DType dtype, LinearAttentionSizes& z, const Tensor& out,
                                           const Tensor& norm, const LinearAttentionState& final,
                                           const LinearAttentionType& type) {
    check_tensor(op, "out", out, dtype, {z.N, z.NH, z.M});
    if (type.normalise) check_tensor(op, "norm", norm, DType::F32, {z.NH, z.N}, Given::Optional);
    check_state(op, {"final.rows", "final.s", "final.z"}, final, z, type.normalise, Given::Optional, true);
    z.states |= bool(final.s);
}

inline void check_linear_attention_backward(const char* op, DType dtype, LinearAttentionSizes& z, const Tensor& dq,
                                            const Tensor& dk, const Tensor& dv, const Tensor& dgate,
                                            const LinearAttentionState& dinitial, const Tensor& dout,
                                            const LinearAttentionState& dfinal, const Tensor& gate, const Tensor& out,
                                            const Tensor& norm, const LinearAttentionType& type) {
    check_tensor(op, "dq", dq, dtype, {z.N, z.NH, z.E});
    check_tensor(op, "dk", dk, dtype, {z.N, z.NKV, z.E});
    check_tensor(op, "dv", dv, dtype, {z.N, z.NKV, z.M});
    check_tensor(op, "dout", dout, dtype, {z.N, z.NH, z.M});
    require(bool(gate) == bool(dgate), op, ": gate and dgate are given together or not at all");
    check_tensor(op, "dgate", dgate, DType::F32, {z.N, z.NKV}, Given::Optional);
    if (type.normalise) {
        check_tensor(op, "out", out, dtype, {z.N, z.NH, z.M});
        check_tensor(op, "norm", norm, DType::F32, {z.NH, z.N});
    }
    check_state(op, {"dinitial.rows", "dinitial.s", "dinitial.z"}, dinitial, z, type.normalise, Given::Optional);
    check_state(op, {"dfinal.rows", "dfinal.s", "dfinal.z"}, dfinal, z, type.normalise, Given::Optional);
    z.states |= dinitial.s || dfinal.s;
}

inline LinearAttentionSizes check_linear_attention_decode(const char* op, DType dtype, const Tensor& out,
                                                          const LinearAttentionState& state, const Tensor& q,
                                                          const Tensor& k, const Tensor& v, const Tensor& gate,
                                                          const LinearAttentionType& type) {
    LinearAttentionSizes z = check_linear_attention(op, dtype, q, k, v, gate, type);
    z.S = z.N;
    check_tensor(op, "out", out, dtype, {z.S, z.NH, z.M});
    check_state(op, {"state.rows", "state.s", "state.z"}, state, z, type.normalise, Given::Required, true);
    return z;
}

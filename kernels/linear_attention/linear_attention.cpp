// Linear attention on a CPU: the forward and backward pass over all sequences and heads.
#include "kernels/linear_attention/linear_attention.h"

#include <omp.h>

#include "kernels/attention/cum_seqlens_check.h"
#include "kernels/linear_attention/linear_attention_check.h"
#include "kernels/linear_attention/linear_attention_cpu.h"

namespace linear_attention {

MULTIARCH void apply_features(float* y, const float* x, int64_t n) {
    for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        const vec16 v = vec_load_lanes(x + i, lanes);
        vec_store_lanes(y + i, v > 0 ? v + 1 : vec_exp(vec_min(v, vec16{})), lanes);
    });
}

MULTIARCH float dot(const float* a, const float* b, int64_t n) {
    return vec_dot(a, b, n);
}

MULTIARCH void scale_row(float* y, float scale, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) vec_store(y + i, vec_load(y + i) * scale);
}
MULTIARCH void add_row(float* y, float scale, const float* x, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) vec_store(y + i, vec_load(y + i) + vec_load(x + i) * scale);
}

Operands operands_of(const Pass& p, Result result) {
    const Operand q{p.q, p.features()}, k{p.k, p.features()}, v{p.v, Use::AsStored}, g{p.dout, p.gradient()};
    switch (result) {
        case Result::Out:
            return {q, k, v, p.out, {}, p.z.E, p.z.M, false};
        case Result::DQ:
            return {g, v, k, p.dq, p.q, p.z.M, p.z.E, false};
        case Result::DV:
            return {k, q, g, p.dv, {}, p.z.E, p.z.M, true};
        default:
            return {v, g, q, p.dk, p.k, p.z.M, p.z.E, true};
    }
}

void load_rows(float* dst, int64_t width, const Pass& p, const Operand& x, int64_t token, int64_t n, int64_t head) {
    const HeadRows rows = head_rows(x.rows, token, head);
    const int64_t size = x.rows.shape[2];
    for (int64_t i = 0; i < n; i++) {
        float* to = dst + i * width;
        if (x.use == Use::Features)
            apply_features(to, rows[i], size);
        else
            std::copy(rows[i], rows[i] + size, to);
        std::fill(to + size, to + width, 0.0f);
        if (x.use == Use::Gradient) scale_row(to, 1 / p.norm_of(head)[token + i], width);
    }
}

void HeadPass::finish() const {
    const int64_t at = sequence * p.z.NKV + kv;
    const bool first = row_head % (x.reversed ? 1 : p.z.NH / p.z.NKV) == 0;  // of the query heads that share this state
    const LinearAttentionState& to = x.reversed ? p.dinitial : p.final;
    const int64_t row = state_row_of(to, sequence), to_at = row * p.z.NKV + kv;
    if ((result == Result::Out || result == Result::DV) && to.s && first && row >= 0) state.store(to.s, to_at);
    if ((result == Result::Out || result == Result::DK) && to.z && first && row >= 0) state.store_vector(to.z, to_at);
    if (result == Result::DQ && p.end_dots && first) {  // ⟨S_T, dS_T⟩ + z_T·dz_T
        double sum = 0;
        const float* ds = p.dfinal.s.as<float>() + at * x.E * x.M;
        for (int64_t e = 0; e < x.E; e++)
            for (int64_t m = 0; m < x.M; m++) sum += double(state.rows[e * state.width + m]) * ds[m * x.E + e];
        for (int64_t m = 0; m < state.vector_size; m++)
            sum += double(state.vector[m]) * p.dfinal.z.as<float>()[at * x.M + m];
        p.end_dots[at] = float(sum);
    }
}

void HeadPass::store(const float* o, int64_t t, float norm) const {
    float* to = head_rows(x.out, token0 + t, row_head)[0];
    if (result == Result::Out && p.type.normalise) {
        for (int64_t m = 0; m < x.M; m++) to[m] = o[m] / norm;
        if (p.norm) p.norm_of(row_head)[token0 + t] = norm;
        return;
    }
    if (!x.inputs) {
        std::copy(o, o + x.M, to);
        return;
    }
    float features[MAX_SIZE];
    std::copy_n(head_rows(x.inputs, token0 + t, row_head)[0], x.M, features);
    const bool elu = p.features() == Use::Features;
    if (elu) apply_features(features, features, x.M);
    if (p.gate) {
        float* dots = x.reversed ? p.key_dots : p.query_dots;
        dots[row_head * p.z.N + token0 + t] = dot(features, o, x.M);
    }
    for (int64_t m = 0; m < x.M; m++) to[m] = elu ? o[m] * std::min(features[m], 1.0f) : o[m];  // φ' = min(φ, 1)
}

}  // namespace linear_attention

namespace {

using namespace linear_attention;

// Computes one result for all sequences and heads.
void run(const Pass& p, Result result) {
    using Form = LinearAttentionType::Form;
    const int64_t rows = result == Result::DV || result == Result::DK ? p.z.NKV : p.z.NH;
    const bool chunked =
        p.type.form == Form::Chunked || (p.type.form == Form::Automatic && std::max(p.z.E, p.z.M) <= MAX_CHUNKED);
#pragma omp parallel for schedule(dynamic)
    for (int64_t task = 0; task < p.z.S * rows; task++) {
        alignas(64) float memory[MAX_SIZE * MAX_SIZE], vector[MAX_SIZE];
        State state{memory, vector, 0, 0, 0, 0};
        HeadPass pass(p, result, task / rows, task % rows, state);
        if (chunked)
            pass.chunked();
        else
            pass.recurrent();
        pass.finish();
    }
}

void zero_tail(const Tensor& t, int64_t first) {
    for (int64_t h = 0; h < t.shape[1]; h++) zero_rows(head_rows(t, 0, h), first, t.shape[0], t.shape[2]);
}

Pass pass_of(const char* op, const LinearAttentionSizes& z, const Tensor& q, const Tensor& k, const Tensor& v,
             const Tensor& gate, const LinearAttentionState& initial, const LinearAttentionSequences& sequences,
             const LinearAttentionType& type) {
    check_cumulative(op, "cum", sequences.cum, z.N, z.max_length);
    Pass p{};
    p.z = z;
    p.type = type;
    p.cum = sequences.cum.as<int32_t>();
    p.q = q;
    p.k = k;
    p.v = v;
    p.gate = gate;
    p.initial = initial;
    return p;
}

}  // namespace

void linear_attention_forward(Tensor out, Tensor norm, const LinearAttentionState& final, Tensor q, Tensor k, Tensor v,
                              Tensor gate, const LinearAttentionState& initial,
                              const LinearAttentionSequences& sequences, const LinearAttentionType& type,
                              Tensor scratch, Stream) {
    const char* op = "linear_attention_forward";
    LinearAttentionSizes z = check_linear_attention(op, DType::F32, q, k, v, gate, initial, sequences, type);
    check_linear_attention_forward(op, DType::F32, z, out, norm, final, type);
    check_scratch(op, scratch, linear_attention_forward_scratch(z));
    Pass p = pass_of(op, z, q, k, v, gate, initial, sequences, type);
    p.out = out;
    p.final = final;
    if (type.normalise) p.norm = norm;
    run(p, Result::Out);
    zero_tail(out, p.cum[z.S]);
    for (int64_t h = 0; h < z.NH && p.norm; h++) std::fill(p.norm_of(h) + p.cum[z.S], p.norm_of(h) + z.N, 0.0f);
}

// Scratch, fp32: δ and φ(q)·dφ(q) [NH, N], φ(k)·dφ(k) [NKV, N], ⟨S_T, dS_T⟩ [S, NKV].
void linear_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor dgate, const LinearAttentionState& dinitial,
                               Tensor dout, const LinearAttentionState& dfinal, Tensor q, Tensor k, Tensor v,
                               Tensor gate, const LinearAttentionState& initial, Tensor out, Tensor norm,
                               const LinearAttentionSequences& sequences, const LinearAttentionType& type,
                               Tensor scratch, Stream) {
    const char* op = "linear_attention_backward";
    LinearAttentionSizes z = check_linear_attention(op, DType::F32, q, k, v, gate, initial, sequences, type);
    check_linear_attention_backward(op, DType::F32, z, dq, dk, dv, dgate, dinitial, dout, dfinal, gate, out, norm,
                                    type);
    check_scratch(op, scratch, linear_attention_backward_scratch(z));
    Pass p = pass_of(op, z, q, k, v, gate, initial, sequences, type);
    p.out = out;
    p.norm = norm;
    p.dout = dout;
    p.dq = dq;
    p.dk = dk;
    p.dv = dv;
    p.dgate = dgate;
    p.dinitial = dinitial;
    p.dfinal = dfinal;
    p.delta = static_cast<float*>(scratch.data);
    p.query_dots = p.delta + z.NH * z.N;
    p.key_dots = p.query_dots + z.NH * z.N;
    if (gate && dfinal.s) p.end_dots = p.key_dots + z.NKV * z.N;
    for (const Result result : {Result::DQ, Result::DV, Result::DK}) run(p, result);
    for (const Tensor& gradient : {dq, dk, dv}) zero_tail(gradient, p.cum[z.S]);
    if (!gate) return;

    // dg_t: a running sum from the last token to t.
    const int64_t group = z.NH / z.NKV;
#pragma omp parallel for schedule(static)
    for (int64_t kv = 0; kv < z.NKV; kv++) {
        const HeadRows to = {dgate.as<float>() + kv, dgate.stride[0]};
        for (int64_t s = 0; s < z.S; s++) {
            double sum = p.end_dots ? p.end_dots[s * z.NKV + kv] : 0;
            for (int64_t t = p.cum[s + 1] - 1; t >= p.cum[s]; t--) {
                for (int64_t h = kv * group; h < (kv + 1) * group; h++) sum += p.query_dots[h * z.N + t];
                sum -= p.key_dots[kv * z.N + t];
                to[t][0] = float(sum);
            }
        }
        zero_rows(to, p.cum[z.S], z.N, 1);
    }
}

// One token for each sequence, on a CPU.
#include "kernels/linear_attention/linear_attention.h"
#include "kernels/linear_attention/linear_attention_check.h"
#include "kernels/linear_attention/linear_attention_cpu.h"

void linear_attention_decode(Tensor out, const LinearAttentionState& state, Tensor q, Tensor k, Tensor v, Tensor gate,
                             const LinearAttentionType& type, Stream) {
    using namespace linear_attention;
    const char* op = "linear_attention_decode";
    const LinearAttentionSizes z = check_linear_attention_decode(op, DType::F32, out, state, q, k, v, gate, type);
    Pass p{};
    p.z = z;
    p.type = type;
    p.q = q;
    p.k = k;
    p.v = v;
    p.out = out;
    const Operands x = operands_of(p, Result::Out);
    const int64_t group = z.NH / z.NKV;
#pragma omp parallel for schedule(static)
    for (int64_t task = 0; task < z.S * z.NKV; task++) {
        const int64_t s = task / z.NKV, kv = task % z.NKV, row = state_row_of(state, s), at = row * z.NKV + kv;
        if (row < 0) {
            for (int64_t h = kv * group; h < (kv + 1) * group; h++) zero_rows(head_rows(out, s, h), 0, 1, z.M);
            continue;
        }
        alignas(64) float a[MAX_SIZE], b[MAX_SIZE];
        load_rows(b, round_up(z.E), p, x.b, s, 1, kv);
        const float decay = gate ? std::exp(gate.as<float>()[s * gate.stride[0] + kv]) : 1.0f;
        const float* value = head_rows(v, s, kv)[0];
        float *rows = state.s.as<float>() + at * z.E * z.M, *sums = nullptr;
        for (int64_t e = 0; e < z.E; e++)
            for (int64_t m = 0; m < z.M; m++) rows[e * z.M + m] = rows[e * z.M + m] * decay + b[e] * value[m];
        if (type.normalise) {
            sums = state.z.as<float>() + at * z.E;
            for (int64_t e = 0; e < z.E; e++) sums[e] = sums[e] * decay + b[e];
        }
        for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
            load_rows(a, round_up(z.E), p, x.a, s, 1, h);
            float* to = head_rows(out, s, h)[0];
            std::fill(to, to + z.M, 0.0f);
            for (int64_t e = 0; e < z.E; e++)
                for (int64_t m = 0; m < z.M; m++) to[m] += a[e] * rows[e * z.M + m];
            if (!type.normalise) continue;
            const float factor = 1 / (dot(a, sums, z.E) + LINEAR_ATTENTION_EPS);
            for (int64_t m = 0; m < z.M; m++) to[m] *= factor;
        }
    }
}

// Linear attention on a CPU. The products of linear_attention_check.h, each a walk of one thread through the tokens of
// one sequence and head with its state in the caches:
//
//   recurrent  token by token: the state moves on by b cᵀ, and aᵀ·state is read off it.
//   chunked    32 tokens at a time: scores A·Bᵀ, masked; O = A·state + scores·C; state += Bᵀ·C: four matrix products,
//              where the scan reads and writes the whole state for every token.
#include "kernels/linear_attention/linear_attention.h"

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "kernels/attention/cum_seqlens_check.h"
#include "kernels/cpu/cpu_loops.h"
#include "kernels/cpu/cpu_tile.h"
#include "kernels/linear_attention/linear_attention_check.h"

namespace {

using Role = LinearAttentionRole;

constexpr int64_t CHUNK = 32;
constexpr int64_t BLOCK = 32;  // terms that are summed in a row: longer sums of one sign lose digits (docs/numerics.md)
constexpr int64_t MAX_SIZE = LINEAR_ATTENTION_MAX_SIZE, MAX_CHUNKED = LINEAR_ATTENTION_MAX_CHUNKED_SIZE;

int64_t round_up(int64_t n) {
    return ceil_div(n, LANES) * LANES;
}

// y = φ(x): elu + 1, n floats.
MULTIARCH void apply_features(float* y, const float* x, int64_t n) {
    for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        const vec16 v = vec_load_lanes(x + i, lanes);
        vec_store_lanes(y + i, v > 0 ? v + 1 : vec_exp(vec_min(v, vec16{})), lanes);
    });
}

MULTIARCH float dot(const float* a, const float* b, int64_t n) {
    return vec_dot(a, b, n);
}

// y (+)= scale·x; vectors of 16.
MULTIARCH void scale_row(float* y, float scale, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) vec_store(y + i, vec_load(y + i) * scale);
}
MULTIARCH void add_row(float* y, float scale, const float* x, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) vec_store(y + i, vec_load(y + i) + vec_load(x + i) * scale);
}

// The scan's two halves: state [E, n] = carry·state + b cᵀ, and out [n] = aᵀ·(state + recent). Rows are vectors of 16.
MULTIARCH void scan_update(float* state, float carry, const float* b, const float* c, int64_t E, int64_t n) {
    for (int64_t e = 0; e < E; e++)
        for (int64_t i = 0; i < n; i += LANES)
            vec_store(state + e * n + i, vec_load(state + e * n + i) * carry + vec_load(c + i) * b[e]);
}
MULTIARCH void scan_read(float* out, const float* a, const float* state, const float* recent, int64_t E, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        vec16 total = {};
        for (int64_t begin = 0; begin < E; begin += BLOCK) {
            vec16 sum = {};
            for (int64_t e = begin; e < std::min(begin + BLOCK, E); e++)
                sum += (vec_load(state + e * n + i) + vec_load(recent + e * n + i)) * a[e];
            total += sum;
        }
        vec_store(out + i, total);
    }
}

// c [M, n] = a [M, K]·b [K, n], or += in additions of BLOCK terms. Rows of c and b are ldc and ldb apart.
void product(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t M, int64_t n,
             int64_t K, bool accumulate) {
    for (int64_t k = 0; k < K; k += BLOCK)
        tile_AB(c, ldc, a + k, lda, b + k * ldb, ldb, M, n / LANES, std::min(BLOCK, K - k),
                k > 0 || accumulate ? Into::Added : Into::Overwritten);
}

// One row of scores, all keys from `begin` on: (score + α + β_j)·exp(±(Γ_i − Γ_j)), 0 where masked: keys after i or,
// reversed, before it. Returns their sum.
MULTIARCH float finish_scores(float* score, int64_t begin, int64_t end, int64_t i, bool reversed, float alpha,
                              const float* beta, const double* gamma) {
    vec16 sum = {};
    for (int64_t j = begin; j < end; j += LANES) {
        vec16 x = vec_load(score + j) + alpha;
        if (beta) x += vec_load(beta + j);
        if (gamma) {
            vec16 between;
            for (int64_t l = 0; l < LANES; l++)
                between[l] = float(reversed ? gamma[j + l] - gamma[i] : gamma[i] - gamma[j + l]);
            x *= vec_exp(between);
        }
        for (int64_t l = 0; l < LANES; l++)
            if (reversed ? j + l < i : j + l > i) x[l] = 0;
        vec_store(score + j, x);
        sum += x;
    }
    return vec_sum(sum);
}

// ---------------------------------------------------------------------------------------------------------------------
// What a product reads and writes

// How the rows of an operand enter the product.
enum class Use { AsStored, Features, Gradient };  // x; φ(x); ĝ = x/d

struct Operand {
    Tensor rows;  // [N, heads, size]
    Use use = Use::AsStored;
};

// All tensors of a pass. delta, query_dots: [NH, N]; key_dots [NKV, N]: φ(q)·dφ(q) and φ(k)·dφ(k), for the gate.
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

int64_t state_row_of(const LinearAttentionState& state, int64_t sequence) {
    return state.rows ? state_row(state.rows.as<int32_t>(), state.s.shape[0], sequence) : sequence;
}

struct Product {
    Operand a, b, c;
    Tensor out, inputs;  // inputs: of dq and dk, for φ'
    int64_t E, M;
    bool reversed;
};

Product product_of(const Pass& p, Role role) {
    const Operand q{p.q, p.features()}, k{p.k, p.features()}, v{p.v, Use::AsStored}, g{p.dout, p.gradient()};
    switch (role) {
        case Role::Out:
            return {q, k, v, p.out, {}, p.z.E, p.z.M, false};
        case Role::DQ:
            return {g, v, k, p.dq, p.q, p.z.M, p.z.E, false};
        case Role::DV:
            return {k, q, g, p.dv, {}, p.z.E, p.z.M, true};
        default:
            return {v, g, q, p.dk, p.k, p.z.M, p.z.E, true};
    }
}

// n rows of one head from `token` on, `width` floats apart, the rest of each row zero.
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

// The state of one sequence and head that a product carries: rows [E, width], of which M columns count, and the vector.
struct State {
    float *rows, *vector;
    int64_t E, M, width, vector_size;

    // From (or to) s [E, M] and z, or their transpose: DQ carries Sᵀ, DK Rᵀ.
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

// One product for one sequence and one head of its rows.
class Walk {
  public:
    Walk(const Pass& pass, Role role_, int64_t sequence_, int64_t row_head_, State& state_)
        : p(pass), role(role_), x(product_of(pass, role_)), sequence(sequence_), row_head(row_head_), state(state_) {
        const int64_t group = p.z.NH / p.z.NKV;
        kv = x.reversed ? row_head : row_head / group;
        first_head = x.reversed ? kv * group : kv;
        heads = x.reversed ? group : 1;
        token0 = p.cum[sequence];
        length = p.cum[sequence + 1] - token0;
        // The vector: z over b's columns for Out, z or r over c's for DQ and DK.
        state.E = x.E, state.M = x.M, state.width = round_up(x.M);
        state.vector_size = !p.type.normalise || role == Role::DV ? 0 : role == Role::Out ? x.E : x.M;
        state.load(x.reversed ? p.dfinal : p.initial, sequence * p.z.NKV + kv, role == Role::DQ || role == Role::DK);
    }

    void recurrent();
    void chunked();

    // The state after the last token (reversed: the gradient of the one before the first).
    void finish() const {
        const int64_t at = sequence * p.z.NKV + kv;
        const bool first = row_head % (x.reversed ? 1 : p.z.NH / p.z.NKV) == 0;  // of the heads with this state
        const LinearAttentionState& to = x.reversed ? p.dinitial : p.final;
        const int64_t row = state_row_of(to, sequence), to_at = row * p.z.NKV + kv;
        if ((role == Role::Out || role == Role::DV) && to.s && first && row >= 0) state.store(to.s, to_at);
        if ((role == Role::Out || role == Role::DK) && to.z && first && row >= 0) state.store_vector(to.z, to_at);
        if (role == Role::DQ && p.end_dots && first) {  // ⟨S_T, dS_T⟩ + z_T·dz_T
            double sum = 0;
            const float* ds = p.dfinal.s.as<float>() + at * x.E * x.M;
            for (int64_t e = 0; e < x.E; e++)
                for (int64_t m = 0; m < x.M; m++) sum += double(state.rows[e * state.width + m]) * ds[m * x.E + e];
            for (int64_t m = 0; m < state.vector_size; m++)
                sum += double(state.vector[m]) * p.dfinal.z.as<float>()[at * x.M + m];
            p.end_dots[at] = float(sum);
        }
    }

  private:
    float gate(int64_t t) const { return p.gate ? p.gate.as<float>()[(token0 + t) * p.gate.stride[0] + kv] : 0.0f; }
    // δ of tokens [t, t + n) of a query head: by DQ from ĝ, for DK from memory.
    float* delta(int64_t head, int64_t t) const { return p.delta + head * p.z.N + token0 + t; }
    void set_delta(const float* gradient, int64_t width, int64_t t, int64_t n) const {
        const HeadRows out = head_rows(p.out, token0 + t, row_head);
        for (int64_t i = 0; i < n; i++) delta(row_head, t)[i] = -dot(gradient + i * width, out[i], x.E);
    }
    // Row t of the result, which lies in o.
    void store(const float* o, int64_t t, float norm) const {
        float* to = head_rows(x.out, token0 + t, row_head)[0];
        if (role == Role::Out && p.type.normalise) {
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

    const Pass& p;
    const Role role;
    const Product x;
    const int64_t sequence, row_head;
    int64_t kv, first_head, heads, token0, length;
    State& state;
};

void Walk::recurrent() {
    alignas(64) float a[MAX_SIZE], b[MAX_SIZE], c[MAX_SIZE], o[MAX_SIZE];
    // What the last tokens added to the state, kept apart for BLOCK of them.
    alignas(64) float recent[MAX_SIZE * MAX_SIZE], recent_vector[MAX_SIZE];
    const int64_t n = state.width, E = round_up(x.E), vector = round_up(state.vector_size);
    std::fill(recent, recent + x.E * n, 0.0f);
    std::fill(recent_vector, recent_vector + vector, 0.0f);
    const auto merge = [&] {
        add_row(state.rows, 1, recent, x.E * n);
        add_row(state.vector, 1, recent_vector, vector);
        std::fill(recent, recent + x.E * n, 0.0f);
        std::fill(recent_vector, recent_vector + vector, 0.0f);
    };
    float before = 0;  // reversed: the gate between this token and the one after it
    for (int64_t step = 0; step < length; step++) {
        const int64_t t = x.reversed ? length - 1 - step : step;
        const float carry = std::exp(x.reversed ? before : gate(t));
        before = gate(t);
        if (step % BLOCK == 0) merge();
        load_rows(a, E, p, x.a, token0 + t, 1, row_head);
        if (role == Role::DQ && vector) set_delta(a, E, t, 1);
        if (p.gate) {
            scale_row(state.rows, carry, x.E * n);
            scale_row(state.vector, carry, vector);
            scale_row(recent_vector, carry, vector);
        }
        for (int64_t h = first_head; h < first_head + heads; h++) {
            load_rows(b, E, p, x.b, token0 + t, 1, h);
            load_rows(c, n, p, x.c, token0 + t, 1, h);
            scan_update(recent, h == first_head ? carry : 1.0f, b, c, x.E, n);
            if (!vector) continue;
            if (role == Role::Out)
                add_row(recent_vector, 1, b, E);
            else
                add_row(recent_vector, role == Role::DK ? *delta(h, t) : 1.0f, c, n);
        }
        scan_read(o, a, state.rows, recent, x.E, n);
        float norm = 0;
        if (vector) {
            if (role == Role::Out)
                norm = dot(a, state.vector, x.E) + dot(a, recent_vector, x.E) + LINEAR_ATTENTION_EPS;
            else
                for (const float* sums : {state.vector, recent_vector})
                    add_row(o, role == Role::DQ ? *delta(row_head, t) : 1.0f, sums, n);
        }
        store(o, t, norm);
    }
    merge();
    if (x.reversed) {
        const float carry = std::exp(before);
        scale_row(state.rows, carry, x.E * n);
        scale_row(state.vector, carry, vector);
    }
}

void Walk::chunked() {
    alignas(64) float a[CHUNK * MAX_CHUNKED], b[CHUNK * MAX_CHUNKED], bt[CHUNK * MAX_CHUNKED], c[CHUNK * MAX_CHUNKED],
        o[CHUNK * MAX_CHUNKED], score[CHUNK * CHUNK], beta[CHUNK], into[CHUNK], within[CHUNK], added[MAX_CHUNKED],
        norm[CHUNK] = {};
    double gamma[CHUNK];  // Σ of the gates from the chunk's first token on; in double, for differences of them
    const int64_t width = state.width, E = round_up(x.E), chunks = ceil_div(length, CHUNK);
    for (int64_t step = 0; step < chunks; step++) {
        const int64_t t = (x.reversed ? chunks - 1 - step : step) * CHUNK, n = std::min(CHUNK, length - t);
        const int64_t padded = round_up(n);
        // What the state decays by until it reaches row i (into), what row j has decayed by when it enters the state
        // that is handed on (within).
        float carry = 1;
        if (p.gate) {
            double sum = 0;
            for (int64_t i = 0; i < n; i++) gamma[i] = sum += double(gate(t + i));
            std::fill(gamma + n, gamma + padded, sum);
            for (int64_t i = 0; i < n; i++) {
                const float from_start = float(std::exp(gamma[i])), to_end = float(std::exp(sum - gamma[i]));
                into[i] = x.reversed ? to_end : from_start;
                within[i] = x.reversed ? from_start : to_end;
            }
            carry = float(std::exp(sum));
        }
        load_rows(a, E, p, x.a, token0 + t, n, row_head);
        const bool vector = state.vector_size > 0;
        if (role == Role::DQ && vector) set_delta(a, E, t, n);

        product(o, width, a, E, state.rows, width, n, width, x.E, false);
        for (int64_t i = 0; i < n && vector; i++) {
            if (role == Role::Out)
                norm[i] = dot(a + i * E, state.vector, x.E);
            else
                add_row(o + i * width, role == Role::DQ ? delta(row_head, t)[i] : 1.0f, state.vector, width);
        }
        if (p.gate) {
            for (int64_t i = 0; i < n; i++) {
                scale_row(o + i * width, into[i], width);
                if (vector) norm[i] *= into[i];
            }
            scale_row(state.rows, carry, x.E * width);
            scale_row(state.vector, carry, round_up(state.vector_size));
        }

        for (int64_t h = first_head; h < first_head + heads; h++) {
            load_rows(b, E, p, x.b, token0 + t, n, h);
            load_rows(c, width, p, x.c, token0 + t, n, h);
            pack_lanes(bt, CHUNK, b, E, n, x.E, 1);
            if (role == Role::DK && vector) {
                std::copy_n(delta(h, t), n, beta);
                std::fill(beta + n, beta + padded, 0.0f);
            }
            for (int64_t i = 0; i < n; i += LANES) {  // 16 rows and the keys that any of them sees
                const int64_t rows = std::min(LANES, n - i), begin = x.reversed ? i : 0,
                              end = x.reversed ? padded : i + LANES;
                product(score + i * CHUNK + begin, CHUNK, a + i * E, E, bt + begin, CHUNK, rows, end - begin, x.E,
                        false);
                for (int64_t r = i; r < i + rows; r++) {
                    const float sum =
                        finish_scores(score + r * CHUNK, begin, end, r, x.reversed,
                                      role == Role::DQ && vector ? delta(row_head, t)[r] : 0.0f,
                                      role == Role::DK && vector ? beta : nullptr, p.gate ? gamma : nullptr);
                    if (role == Role::Out && vector) norm[r] += sum;
                }
                product(o + i * width, width, score + i * CHUNK + begin, CHUNK, c + begin * width, width, rows, width,
                        std::min(end, n) - begin, true);
            }
            for (int64_t j = 0; j < n && p.gate; j++) scale_row(b + j * E, within[j], E);
            // What the chunk adds is summed by itself first.
            tile_AtB(state.rows, width, b, E, c, width, x.E, width / LANES, n, Into::Added);
            if (!vector) continue;
            const int64_t columns = role == Role::Out ? E : width;
            std::fill(added, added + columns, 0.0f);
            for (int64_t j = 0; j < n; j++) {
                if (role == Role::Out)
                    add_row(added, 1, b + j * E, columns);
                else
                    add_row(added, (role == Role::DK ? beta[j] : 1.0f) * (p.gate ? within[j] : 1.0f), c + j * width,
                            columns);
            }
            add_row(state.vector, 1, added, columns);
        }
        for (int64_t i = 0; i < n; i++)
            store(o + i * width, t + i, role == Role::Out && vector ? norm[i] + LINEAR_ATTENTION_EPS : 0.0f);
    }
}

// A product over all sequences and heads.
void run(const Pass& p, Role role) {
    using Form = LinearAttentionType::Form;
    const int64_t rows = role == Role::DV || role == Role::DK ? p.z.NKV : p.z.NH;
    const bool chunked =
        p.type.form == Form::Chunked || (p.type.form == Form::Automatic && std::max(p.z.E, p.z.M) <= MAX_CHUNKED);
#pragma omp parallel for schedule(dynamic)
    for (int64_t task = 0; task < p.z.S * rows; task++) {
        alignas(64) float memory[MAX_SIZE * MAX_SIZE], vector[MAX_SIZE];
        State state{memory, vector, 0, 0, 0, 0};
        Walk walk(p, role, task / rows, task % rows, state);
        if (chunked)
            walk.chunked();
        else
            walk.recurrent();
        walk.finish();
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
    p.z = z, p.type = type, p.cum = sequences.cum.as<int32_t>();
    p.q = q, p.k = k, p.v = v, p.gate = gate, p.initial = initial;
    return p;
}

}  // namespace

int64_t linear_attention_forward_scratch(const LinearAttentionSizes&) {
    return 0;
}

void linear_attention_forward(Tensor out, Tensor norm, const LinearAttentionState& final, Tensor q, Tensor k, Tensor v,
                              Tensor gate, const LinearAttentionState& initial,
                              const LinearAttentionSequences& sequences, const LinearAttentionType& type,
                              Tensor scratch, Stream) {
    const char* op = "linear_attention_forward";
    LinearAttentionSizes z = check_linear_attention(op, DType::F32, q, k, v, gate, initial, sequences, type);
    check_linear_attention_forward(op, DType::F32, z, out, norm, final, type, scratch);
    Pass p = pass_of(op, z, q, k, v, gate, initial, sequences, type);
    p.out = out, p.final = final;
    if (type.normalise) p.norm = norm;
    run(p, Role::Out);
    zero_tail(out, p.cum[z.S]);
    for (int64_t h = 0; h < z.NH && p.norm; h++) std::fill(p.norm_of(h) + p.cum[z.S], p.norm_of(h) + z.N, 0.0f);
}

// δ, φ(q)·dφ(q), φ(k)·dφ(k), and a number for each state.
int64_t linear_attention_backward_scratch(const LinearAttentionSizes& z) {
    return (2 * z.NH * z.N + z.NKV * z.N + (z.states ? z.S * z.NKV : 0)) * int64_t(sizeof(float));
}

void linear_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor dgate, const LinearAttentionState& dinitial,
                               Tensor dout, const LinearAttentionState& dfinal, Tensor q, Tensor k, Tensor v,
                               Tensor gate, const LinearAttentionState& initial, Tensor out, Tensor norm,
                               const LinearAttentionSequences& sequences, const LinearAttentionType& type,
                               Tensor scratch, Stream) {
    const char* op = "linear_attention_backward";
    LinearAttentionSizes z = check_linear_attention(op, DType::F32, q, k, v, gate, initial, sequences, type);
    check_linear_attention_backward(op, DType::F32, z, dq, dk, dv, dgate, dinitial, dout, dfinal, gate, out, norm, type,
                                    scratch);
    Pass p = pass_of(op, z, q, k, v, gate, initial, sequences, type);
    p.out = out, p.norm = norm, p.dout = dout, p.dq = dq, p.dk = dk, p.dv = dv, p.dgate = dgate;
    p.dinitial = dinitial, p.dfinal = dfinal;
    p.delta = static_cast<float*>(scratch.data);
    p.query_dots = p.delta + z.NH * z.N;
    p.key_dots = p.query_dots + z.NH * z.N;
    if (gate && dfinal.s) p.end_dots = p.key_dots + z.NKV * z.N;
    for (const Role role : {Role::DQ, Role::DV, Role::DK}) run(p, role);
    for (const Tensor& gradient : {dq, dk, dv}) zero_tail(gradient, p.cum[z.S]);
    if (!gate) return;

    // dg_t: what flows through the decay at t, a running sum from the end.
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

void linear_attention_decode(Tensor out, const LinearAttentionState& state, Tensor q, Tensor k, Tensor v, Tensor gate,
                             const LinearAttentionType& type, Stream) {
    const char* op = "linear_attention_decode";
    const LinearAttentionSizes z = check_linear_attention_decode(op, DType::F32, out, state, q, k, v, gate, type);
    Pass p{};
    p.z = z, p.type = type, p.q = q, p.k = k, p.v = v, p.out = out;
    const Product x = product_of(p, Role::Out);
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
        const float carry = gate ? std::exp(gate.as<float>()[s * gate.stride[0] + kv]) : 1.0f;
        const float* value = head_rows(v, s, kv)[0];
        float *rows = state.s.as<float>() + at * z.E * z.M, *sums = nullptr;
        for (int64_t e = 0; e < z.E; e++)
            for (int64_t m = 0; m < z.M; m++) rows[e * z.M + m] = rows[e * z.M + m] * carry + b[e] * value[m];
        if (type.normalise) {
            sums = state.z.as<float>() + at * z.E;
            for (int64_t e = 0; e < z.E; e++) sums[e] = sums[e] * carry + b[e];
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

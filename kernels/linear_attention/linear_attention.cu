// The launches of linear attention: how sequences are split over T, the scratch, and the kernels of each pass.
//
// Blocks work on splits of sequences (linear_attention.cuh). There are as few splits as fill the GPU, so that most of
// the memory traffic is q, k, v and out themselves. With several splits a pass has three kernels: KeyState (or
// QueryState) sums each split by itself, state passing turns the sums into the state that each split begins with, and
// the result's kernel starts from there. A single split needs only the last one. There are no float atomics.
//
// One case: B = 8, T = 4096, 12 heads of 64, H100 (132 SMs, 3 blocks per SM). 132·3 = 396 blocks are wanted, and
// 8·4096·12 / 396 = 993 tokens for each, so 4 splits of 1,024 tokens: 8·12·4 = 384 blocks of 16 chunks, 97% of the 396.
#include "kernels/linear_attention/linear_attention.h"

#include "kernels/linear_attention/linear_attention.cuh"
#include "kernels/linear_attention/linear_attention_check.h"
#include "kernels/linear_attention/linear_attention_layout.h"

namespace {

using namespace linear_attention;

static_assert(MIN_SPLIT == 4 * MAX_CHUNK);

// The splits of each sequence, and their tokens.
struct Splits {
    int64_t count, length;
};

Splits splits_of(const LinearAttentionSizes& z) {
    // Splits end at chunk boundaries, whichever kernel takes them.
    constexpr int64_t GRANULARITY = MAX_CHUNK;
    const int64_t blocks = wanted_blocks(z, num_sms());
    // dk and dv have a block for each KV head.
    const int64_t wanted_tokens = std::max(ceil_div(z.N * z.NKV, blocks), MIN_SPLIT);
    const int64_t count = std::max<int64_t>(1, (z.max_length + wanted_tokens / 2) / wanted_tokens);
    const int64_t length = std::max<int64_t>(1, ceil_div(ceil_div(z.max_length, count), GRANULARITY)) * GRANULARITY;
    const Splits splits{std::max<int64_t>(1, ceil_div(z.max_length, length)), length};
    // Many sequences of which some are long (packed documents) fill the GPU without splits and need no states.
    if (splits.count == 1 || z.S * (splits.count + 1) <= max_states(z, blocks)) return splits;
    return {1, ceil_div(z.max_length, GRANULARITY) * GRANULARITY};
}

// All tensors of a forward or backward pass, and the launches of its kernels.
template <typename T>
struct Pass {
    const char* op;
    LinearAttentionSizes z;
    LinearAttentionType type;
    Stream stream;
    Tensor cum, q, k, v, gate, out, norm, dout, dq, dk, dv;
    LinearAttentionState initial, dfinal;
    float *key_states, *key_decays, *query_states, *query_decays, *delta, *query_dots, *key_dots;
    bool aligned;

    bool recurrent() const {
        using Form = LinearAttentionType::Form;
        return type.form == Form::Recurrent || std::max(z.E, z.M) > LINEAR_ATTENTION_MAX_CHUNKED_SIZE;
    }
    Splits splits() const {
        const int64_t all = std::max<int64_t>(1, z.max_length);
        return recurrent() ? Splits{1, all} : splits_of(z);
    }
    int64_t state_size() const { return z.E * z.M + (type.normalise ? z.E : 0); }
    bool elu() const { return type.features == FeatureMap::EluPlusOne; }
    // Whose state is Sᵀ or Rᵀ.
    static constexpr bool transposed(Result result) { return result == Result::DQ || result == Result::DK; }
    int64_t row_heads(Result result) const { return is_reversed(result) || state_only(result) ? z.NKV : z.NH; }

    // The table of linear_attention_common.h.
    void set_operands(Params<T>& p, Result result) const {
        const Heads<T> query = heads_of<T>(q), key = heads_of<T>(k), value = heads_of<T>(v),
                       gradient = heads_of<T>(dout);
        switch (result) {
            case Result::Out:
                p.a = query;
                p.b = key;
                p.c = value;
                p.out = heads_of<T>(out);
                break;
            case Result::DQ:
                p.a = gradient;
                p.b = value;
                p.c = key;
                p.out = heads_of<T>(dq);
                p.inputs = query;
                p.forward_out = heads_of<T>(out);
                break;
            case Result::DV:
                p.a = key;
                p.b = query;
                p.c = gradient;
                p.out = heads_of<T>(dv);
                break;
            case Result::DK:
                p.a = value;
                p.b = gradient;
                p.c = query;
                p.out = heads_of<T>(dk);
                p.inputs = key;
                break;
            case Result::KeyState:
                p.b = key;
                p.c = value;
                break;
            case Result::QueryState:
                p.b = query;
                p.c = gradient;
                break;
        }
    }

    Params<T> params(Result result) const {
        Params<T> p{};
        set_operands(p, result);
        p.E = int(transposed(result) ? z.M : z.E);
        p.M = int(transposed(result) ? z.E : z.M);
        if (gate) {
            p.gate = gate.as<float>();
            p.gate_stride = gate.stride[0];
        }
        if (norm) {
            p.norm = norm.as<float>();
            p.norm_stride = norm.stride[0];
        }
        if (gate) p.dots = result == Result::DQ ? query_dots : result == Result::DK ? key_dots : nullptr;
        p.delta = delta;
        p.states = is_reversed(result) ? query_states : key_states;
        p.decays = is_reversed(result) ? query_decays : key_decays;
        p.state_size = state_size();
        p.state_vector = z.E * z.M;
        p.state_row = transposed(result) ? 1 : z.M;
        p.state_column = transposed(result) ? z.M : 1;
        p.cum = cum.as<int32_t>();
        p.S = z.S;
        p.N = z.N;
        p.NH = z.NH;
        p.NKV = z.NKV;
        p.splits = int(splits().count);
        p.split_length = int(splits().length);
        p.elu = elu();
        p.normalise = type.normalise;
        p.aligned = aligned;
        return p;
    }

    // Columns of the kernels for Hopper GPUs; 0: they do not support this pass.
    int hopper() const {
#ifdef HAVE_SM90A
        if constexpr (std::is_same_v<T, bf16>) return hopper_columns(params(Result::Out));
#endif
        return 0;
    }

    ColumnBlocks column_blocks(Result result) const {
        if (const int columns = hopper()) return {1, columns / 64};
        return transposed(result) ? chunked_column_blocks<T>(z.M, z.E) : chunked_column_blocks<T>(z.E, z.M);
    }

    // flag: with_last_split of KeyState and QueryState, has_states of the others.
    Params<T> params(Result result, bool flag) const {
        Params<T> p = params(result);
        p.column_blocks = int(column_blocks(result).blocks);
        (state_only(result) ? p.with_last_split : p.has_states) = flag;
        return p;
    }

    void run_chunked(Result result, bool flag) const {
        const Params<T> p = params(result, flag);
        const int64_t sequences = state_only(result) ? z.S : z.S + 1;  // S: the tokens after the last sequence
        const int64_t blocks = sequences * p.splits * row_heads(result) * p.column_blocks;
#ifdef HAVE_SM90A
        if constexpr (std::is_same_v<T, bf16>)
            if (hopper()) {
                if (result != Result::DV) return launch_hopper(op, result, p, blocks, stream);
                return launch_hopper_dv_dk(op, p, params(Result::DK, flag), blocks, stream);
            }
#endif
        launch_chunked<T>(op, result, p, blocks, stream);
    }

    // The states that splits begin with: S and z, or R and r. has_sums: `states` holds the splits' sums; has_last_sum:
    // also that of the last split.
    void run_state_passing(bool reversed, bool has_sums, bool has_last_sum, const LinearAttentionState& from,
                           const LinearAttentionState& to) const {
        const auto data = [](const Tensor& t) { return t ? t.as<float>() : nullptr; };
        StatePassingParams p{};
        p.states = reversed ? query_states : key_states;
        if (gate) p.decays = reversed ? query_decays : key_decays;
        p.initial = data(from.s);
        p.initial_z = data(from.z);
        p.final = data(to.s);
        p.final_z = data(to.z);
        if (to.rows) {
            p.rows = to.rows.as<int32_t>();
            p.num_rows = to.s.shape[0];
        }
        p.cum = cum.as<int32_t>();
        p.N = z.N;
        p.NKV = z.NKV;
        p.size = state_size();
        p.matrix = z.E * z.M;
        p.splits = int(splits().count);
        p.split_length = int(splits().length);
        p.reversed = reversed;
        p.has_sums = has_sums;
        p.has_last_sum = has_last_sum;
        const bool state_aligned = z.E % 4 == 0 && rows_aligned({from.s, from.z, to.s, to.z});
        launch_state_passing(op, p, z.S, state_aligned, stream);
    }

    // Computes the states that the splits begin with and, into `to`, the final ones. Returns whether the kernels that
    // follow must load them. state_at_end: the caller needs the state after the last token too.
    bool run_states(Result result, const LinearAttentionState& from, const LinearAttentionState& to,
                    bool state_at_end) const {
        const bool last = to.s || state_at_end, several = splits().count > 1;
        if (!last && !several && !from.s) return false;
        if (last || several) run_chunked(result, last);
        run_state_passing(is_reversed(result), last || several, last, from, to);
        return several || from.s;
    }

    void run_scan(Result result, const LinearAttentionState& from, const LinearAttentionState& to,
                  float* end_state) const {
        launch_scan<T>(op, {params(result), result, from, to, end_state}, stream);
    }

    void run_dots(float* to, const Tensor& gradient, const Tensor& inputs) const {
        launch_dots<T>(op, {to, heads_of<T>(gradient), heads_of<T>(inputs), z.N, gradient.shape[1], int(z.E), elu()},
                       stream);
    }

    // states: gradients flow between splits or through the end of a sequence.
    void run_gate_gradient(const Tensor& dgate, bool states, int64_t query_blocks, int64_t key_blocks) const {
        GateGradientParams p{};
        p.dgate = dgate.as<float>();
        p.stride = dgate.stride[0];
        p.query_dots = query_dots;
        p.key_dots = key_dots;
        if (states) {
            p.key_states = key_states;
            p.query_states = query_states;
        }
        p.cum = cum.as<int32_t>();
        p.S = z.S;
        p.N = z.N;
        p.NH = z.NH;
        p.NKV = z.NKV;
        p.size = state_size();
        p.splits = int(splits().count);
        p.split_length = int(splits().length);
        p.query_blocks = int(query_blocks);
        p.key_blocks = int(key_blocks);
        p.has_dfinal = bool(dfinal.s);
        launch_gate_gradient(op, p, stream);
    }

    void backward_recurrent(const Tensor& dgate, const LinearAttentionState& dinitial, bool state_at_end) const {
        run_scan(Result::DQ, initial, {}, state_at_end ? key_states : nullptr);
        run_scan(Result::DV, dfinal, {dinitial.s, Tensor{}}, nullptr);
        run_scan(Result::DK, dfinal, {Tensor{}, dinitial.z}, nullptr);
        if (!gate) return;
        run_dots(query_dots, dq, q);
        run_dots(key_dots, dk, k);
        if (state_at_end) run_state_passing(true, false, false, dfinal, {});
        run_gate_gradient(dgate, state_at_end, 1, 1);
    }

    void backward_chunked(const Tensor& dgate, const LinearAttentionState& dinitial, bool state_at_end) const {
        const bool has_key_states = run_states(Result::KeyState, initial, {}, state_at_end);
        run_chunked(Result::DQ, has_key_states);
        const bool has_query_states = run_states(Result::QueryState, dfinal, dinitial, false);
        run_chunked(Result::DV, has_query_states);
        if (!hopper()) run_chunked(Result::DK, has_query_states);
        if (gate)
            run_gate_gradient(dgate, splits().count > 1 || state_at_end, column_blocks(Result::DQ).dots,
                              column_blocks(Result::DK).dots);
    }
};

template <typename T>
Pass<T> pass_of(const char* op, const LinearAttentionSizes& z, const Tensor& q, const Tensor& k, const Tensor& v,
                const Tensor& gate, const LinearAttentionState& initial, const LinearAttentionSequences& sequences,
                const LinearAttentionType& type, const Tensor& scratch, bool backward, Stream stream) {
    Pass<T> p{};
    p.op = op;
    p.z = z;
    p.type = type;
    p.stream = stream;
    p.cum = sequences.cum;
    p.q = q;
    p.k = k;
    p.v = v;
    p.gate = gate;
    p.initial = initial;
    const Layout layout(z, backward, num_sms());
    p.key_states = static_cast<float*>(scratch.data);
    p.key_decays = p.key_states + layout.states;
    if (!backward) return p;
    p.query_states = p.key_decays + layout.decays;
    p.query_decays = p.query_states + layout.states;
    p.delta = p.query_decays + layout.decays;
    p.query_dots = p.delta + layout.delta;
    p.key_dots = p.query_dots + layout.query_dots;
    return p;
}

}  // namespace

void linear_attention_forward(Tensor out, Tensor norm, const LinearAttentionState& final, Tensor q, Tensor k, Tensor v,
                              Tensor gate, const LinearAttentionState& initial,
                              const LinearAttentionSequences& sequences, const LinearAttentionType& type,
                              Tensor scratch, Stream stream) {
    const char* op = "linear_attention_forward";
    const DType dtype = check_dtype(op, q);
    LinearAttentionSizes z = check_linear_attention(op, dtype, q, k, v, gate, initial, sequences, type);
    check_linear_attention_forward(op, dtype, z, out, norm, final, type);
    check_scratch(op, scratch, linear_attention_forward_scratch(z));
    dispatch(dtype, [&](auto zero) {
        using T = decltype(zero);
        Pass<T> p = pass_of<T>(op, z, q, k, v, gate, initial, sequences, type, scratch, false, stream);
        p.out = out;
        if (type.normalise) p.norm = norm;
        if (p.recurrent()) return p.run_scan(Result::Out, initial, final, nullptr);
        p.aligned = z.E % FULL_WIDTH<T> == 0 && z.M % FULL_WIDTH<T> == 0 && rows_aligned({q, k, v, out});
        const bool has_states = p.run_states(Result::KeyState, initial, final, false);
        p.run_chunked(Result::Out, has_states);
    });
}

void linear_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor dgate, const LinearAttentionState& dinitial,
                               Tensor dout, const LinearAttentionState& dfinal, Tensor q, Tensor k, Tensor v,
                               Tensor gate, const LinearAttentionState& initial, Tensor out, Tensor norm,
                               const LinearAttentionSequences& sequences, const LinearAttentionType& type,
                               Tensor scratch, Stream stream) {
    const char* op = "linear_attention_backward";
    const DType dtype = check_dtype(op, q);
    LinearAttentionSizes z = check_linear_attention(op, dtype, q, k, v, gate, initial, sequences, type);
    check_linear_attention_backward(op, dtype, z, dq, dk, dv, dgate, dinitial, dout, dfinal, gate, out, norm, type);
    check_scratch(op, scratch, linear_attention_backward_scratch(z));
    dispatch(dtype, [&](auto zero) {
        using T = decltype(zero);
        Pass<T> p = pass_of<T>(op, z, q, k, v, gate, initial, sequences, type, scratch, true, stream);
        p.dq = dq;
        p.dk = dk;
        p.dv = dv;
        p.dout = dout;
        p.dfinal = dfinal;
        if (type.normalise) {
            p.out = out;
            p.norm = norm;
        }
        const bool state_at_end = gate && dfinal.s;  // dgate needs S after the last token
        if (p.recurrent()) return p.backward_recurrent(dgate, dinitial, state_at_end);
        p.aligned =
            z.E % FULL_WIDTH<T> == 0 && z.M % FULL_WIDTH<T> == 0 && rows_aligned({q, k, v, dout, dq, dk, dv, p.out});
        p.backward_chunked(dgate, dinitial, state_at_end);
    });
}

#include "infer/engine.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/attention/attention.h"
#include "kernels/cross_entropy.h"
#include "kernels/embedding.h"
#include "kernels/generation/decode_attention.h"
#include "kernels/generation/kv_cache.h"
#include "kernels/layernorm.h"
#include "kernels/linear_attention/decay_gate.h"
#include "kernels/linear_attention/linear_attention.h"
#include "kernels/matmul.h"
#include "kernels/rmsnorm.h"
#include "kernels/rope.h"
#include "runtime/device/convert.h"

namespace {

Activation activation(Mlp mlp) {
    return mlp == Mlp::GELU ? Activation::GELU : mlp == Mlp::SwiGLU ? Activation::SwiGLU : Activation::ReLU2;
}

void mark(std::vector<int32_t>& bits, int32_t token) {
    bits[size_t(token / 32)] |= static_cast<int32_t>(1u << (token % 32));
}

EngineOptions effective(EngineOptions o) {
    if (o.prompt_tokens == 0) o.prompt_tokens = o.slots * o.context;
    return o;
}

// Steps are cut to the longest context in doublings, so that a text of any length needs few graphs.
int64_t bucket(int64_t length, int64_t capacity) {
    int64_t b = 256;
    while (b < length) b *= 2;
    return std::min(b, capacity);
}

}  // namespace

int64_t Engine::pass_tokens() {
    return backend_device() == Device::CPU ? 512 : 8192;
}

int64_t Engine::steps_ahead() {
    return graphs_replay() ? 2 : 1;
}

Engine::Engine(const ModelConfig& model_config, const EngineOptions& engine_options, Stream s)
    : config(model_config),
      options(effective(engine_options)),
      stream(s),
      dynamic(config.positions == Positions::RoPE && config.rope_scaling.kind == RopeScaling::Kind::Dynamic &&
              options.context > config.rope_scaling.original_max_position),
      single_launch_rows(
          options.batch_invariant || config.has_linear_attention() ? 0 : decode_step_max_batch(decode_model())),
      cache(config, options.slots, options.context, options.dtype),
      states(config, options.slots),
      lengths(size_t(options.slots), 0) {
    require(options.slots > 0 && options.context > 0, "engine: ", options.slots, " texts of ", options.context,
            " tokens; both must be positive");
    require(config.positions != Positions::Learned || options.context <= config.max_positions, "a context of ",
            options.context, " tokens is beyond the model's position table of ", config.max_positions,
            " rows; shorten it (--context)");
    if (options.sampling.repeat_penalty != 1)
        marks.assign(lengths.size(), std::vector<int32_t>(size_t((config.vocab_size + 31) / 32), 0));
    plan_memory();
}

// The device may still be at work, and write to this memory.
Engine::~Engine() {
    try {
        synchronize(stream);
    } catch (const Error&) {  // a destructor has nobody to tell
    }
}

void Engine::plan_memory() {
    const ModelConfig& c = config;
    const DType T = options.dtype;
    const int64_t B = options.slots, N = std::max(std::min(pass_tokens(), options.prompt_tokens), B);
    const int64_t attention = c.heads * c.head_size, words = (c.vocab_size + 31) / 32;
    auto place = [&](Tensor* t, const char* name, DType dtype, std::vector<int64_t> shape, int64_t first,
                     int64_t last_use) { bindings.emplace_back(t, plan.add(name, dtype, shape, first, last_use)); };
    // The moments of a block, and after all blocks those of the head and the draw.
    enum { QKV, ATTENTION, PROJ, FC, FCPROJ, HEAD, DRAW };
    auto kept = [&](Tensor* t, const char* name, DType dtype, std::vector<int64_t> shape) {
        place(t, name, dtype, std::move(shape), QKV, DRAW);
    };
    kept(&tokens, "tokens", DType::I32, {N});
    kept(&positions, "positions", DType::I32, {N});
    kept(&rows, "rows", DType::I32, {N});
    kept(&iota, "iota", DType::I32, {N});
    kept(&cum_q, "cum_q", DType::I32, {2 * B + 1});
    kept(&cum_k, "cum_k", DType::I32, {2 * B + 1});
    if (c.positions == Positions::RoPE)
        kept(&table, "rope_table", DType::F32, {dynamic ? N : options.context, c.head_size / 2, 2});
    kept(&x, "x", T, {N, c.channels});
    place(&qkv, "qkv", T, {N, c.qkv_channels()}, QKV, ATTENTION);
    place(&att, "att", T, {N, attention}, ATTENTION, PROJ);
    const bool has_linear = c.has_linear_attention();
    const LinearAttentionSizes linear{N, B, c.heads, c.kv_heads, c.head_size, c.head_size, std::min(N, pass_tokens())};
    if (has_linear) {
        kept(&linear_cum, "linear_cum", DType::I32, {B + 1});
        kept(&linear_slots, "linear_slots", DType::I32, {B});
        place(&past_s, "past_s", DType::F32, {B, c.kv_heads, c.head_size, c.head_size}, ATTENTION, ATTENTION);
    }
    if (c.layers_of('L')) place(&past_z, "past_z", DType::F32, {B, c.kv_heads, c.head_size}, ATTENTION, ATTENTION);
    if (c.layers_of('G')) {
        place(&normed, "normed", T, {N, c.channels}, QKV, QKV);
        place(&gate, "gate", DType::F32, {N, c.kv_heads}, QKV, ATTENTION);
        place(&mix, "mix", T, {N, attention}, ATTENTION, ATTENTION);
    }
    place(&act, "act", T, {N, c.ffn}, FC, FCPROJ);
    const int64_t scratch_bytes =
        std::max({linear_scratch(N, c.channels, c.qkv_channels(), T), linear_scratch(N, attention, c.channels, T),
                  linear_scratch(N, c.channels, c.fc_channels(), T), linear_scratch(N, c.ffn, c.channels, T),
                  linear_scratch(B, c.channels, c.padded_vocab(), T)});
    kept(&scratch, "scratch", DType::U8, {scratch_bytes});
    const int64_t attention_bytes =
        std::max(attention_forward_scratch(), has_linear ? linear_attention_forward_scratch(linear) : 0);
    if (attention_bytes > 0) kept(&attention_scratch, "attention_scratch", DType::U8, {attention_bytes});
    kept(&decode_scratch, "decode_scratch", DType::U8,
         {decode_attention_scratch(B, c.heads, c.head_size, options.context)});
    if (single_launch_rows > 0) kept(&step_scratch, "step_scratch", DType::U8, {decode_step_scratch(decode_model())});
    kept(&last, "last", T, {B, c.channels});
    kept(&last_rows, "last_rows", DType::I32, {B});
    kept(&logits_out, "logits", T, {B, c.padded_vocab()});
    kept(&losses, "losses", DType::F32, {B});
    kept(&ids, "ids", DType::I32, {B});
    kept(&turn, "turn", DType::I32, {1});
    kept(&slot_ids, "slots", DType::I32, {B});
    kept(&step_positions, "step_positions", DType::I32, {B});
    kept(&sequences, "sequences", DType::I64, {B});
    kept(&steps, "steps", DType::I64, {B});
    if (!marks.empty()) kept(&seen, "seen", DType::I32, {B, words});
    place(&draw_scratch, "draw_scratch", DType::U8, {sampling_scratch(B, c.vocab_size, options.sampling)}, DRAW, DRAW);
    plan.assign_offsets();
}

void Engine::allocate(const InferenceWeights& model_weights) {
    weights = model_weights;
    cache.allocate();
    states.allocate();
    memory = Arena(plan.bytes(), "activations");
    for (const auto& [tensor, entry] : bindings) {
        const ArenaPlan::Entry& e = plan.entries()[size_t(entry)];
        *tensor = memory.at(e.offset, e.dtype, e.shape);
    }
    const int64_t N = tokens.shape[0], B = options.slots;
    staging = std::make_unique<Staging>(
        (4 * N + 10 * B + 9) * 4 + (dynamic ? table.bytes() : 0) + B * (6 * 4 + 2 * 8) + (seen ? seen.bytes() : 0), 4);
    results = HostMemory(host_alloc(size_t(B) * 16), host_free);
    const Tensor rows_of_results = make_tensor(results.get(), DType::I32, Device::CPU, {2, 2 * B});
    told = rows_of_results.columns(0, B);
    for (int i = 0; i < 2; i++) {
        queue[i].tokens = rows_of_results.as<int32_t>() + i * rows_of_results.stride[0];
        queue[i].losses = reinterpret_cast<float*>(queue[i].tokens + B);
    }
    device_fill(decode_scratch.data, 0, size_t(decode_scratch.bytes()), stream);
    if (single_launch_rows > 0) {
        std::vector<Tensor> k, v;
        for (int64_t l = 0; l < config.layers; l++) k.push_back(cache.k(l)), v.push_back(cache.v(l));
        decode_step_prepare(step_scratch, decode_model(), weights, k, v, stream);
    }
    std::vector<int32_t> count(size_t(N), 0);
    std::iota(count.begin(), count.end(), 0);
    copy_to_device(iota.data, count.data(), size_t(iota.bytes()), stream);
    if (table && !dynamic) {
        std::vector<float> host(size_t(table.numel()));
        // Dynamic scaling changes nothing up to the original length, where this table ends.
        rope_table(host_tensor(host.data(), {options.context, config.head_size / 2, 2}), config.rope_theta,
                   config.rope_scaling);
        copy_to_device(table.data, host.data(), host.size() * sizeof(float), stream);
    }
    synchronize(stream);  // the copies' sources end here

    const auto count_bytes = [&](const Tensor& t) { weight_bytes += t ? t.bytes() : 0; };
    for (const BlockWeights& b : weights.blocks) {
        for (const NormWeights& norm : {b.norm1, b.norm2}) count_bytes(norm.weight), count_bytes(norm.bias);
        for (const LinearWeights& w : {b.qkv, b.proj, b.fc, b.fcproj, b.gate})
            count_bytes(w.weight), count_bytes(w.bias);
        count_bytes(b.headnorm);
    }
    count_bytes(weights.head);
    prepare_steps();
    device_fill(turn.data, 0, size_t(turn.bytes()), stream);
}

// Steps of a full batch on a GPU, before the first text: with products of many rows the library's fastest algorithms
// are found by timing them, and for every length that a text may grow to the step is recorded, which takes milliseconds
// that nobody should wait for between two tokens. All texts are finished; what is computed means nothing and is
// overwritten.
void Engine::prepare_steps() {
    const int64_t B = options.slots;
    if (!graphs_replay()) return;
    for (const Tensor& t : {step_positions, slot_ids}) device_fill(t.data, 0xFF, size_t(t.bytes()), stream);  // −1
    for (const Tensor& t : {ids, sequences, steps, turn}) device_fill(t.data, 0, size_t(t.bytes()), stream);
    if (!options.batch_invariant && B > LINEAR_SMALL_N) {
        matmul_tuning(true, stream);
        decode_step(B, bucket(1, options.context));
        matmul_tuning(false, stream);
    }
    for (int64_t length = 0; length < options.context;) {
        length = bucket(length + 1, options.context);
        graphs[{B, length}].run(stream, [&] { decode_step(B, length); });
    }
}

// x [N, C] through all blocks. attend(l) computes att from qkv and the cache.
template <typename Attend>
void Engine::blocks(Tensor hidden, bool batch_invariant, Attend attend) {
    const int64_t N = hidden.shape[0];
    const auto layer = [&](Tensor out, Tensor inp, const NormWeights& norm, const LinearWeights& w, Activation f,
                           Tensor residual) {
        const InputNorm before{norm.weight, norm.bias, static_cast<float>(config.norm_eps),
                               config.norm == Norm::LayerNorm};
        linear(out.rows(0, N), inp.rows(0, N), before, w.weight, w.bias, f, residual, scratch, batch_invariant, stream);
    };
    for (int64_t l = 0; l < config.layers; l++) {
        const BlockWeights& w = weights.blocks[size_t(l)];
        if (config.attention_type(l) == 'G') {  // the gate reads the norm's output too
            const Tensor out = normed.rows(0, N);
            const float eps = static_cast<float>(config.norm_eps);
            if (config.norm == Norm::LayerNorm)
                layernorm_forward(out, {}, {}, {}, hidden, {}, w.norm1.weight, w.norm1.bias, eps, stream);
            else
                rmsnorm_forward(out, {}, {}, hidden, {}, w.norm1.weight, eps, stream);
            decay_gate_forward(gate.rows(0, N), out, w.gate.weight, w.gate.bias, stream);
            layer(qkv, normed, {}, w.qkv, Activation::None, {});
        } else {
            layer(qkv, hidden, w.norm1, w.qkv, Activation::None, {});
        }
        attend(l);
        layer(hidden, att, {}, w.proj, Activation::None, hidden);
        layer(act, hidden, w.norm2, w.fc, activation(config.mlp), {});
        layer(hidden, act, {}, w.fcproj, Activation::None, hidden);
    }
}

// att of a layer of linear attention: attend(q, k and v, turned; out; gate; kind) computes its out [N, NH, HS]. angles:
// rows of the table.
template <typename Attend>
void Engine::mix_linear(int64_t l, int64_t N, const Tensor& angles, Attend attend) {
    const Tensor packed = qkv.rows(0, N);
    if (config.uses_rope(l)) rope(split_qk(config, packed), angles, table, false, stream);
    const bool gated = config.attention_type(l) == 'G';
    const Tensor out = (gated ? mix : att).rows(0, N);
    attend(split_qkv(config, packed), split_heads(out, config.heads), gated ? gate.rows(0, N) : Tensor{},
           linear_attention_type(config.attention_type(l)));
    if (!gated) return;
    rmsnorm_forward(head_matrix(att.rows(0, N), config.heads), {}, {}, head_matrix(out, config.heads), {},
                    weights.blocks[size_t(l)].headnorm, static_cast<float>(config.norm_eps), stream);
}

// Angles by the length of each token's text, where that changes them. What is in the cache stays as it was turned, as
// in transformers.
void Engine::put_angles(const std::vector<int32_t>& places, const std::vector<int64_t>& text_lengths) {
    if (!dynamic) return;
    std::vector<float> host(places.size() * size_t(config.head_size));
    const int64_t N = int64_t(places.size());
    rope_rows(host_tensor(host.data(), {N, config.head_size / 2, 2}), places.data(), text_lengths.data(),
              config.rope_theta, config.rope_scaling);
    staging->put(table.data, host.data(), int64_t(host.size() * sizeof(float)), stream);
}

// A copy of the states in the rows that `from` names: a pass reads them in more than one place while it writes the new
// ones.
LinearAttentionState Engine::past_states(const LinearAttentionState& from) {
    const auto copy = [&](const Tensor& planned, const Tensor& all) {  // rows by their numbers, as of a table
        const auto flat = [](const Tensor& t) {
            return make_tensor(t.data, t.dtype, t.device, {t.shape[0], t.shape[0] ? t.numel() / t.shape[0] : 0});
        };
        const Tensor to = planned.rows(0, from.rows.shape[0]);
        embedding_forward(flat(to), from.rows, from.rows, flat(all), {}, stream);
        return to;
    };
    return {copy(past_s, from.s), from.z ? copy(past_z, from.z) : Tensor{}};
}

// Packed pieces through the model. The last token of each prompt that ends here leaves its row for the head in `last`,
// from row first_finished on.
void Engine::pass(const std::vector<Piece>& unsorted, int64_t first_finished) {
    // Keys lie in order of slots. Between two sequences' keys lie rows of the cache that nobody reads: sequences
    // without queries.
    std::vector<Piece> pieces = unsorted;
    std::sort(pieces.begin(), pieces.end(),
              [](const Piece& a, const Piece& b) { return a.prompt->slot < b.prompt->slot; });
    std::vector<int32_t> token, place, row, q_ends{0}, k_ends{0}, ends{0}, slots;
    std::vector<int64_t> text_lengths;
    std::map<const Prompt*, int32_t> last_token;
    int64_t longest = 0;
    const bool has_past =
        std::any_of(pieces.begin(), pieces.end(), [&](const Piece& p) { return length(p.prompt->slot) > 0; });
    for (const Piece& p : pieces) {
        const int64_t n = p.end - p.begin, past = lengths[size_t(p.prompt->slot)],
                      first_row = p.prompt->slot * options.context;
        for (int64_t i = 0; i < n; i++) {
            token.push_back(p.prompt->tokens[size_t(p.begin + i)]);
            place.push_back(static_cast<int32_t>(past + i));
            row.push_back(static_cast<int32_t>(first_row + past + i));
            text_lengths.push_back(past + n);
        }
        q_ends.push_back(q_ends.back());
        k_ends.push_back(static_cast<int32_t>(first_row));
        q_ends.push_back(q_ends.back() + static_cast<int32_t>(n));
        k_ends.push_back(static_cast<int32_t>(first_row + past + n));
        ends.push_back(q_ends.back());
        slots.push_back(static_cast<int32_t>(p.prompt->slot));
        if (has_past && past == 0) states.clear(p.prompt->slot, stream);
        longest = std::max(longest, n);
        last_token[p.prompt] = static_cast<int32_t>(token.size()) - 1;
        lengths[size_t(p.prompt->slot)] += n;
    }
    std::vector<int32_t> finished;
    for (const Piece& p : unsorted)
        if (p.end == int64_t(p.prompt->tokens.size())) finished.push_back(last_token[p.prompt]);

    staging->next();
    const auto put = [&](const Tensor& planned, const std::vector<int32_t>& host) {
        const Tensor t = planned.rows(0, int64_t(host.size()));
        if (!host.empty()) staging->put(t.data, host.data(), t.bytes(), stream);
        return t;
    };
    const Tensor token_ids = put(tokens, token), token_places = put(positions, place), token_rows = put(rows, row);
    put_angles(place, text_lengths);
    AttentionSequences sequences_in;
    sequences_in.cum_q = put(cum_q, q_ends), sequences_in.cum_k = put(cum_k, k_ends);
    sequences_in.max_q = longest, sequences_in.max_k = options.slots * options.context;
    const Tensor finished_rows = put(last_rows, finished);
    LinearAttentionSequences texts;
    Tensor text_slots;
    if (linear_cum) texts = {put(linear_cum, ends), longest}, text_slots = put(linear_slots, slots);

    const ModelConfig& c = config;
    const int64_t N = int64_t(token.size()), Q = c.heads * c.head_size;
    const Tensor hidden = x.rows(0, N);
    embedding_forward(hidden, token_ids, token_places, weights.wte, weights.wpe, stream);
    blocks(hidden, false, [&](int64_t l) {
        if (c.attention_type(l) != 'S') {
            return mix_linear(l, N, table ? angle_rows(N) : Tensor{},
                              [&](const QkvHeads& h, Tensor out, Tensor g, const LinearAttentionType& kind) {
                                  const LinearAttentionState end = states.layer(l, text_slots);
                                  linear_attention_forward(out, {}, end, h.q, h.k, h.v, g,
                                                           has_past ? past_states(end) : LinearAttentionState{}, texts,
                                                           kind, attention_scratch, stream);
                              });
        }
        const Tensor k = cache.k_rows(l), v = cache.v_rows(l), heads = qkv.rows(0, N);
        kv_append(k, v, heads, token_rows, table ? angle_rows(N) : Tensor{}, table, c.heads, stream);
        attention_forward(split_heads(att.rows(0, N), c.heads), {}, split_heads(heads.columns(0, Q), c.heads), k, v,
                          sequences_in, c.attention_scale(), attention_scratch, stream);
    });
    const int64_t done = int64_t(finished.size());
    if (done > 0) {  // rows of x by their numbers, as of a table
        embedding_forward(last.rows(first_finished, first_finished + done), finished_rows, finished_rows, hidden, {},
                          stream);
    }
}

void Engine::prefill(const std::vector<Prompt>& prompts) {
    require(!pending(), "engine: prefill while a step is waiting to be read");
    int64_t total = 0;
    std::vector<bool> taken_slots(lengths.size(), false);
    for (const Prompt& p : prompts) {
        const int64_t n = int64_t(p.tokens.size());
        require(p.slot >= 0 && p.slot < options.slots && !taken_slots[size_t(p.slot)], "engine: slot ", p.slot,
                " is not one of ", options.slots, " or is given twice");
        taken_slots[size_t(p.slot)] = true;
        require(n > 0, "a prompt without tokens; give it at least one");
        require(n <= options.context - length(p.slot), "a text of ", length(p.slot) + n,
                " tokens is beyond the context of ", options.context, "; shorten it or raise --context");
        for (const int32_t id : p.tokens) {
            require(id >= 0 && id < config.vocab_size, "token ", id, " is beyond the model's vocabulary of ",
                    config.vocab_size);
        }
        total += n;
    }
    require(total <= options.prompt_tokens, "engine: prompts of ", total, " tokens, planned for ",
            options.prompt_tokens);

    if (prompts.empty()) return;
    std::vector<Text> others;
    for (const Text& t : batch) {
        if (t.retired) continue;
        require(!taken_slots[size_t(t.slot)], "engine: slot ", t.slot, " is at work");
        others.push_back(t);
    }
    batch.clear();
    for (const Prompt& p : prompts) {
        batch.push_back({p.slot, p.sequence, p.step, -1, false});
        for (const int32_t id : p.tokens)
            if (!marks.empty()) mark(marks[size_t(p.slot)], id);
    }

    // Each prompt is cut where it would be cut alone; a pass takes as many pieces as it has room for, one of a prompt.
    const int64_t room = tokens.shape[0];
    std::vector<Piece> pieces;
    int64_t used = 0, finished = 0, finished_in_pass = 0;
    const auto flush = [&] {
        if (!pieces.empty()) pass(pieces, finished);
        finished += finished_in_pass;
        pieces.clear();
        used = finished_in_pass = 0;
    };
    for (const Prompt& p : prompts) {
        const int64_t n = int64_t(p.tokens.size());
        for (int64_t begin = 0; begin < n; begin += pass_tokens()) {
            const int64_t end = std::min(begin + pass_tokens(), n);
            const bool alone = options.batch_invariant && backend_device() != Device::CPU;
            if (used + end - begin > room || begin > 0 || alone) flush();
            pieces.push_back({&p, begin, end});
            used += end - begin;
            finished_in_pass += end == n;
        }
    }
    flush();
    put_batch(false);
    head(last.rows(0, int64_t(batch.size())));
    draw(int64_t(batch.size()));
    queue_results(int64_t(batch.size()));
    repack = !others.empty();
    batch.insert(batch.begin(), others.begin(), others.end());
}

// The rows of a step, for the device. drawn: their tokens are on the host and not in `ids`.
void Engine::put_batch(bool drawn) {
    std::vector<int32_t> slot, place, token;
    std::vector<int64_t> sequence, next;
    staging->next();
    for (size_t b = 0; b < batch.size(); b++) {
        const Text& t = batch[b];
        slot.push_back(static_cast<int32_t>(t.slot));
        // advance() follows the draw after a prefill.
        place.push_back(static_cast<int32_t>(length(t.slot) - (drawn ? 0 : 1)));
        token.push_back(t.token);
        sequence.push_back(t.sequence);
        next.push_back(t.step);
        if (seen) {
            const Tensor bits = seen.rows(int64_t(b), int64_t(b) + 1);
            staging->put(bits.data, marks[size_t(t.slot)].data(), bits.bytes(), stream);
        }
    }
    const auto put = [&](const Tensor& t, const auto& host) {
        staging->put(t.data, host.data(), int64_t(host.size() * sizeof(host[0])), stream);
    };
    put(slot_ids, slot), put(step_positions, place), put(sequences, sequence), put(steps, next);
    if (drawn) put(ids, token);
}

DecodeModel Engine::decode_model() const {
    const ModelConfig& c = config;
    DecodeModel m;
    m.layers = c.layers, m.C = c.channels, m.NH = c.heads, m.NKV = c.kv_heads, m.HS = c.head_size, m.FFN = c.ffn;
    m.Vp = c.padded_vocab(), m.slots = options.slots, m.capacity = options.context, m.dtype = options.dtype;
    m.activation = activation(c.mlp), m.eps = static_cast<float>(c.norm_eps), m.scale = c.attention_scale();
    m.centred = c.norm == Norm::LayerNorm;
    return m;
}

// The final norm and the logits.
void Engine::head(Tensor hidden) {
    const InputNorm norm{weights.normf.weight, weights.normf.bias, static_cast<float>(config.norm_eps),
                         config.norm == Norm::LayerNorm};
    linear(logits_out.rows(0, hidden.shape[0]), hidden, norm, weights.head, {}, Activation::None, {}, scratch,
           options.batch_invariant, stream);
}

void Engine::draw(int64_t B) {
    const Tensor logits_rows = logits_out.rows(0, B), drawn = ids.rows(0, B);
    sample_tokens(drawn, logits_rows, config.vocab_size, sequences.rows(0, B), steps.rows(0, B), options.sampling,
                  seen ? seen.rows(0, B) : seen, draw_scratch, stream);
    if (options.logprobs) cross_entropy_forward(losses.rows(0, B), logits_rows, drawn, config.vocab_size, stream);
    advance(step_positions.rows(0, B), steps.rows(0, B), drawn, told, turn, stream);
}

void Engine::queue_results(int64_t B) {
    QueuedStep& q = queue[queued % 2];
    if (options.logprobs) copy_to_host_async(q.losses, losses.data, size_t(B) * sizeof(float), stream);
    q.done.record(stream);
    q.slots.clear();
    for (Text& t : batch) {
        q.slots.push_back(t.retired ? -1 : t.slot);
        t.step++;
    }
    queued++;
}

void Engine::decode_step(int64_t B, int64_t max_length) {
    const ModelConfig& c = config;
    const Tensor hidden = x.rows(0, B), places = step_positions.rows(0, B);
    DecodeBatch place;
    place.slots = slot_ids.rows(0, B), place.positions = places, place.max_length = max_length;
    place.inputs_ready = true;  // by the embedding's launch
    const Tensor angles = dynamic ? iota.rows(0, B) : places;
    if (table) place.table = table, place.angles = angles;
    if (B <= single_launch_rows) {
        ::decode_step(logits_out.rows(0, B), ids.rows(0, B), place, decode_model(), weights, step_scratch, stream);
        return draw(B);
    }
    embedding_forward(hidden, ids.rows(0, B), places, weights.wte, weights.wpe, stream);
    blocks(hidden, options.batch_invariant, [&](int64_t l) {
        if (c.attention_type(l) != 'S') {
            return mix_linear(
                l, B, angles, [&](const QkvHeads& h, Tensor out, Tensor g, const LinearAttentionType& kind) {
                    linear_attention_decode(out, states.layer(l, slot_ids.rows(0, B)), h.q, h.k, h.v, g, kind, stream);
                });
        }
        decode_attention(att.rows(0, B), qkv.rows(0, B), cache.k(l), cache.v(l), place, c.attention_scale(),
                         decode_scratch, stream);
    });
    head(hidden);
    draw(B);
}

int64_t Engine::active() const {
    return std::count_if(batch.begin(), batch.end(), [](const Text& t) { return !t.retired; });
}

// Half of the rows retired: better to wait until everything is read, and to close the gaps.
bool Engine::ready() const {
    const bool sparse = 2 * active() <= int64_t(batch.size());
    if (active() == 0 || queued - taken >= steps_ahead() || (pending() && (repack || sparse))) return false;
    return std::all_of(batch.begin(), batch.end(),
                       [&](const Text& t) { return t.retired || length(t.slot) < options.context; });
}

// The texts that go on, without gaps; their state comes from the host, which has read all of it.
void Engine::pack() {
    batch.erase(std::remove_if(batch.begin(), batch.end(), [](const Text& t) { return t.retired; }), batch.end());
    put_batch(true);
    repack = false;
}

void Engine::decode() {
    require(ready(), "engine: decode() before its time");
    if (!pending() && (repack || active() < int64_t(batch.size()))) pack();
    int64_t longest = 0;
    std::vector<int32_t> places;
    std::vector<int64_t> text_lengths;
    for (const Text& t : batch) {
        if (dynamic) places.push_back(static_cast<int32_t>(length(t.slot))), text_lengths.push_back(length(t.slot) + 1);
        if (!t.retired) longest = std::max(longest, ++lengths[size_t(t.slot)]);
    }
    if (dynamic) staging->next();
    put_angles(places, text_lengths);
    const int64_t B = int64_t(batch.size()), max_length = bucket(longest, options.context);
    graphs[{B, max_length}].run(stream, [&] { decode_step(B, max_length); });
    queue_results(B);
}

const Engine::Step& Engine::next() {
    require(pending(), "engine: no step is waiting to be read");
    const QueuedStep& q = queue[taken++ % 2];
    q.done.wait();
    step.slots.clear(), step.tokens.clear(), step.logprobs.clear();
    for (size_t b = 0; b < q.slots.size(); b++) {
        if (q.slots[b] < 0) continue;
        require(q.tokens[b] >= 0,
                "the model's logits are not finite; its weights are damaged or --dtype is too narrow");
        step.slots.push_back(q.slots[b]);
        step.tokens.push_back(q.tokens[b]);
        if (options.logprobs) step.logprobs.push_back(-q.losses[b]);
        if (!marks.empty()) mark(marks[size_t(q.slots[b])], q.tokens[b]);
        for (Text& t : batch)
            if (t.slot == q.slots[b]) t.token = q.tokens[b];
    }
    return step;
}

// On the device too: a step that skips the text reads less.
void Engine::retire(int64_t slot) {
    for (size_t b = 0; b < batch.size(); b++) {
        if (batch[b].slot != slot || batch[b].retired) continue;
        batch[b].retired = true;
        const int32_t finished = -1;
        staging->next();
        for (const Tensor& t : {step_positions, slot_ids})  // a cache goes by the one, states by the other
            staging->put(t.rows(int64_t(b), int64_t(b) + 1).data, &finished, sizeof finished, stream);
        return;
    }
}

int64_t Engine::forget(int64_t slot, int64_t kept) {
    require(kept >= 0 && kept <= length(slot), "engine: slot ", slot, " holds ", length(slot), " tokens, not ", kept);
    if (linear_cum && kept < length(slot)) kept = 0;  // a state can't be taken back
    lengths[size_t(slot)] = kept;
    if (kept == 0 && !marks.empty()) std::fill(marks[size_t(slot)].begin(), marks[size_t(slot)].end(), 0);
    return kept;
}

std::vector<float> Engine::logits(int64_t i) const {
    const Tensor row = logits_out.rows(i, i + 1).columns(0, config.vocab_size);
    std::string bytes(size_t(row.numel() * dtype_size(row.dtype)), '\0');
    copy_to_host(bytes.data(), row.data, bytes.size(), stream);
    std::vector<float> values(size_t(row.numel()));
    convert_to_float(values.data(), bytes.data(), row.dtype, row.numel());
    return values;
}

int64_t Engine::step_bytes() const {
    int64_t bytes = weight_bytes;
    for (const Text& t : batch)
        if (!t.retired) bytes += length(t.slot) * cache.bytes_per_token() + states.bytes_per_text();
    return bytes;
}

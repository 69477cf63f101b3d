#include "infer/engine.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

#include "kernels/activation.h"
#include "kernels/attention/attention.h"
#include "kernels/cross_entropy.h"
#include "kernels/embedding.h"
#include "kernels/generation/decode_attention.h"
#include "kernels/generation/kv_write.h"
#include "kernels/generation/token_logprobs.h"
#include "kernels/generation/topk.h"
#include "kernels/linear_attention/decay_gate.h"
#include "kernels/linear_attention/linear_attention.h"
#include "kernels/matmul.h"
#include "kernels/nf4.h"
#include "kernels/norm.h"
#include "kernels/qk_norm_all_heads.h"
#include "kernels/rope.h"
#include "kernels/softcap.h"
#include "runtime/device/convert_dtype.h"
#include "runtime/device/target.h"

namespace {

// A token that is never sampled has no bit.
void set_bit(std::vector<int32_t>& bits, int32_t token) {
    if (size_t(token / 32) < bits.size()) bits[size_t(token / 32)] |= static_cast<int32_t>(1u << (token % 32));
}

// The first model option that the fused decode step does not support; null: it supports all of them.
const char* unfused_model_option(const ModelConfig& c, const EngineOptions& o) {
    const auto packed = [&](int64_t inputs) { return can_pack(o.packing->blocks, inputs); };
    if (c.has_linear_attention()) return "--attention linear";
    if (c.norm_after) return "--norm-placement after";
    if (c.qk_norm == QkNorm::AllHeads) return "--qk-norm all-heads";
    if (o.nf4) return "--weights nf4";
    if (o.packing && !(packed(c.channels) && packed(c.heads * c.head_size) && packed(c.ffn)))
        return "--weights where some matrices are not packed";
    if (o.packing && !o.packing->uniform()) return "a GGUF file whose embedding or head has its own type";
    return nullptr;
}

// Bits of step_classes beside those of sampling_class: what a step computes after sampling, and whether its rows use
// adapters, or all of them the only one (AdapterTiles::everywhere).
constexpr uint32_t LOGPROBS = 1 << 16, TOP_LOGPROBS = 1 << 17, ADAPTERS = 1 << 18, ADAPTED_EVERYWHERE = 1 << 19;
constexpr uint32_t STEP_KERNELS = sampling_class::KERNELS | LOGPROBS | TOP_LOGPROBS | ADAPTERS | ADAPTED_EVERYWHERE;

// For so many rows linear.h and lora_rows.h have kernels of their own. More are computed by the library's matmuls, and
// adapters too where they can: it reads the inputs once (predicted, docs/log/generation.md).
constexpr int64_t SMALL_BATCH_ROWS = 64;

EngineOptions effective(EngineOptions o, const ModelConfig& config) {
    if (o.sampled_vocab == 0 || o.sampled_vocab > config.vocab_size) o.sampled_vocab = config.vocab_size;
    o.sampling_classes |= sampling_row(o.sampling, o.sampled_vocab).classes;
    o.top_logprobs = std::min(o.top_logprobs, o.sampled_vocab);
    if (o.prompt_tokens == 0) o.prompt_tokens = o.slots * o.context;
    return o;
}

int64_t bytes_of(const Tensor& t) {
    return t ? t.bytes() : 0;
}

// Rounds the longest context up to a power of two, so that sequences of any length need few graphs.
int64_t bucket(int64_t length, int64_t capacity) {
    int64_t b = 256;
    while (b < length) b *= 2;
    return std::min(b, capacity);
}

// Most rows of a fused step. From three rows on the kernels of linear.h are faster on Hopper for large models: LLaMA
// 1B, half of the contexts of 2,000 keys, takes 1.12 ms with 2 rows and 1.80 with 4 fused, 1.30 with 6 apart (H200); in
// fp8, contexts of 1 to 256 keys, 0.87 with 4 rows fused and 0.71 with 8 apart, in int4 1.41 with 8 fused. GPT-2 124M
// takes 0.28 ms with 4 rows and 0.40 with 8 fused, 0.42 with 64 apart.
int64_t fused_rows(const ModelConfig& config, const EngineOptions& options) {
    const bool large = config.channels >= 2048 && dtype_size(options.dtype) == 2;
    return large && this_target().hopper ? 2 : LINEAR_SMALL_N;
}

}  // namespace

// The most tokens of a pass.
int64_t Engine::pass_tokens() const {
    if (prompts_by_page()) return std::max(KV_PAGE, options.slots);
    return std::max(std::min(prompt_chunk_tokens(), options.prompt_tokens), options.slots);
}

int64_t Engine::prompt_chunk_tokens() {
    return backend_device() == Device::CPU ? 512 : 8192;
}

int64_t Engine::steps_ahead() {
    return graphs_replay() ? 2 : 1;
}

Engine::Engine(const ModelConfig& model_config, const EngineOptions& engine_options, Stream s)
    : config(model_config),
      options(effective(engine_options, model_config)),
      stream(s),
      dynamic_rope(config.positions == Positions::RoPE && config.rope_scaling.kind == RopeScaling::Kind::Dynamic &&
                   options.context > config.rope_scaling.original_max_position),
      cache(config, {options.slots, options.context, options.cache_pages, pass_tokens()}, options.dtype),
      fused_step_max_batch(options.batch_invariant || options.outside_forward || unfused_model_option(config, options)
                               ? 0
                               : std::min(decode_step_max_batch(decode_model()), fused_rows(config, options))),
      states(config, options.slots),
      lengths(size_t(options.slots), 0) {
    require(options.slots > 0 && options.context > 0, "engine: a batch of ", options.slots, " sequences of ",
            options.context, " tokens; both must be positive");
    require(cache.pages_for(options.context) <= cache.pages_available(), "engine: a KV cache of ",
            cache.pages_available(), " pages cannot hold a sequence of ", options.context, " tokens");
    require(config.positions != Positions::Learned || options.context <= config.max_positions, "a context of ",
            options.context, " tokens exceeds the model's position table of ", config.max_positions,
            " rows; use a shorter context");
    require(options.top_logprobs >= 0 && options.top_logprobs <= MAX_TOP_LOGPROBS, "engine: top_logprobs is ",
            options.top_logprobs, ", expected 0 to ", MAX_TOP_LOGPROBS);
    require(!options.outside_forward ||
                (options.dtype != DType::F16 && !options.batch_invariant && !config.has_linear_attention() &&
                 !dynamic_rope && !options.adapters && !options.top_logprobs && !options.prompt_logprobs),
            "engine: outside_forward with what it does not support");
    require(!options.joint_passes.value_or(false) || can_join(), "engine: joint_passes with what it does not support");
    if (options.sampling_classes & sampling_class::REPEAT)
        seen_bits.assign(lengths.size(), std::vector<int32_t>(size_t((options.sampled_vocab + 31) / 32), 0));
    plan_memory();
}

// Waits, because the device may still write to this memory.
Engine::~Engine() {
    try {
        synchronize(stream);
    } catch (const Error&) {  // a destructor must not throw
    }
}

void Engine::plan_memory() {
    const ModelConfig& c = config;
    const DType T = options.dtype;
    const int64_t B = options.slots, N = pass_tokens();
    const int64_t attention = c.heads * c.head_size, V = options.sampled_vocab, words = (V + 31) / 32;
    // Prompts' logprobs need a GEMM that is not much smaller than a pass.
    const int64_t head_rows = options.prompt_logprobs ? std::max(B, std::min<int64_t>(N, 128)) : B;
    auto add = [&](Tensor* t, const char* name, DType dtype, const std::vector<int64_t>& shape, int64_t first,
                   int64_t last_use) { bindings.emplace_back(t, plan.add(name, dtype, shape, first, last_use)); };
    // The phases of a block; after all blocks the head and sampling.
    enum { QKV, ATTENTION, PROJ, FC, FCPROJ, HEAD, SAMPLE };
    auto keep = [&](Tensor* t, const char* name, DType dtype, const std::vector<int64_t>& shape) {
        add(t, name, dtype, shape, QKV, SAMPLE);
    };
    auto own = [&](Tensor* t, const char* name, DType dtype, const std::vector<int64_t>& shape, int64_t first,
                   int64_t last_use) {  // of the engine's own forward pass
        if (!options.outside_forward) add(t, name, dtype, shape, first, last_use);
    };
    keep(&tokens, "tokens", DType::I32, {N});
    keep(&positions, "positions", DType::I32, {N});
    rows.resize(size_t(cache.num_groups()));
    for (Tensor& t : rows) keep(&t, "rows", DType::I32, {N});
    keep(&iota, "iota", DType::I32, {N});
    keep(&cum_q, "cum_q", DType::I32, {B + 1});
    keep(&cum_k, "cum_k", DType::I32, {B + 1});
    for (Tensor* t : {&pass_slots, &copied_from, &copied_to}) keep(t, "pass_slots", DType::I32, {B});
    if (c.positions == Positions::RoPE)
        own(&table, "rope_table", DType::F32, {dynamic_rope ? N : options.context, c.rotary_channels() / 2, 2}, QKV,
            SAMPLE);
    own(&x, "x", T, {N, c.channels}, QKV, SAMPLE);
    own(&qkv, "qkv", T, {N, c.qkv_channels()}, QKV, ATTENTION);
    own(&att, "att", T, {N, attention}, ATTENTION, PROJ);
    const bool has_linear = c.has_linear_attention();
    const LinearAttentionSizes linear{
        N, B, c.heads, c.kv_heads, c.head_size, c.head_size, std::min(N, prompt_chunk_tokens())};
    if (has_linear) add(&past_s, "past_s", DType::F32, {B, c.kv_heads, c.head_size, c.head_size}, ATTENTION, ATTENTION);
    if (c.layers_of(AttentionType::Linear))
        add(&past_z, "past_z", DType::F32, {B, c.kv_heads, c.head_size}, ATTENTION, ATTENTION);
    if (c.layers_of(AttentionType::GatedLinear)) {
        add(&gate, "gate", DType::F32, {N, c.kv_heads}, QKV, ATTENTION);
        add(&linear_att, "linear_att", T, {N, attention}, ATTENTION, ATTENTION);
    }
    if ((c.layers_of(AttentionType::GatedLinear) || options.adapters) && !c.norm_after)
        add(&normed, "normed", T, {N, c.channels}, QKV, FC);
    if (options.adapters) {
        const int64_t R = options.adapter_rank;  // at most three parts have channels as inputs
        const int64_t columns =
            R * std::max({3 * adapter_splits(c.channels), adapter_splits(attention), adapter_splits(c.ffn)});
        const int64_t tiles = max_adapter_tiles(N, options.adapters);
        add(&low_rank, "low_rank", DType::F32, {N * columns}, QKV, FCPROJ);
        add(&pre_activation, "pre_activation", T, {N, c.fc_channels()}, FC, FC);
        keep(&tile_rows, "tile_rows", DType::I32, {tiles * LORA_TILE});
        keep(&tile_adapters, "tile_adapters", DType::I32, {tiles});
        keep(&row_adapters, "row_adapters", DType::I32, {N});
    }
    own(&act, "act", T, {N, c.ffn}, FC, FCPROJ);
    if (backend_device() != Device::CPU && T == DType::BF16 && !c.norm_after) {
        own(&unscaled, "unscaled", T, {std::min(N, UNSCALED_MAX_ROWS), c.channels}, QKV, FCPROJ);
        own(&norm_parts, "norm_parts", DType::F32, {unscaled_parts(c.channels), UNSCALED_MAX_ROWS, 2}, QKV, FCPROJ);
    }
    if (c.norm_after) own(&unnormed, "unnormed", T, {N, c.channels}, PROJ, FCPROJ);
    const auto layer_scratch = [&](int64_t n, int64_t inputs, int64_t outputs) {  // prefill passes and decode steps
        const auto scratch_of = [&](int64_t rows_in) {
            const int64_t bytes = linear_scratch(rows_in, inputs, outputs, T, options.packing.has_value());
            return options.nf4 ? std::max(bytes, linear_nf4_scratch(rows_in, inputs, outputs, T)) : bytes;
        };
        return std::max(scratch_of(n), scratch_of(1));
    };
    const int64_t scratch_bytes =
        std::max({layer_scratch(N, c.channels, c.qkv_channels()), layer_scratch(N, attention, c.channels),
                  layer_scratch(N, c.channels, c.fc_channels()), layer_scratch(N, c.ffn, c.channels),
                  layer_scratch(head_rows, c.channels, c.padded_vocab())});
    own(&scratch, "scratch", DType::U8, {scratch_bytes}, QKV, SAMPLE);
    const int64_t attention_bytes =
        std::max(attention_forward_scratch(), has_linear ? linear_attention_forward_scratch(linear) : 0);
    if (attention_bytes > 0) keep(&attention_scratch, "attention_scratch", DType::U8, {attention_bytes});
    own(&decode_scratch, "decode_scratch", DType::U8,
        {decode_attention_scratch(B, c.heads, c.head_size, options.context)}, QKV, SAMPLE);
    if (fused_step_max_batch > 0) keep(&step_scratch, "step_scratch", DType::U8, {decode_step_scratch(decode_model())});
    keep(&last, "last", T, {B, c.channels});
    keep(&last_rows, "last_rows", DType::I32, {B});
    keep(&logits_out, "logits", options.outside_forward ? DType::F32 : T, {head_rows, c.padded_vocab()});
    keep(&losses, "losses", DType::F32, {head_rows});
    keep(&ids, "ids", DType::I32, {B});
    keep(&buffer_index, "buffer_index", DType::I32, {1});
    keep(&slot_ids, "slots", DType::I32, {B});
    keep(&step_positions, "step_positions", DType::I32, {B});
    keep(&sequences, "sequences", DType::I64, {B});
    keep(&steps, "steps", DType::I64, {B});
    keep(&sampling_rows, "sampling_rows", DType::U8, {B, int64_t(sizeof(SamplingRow))});
    const uint32_t classes = options.sampling_classes;
    if (classes & sampling_class::REPEAT) keep(&seen, "seen", DType::I32, {B, words});
    if (classes & sampling_class::COUNTS) keep(&counts, "counts", DType::I32, {B, V});
    if (classes & sampling_class::MASK) keep(&masks, "masks", DType::I32, {B, words});
    add(&sample_scratch, "sample_scratch", DType::U8, {sampling_scratch(B, V, classes)}, SAMPLE, SAMPLE);
    if (const int64_t k = options.top_logprobs) {
        int64_t bytes = 0;  // a smaller batch may need more
        for (int64_t b = 1; b <= head_rows; b++) bytes = std::max(bytes, top_k_scratch(b, V, k));
        add(&top_scratch, "top_scratch", DType::U8, {bytes}, SAMPLE, SAMPLE);
        add(&top_values, "top_values", T, {head_rows, k}, SAMPLE, SAMPLE);
        keep(&top_ids, "top_ids", DType::I32, {head_rows, k});
        keep(&top_out, "top_logprobs", DType::F32, {head_rows, k});
    }
    if (options.prompt_logprobs) keep(&prompt_targets, "prompt_targets", DType::I32, {N});
    plan.assign_offsets();
}

int64_t Engine::bytes() const {
    return ArenaPlan::aligned(cache.bytes()) + ArenaPlan::aligned(states.bytes()) + plan.bytes();
}

void Engine::allocate(const InferenceWeights& model_weights, const Tensor& shared, EngineForward* forward_pass) {
    weights = model_weights;
    forward = forward_pass;
    require(options.outside_forward == (forward != nullptr), "engine: outside_forward needs a forward pass");
    require(!forward || options.dtype == (backend_device() == Device::CPU ? DType::F32 : DType::BF16),
            "engine: outside_forward in ", dtype_name(options.dtype), ", which this backend does not support");
    require(options.adapters == 0 || int64_t(weights.adapters.size()) == config.layers, "engine: adapters of ",
            weights.adapters.size(), " layers, expected ", config.layers);
    const auto part = [&](int64_t begin, int64_t size) { return shared ? shared.rows(begin, begin + size) : Tensor{}; };
    const int64_t states_at = ArenaPlan::aligned(cache.bytes()),
                  rest_at = states_at + ArenaPlan::aligned(states.bytes());
    cache.allocate(part(0, cache.bytes()));
    states.allocate(part(states_at, states.bytes()));
    memory = shared ? Arena(part(rest_at, plan.bytes())) : Arena(plan.bytes(), "activations");
    for (const auto& [tensor, entry] : bindings) {
        const ArenaPlan::Entry& e = plan.entries()[size_t(entry)];
        *tensor = memory.at(e.offset, e.dtype, e.shape);
    }
    const int64_t N = tokens.shape[0], B = options.slots;
    staging = std::make_unique<Staging>(
        cache.table_bytes() + ((2 + cache.num_groups()) * N + 10 * B + 9) * 4 + (dynamic_rope ? table.bytes() : 0) +
            B * (6 * 4 + 2 * 8) + sampling_rows.bytes() + bytes_of(seen) + bytes_of(masks) + bytes_of(prompt_targets) +
            bytes_of(tile_rows) + bytes_of(tile_adapters) + bytes_of(row_adapters),
        4);
    const int64_t top = B * options.top_logprobs, result_row = 2 * B + 2 * top;
    results = HostMemory(host_alloc(size_t(result_row) * 8), host_free);
    if (options.prompt_logprobs)
        prompt_results =
            HostMemory(host_alloc(size_t(options.prompt_tokens * (1 + 2 * options.top_logprobs)) * 4), host_free);
    const Tensor result_rows = make_tensor(results.get(), DType::I32, Device::CPU, {2, result_row});
    host_tokens = result_rows.columns(0, B);
    for (int i = 0; i < 2; i++) {
        queue[i].tokens = result_rows.as<int32_t>() + i * result_rows.stride[0];
        queue[i].losses = reinterpret_cast<float*>(queue[i].tokens + B);
        queue[i].top_ids = queue[i].tokens + 2 * B;
        queue[i].top_logprobs = reinterpret_cast<float*>(queue[i].top_ids + top);
    }
    count_weight_bytes();
    fill_memory();
    prepare_graphs();
    prepare_pass_graphs();
    prepare_longest_pass();
    device_fill(buffer_index.data, 0, size_t(buffer_index.bytes()), stream);
}

void Engine::restart() {
    require(active() == 0 && !pending(), "engine: restart() while sequences are active");
    require(std::all_of(lengths.begin(), lengths.end(), [](int64_t n) { return n == 0; }),
            "engine: restart() while slots hold tokens; truncate() them");
    batch.clear();
    batch_changed = false;
    cache.restart();
    fill_memory();
    // The host reads alternate buffers; the device writes the one that this says.
    const auto next_buffer = static_cast<int32_t>(steps_queued % 2);
    copy_to_device(buffer_index.data, &next_buffer, sizeof next_buffer, stream);
    synchronize(stream);
}

// What lies in memory before the first step.
void Engine::fill_memory() {
    if (decode_scratch) device_fill(decode_scratch.data, 0, size_t(decode_scratch.bytes()), stream);
    device_fill(ids.data, 0, size_t(ids.bytes()), stream);  // rows that no sequence has look up token 0
    if (fused_step_max_batch > 0) {
        std::vector<LayerCache> of_layer;
        for (int64_t l = 0; l < config.layers; l++) of_layer.push_back(cache.layer(l));
        decode_step_prepare(step_scratch, decode_model(), weights, of_layer, stream);
    }
    std::vector<int32_t> count(size_t(iota.shape[0]), 0);
    std::iota(count.begin(), count.end(), 0);
    copy_to_device(iota.data, count.data(), size_t(iota.bytes()), stream);
    fill_rope_table();
    synchronize(stream);  // the source of the copy is a local variable
    staging->next();
    cache.upload_tables(*staging, stream);
}

// The tiles of a batch of N rows, as they were uploaded last.
AdapterTiles Engine::adapter_tiles(int64_t N, bool everywhere) const {
    const int64_t count = max_adapter_tiles(N, options.adapters);
    return {tile_rows.rows(0, count * LORA_TILE), tile_adapters.rows(0, count), row_adapters.rows(0, N), everywhere};
}

// Null where the rows are computed without adapters. With a promise of bits all rows are computed alike. From row
// `used_rows` on they belong to no sequence.
std::optional<AdapterTiles> Engine::upload_adapters(const std::vector<int32_t>& adapter_of_row, size_t used_rows) {
    const auto adapted = [](int32_t adapter) { return adapter >= 0; };
    const auto end = adapter_of_row.begin() + std::ptrdiff_t(used_rows);
    const bool used = std::any_of(adapter_of_row.begin(), end, adapted);
    if (!used && !(options.adapters && options.batch_invariant)) return {};
    const bool everywhere =
        may_adapt_everywhere(int64_t(adapter_of_row.size())) && std::all_of(adapter_of_row.begin(), end, adapted);
    const HostAdapterTiles host = tiles_of_adapters(adapter_of_row, options.adapters);
    const AdapterTiles tiles = adapter_tiles(int64_t(adapter_of_row.size()), everywhere);
    staging->put(tiles.rows.data, host.rows.data(), tiles.rows.bytes(), stream);
    staging->put(tiles.adapters.data, host.adapters.data(), tiles.adapters.bytes(), stream);
    staging->put(tiles.of_row.data, adapter_of_row.data(), tiles.of_row.bytes(), stream);
    return tiles;
}

void Engine::fill_rope_table() {
    if (!table || dynamic_rope) return;
    std::vector<float> host(size_t(table.numel()));
    // Without dynamic scaling, or up to the original length, the angles do not depend on the sequence's length.
    rope_table(host_tensor(host.data(), {options.context, config.rotary_channels() / 2, 2}), config.rope_theta,
               config.rope_scaling);
    copy_to_device(table.data, host.data(), host.size() * sizeof(float), stream);
    synchronize(stream);  // `host` is a local variable
}

void Engine::count_weight_bytes() {
    const auto count_bytes = [&](const Tensor& t) { weight_bytes += t ? t.bytes() : 0; };
    const auto count_layer = [&](const LinearWeights& w) {
        require(!w.lora.a, "engine: weights with training's adapters; give those of InferenceWeights");
        count_bytes(w.packed ? w.packed->rows : w.weight);
        if (w.nf4)
            for (const Nf4Matrix::Part& part : w.nf4->parts)
                for (const Tensor& t : {part.weights.codes, part.weights.absmax_codes, part.weights.group_absmax})
                    count_bytes(t);
        count_bytes(w.bias);
    };
    for (const BlockWeights& b : weights.blocks) {
        for (const NormWeights& norm : {b.norm1, b.norm2}) {
            count_bytes(norm.weight);
            count_bytes(norm.bias);
        }
        for (const LinearWeights& w : {b.qkv, b.proj, b.fc, b.fcproj, b.gate}) count_layer(w);
        for (const Tensor& norm : {b.headnorm, b.qnorm, b.knorm}) count_bytes(norm);
    }
    count_layer(weights.head);
}

// On a GPU, runs steps of a full batch before the first sequence starts. For large batches this times the GEMM
// library's algorithms and picks the fastest. It also records the graph for every context bucket, and with
// all_batch_sizes for every batch size: recording takes milliseconds and would delay a token later. Every row is marked
// as retired, and the results are not used.
void Engine::prepare_graphs() {
    const int64_t B = options.slots;
    if (!graphs_replay() || forward) return;
    for (const Tensor& t : {step_positions, slot_ids, tile_rows, tile_adapters, row_adapters})
        if (t) device_fill(t.data, 0xFF, size_t(t.bytes()), stream);  // −1
    for (const Tensor& t : {ids, sequences, steps, buffer_index}) device_fill(t.data, 0, size_t(t.bytes()), stream);
    std::vector<SamplingRow> sampling;
    for (int64_t b = 0; b < B; b++) sampling.push_back(sampling_row(options.sampling, options.sampled_vocab, b));
    copy_to_device(sampling_rows.data, sampling.data(), size_t(sampling_rows.bytes()), stream);
    synchronize(stream);  // `sampling` is a local variable
    step_classes = sampling[0].classes | (options.logprobs ? LOGPROBS : 0u);
    if (options.adapters && options.batch_invariant) step_classes |= ADAPTERS;
    if (!options.batch_invariant && B > std::max(fused_step_max_batch, linear_gemv_rows(options.dtype))) {
        matmul_tuning(options.tune_matmuls, stream);
        decode_step(B, bucket(1, options.context));
        const uint32_t classes = step_classes;
        step_classes |= ADAPTERS;  // other matmuls, without activations
        if (may_adapt_everywhere(B)) step_classes |= ADAPTED_EVERYWHERE;
        if (options.adapters) decode_step(B, bucket(1, options.context));
        step_classes = classes;
        matmul_tuning(false, stream);
    }
    for (int64_t n = options.all_batch_sizes ? 1 : B; n <= B; n = step_rows(n + 1)) {
        for (int64_t length = 0; length < options.context;) {
            length = bucket(length + 1, options.context);
            graphs[{n, length, step_classes & STEP_KERNELS}].run(stream, [&] { decode_step(n, length); });
        }
        if (n == B) break;
    }
}

bool Engine::may_adapt_everywhere(int64_t N) const {
    return options.adapters == 1 && !promises_bits() && N > SMALL_BATCH_ROWS;
}

// With all_batch_sizes, short passes are graphs too: running sequences wait for them, and a graph has no gaps between
// its kernels. Passes take one of few sizes, whose last rows belong to no sequence, and have the same number of chunks,
// of which the last are empty; more chunks, which only prompts of less than a page make, are not a graph. (Linear
// attention would write the state of an empty chunk.)
int64_t Engine::recorded_rows(int64_t N, int64_t chunks, int64_t decoding) const {
    const bool records =
        options.all_batch_sizes && graphs_replay() && !forward && !prompts_by_page() && !config.has_linear_attention();
    const int64_t used = N + (decoding ? padded_batch(decoding) : 0), padded = (used + KV_PAGE - 1) / KV_PAGE * KV_PAGE;
    const bool fits = N > 0 && N + decoding > SMALL_BATCH_ROWS &&
                      padded <= std::min(JOINT_PASS_ROWS, tokens.shape[0]) && chunks <= recorded_chunks();
    return records && fits ? padded : 0;
}

// A power of two from 32 on.
int64_t Engine::padded_batch(int64_t n) const {
    int64_t rows_of_batch = 32;
    while (rows_of_batch < n) rows_of_batch *= 2;
    return std::min(rows_of_batch, options.slots);
}

int64_t Engine::joint_rows() const {
    return padded_batch(int64_t(batch.size()));
}

// Makes the rows of all passes those of no sequence.
void Engine::clear_pass_inputs() {
    for (const Tensor& t : {tokens, positions, cum_q, cum_k, pass_slots})
        device_fill(t.data, 0, size_t(t.bytes()), stream);
    for (const std::vector<Tensor>& filled : {rows, {tile_rows, tile_adapters, row_adapters}})
        for (const Tensor& t : filled)
            if (t) device_fill(t.data, 0xFF, size_t(t.bytes()), stream);  // −1
}

// The first N rows and the first chunks of what was uploaded last.
Engine::PassInputs Engine::pass_inputs(int64_t N, int64_t chunks) const {
    PassInputs in;
    in.tokens = tokens.rows(0, N);
    in.positions = positions.rows(0, N);
    for (const Tensor& t : rows) in.rows.push_back(t.rows(0, N));
    in.sequences.cum_q = cum_q.rows(0, chunks + 1);
    in.sequences.cum_k = cum_k.rows(0, chunks + 1);
    in.sequences.page_rows = pass_slots.rows(0, chunks);
    return in;
}

// Tunes the matmuls of recorded_rows() and records the graphs ahead, with passes whose rows all belong to no sequence.
void Engine::prepare_pass_graphs() {
    if (!recorded_rows(KV_PAGE, 1, 0)) return;
    clear_pass_inputs();
    std::vector<int64_t> batches{0};
    for (int64_t n = 1; joins_at_all() && n <= options.slots; n = batches.back() + 1)
        batches.push_back(padded_batch(n));
    matmul_tuning(options.tune_matmuls, stream);
    for (const int64_t decoding : batches)
        for (int64_t N = (decoding / KV_PAGE + 1) * KV_PAGE; recorded_rows(N - decoding, 1, decoding); N += KV_PAGE)
            record_passes(N, decoding);
    matmul_tuning(false, stream);
}

// Runs the first layer for a pass of the most tokens, whose rows all belong to no sequence, and the head for one row:
// kernels are loaded, and the library chooses among its own, before a prompt waits for them.
void Engine::prepare_longest_pass() {
    if (!graphs_replay() || forward || config.has_linear_attention()) return;
    clear_pass_inputs();
    const int64_t N = pass_tokens();
    PassInputs in = pass_inputs(N, 1);
    in.sequences.max_q = in.sequences.max_k = std::min(N, options.context);
    in.layers = 1;
    run_pass(in, {});
    compute_logits(last.rows(0, 1));
    synchronize(stream);
}

// For every context bucket, with adapters and without.
void Engine::record_passes(int64_t N, int64_t decoding) {
    PassInputs in = pass_inputs(N, recorded_chunks());
    in.decoding = decoding;
    in.sequences.max_q = N - decoding;
    std::vector<std::optional<AdapterTiles>> adapters{std::nullopt};
    if (options.adapters) adapters.emplace_back(adapter_tiles(N, false));
    if (may_adapt_everywhere(N)) adapters.emplace_back(adapter_tiles(N, true));
    for (const std::optional<AdapterTiles>& tiles : adapters) {
        in.tiles = tiles;
        for (int64_t length = 0; length < options.context; length = in.sequences.max_k) {
            in.sequences.max_k = bucket(length + 1, options.context);
            run_recorded_pass(in);
        }
    }
}

void Engine::run_recorded_pass(const PassInputs& in) {
    const int64_t adapted = in.tiles ? 1 + in.tiles->everywhere : 0;
    pass_graphs[{in.positions.shape[0], in.decoding, in.sequences.max_k, adapted}].run(stream,
                                                                                       [&] { run_pass(in, {}); });
}

// Applies QK-norm and RoPE to q and k in the packed rows, where attention does not rotate them itself. angles: rows of
// the table.
void Engine::prepare_qk(int64_t l, Tensor packed, const Tensor& angles) {
    const Tensor qk = split_qk(config, packed), layer_table = config.uses_rope(l) ? table : Tensor{};
    const BlockWeights& w = weights.blocks[size_t(l)];
    const float eps = static_cast<float>(config.norm_eps);
    if (config.qk_norm == QkNorm::AllHeads) {
        const Tensor both = qk_rows(config, packed);
        qk_norm_all_heads_forward(both, {}, both, {w.qnorm, w.knorm}, angles, layer_table,
                                  config.heads + config.kv_heads, eps, stream);
    } else if (config.qk_norm != QkNorm::Off) {
        qk_norm_forward(qk, {}, qk, {w.qnorm, w.knorm}, angles, layer_table, config.heads, eps, stream);
    } else if (layer_table && config.attention_type(l) != AttentionType::Softmax) {
        rope(qk, angles, layer_table, false, stream);
    }
}

// Token ids to the input of the first block.
void Engine::embed(Tensor hidden, Tensor token_ids, Tensor token_positions) {
    if (weights.packed_wte)
        embedding_forward(hidden, token_ids, token_positions, *weights.packed_wte, weights.wpe, stream);
    else
        embedding_forward(hidden, token_ids, token_positions, weights.wte, weights.wpe, stream);
    if (config.embedding_norm) norm(hidden, hidden, weights.embedding_norm);
}

void Engine::norm(Tensor out, Tensor inp, const NormWeights& w) {
    const float eps = static_cast<float>(config.norm_eps);
    const NormForward norm{.out = out, .inp = inp, .weight = w.weight, .bias = w.bias, .eps = eps};
    switch (config.norm) {
        case Norm::LayerNorm:
            return layernorm_forward(norm, stream);
        case Norm::RMSNorm:
            return rmsnorm_forward(norm, stream);
    }
}

// A linear layer with what surrounds it, where rows use adapters.
void Engine::adapted_layer(const LinearOutput& output, Tensor inp, const NormWeights& n, const LinearWeights& w,
                           const AdapterWeights& adapters, const AdapterTiles& tiles, bool batch_invariant) {
    const int64_t N = inp.shape[0];
    const Tensor from = n.weight ? normed.rows(0, N) : inp;
    if (n.weight) norm(from, inp, n);
    // With a promise of bits all layers are computed by kernels that keep it.
    if (adapters.a && !options.batch_invariant &&
        linear_with_adapters(output, from, w, adapters, tiles, scratch, stream))
        return;
    const bool activates = output.activation != Activation::None;
    const Tensor y = activates ? pre_activation.rows(0, N) : output.out;
    linear({y, Activation::None, output.residual}, from, {}, w, scratch, batch_invariant, stream);
    if (adapters.a && tiles.everywhere) {
        add_adapter(y, from, adapters);
    } else if (adapters.a) {
        const Tensor h = make_tensor(low_rank.data, DType::F32, low_rank.device,
                                     {adapter_splits(from.shape[1]), N, adapters.a.shape[1]});
        adapters_shrink(h, from, adapters, tiles, stream);
        adapters_expand(y, h, adapters, tiles, stream);
    }
    if (activates) activation_forward(output.activation, output.out, y, stream);
}

// Adds the only adapter to all rows of y. h is rounded to the rows' dtype.
void Engine::add_adapter(Tensor y, Tensor inp, const AdapterWeights& w) {
    const int64_t width = w.a.shape[1];
    const Tensor h = make_tensor(low_rank.data, inp.dtype, low_rank.device, {inp.shape[0], width}),
                 a = make_tensor(w.a.data, w.a.dtype, w.a.device, {width, w.a.shape[2]});
    matmul(h, inp, a, false, true, false, stream);
    adapter_expand_all(y, h, w, stream);
}

// Runs x [N, C] through the first blocks. attend(l) computes att from qkv and the cache.
template <typename Attend>
void Engine::run_blocks(Tensor hidden, const Tensor& angles, bool batch_invariant,
                        const std::optional<AdapterTiles>& tiles, int64_t layers, Attend attend) {
    const int64_t N = hidden.shape[0];
    BlockAdapters adapters;  // of the layer
    const float eps = static_cast<float>(config.norm_eps);
    const auto input_norm = [&](const NormWeights& n) {
        return InputNorm{n.weight, n.bias, eps, config.norm == Norm::LayerNorm};
    };
    bool norm_begun = false;  // `unscaled` has the rows of hidden for the norm before the next layer
    // next: the norm that reads the output, if linear_unscaled() may begin it.
    const auto layer = [&](const LinearOutput& output, Tensor inp, const NormWeights& n, const LinearWeights& w,
                           const AdapterWeights& a, const NormWeights* next = nullptr) {
        const LinearOutput to{output.out.rows(0, N), output.activation, output.residual};
        if (tiles) return adapted_layer(to, inp.rows(0, N), n, w, a, *tiles, batch_invariant);
        const bool reads = norm_begun && n.weight;
        norm_begun = next;
        if (reads || next) {
            const auto rows = [&](const NormWeights& of) {
                return UnscaledRows{unscaled.rows(0, N), norm_parts, input_norm(of)};
            };
            if (linear_unscaled(to, reads ? rows(n) : UnscaledRows{inp.rows(0, N)}, w,
                                next ? rows(*next) : UnscaledRows{}, stream))
                return;
        }
        norm_begun = false;
        linear(to, inp.rows(0, N), input_norm(n), w, scratch, batch_invariant, stream);
    };
    const auto begins = [&](const NormWeights& n, const LinearWeights& w) {
        const bool may =
            unscaled && !tiles && !batch_invariant && linear_takes_unscaled(N, w, input_norm(n), options.dtype);
        return may ? &n : nullptr;
    };
    const bool norm_after = config.norm_after;
    // Adds a half of the block to hidden: the linear layer's output, or its norm.
    const auto add_half = [&](Tensor inp, const LinearWeights& w, const AdapterWeights& a, const NormWeights& n,
                              const NormWeights* next) {
        if (!norm_after) return layer({hidden, Activation::None, hidden}, inp, {}, w, a, next);
        layer({unnormed}, inp, {}, w, a);
        rmsnorm_add_forward(
            {.out = hidden, .inp = unnormed.rows(0, N), .residual = hidden, .weight = n.weight, .eps = eps}, stream);
    };
    for (int64_t l = 0; l < layers; l++) {
        const BlockWeights& w = weights.blocks[size_t(l)];
        if (tiles) adapters = weights.adapters[size_t(l)];
        if (config.attention_type(l) == AttentionType::GatedLinear) {  // the decay gate reads the same as qkv
            const Tensor out = norm_after ? hidden : normed.rows(0, N);
            if (!norm_after) norm(out, hidden, w.norm1);
            decay_gate_forward(gate.rows(0, N), out, w.gate.weight, w.gate.bias, stream);
            layer({qkv}, out, {}, w.qkv, adapters.qkv);
        } else {
            layer({qkv}, hidden, norm_after ? NormWeights{} : w.norm1, w.qkv, adapters.qkv);
        }
        prepare_qk(l, qkv.rows(0, N), angles);
        attend(l);
        add_half(att, w.proj, adapters.proj, w.norm1, begins(w.norm2, w.fc));
        layer({act, config.activation}, hidden, norm_after ? NormWeights{} : w.norm2, w.fc, adapters.fc);
        const bool qkv_follows = l + 1 < layers && config.attention_type(l + 1) != AttentionType::GatedLinear;
        const BlockWeights& after = weights.blocks[size_t(qkv_follows ? l + 1 : l)];
        add_half(act, w.fcproj, adapters.fcproj, w.norm2, qkv_follows ? begins(after.norm1, after.qkv) : nullptr);
    }
}

// Computes att of a layer with linear attention. attend(heads, out, gate, type) computes out [N, NH, HS] from the
// rotated q, k and v.
template <typename Attend>
void Engine::linear_attention_layer(int64_t l, int64_t N, Attend attend) {
    const Tensor packed = qkv.rows(0, N);
    const bool gated = config.attention_type(l) == AttentionType::GatedLinear;
    const Tensor out = (gated ? linear_att : att).rows(0, N);
    attend(split_qkv(config, packed), split_heads(out, config.heads), gated ? gate.rows(0, N) : Tensor{},
           linear_attention_type(gated));
    if (!gated) return;
    rmsnorm_forward({.out = head_matrix(att.rows(0, N), config.heads),
                     .inp = head_matrix(out, config.heads),
                     .weight = weights.blocks[size_t(l)].headnorm,
                     .eps = static_cast<float>(config.norm_eps)},
                    stream);
}

// With dynamic RoPE scaling, uploads the angles for each token, which depend on the length of its sequence. Keys in the
// cache keep the angles that they were rotated by, as in transformers.
void Engine::upload_angles(const std::vector<int32_t>& token_positions, const std::vector<int64_t>& sequence_lengths) {
    if (!dynamic_rope) return;
    std::vector<float> host(token_positions.size() * size_t(config.rotary_channels()));
    const int64_t N = int64_t(token_positions.size());
    rope_rows(host_tensor(host.data(), {N, config.rotary_channels() / 2, 2}), token_positions.data(),
              sequence_lengths.data(), config.rope_theta, config.rope_scaling);
    staging->put(table.data, host.data(), int64_t(host.size() * sizeof(float)), stream);
}

// Copies the states in the rows that `from` names: a pass reads the old states several times while it writes the new
// ones.
LinearAttentionState Engine::copy_states(const LinearAttentionState& from) {
    const auto copy = [&](const Tensor& planned, const Tensor& all) {  // an embedding look-up gathers the rows
        const auto flat = [](const Tensor& t) {
            return make_tensor(t.data, t.dtype, t.device, {t.shape[0], t.shape[0] ? t.numel() / t.shape[0] : 0});
        };
        const Tensor to = planned.rows(0, from.rows.shape[0]);
        embedding_forward(flat(to), from.rows, from.rows, flat(all), {}, stream);
        return to;
    };
    return {copy(past_s, from.s), from.z ? copy(past_z, from.z) : Tensor{}};
}

// Runs packed prompt chunks through the model, after the last tokens of `decoding` rows of the batch. For each of these
// and each prompt that ends in this pass, copies the last token's row of x to `last`, the head's input, from row
// first_finished on.
void Engine::prefill_pass(const std::vector<PromptChunk>& chunks, int64_t first_finished, int64_t decoding) {
    const PassInputs in = upload_pass(chunks, decoding);
    const Tensor last_of_pass = last.rows(first_finished, first_finished + in.finished.shape[0]);
    if (in.recorded)
        run_recorded_pass(in);
    else
        run_pass(in, last_of_pass);
    for (const PromptChunk& p : chunks) cache.forget(p.prompt->slot, length(p.prompt->slot));
    if (forward) return;
    const Tensor hidden = x.rows(0, in.positions.shape[0]);
    // An embedding look-up gathers the rows.
    if (last_of_pass.shape[0]) embedding_forward(last_of_pass, in.finished, in.finished, hidden, {}, stream);
    score_prompts(chunks, hidden.rows(in.decoding, hidden.shape[0]));
}

// Uploads what a pass over the chunks reads. decoding: the batch's rows, whose tokens are in `ids`, come first.
// token_ids: the tokens of all rows, if they are on the device only.
Engine::PassInputs Engine::upload_pass(const std::vector<PromptChunk>& chunks, int64_t decoding, Tensor token_ids) {
    PassInputs in;
    int64_t chunk_rows = 0;
    for (const PromptChunk& p : chunks) chunk_rows += p.end - p.begin;
    const int64_t recorded = recorded_rows(chunk_rows, int64_t(chunks.size()), decoding);
    in.recorded = recorded > 0;
    in.decoding = in.recorded && decoding ? padded_batch(decoding) : decoding;
    std::vector<int32_t> token, position, adapter, q_ends{0}, k_ends{0}, slots, finished;
    std::vector<std::vector<int32_t>> row(rows.size());
    std::vector<int64_t> sequence_lengths;
    int64_t most_tokens = 0, most_keys = 0;  // of a chunk
    in.has_past =
        std::any_of(chunks.begin(), chunks.end(), [&](const PromptChunk& p) { return length(p.prompt->slot) > 0; });
    for (const PromptChunk& p : chunks) {
        if (p.retired) continue;
        if (in.has_past && length(p.prompt->slot) == 0) states.clear(p.prompt->slot, stream);
        grow(p.prompt->slot, p.end - p.begin);
    }
    for (int64_t b = 0; b < in.decoding; b++) {
        const bool used = b < decoding && !batch[size_t(b)].retired;
        const int64_t keys = used ? length(batch[size_t(b)].slot) : 1;
        token.push_back(0);
        position.push_back(static_cast<int32_t>(keys - 1));
        // Others have a prompt's, so that all rows may still use the only adapter.
        adapter.push_back(used ? batch[size_t(b)].adapter : chunks[0].prompt->adapter);
        for (std::vector<int32_t>& of_group : row) of_group.push_back(-1);
        sequence_lengths.push_back(keys);
        most_keys = std::max(most_keys, keys);
        if (b < decoding) finished.push_back(static_cast<int32_t>(b));
    }
    for (const PromptChunk& p : chunks) {
        const int64_t slot = p.prompt->slot, n = p.end - p.begin, past = length(slot) - n;
        // Of the prompt, tokens that other passes compute; dynamic RoPE's angles are those of the whole prompt.
        const int64_t later = token_ids ? 0 : int64_t(p.prompt->tokens.size()) - p.end + p.prompt->later;
        for (int64_t i = 0; i < n; i++) {
            if (!token_ids) token.push_back(p.prompt->tokens[size_t(p.begin + i)]);
            position.push_back(static_cast<int32_t>(past + i));
            adapter.push_back(p.prompt->adapter);
            for (size_t g = 0; g < row.size(); g++)
                row[g].push_back(p.retired ? -1 : cache.row(int64_t(g), slot, past + i));
            sequence_lengths.push_back(past + n + later);
        }
        q_ends.push_back(q_ends.back() + static_cast<int32_t>(n));
        k_ends.push_back(k_ends.back() + static_cast<int32_t>(past + n));
        slots.push_back(static_cast<int32_t>(slot));
        most_tokens = std::max(most_tokens, n);
        most_keys = std::max(most_keys, past + n);
        finished.insert(finished.end(), size_t(p.sampled), static_cast<int32_t>(in.decoding) + q_ends.back() - 1);
    }
    const size_t used_rows = position.size();
    if (in.recorded || prompts_by_page()) {
        // Rows of no sequence; attention and linear attention choose kernels by max_q.
        const size_t all_rows = size_t(in.recorded ? recorded : KV_PAGE);
        most_tokens = int64_t(all_rows) - in.decoding;
        for (std::vector<int32_t>* of_rows : {&token, &position}) of_rows->resize(all_rows, 0);
        adapter.resize(all_rows, -1);
        for (std::vector<int32_t>& of_group : row) of_group.resize(all_rows, -1);
        sequence_lengths.resize(all_rows, 1);
    }
    if (in.recorded) {
        for (std::vector<int32_t>* ends : {&q_ends, &k_ends}) ends->resize(size_t(recorded_chunks()) + 1, ends->back());
        slots.resize(size_t(recorded_chunks()), slots.back());
        most_keys = bucket(most_keys, options.context);
    }

    staging->next();
    cache.upload_tables(*staging, stream);
    const auto put = [&](const Tensor& planned, const std::vector<int32_t>& host) {
        const Tensor t = planned.rows(0, int64_t(host.size()));
        if (!host.empty()) staging->put(t.data, host.data(), t.bytes(), stream);
        return t;
    };
    in.tokens = token_ids ? token_ids : put(tokens, token);
    in.positions = put(positions, position);
    in.tiles = upload_adapters(adapter, used_rows);
    for (size_t g = 0; g < row.size(); g++) in.rows.push_back(put(rows[g], row[g]));
    upload_angles(position, sequence_lengths);
    in.sequences.cum_q = put(cum_q, q_ends);
    in.sequences.cum_k = put(cum_k, k_ends);
    in.sequences.max_q = most_tokens;
    in.sequences.max_k = most_keys;
    in.sequences.page_rows = put(pass_slots, slots);
    in.finished = put(last_rows, finished);
    return in;
}

// Computes x of a pass, or, with another program's forward pass, the rows of x that the head reads.
void Engine::run_pass(const PassInputs& in, const Tensor& last_of_pass) {
    const ModelConfig& c = config;
    const int64_t N = in.positions.shape[0], B = in.decoding, Q = c.heads * c.head_size;
    const Tensor angles = table ? angle_rows(N) : Tensor{};
    const auto attend = [&](int64_t l, const Tensor& all_heads, const Tensor& out) {
        const Tensor k = cache.k_rows(l), v = cache.v_rows(l), heads = all_heads.rows(B, N);
        AttentionSequences s = in.sequences;
        s.pages = cache.layer(l).pages;
        s.window = cache.window(l);
        if (B > 0) attend_to_batch(l, decode_batch(B, in.sequences.max_k));
        kv_append(k, v, heads, in.rows[size_t(cache.group(l))].rows(B, N), angles ? angles.rows(B, N) : Tensor{},
                  rotating_table(l), c.heads, stream);
        attention_forward(split_heads(out.rows(B, N), c.heads), {}, split_heads(heads.columns(0, Q), c.heads), k, v, s,
                          c.attention_scale(), attention_scratch, stream);
    };
    if (forward) return forward->blocks(last_of_pass, in.finished, in.tokens, in.positions, attend);
    if (B > 0) device_copy(in.tokens.data, ids.data, size_t(ids.rows(0, B).bytes()), stream);
    const Tensor hidden = x.rows(0, N);
    embed(hidden, in.tokens, in.positions);
    run_blocks(hidden, angles, false, in.tiles, std::min(in.layers, c.layers), [&](int64_t l) {
        if (c.attention_type(l) != AttentionType::Softmax) {
            return linear_attention_layer(
                l, N, [&](const QkvHeads& h, Tensor out, Tensor g, const LinearAttentionType& type) {
                    const LinearAttentionState end = states.layer(l, in.sequences.page_rows);
                    linear_attention_forward(out, {}, end, h.q, h.k, h.v, g,
                                             in.has_past ? copy_states(end) : LinearAttentionState{},
                                             {in.sequences.cum_q, in.sequences.max_q}, type, attention_scratch, stream);
                });
        }
        attend(l, qkv.rows(0, N), att.rows(0, N));
    });
}

// Computes the logprobs of the pass's tokens for prompts that ask for them, in chunks of rows that fit `logits_out`.
void Engine::score_prompts(const std::vector<PromptChunk>& chunks, const Tensor& hidden) {
    if (std::all_of(chunks.begin(), chunks.end(), [](const PromptChunk& p) { return p.losses < 0; })) return;
    std::vector<int32_t> next_tokens;
    for (const PromptChunk& p : chunks) {
        const std::vector<int32_t>& of_prompt = p.prompt->tokens;
        for (int64_t i = p.begin + 1; i <= p.end; i++)
            next_tokens.push_back(i < int64_t(of_prompt.size()) ? of_prompt[size_t(i)] : IGNORE_TARGET);
    }
    staging->put(prompt_targets.data, next_tokens.data(), int64_t(next_tokens.size() * sizeof(int32_t)), stream);
    const int64_t most = logits_out.shape[0];
    int64_t row = 0;
    for (const PromptChunk& p : chunks) {
        const int64_t n = p.end - p.begin;
        for (int64_t i = 0; p.losses >= 0 && i < n; i += most) {
            const int64_t m = std::min(most, n - i);
            const Tensor chunk_logits = logits_out.rows(0, m), chunk_losses = losses.rows(0, m),
                         targets = prompt_targets.rows(row + i, row + i + m);
            compute_logits(hidden.rows(row + i, row + i + m));
            softcap_forward(chunk_logits, config.logit_softcap, stream);
            cross_entropy_forward(chunk_losses, chunk_logits, targets, config.vocab_size, {}, stream);
            const PromptResults to = prompt_results_at(p.losses + p.begin + i);
            copy_to_host_async(to.losses, chunk_losses.data, size_t(chunk_losses.bytes()), stream);
            if (p.prompt->top_logprobs == 0) continue;
            find_top_tokens(chunk_logits, targets);
            copy_to_host_async(to.top_ids, top_ids.data, size_t(top_ids.rows(0, m).bytes()), stream);
            copy_to_host_async(to.top_logprobs, top_out.data, size_t(top_out.rows(0, m).bytes()), stream);
        }
        row += n;
    }
}

// Throws Error for a prompt that asks for what the engine was not planned for.
void Engine::check_prompt(const Prompt& p) const {
    using namespace sampling_class;
    const uint32_t missing = row_of(p).classes & ~options.sampling_classes;
    require(missing == 0, "engine: slot ", p.slot, " asks for ",
            missing & MASK     ? "a mask"
            : missing & COUNTS ? "a presence or frequency penalty"
            : missing & REPEAT ? "a repeat penalty"
                               : "other filters",
            "; name it in EngineOptions::sampling_classes");
    require(p.adapter >= -1 && p.adapter < options.adapters, "engine: slot ", p.slot, " asks for adapter ", p.adapter,
            "; there are ", options.adapters);
    require(p.top_logprobs >= 0 && p.top_logprobs <= options.top_logprobs, "engine: slot ", p.slot, " asks for ",
            p.top_logprobs, " top logprobs; EngineOptions::top_logprobs is ", options.top_logprobs);
    require(!p.prompt_logprobs || options.prompt_logprobs, "engine: slot ", p.slot,
            " asks for its prompt's logprobs; set EngineOptions::prompt_logprobs");
    require(!p.prompt_logprobs || p.ends(), "engine: slot ", p.slot,
            " asks for its prompt's logprobs; give it in one prefill()");
    if (p.mask.empty()) return;
    const int64_t words = (options.sampled_vocab + 31) / 32, rest = options.sampled_vocab % 32;
    require(int64_t(p.mask.size()) == words, "engine: the mask of slot ", p.slot, " has ", p.mask.size(),
            " words, expected ", words);
    const uint32_t last_word = uint32_t(p.mask.back()) & (rest ? (1u << rest) - 1 : ~0u);
    require(last_word || std::any_of(p.mask.begin(), p.mask.end() - 1, [](int32_t word) { return word != 0; }),
            "engine: the mask of slot ", p.slot, " allows no token");
}

// Throws the errors of prefill(). beside: pages that others are about to take.
void Engine::check_prompts(const std::vector<Prompt>& prompts, int64_t beside) const {
    int64_t total = 0;
    std::vector<bool> taken_slots(lengths.size(), false);
    for (const Prompt& p : prompts) {
        const int64_t n = int64_t(p.tokens.size());
        require(p.slot >= 0 && p.slot < options.slots, "engine: slot ", p.slot, " does not exist; there are ",
                options.slots);
        require(!taken_slots[size_t(p.slot)], "engine: slot ", p.slot, " is given twice");
        taken_slots[size_t(p.slot)] = true;
        require(n > 0 || p.like >= 0, "the prompt has no tokens; give it at least one");
        require(n <= options.context - length(p.slot), "a sequence of ", length(p.slot) + n,
                " tokens exceeds the context of ", options.context, "; shorten the prompt or raise --context");
        for (const int32_t id : p.tokens) {
            require(id >= 0 && id < config.vocab_size, "token ", id, " is beyond the model's vocabulary of ",
                    config.vocab_size, " tokens");
        }
        check_prompt(p);
        total += n;
    }
    require(total <= options.prompt_tokens, "engine: the prompts have ", total,
            " tokens; options.prompt_tokens allows ", options.prompt_tokens);
    require(has_room(prompts, beside), "engine: the KV cache has too few free pages for the prompts");
    for (const Sequence& s : batch)
        require(s.retired || !taken_slots[size_t(s.slot)], "engine: slot ", s.slot,
                " is still generating; retire() it first");
}

// The tokens that a repetition penalty knows.
void Engine::note_tokens(const PromptGroups& groups) {
    if (seen_bits.empty()) return;
    for (const std::vector<const Prompt*>& group : groups)
        for (const Prompt* p : group) {
            for (const int32_t id : p->tokens) set_bit(seen_bits[size_t(p->slot)], id);
            if (p->like >= 0) seen_bits[size_t(p->slot)] = seen_bits[size_t(p->like)];
        }
}

// The sequences of prompts that end.
void Engine::add_to_batch(const PromptGroups& groups) {
    for (const std::vector<const Prompt*>& group : groups)
        for (const Prompt* p : group) {
            const bool logprobs = p->logprobs || p->top_logprobs > 0 || options.logprobs;
            if (p->ends())
                batch.push_back(
                    {p->slot, p->sequence, p->step, -1, p->adapter, false, row_of(*p), logprobs, p->top_logprobs});
        }
}

// What sampling reads of the batch, after prompts of it were computed.
void Engine::upload_ended(const PromptGroups& groups) {
    for (const std::vector<const Prompt*>& group : groups) fork(group[0]->slot, {group.begin() + 1, group.end()});
    upload_batch(false);
    for (const std::vector<const Prompt*>& group : groups)
        if (group[0]->ends()) upload_slots(group);
}

// Samples a token after each row of `last`, and queues the step. prompt_losses: QueuedStep's.
void Engine::sample_batch(std::vector<std::pair<int64_t, int64_t>> prompt_losses) {
    compute_logits(last.rows(0, int64_t(batch.size())));
    sample(int64_t(batch.size()));
    queue_results(int64_t(batch.size()));
    QueuedStep& queued = queue[(steps_queued - 1) % 2];
    queued.with_prompts = true;
    queued.prompt_losses = std::move(prompt_losses);
}

void Engine::prefill(const std::vector<Prompt>& prompts) {
    const bool only_more =
        std::all_of(prompts.begin(), prompts.end(), [](const Prompt& p) { return !p.ends(); });  // the batch stays
    require(!pending() || (only_more && takes_prompts_while_pending()),
            "engine: prefill() before every queued step was read with next()");
    check_prompts(prompts);
    if (prompts.empty()) return;
    const PromptGroups groups = groups_of(prompts);
    note_tokens(groups);
    if (only_more) {
        compute_prompts(groups);
        batch_changed |= !takes_prompts_while_pending();
        return;
    }
    std::vector<Sequence> continued;
    std::copy_if(batch.begin(), batch.end(), std::back_inserter(continued),
                 [](const Sequence& s) { return !s.retired; });
    batch.clear();
    add_to_batch(groups);
    std::vector<std::pair<int64_t, int64_t>> prompt_losses = compute_prompts(groups);
    upload_ended(groups);
    sample_batch(std::move(prompt_losses));
    batch_changed = !continued.empty();
    batch.insert(batch.begin(), continued.begin(), continued.end());
}

int64_t Engine::most_joining() const {
    return std::min(prompt_chunk_tokens(), pass_tokens() - joint_rows());
}

bool Engine::joins(int64_t prompt_tokens, bool ends) const {
    return joins_at_all() && prompt_tokens <= most_joining() && ready() &&
           (!pending() || (!ends && takes_prompts_while_pending()));
}

// A step whose pass computes prompts, too.
void Engine::joint_step(const std::vector<Prompt>& prompts) {
    int64_t total = 0;
    bool ends = false;
    for (const Prompt& p : prompts) {
        total += int64_t(p.tokens.size());
        ends |= p.ends();
    }
    require(joins(total, ends), "engine: decode() of prompts that the step does not join");
    check_prompts(prompts, pages_missing());
    const PromptGroups groups = groups_of(prompts);
    note_tokens(groups);
    grow_batch();
    std::vector<std::pair<int64_t, int64_t>> prompt_losses(batch.size());
    const auto of_prompts = compute_prompts(groups, int64_t(batch.size()));
    prompt_losses.insert(prompt_losses.end(), of_prompts.begin(), of_prompts.end());
    add_to_batch(groups);
    if (ends) upload_ended(groups);
    sample_batch(std::move(prompt_losses));
    batch_changed = !ends && !takes_prompts_while_pending();
}

// Runs the passes over prompts. Returns for each sequence that is sampled next where prompt_results has the losses of
// its prompt, and how many they are. The chunks of a prompt do not depend on the other prompts, and with
// prompts_by_page() not on where prefill() is given a part of it that ends where a page does. A pass holds at most one
// chunk of a prompt. decoding: rows of the batch that the only pass begins with.
std::vector<std::pair<int64_t, int64_t>> Engine::compute_prompts(const PromptGroups& groups, int64_t decoding) {
    const int64_t capacity = tokens.shape[0];
    std::vector<PromptChunk> chunks;
    int64_t used = 0, finished = 0, finished_in_pass = 0, losses_begin = 0;
    std::vector<std::pair<int64_t, int64_t>> prompt_losses;
    const auto flush = [&] {
        if (!chunks.empty()) prefill_pass(chunks, finished, decoding);
        finished += finished_in_pass;
        chunks.clear();
        used = finished_in_pass = 0;
    };
    for (const std::vector<const Prompt*>& group : groups) {
        const Prompt& p = *group[0];
        const int64_t n = int64_t(p.tokens.size()), sampled = p.ends() ? int64_t(group.size()) : 0;
        prompt_losses.insert(prompt_losses.end(), size_t(sampled), {losses_begin, p.prompt_logprobs ? n - 1 : 0});
        const int64_t prompt_losses_at = p.prompt_logprobs ? losses_begin : -1;
        losses_begin += n;
        const int64_t past = length(p.slot);
        for (int64_t begin = 0, end = 0; begin < n; begin = end) {
            const int64_t most = prompts_by_page() ? KV_PAGE - (past + begin) % KV_PAGE : prompt_chunk_tokens();
            end = std::min(begin + most, n);
            if (used + end - begin > capacity || begin > 0 || prompts_by_page()) flush();
            chunks.push_back({&p, begin, end, end == n ? sampled : 0, prompt_losses_at, false});
            used += end - begin;
            finished_in_pass += chunks.back().sampled;
        }
    }
    flush();
    return prompt_losses;
}

// Each prompt that is computed, with those that are like it.
Engine::PromptGroups Engine::groups_of(const std::vector<Prompt>& prompts) const {
    PromptGroups groups;
    for (const Prompt& p : prompts)
        if (p.like < 0) groups.push_back({&p});
    for (const Prompt& p : prompts) {
        if (p.like < 0) continue;
        const auto found =
            std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g[0]->slot == p.like; });
        require(found != groups.end() && (*found)[0]->ends(), "engine: slot ", p.slot, " is like slot ", p.like,
                ", whose prompt does not end here");
        require(length(p.slot) == 0 && p.tokens.empty() && p.ends() && !p.prompt_logprobs &&
                    p.adapter == (*found)[0]->adapter,
                "engine: slot ", p.slot,
                " is like another: it must be empty, without tokens and logprobs of its own, and use its adapter");
        found->push_back(&p);
    }
    return groups;
}

// Gives empty slots the sequence of slot `from`: they share its whole pages; the last page and the states are copied.
void Engine::fork(int64_t from, const std::vector<const Prompt*>& to) {
    if (to.empty()) return;
    for (const Prompt* p : to) {
        cache.fork(from, p->slot, length(from));
        states.copy(from, p->slot, stream);
        lengths[size_t(p->slot)] = length(from);
    }
    for (int64_t g = 0; g < cache.num_groups(); g++) {
        const KvCache::PageCopies& pages = cache.copies(g);
        const int64_t n = int64_t(pages.from.size());
        if (n == 0) continue;
        staging->next();
        const Tensor from_pages = copied_from.rows(0, n), to_pages = copied_to.rows(0, n);
        staging->put(from_pages.data, pages.from.data(), from_pages.bytes(), stream);
        staging->put(to_pages.data, pages.to.data(), to_pages.bytes(), stream);
        const auto as_rows = [](const Tensor& t) {  // of whole pages
            return make_tensor(t.data, t.dtype, t.device, {t.shape[0], t.shape[1] * t.shape[2], t.shape[3]});
        };
        for (int64_t l = 0; l < config.layers; l++) {
            if (cache.group(l) != g) continue;
            const Tensor k = as_rows(cache.layer(l).k), v = as_rows(cache.layer(l).v);
            kv_copy(k, v, to_pages, k, v, from_pages, stream);
        }
    }
    cache.clear_copies();
}

// Rows of a decode step. As requests come and go, few batch sizes need few graphs.
int64_t Engine::step_rows(int64_t n) const {
    constexpr int64_t FEW = 8;
    return !graphs_replay() || n <= FEW ? n : std::min((n + FEW - 1) / FEW * FEW, options.slots);
}

// Uploads the rows of a step. with_tokens: the last tokens are on the host and not in `ids` yet.
void Engine::upload_batch(bool with_tokens) {
    std::vector<int32_t> slot, position, token, adapter;
    std::vector<int64_t> id, next;
    std::vector<SamplingRow> sampling;
    staging->next();
    step_classes = 0;
    for (const Sequence& s : batch) {
        slot.push_back(static_cast<int32_t>(s.slot));
        // After a prefill, sampling is followed by advance(), which adds one.
        position.push_back(static_cast<int32_t>(length(s.slot) - (with_tokens ? 0 : 1)));
        token.push_back(s.token);
        adapter.push_back(s.adapter);
        id.push_back(s.id);
        next.push_back(s.step);
        sampling.push_back(s.sampling);
        step_classes |= s.sampling.classes | (s.logprobs ? LOGPROBS : 0u) | (s.top_logprobs ? TOP_LOGPROBS : 0u);
    }
    // Unused rows look like those of retired sequences.
    const int64_t n = int64_t(batch.size()), all_rows = joins_at_all() ? padded_batch(n) : step_rows(n);
    adapter.resize(size_t(step_rows(n)), -1);
    while (int64_t(slot.size()) < all_rows) {
        slot.push_back(-1);
        position.push_back(-1);
        token.push_back(0);
        id.push_back(0);
        next.push_back(0);
        sampling.push_back(sampling[0]);
        sampling.back().classes &= ~sampling_class::ADJUSTED;
    }
    const auto put = [&](const Tensor& t, const auto& host) {
        staging->put(t.data, host.data(), int64_t(host.size() * sizeof(host[0])), stream);
    };
    put(slot_ids, slot);
    put(step_positions, position);
    put(sequences, id);
    put(steps, next);
    put(sampling_rows, sampling);
    if (const std::optional<AdapterTiles> tiles = upload_adapters(adapter, batch.size()))
        step_classes |= ADAPTERS | (tiles->everywhere ? ADAPTED_EVERYWHERE : 0u);
    if (with_tokens) put(ids, token);
}

// Uploads what sampling reads of a prompt's slot. The steps that follow keep it up to date on the device.
void Engine::upload_slots(const std::vector<const Prompt*>& prompts) {
    for (const Prompt* prompt : prompts) {
        const Prompt& p = *prompt;
        const auto row = [&](const Tensor& t) { return t.rows(p.slot, p.slot + 1); };
        const auto put = [&](const Tensor& t, const std::vector<int32_t>& bits) {
            staging->put(row(t).data, bits.data(), row(t).bytes(), stream);
        };
        if (seen) put(seen, seen_bits[size_t(p.slot)]);
        if (!p.mask.empty()) put(masks, p.mask);
        if (!counts) continue;
        device_fill(row(counts).data, 0, size_t(row(counts).bytes()), stream);
        if (p.completion.empty()) continue;
        std::vector<int32_t> count(size_t(options.sampled_vocab), 0);
        for (const int32_t id : p.completion)
            if (id < options.sampled_vocab) count[size_t(id)]++;
        copy_to_device(row(counts).data, count.data(), size_t(row(counts).bytes()), stream);
        synchronize(stream);  // `count` is a local variable
    }
}

DecodeModel Engine::decode_model() const {
    const ModelConfig& c = config;
    DecodeModel m;
    m.layers = c.layers;
    m.C = c.channels;
    m.NH = c.heads;
    m.NKV = c.kv_heads;
    m.HS = c.head_size;
    m.FFN = c.ffn;
    m.Vp = c.padded_vocab();
    m.slots = options.slots;
    m.capacity = options.context;
    m.dtype = options.dtype;
    m.activation = c.activation;
    m.eps = static_cast<float>(c.norm_eps);
    m.scale = c.attention_scale();
    m.centred = c.norm == Norm::LayerNorm;
    m.qk_norm = c.qk_norm != QkNorm::Off;
    m.embedding_norm = c.embedding_norm;
    m.head_bias = c.head_bias;
    if (options.packing) m.packing = options.packing->blocks;
    for (int64_t l = 0; l < c.layers; l++) m.layer_options.push_back({c.layer[size_t(l)].rope, cache.window(l)});
    return m;
}

// Computes the final norm and the logits; sample() applies the softcap.
void Engine::compute_logits(Tensor hidden) {
    if (forward) return forward->head(logits_out.rows(0, hidden.shape[0]), hidden);
    const InputNorm before{weights.normf.weight, weights.normf.bias, static_cast<float>(config.norm_eps),
                           config.norm == Norm::LayerNorm};
    linear({logits_out.rows(0, hidden.shape[0])}, hidden, before, weights.head, scratch, options.batch_invariant,
           stream);
}

void Engine::sample(int64_t B) {
    const Tensor logits_rows = logits_out.rows(0, B), sampled = ids.rows(0, B);
    softcap_forward(logits_rows, config.logit_softcap, stream);
    const SamplingBatch sampling{
        sampling_rows.rows(0, B), sequences.rows(0, B), steps.rows(0, B), step_classes, seen, counts, masks};
    sample_tokens(sampled, logits_rows, options.sampled_vocab, sampling, sample_scratch, stream);
    if (step_classes & LOGPROBS) {
        if (forward)
            forward->losses(losses.rows(0, B), sampled, last.rows(0, B), logits_rows);
        else
            cross_entropy_forward(losses.rows(0, B), logits_rows, sampled, config.vocab_size, {}, stream);
    }
    if (step_classes & TOP_LOGPROBS) find_top_tokens(logits_rows, sampled);
    advance(step_positions.rows(0, B), steps.rows(0, B), sampled, host_tokens, buffer_index, stream);
}

// Fills top_ids and top_out for rows of logits. `losses` are those of targets.
void Engine::find_top_tokens(const Tensor& logits, const Tensor& targets) {
    const int64_t B = logits.shape[0];
    const Tensor top = top_ids.rows(0, B);
    top_k(top_values.rows(0, B), top, logits.columns(0, options.sampled_vocab), top_scratch, stream);
    token_logprobs(top_out.rows(0, B), top, losses.rows(0, B), targets, logits, stream);
}

void Engine::queue_results(int64_t B) {
    QueuedStep& q = queue[steps_queued % 2];
    q.has_losses = step_classes & LOGPROBS;
    if (q.has_losses) copy_to_host_async(q.losses, losses.data, size_t(B) * sizeof(float), stream);
    if (step_classes & TOP_LOGPROBS) {
        copy_to_host_async(q.top_ids, top_ids.data, size_t(top_ids.rows(0, B).bytes()), stream);
        copy_to_host_async(q.top_logprobs, top_out.data, size_t(top_out.rows(0, B).bytes()), stream);
    }
    q.done.record(stream);
    q.slots.clear();
    q.num_top.clear();
    q.masked.clear();
    q.prompt_losses.clear();
    q.with_prompts = false;
    for (Sequence& s : batch) {
        q.slots.push_back(s.retired ? -1 : s.slot);
        q.num_top.push_back(s.top_logprobs);
        q.masked.push_back(s.sampling.classes & sampling_class::MASK);
        s.step++;
    }
    steps_queued++;
}

// The first B rows of the batch. An ordinary launch, the embedding, comes before what reads them.
DecodeBatch Engine::decode_batch(int64_t B, int64_t max_length) const {
    DecodeBatch b;
    b.slots = slot_ids.rows(0, B);
    b.positions = step_positions.rows(0, B);
    b.max_length = max_length;
    b.inputs_ready = true;
    b.table = table;
    b.angles = dynamic_rope ? iota.rows(0, B) : b.positions;
    return b;
}

// Attention of layer l for the rows of the batch, the first ones of qkv.
void Engine::attend_to_batch(int64_t l, DecodeBatch of_layer) {
    const int64_t B = of_layer.slots.shape[0];
    const LayerCache layer_cache = cache.layer(l);
    of_layer.table = rotating_table(l);
    of_layer.pages = layer_cache.pages;
    decode_attention(att.rows(0, B), qkv.rows(0, B), layer_cache.k, layer_cache.v, of_layer, cache.window(l),
                     config.attention_scale(), decode_scratch, stream);
}

void Engine::decode_step(int64_t B, int64_t max_length) {
    const ModelConfig& c = config;
    const Tensor hidden = x.rows(0, B);
    const DecodeBatch step_batch = decode_batch(B, max_length);
    if (B <= fused_step_max_batch && !(step_classes & ADAPTERS)) {
        ::decode_step(logits_out.rows(0, B), ids.rows(0, B), step_batch, decode_model(), weights, step_scratch, stream);
        return sample(B);
    }
    embed(hidden, ids.rows(0, B), step_batch.positions);
    const bool everywhere = step_classes & ADAPTED_EVERYWHERE;
    const std::optional<AdapterTiles> tiles =
        step_classes & ADAPTERS ? std::optional(adapter_tiles(B, everywhere)) : std::nullopt;
    run_blocks(hidden, step_batch.angles, options.batch_invariant, tiles, config.layers, [&](int64_t l) {
        if (c.attention_type(l) != AttentionType::Softmax) {
            return linear_attention_layer(
                l, B, [&](const QkvHeads& h, Tensor out, Tensor g, const LinearAttentionType& type) {
                    linear_attention_decode(out, states.layer(l, slot_ids.rows(0, B)), h.q, h.k, h.v, g, type, stream);
                });
        }
        attend_to_batch(l, step_batch);
    });
    compute_logits(hidden);
    sample(B);
}

const char* Engine::unfused_option() const {
    const bool otherwise_fused = !options.batch_invariant && decode_step_max_batch(decode_model()) > 0;
    return otherwise_fused ? unfused_model_option(config, options) : nullptr;
}

int64_t Engine::active() const {
    return std::count_if(batch.begin(), batch.end(), [](const Sequence& s) { return !s.retired; });
}

// If at least half of the rows are retired, reading all queued steps and compacting the batch is faster; with another
// program's forward pass, which computes retired rows like any others, if a sixteenth is.
bool Engine::ready() const {
    const int64_t retired = int64_t(batch.size()) - active();
    const bool sparse = (forward ? 16 : 2) * retired >= int64_t(batch.size());
    if (active() == 0 || steps_queued - steps_read >= steps_ahead() || (pending() && (batch_changed || sparse)))
        return false;
    return pages_missing() <= pages_available() && std::all_of(batch.begin(), batch.end(), [&](const Sequence& s) {
               return s.retired || length(s.slot) < options.context;
           });
}

bool Engine::has_room(const std::vector<Prompt>& prompts, int64_t beside) const {
    int64_t missing = beside;
    for (const std::vector<const Prompt*>& group : groups_of(prompts)) {
        const int64_t slot = group[0]->slot, end = length(slot) + int64_t(group[0]->tokens.size());
        missing += cache.pages_missing(slot, end);
        if (end % KV_PAGE) missing += int64_t(group.size()) - 1;  // copies of the last page
    }
    return missing <= cache.pages_available();
}

int64_t Engine::pages_missing() const {
    int64_t missing = 0;
    for (const Sequence& s : batch)
        if (!s.retired) missing += cache.pages_missing(s.slot, length(s.slot) + 1);
    return missing;
}

int64_t Engine::adopt(int64_t slot, const std::vector<int32_t>& sequence_tokens, int64_t name_space) {
    require(length(slot) == 0, "engine: slot ", slot, " is not empty");
    if (!finds_prefixes()) return 0;
    const int64_t found = cache.adopt(slot, sequence_tokens, name_space);
    lengths[size_t(slot)] = found;
    for (int64_t i = 0; i < found && !seen_bits.empty(); i++)
        set_bit(seen_bits[size_t(slot)], sequence_tokens[size_t(i)]);
    return found;
}

void Engine::remember(int64_t slot, const std::vector<int32_t>& sequence_tokens, int64_t name_space) {
    require(int64_t(sequence_tokens.size()) <= length(slot), "engine: slot ", slot, " holds ", length(slot),
            " tokens, not ", sequence_tokens.size());
    if (finds_prefixes()) cache.remember(slot, sequence_tokens, name_space);
}

void Engine::suspend(int64_t slot) {
    require(!pending(), "engine: suspend() before every queued step was read with next()");
    const auto found =
        std::find_if(batch.begin(), batch.end(), [&](const Sequence& s) { return s.slot == slot && !s.retired; });
    require(found != batch.end(), "engine: slot ", slot, " is not generating");
    suspended.emplace(slot, Suspended{*found, cache.save(slot, stream)});
    batch.erase(found);
    batch_changed = true;
}

bool Engine::can_resume(int64_t slot) const {
    return cache.pages_of(suspended.at(slot).saved) <= cache.pages_available();
}

void Engine::resume(int64_t slot) {
    require(!pending(), "engine: resume() before every queued step was read with next()");
    require(suspended.count(slot), "engine: slot ", slot, " is not suspended");
    cache.restore(slot, suspended.at(slot).saved, stream);
    batch.push_back(suspended.at(slot).sequence);
    suspended.erase(slot);
    batch_changed = true;
}

// Removes the retired rows. The remaining rows are uploaded again: the host has read all of their tokens.
void Engine::compact_batch() {
    batch.erase(std::remove_if(batch.begin(), batch.end(), [](const Sequence& s) { return s.retired; }), batch.end());
    upload_batch(true);
    batch_changed = false;
}

// A pass over the last token of each row, which is in `ids`. A row that is retired, or that no sequence has, takes
// another one's position and keys, and stores nothing.
void Engine::outside_decode_step() {
    const int64_t B = step_rows(int64_t(batch.size()));
    const auto active_row =
        std::find_if(batch.begin(), batch.end(), [](const Sequence& sequence) { return !sequence.retired; });
    std::vector<Prompt> prompts(static_cast<size_t>(B));
    std::vector<PromptChunk> chunks;
    for (size_t b = 0; b < prompts.size(); b++) {
        const bool retired = b >= batch.size() || batch[b].retired;
        prompts[b].slot = retired ? active_row->slot : batch[b].slot;
        chunks.push_back({&prompts[b], 0, 1, 1, -1, retired});
    }
    PassInputs in = upload_pass(chunks, 0, ids.rows(0, B));
    in.sequences.max_k = bucket(in.sequences.max_k, options.context);
    graphs[{B, in.sequences.max_k, step_classes & STEP_KERNELS}].run(stream, [&] {
        run_pass(in, last.rows(0, B));
        compute_logits(last.rows(0, B));
        sample(B);
    });
    for (const PromptChunk& p : chunks) cache.forget(p.prompt->slot, length(p.prompt->slot));
    queue_results(B);
}

// The sampled tokens join their sequences.
void Engine::grow_batch() {
    for (const Sequence& s : batch) {
        if (s.retired) continue;
        grow(s.slot, 1);
        cache.forget(s.slot, length(s.slot));
    }
}

void Engine::decode(const std::vector<Prompt>& prompts) {
    require(ready(), "engine: decode() while not ready()");
    if (!pending() && (batch_changed || active() < int64_t(batch.size()))) compact_batch();
    upload_retired();
    if (!prompts.empty()) return joint_step(prompts);
    if (forward) return outside_decode_step();
    grow_batch();
    int64_t most_tokens = 0;  // of a sequence
    std::vector<int32_t> token_positions;
    std::vector<int64_t> sequence_lengths;
    for (const Sequence& s : batch) {
        if (dynamic_rope) {
            token_positions.push_back(static_cast<int32_t>(length(s.slot) - !s.retired));
            sequence_lengths.push_back(length(s.slot) + s.retired);
        }
        if (!s.retired) most_tokens = std::max(most_tokens, length(s.slot));
    }
    if (dynamic_rope || cache.tables_changed()) staging->next();
    cache.upload_tables(*staging, stream);
    upload_angles(token_positions, sequence_lengths);
    const int64_t B = step_rows(int64_t(batch.size())), max_length = bucket(most_tokens, options.context);
    graphs[{B, max_length, step_classes & STEP_KERNELS}].run(stream, [&] { decode_step(B, max_length); });
    queue_results(B);
}

const Engine::Step& Engine::next() {
    require(pending(), "engine: next() without a queued step");
    const QueuedStep& q = queue[steps_read++ % 2];
    q.done.wait();
    step.with_prompts = q.with_prompts;
    step.slots.clear();
    step.tokens.clear();
    step.logprobs.clear();
    for (size_t b = 0; b < q.slots.size(); b++) {
        if (q.slots[b] < 0) continue;
        require(q.tokens[b] >= 0, "the model's logits are not finite; use a wider --dtype, or check the weights",
                q.masked[b] ? "; the mask of this sequence may allow only tokens of probability 0" : "");
        step.slots.push_back(q.slots[b]);
        step.tokens.push_back(q.tokens[b]);
        if (q.has_losses) step.logprobs.push_back(-q.losses[b]);
        read_logprobs(q, b);
        if (!seen_bits.empty()) set_bit(seen_bits[size_t(q.slots[b])], q.tokens[b]);
        for (Sequence& s : batch)
            if (s.slot == q.slots[b]) s.token = q.tokens[b];
    }
    return step;
}

// Reads what row b of a queued step asks for, of the sequence that was added to `step` last.
void Engine::read_logprobs(const QueuedStep& q, size_t b) {
    const size_t i = step.slots.size() - 1, K = size_t(options.top_logprobs);
    if (step.top_logprobs.size() <= i) {
        step.top_logprobs.resize(i + 1);
        step.prompt_logprobs.resize(i + 1);
        step.prompt_top_logprobs.resize(i + 1);
    }
    step.top_logprobs[i].clear();
    step.prompt_logprobs[i].clear();
    step.prompt_top_logprobs[i].clear();
    for (size_t k = 0; k < size_t(q.num_top[b]); k++)
        step.top_logprobs[i].push_back({q.top_ids[b * K + k], q.top_logprobs[b * K + k]});
    if (q.prompt_losses.empty()) return;
    const auto [first, count] = q.prompt_losses[b];
    const PromptResults from = prompt_results_at(first);
    for (int64_t j = 0; j < count; j++) {
        step.prompt_logprobs[i].push_back(-from.losses[j]);
        for (int64_t k = 0; k < q.num_top[b]; k++) {
            const int64_t at = j * options.top_logprobs + k;
            step.prompt_top_logprobs[i].push_back({from.top_ids[at], from.top_logprobs[at]});
        }
    }
}

void Engine::grow(int64_t slot, int64_t by) {
    cache.grow(slot, length(slot) + by);
    lengths[size_t(slot)] += by;
}

void Engine::retire(int64_t slot) {
    for (Sequence& s : batch) {
        if (s.slot != slot || s.retired) continue;
        s.retired = true;
        return;
    }
}

// Retires rows on the device, too, for the KV cache and for the states: a step that skips them reads less. Most rows
// end where no step is queued, and are removed from the batch instead.
void Engine::upload_retired() {
    const int32_t finished = -1;
    bool begun = false;
    for (size_t b = 0; b < batch.size(); b++) {
        if (!batch[b].retired || batch[b].skipped) continue;
        if (!begun) staging->next();
        begun = batch[b].skipped = true;
        for (const Tensor& t : {step_positions, slot_ids})
            staging->put(t.rows(int64_t(b), int64_t(b) + 1).data, &finished, sizeof finished, stream);
    }
}

int64_t Engine::truncate(int64_t slot, int64_t kept) {
    require(kept >= 0 && kept <= length(slot), "engine: slot ", slot, " holds ", length(slot), " tokens, not ", kept);
    // A state cannot be rewound, and of a window the cache holds the last keys only.
    if (kept < length(slot) && (config.has_linear_attention() || !cache.holds(slot, kept))) kept = 0;
    // A page that others share is not written.
    if (kept < length(slot) && cache.ends_in_shared_page(slot, kept)) kept -= kept % KV_PAGE;
    suspended.erase(slot);
    lengths[size_t(slot)] = kept;
    cache.cut(slot, kept);
    if (kept == 0 && !seen_bits.empty()) std::fill(seen_bits[size_t(slot)].begin(), seen_bits[size_t(slot)].end(), 0);
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
    for (const Sequence& s : batch)
        if (!s.retired) bytes += cache.bytes_read(length(s.slot)) + states.bytes_per_sequence();
    return bytes;
}

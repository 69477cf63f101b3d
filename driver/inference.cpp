#include "driver/inference.h"

#include <iostream>
#include <utility>

#include "driver/frozen_weights.h"
#include "driver/matmul_cache.h"
#include "driver/pass.h"
#include "runtime/device/convert_dtype.h"
#include "runtime/files/checkpoint_directory.h"
#include "runtime/model/initialise.h"
#include "runtime/model/packed_params.h"

namespace {

constexpr const char* SMALLER_INFERENCE =
    "give it fewer tokens at a time, a --dtype of 16 bits if this backend has one, or a smaller model";

std::unique_ptr<AdapterBank> bank_for(const Model& model, const EngineOptions& options) {
    if (options.adapters == 0) return nullptr;
    return std::make_unique<AdapterBank>(model.table, options.adapters, options.adapter_rank, options.dtype);
}

EngineOptions with_adapters(EngineOptions options, const std::vector<LoraAdapter>& adapters) {
    options.adapters = std::max(options.adapters, int64_t(adapters.size()));
    for (const LoraAdapter& adapter : adapters)
        options.adapter_rank = std::max(options.adapter_rank, round_up_rank(adapter.rank()));
    return options;
}

void load_inference_weights(const ModelSource& source, const Model& model) {
    if (model.packed) {
        std::cerr << model.packed->note(model.table);
        std::cerr << model.packed->load(source, model.table);
    }
    if (model.nf4) load_frozen(*model.nf4, open_weight_source(source, model.table), model.table);
    std::cerr << load_weights(source, model.table, model.arenas);
}

}  // namespace

Precision inference_precision(DType dtype, std::optional<Packings> packing) {
    Precision precision{dtype};
    precision.packing = packing;
    return precision;
}

LoadedModel::LoadedModel(const Context& ctx, const ModelSource& from, const RunShape& shape)
    : source(from),
      model(source.config, {}, inference_precision(shape.dtype, shape.packing)),
      acts(source.config, shape) {
    require(!source.directory.empty(), "--model ", source.name, NO_WEIGHTS);
    memory_plan(model, acts).check([](int64_t) { return SMALLER_INFERENCE; });
    model.allocate(ctx);
    load_inference_weights(source, model);
    acts.allocate(ctx);
}

LoadedEngine::LoadedEngine(const Context& ctx, const ModelSource& source, const EngineOptions& options,
                           bool random_weights, const std::vector<std::string>& adapter_names)
    : model(inference_model(source.config, options.dtype, options.packing, options.nf4)),
      adapters(read_adapters(source, model.table, adapter_names)),
      bank(bank_for(model, with_adapters(options, adapters))),
      engine(source.config, with_adapters(options, adapters), ctx.stream) {
    require(random_weights || !source.directory.empty(), "--model ", source.name, NO_WEIGHTS);
    memory_plan(model, engine, bank.get()).check([](int64_t) { return SMALLER_INFERENCE; });
    model.allocate(ctx);
    if (bank) bank->allocate(ctx.stream);
    for (size_t i = 0; i < adapters.size(); i++) bank->store(int64_t(i), adapters[i], ctx.stream);
    adapters.clear();
    if (random_weights) {
        initialise_weights(model.table, model.arenas, options.sampling.seed, ctx.stream);
        if (model.packed) model.packed->randomise(model.table, options.sampling.seed);
        if (model.nf4) initialise_frozen(*model.nf4, model.table, options.sampling.seed);
    } else {
        load_inference_weights(source, model);
    }
    load_matmul_cache(ctx.stream);
    InferenceWeights weights = inference_weights(model);
    if (bank) weights.adapters = bank->blocks();
    engine.allocate(weights);
    store_matmul_cache(ctx.stream);
    if (const char* option = engine.unfused_option())
        std::cerr << "decode steps run kernel by kernel: the fused decode step does not support " << option << "\n";
}

Model inference_model(const ModelConfig& config, DType dtype, std::optional<Packings> packing, bool nf4) {
    LoraOptions base;  // without adapters
    base.nf4 = nf4;
    return {config, {}, inference_precision(dtype, packing), OptimizerType::AdamW, {}, base};
}

void take_weights(EngineOptions& o, const ModelSource& source, const std::string& weights) {
    o.nf4 = weights == NF4_NAME;
    if (o.nf4 && source.packing) refuse_packed(source, "--weights " + weights);
    if (!o.nf4) o.packing = generation_packing(source, weights, o.dtype);
}

std::optional<Packing> packing_of(const ModelSource& source, const std::string& weights) {
    if (weights == "model") return source.packing;
    const Packing packing = enum_of<Packing>(PACKING_NAMES, weights);
    if (source.packing && *source.packing != packing) refuse_packed(source, "--weights " + weights);
    return packing;
}

std::optional<Packings> generation_packing(const ModelSource& source, const std::string& weights, DType dtype) {
    const std::optional<Packing> packing = packing_of(source, weights);
    const bool floats = !packing && !source.directory.empty() && source.adapter.empty();
    if (!floats) return packing;
    const ParamTable table = parameter_table(source.config, 1);
    if (const std::optional<Packings> of_file = gguf_packing(source, table)) return of_file;
    if (backend_device() != Device::CPU || dtype != DType::F32) return packing;
    const WeightSource stored = open_weight_source(source, table);
    for (const Param& p : table.params)
        for (const SourceTensor& tensor : p.sources)
            if (packs(p, Packing::Bf16) && stored.dtype(p, tensor) != DType::BF16) return {};
    return Packing::Bf16;
}

InferenceWeights inference_weights(const Model& model) {
    const auto norm = [&](Role role) { return NormWeights{model.weight(role), model.weight(bias_of(role))}; };
    InferenceWeights w{.wte = model.weight(WTE),
                       .wpe = model.weight(WPE),
                       .packed_wte = linear_weights(model, WTE).packed,
                       .blocks = {},
                       .normf = norm(NORMF_W),
                       .head = linear_weights(model, model.head()),
                       .embedding_norm = norm(EMBEDNORM_W),
                       .adapters = {}};
    for (int64_t l = 0; l < model.config.layers; l++) w.blocks.push_back(block_weights(model, l));
    return w;
}

EngineOptions rollout_engine(const RunOptions& o, int64_t world) {
    EngineOptions out;
    out.slots = std::min(o.rollout.prompts * o.rollout.completions / world, o.rollout.batch_size);
    out.context = o.seq_len;
    out.dtype = o.model.type();
    out.logprobs = true;
    out.outside_forward = o.rollout.exact;
    if (out.outside_forward) return out;  // which has adapters and NF4 of its own
    out.nf4 = o.lora.nf4;
    if (o.lora.on()) out.adapters = 1;
    if (o.lora.on()) out.adapter_rank = round_up_rank(o.lora.rank);
    return out;
}

RunShape rollout_forward(const RunOptions& o, const Model& model, int64_t pass_tokens) {
    RunShape shape = inference_shape(pass_tokens, 1, o.model.type());
    set_adapters(shape, model);
    return shape;
}

// Why a GPU does not sample exactly; empty: it does. kernels/gemm_hopper.h, attention_forward_hopper.cu and
// cross_entropy_hopper.h take no more: other kernels choose by the number of rows, or round logits.
static std::string inexact_on_gpu(const RunOptions& o, const ModelConfig& c, const Target& target) {
    if (!target.hopper)
        return "of a GPU's kernels only those for sm_90a (Hopper) promise the same bits; use --rollout fast on this "
               "one";
    if (o.model.type() != DType::BF16) return str("on a GPU it takes --dtype bf16, not ", o.model.dtype);
    if (c.head_bias || c.logit_softcap)
        return str("on a GPU the loss of a head with a ", c.head_bias ? "bias" : "softcap",
                   " comes from rounded logits; use --rollout fast");
    if (c.head_size > 128)
        return str("on a GPU heads may have up to 128 channels, not ", c.head_size, "; use --rollout fast");
    const std::pair<const char*, int64_t> sizes[] = {
        {"channels", c.channels}, {"ffn", c.ffn}, {"head size", c.head_size}, {"--lora-rank", o.lora.rank}};
    for (const auto& [name, size] : sizes)
        if (size % 8)
            return str(name, " is ", size,
                       ", and on a GPU it must be a multiple of 8; change it, or use --rollout fast");
    return {};
}

// The same anywhere.
static std::string inexact(const RunOptions& o, const ModelConfig& c, const Target& target) {
    if (o.fp8.on)
        return "--matmul-dtype fp8 scales all tokens of a batch together, so that they depend on each other; leave one "
               "of them out";
    if (c.has_linear_attention())
        return "layers of linear attention sum in chunks when they train, and token by token when they sample; use "
               "--rollout fast";
    const bool dynamic = c.positions == Positions::RoPE && c.rope_scaling.kind == RopeScaling::Kind::Dynamic;
    if (dynamic && o.seq_len > c.rope_scaling.original_max_position)
        return str("with dynamic RoPE scaling the angles of sequences beyond ", c.rope_scaling.original_max_position,
                   " tokens depend on their length; use --rollout fast, or lower --max-tokens");
    return target.device == Device::CPU ? std::string() : inexact_on_gpu(o, c, target);
}

void choose_sampler(RunOptions& o, const ModelConfig& c, const Target& target) {
    const std::string why_not = inexact(o, c, target);
    // On a CPU a step takes twice the time (docs/log/cpu.md).
    const bool when_possible = o.rollout.sampler == Sampler::Auto && target.device != Device::CPU && why_not.empty();
    o.rollout.exact = o.rollout.on() && (when_possible || o.rollout.sampler == Sampler::Exact);
    require(!o.rollout.exact || why_not.empty(), "--rollout exact: ", why_not);
}

int64_t rollout_bytes(const RunOptions& o, const Model& model) {
    const EngineOptions options = rollout_engine(o, model.sharding.world);
    const Engine planned(model.config, options, {});
    const int64_t engine = ArenaPlan::aligned(planned.bytes());
    if (o.rollout.exact)
        return engine + Activations(model.config, rollout_forward(o, model, planned.pass_tokens())).plan.bytes();
    return o.lora.on() ? engine + AdapterBank(model.table, 1, options.adapter_rank, options.dtype).bytes() : engine;
}

bool keeps_reference(const RunShape& shape, const Model& trained) {
    return shape.rollout && shape.rollout->policy.kl > 0 && !trained.adapters;
}

Model reference_model(const Model& trained) {
    return inference_model(trained.config, trained.precision.dtype, {});
}

MemoryPlan memory_plan(const Model& model, const Engine& engine, const AdapterBank* bank) {
    MemoryPlan plan = memory_plan(model);
    if (bank) plan.add("adapters", bank->bytes());
    plan.add("KV cache", engine.cache_bytes());
    if (engine.state_bytes()) plan.add("linear states", engine.state_bytes());
    plan.add("activations", engine.activation_bytes());
    plan.add("program and libraries", this_target().overhead_bytes());
    return plan;
}
std::vector<float> fetch_floats(const Context& ctx, const Tensor& t) {
    std::string bytes(static_cast<size_t>(t.bytes()), '\0');
    copy_to_host(bytes.data(), t.data, bytes.size(), ctx.stream);
    std::vector<float> values(static_cast<size_t>(t.numel()));
    convert_to_float(values.data(), bytes.data(), t.dtype, t.numel());
    return values;
}

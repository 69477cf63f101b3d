// From options to a model, the shape of its micro-steps and its memory plan. Nothing is allocated here: `plan` and
// `train` share these functions.
#include "driver/inference.h"
#include "model.h"

// 6 FLOP per weight of a matmul (2 forward, 4 backward; a frozen weight has no gradient: 2 backward), plus attention's
// two matmuls: the causal half of [T, T] for softmax, of which a window w < T leaves T·w − w²/2; the recurrent form for
// linear attention (k vᵀ is added to a state, the state is multiplied by q).
double flop_per_token(const Model& model, int64_t T) {
    const ModelConfig& c = model.config;
    double weights = 0;
    for (const Param& p : model.table.params) {
        const bool lookup_only = p.role == WPE || (p.role == WTE && !c.tied);
        if (p.cols > 0 && !lookup_only) weights += double(p.numel());
    }
    const double of_weights =
        model.adapters ? 4 * weights + 6 * double(model.adapters->table.num_weights()) : 6 * weights;
    double attention = 0;
    for (int64_t l = 0; l < c.layers; l++) {
        const double w = double(c.window(l)), keys = w > 0 && w < double(T) ? w * (2 - w / double(T)) : double(T);
        if (c.attention_type(l) == AttentionType::Softmax)
            attention += keys * double(c.heads * c.head_size);
        else
            attention += double((c.heads + c.kv_heads) * c.head_size * c.head_size);
    }
    return of_weights + 6 * attention;
}

MemoryPlan memory_plan(const Model& model, const Target& target) {
    const int64_t size = dtype_size(model.precision.dtype);
    MemoryPlan plan;
    plan.device = target.device;
    const FrozenMemory* const frozen = model.frozen();
    plan.add("weights", model.kept() * size, Offload::place(model.streams_groups()));
    plan.add("gathered weights", model.gathered() * size + (frozen ? frozen->buffer_bytes() : 0));
    plan.add("master weights", model.master() * 4, Offload::place(model.offload.master));
    plan.add("fp32 weights", model.fp32() * 4);
    if (model.shards) plan.add("fp8 weights", model.shards->bytes());
    if (frozen) plan.add(model.nf4 ? "NF4 weights" : "fp8 weights", frozen->bytes(), frozen->place());
    if (model.packed) plan.add(str(packing_name(model.packed->packings.blocks), " weights"), model.packed->bytes());
    if (model.adapters) plan.add("adapters", model.adapters->bytes());
    return plan;
}

MemoryPlan memory_plan(const Model& model, const Activations& acts, const GradientOptions& gradients) {
    const Target& target = acts.shape.target;
    MemoryPlan plan = memory_plan(model, target);
    if (acts.shape.training) {
        const Model& trained = model.trained();
        const Gradients::Memory grads = Gradients::memory(trained.table, trained.sharding, gradients);
        plan.add("gradients", grads.arena);
        plan.add("gradients in progress", grads.buffers + grads.sums + grads.exchanged);
        plan.add("optimizer (m, v)", Optimizer::state_bytes(trained), Offload::place(model.offload.optimizer));
        if (const int64_t world = model.sharding.world; world > 1) {
            const bool all_to_all =
                trained.table.updates_matrices() && trained.sharding.splits_optimizer();  // parallel/distributed_muon.h
            plan.add("collectives", target.comm_overhead_bytes() + (all_to_all ? target.all_to_all_bytes(world) : 0));
        }
    }
    if (keeps_reference(acts.shape, model)) plan.add("reference weights", reference_model(model).bytes());
    plan.add("activations", acts.plan.bytes());
    plan.add("block inputs", acts.host_bytes(), MemoryPlace::Host);
    if (acts.fp8) {
        plan.add("fp8 weights", acts.fp8->weight_bytes());
        plan.add("fp8 scales", acts.fp8->scale_bytes(model.sharding.world));
    }
    plan.add("program and libraries", target.overhead_bytes());
    return plan;
}

Snapshot snapshot_of(const Model& whole) {
    const Model& model = whole.trained();
    const DType exact = model.master() ? DType::F32 : model.precision.dtype;
    return {model.table, exact, model.precision.moments, model.sharding.rank, model.sharding.world};
}

GradientOptions gradient_options(const RunOptions& o, uint64_t seed) {
    return {float_type(o.sharding.reduce_dtype), o.sharding.bucket_mib << 20, float_type(o.grad_dtype), seed,
            o.grad_rounding == "nearest"};
}

Offload offload_options(const std::string& what) {
    const auto has = [&](const char* state) { return what.find(state) != std::string::npos; };
    return {has("optimizer"), has("master"), has("activations"), has("weights")};
}

Fp8Options fp8_options(Fp8Options options, const Model& model) {
    options.frozen = model.table.frozen;
    options.keep_weights &= !model.sharding.splits_weights() && !model.nf4 && !model.offload.weights;
    return options;
}

Model model_of(const RunOptions& o, const ModelConfig& config, int64_t rank, int64_t world) {
    const DType dtype = o.model.type();
    return Model(config, {o.sharding.zero_stage, rank, world},
                 {dtype, dtype != DType::F32 && o.master_weights, float_type(o.optimizer_dtype)}, o.optimizer,
                 offload_options(o.offload), o.lora, o.fp8);
}

RunShape run_shape(const RunOptions& o, const Model& model, const Target& target) {
    RunShape shape = training_shape(o.batch_size, o.seq_len, o.model.type());
    shape.target = target;
    shape.recompute = o.recompute;
    shape.recompute_layers = o.recompute_layers;
    shape.world = model.sharding.world;
    shape.update_bytes = update_workspace_bytes(model, MUON_ROUND_BYTES, target);
    if (shape.dtype != DType::F32) shape.activation_epilogue = o.activation_epilogue;
    shape.deterministic = !o.nondeterministic;
    shape.fp8 = o.fp8;
    shape.preference = o.preference.options();
    if (o.rollout.on()) {
        shape.rollout = o.rollout;
        shape.rollout_bytes = rollout_bytes(o, model);
    }
    shape.offload_inputs = model.offload.moves_inputs(target);
    set_adapters(shape, model);
    return shape;
}

void set_adapters(RunShape& shape, const Model& model) {
    shape.fp8 = fp8_options(shape.fp8, model);
    if (model.lora) {
        shape.lora_widths = model.lora->widths;
        shape.lora_vocabulary = model.lora->vocabulary;
        shape.adapter_elements = model.adapters->table.total;
    }
    if (model.nf4) shape.nf4_weight = model.nf4->largest();
}

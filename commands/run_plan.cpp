// `plan`: the memory and the FLOP that a run needs.
#include <optional>

#include "commands/inference.h"
#include "commands/plan.h"
#include "commands/run.h"
#include "commands/training.h"
#include "runtime/files/log.h"

namespace {

// What is in use before a run, and a remark on it. A context that was not measured is taken to be an H100's.
std::pair<int64_t, std::string> in_use_on(const Gpu* gpu) {
    if (!gpu) return {device_bytes_in_use(), ""};
    if (gpu->context_mib) return {gpu->context_mib << 20, ""};
    return {find_gpu("H100 80GB HBM3").context_mib << 20,
            str("  the CUDA context was not measured on ", gpu->name, "; that of an H100 is planned\n")};
}

}  // namespace

void run_plan(const Args& args) {
    const PlanOptions o = parse_plan(args);
    const ModelSource source = o.model.resolve(0);
    const DType dtype = o.model.type();
    const Gpu* const gpu = planned_gpu(o);
    const bool training = !o.inference && !o.generate;
    const Precision precision{dtype, dtype != DType::F32 && training && o.master_weights,
                              training_dtype(o.optimizer_dtype)};
    const auto model_of = [&](int64_t stage) {
        return Model(source.config, {stage, 0, o.world}, precision, o.optimizer);
    };
    const Model model = model_of(o.sharding.zero_stage);
    RunShape shape = inference_shape(o.batch_size, o.seq_len, dtype);
    shape.training = training;
    shape.recompute = o.recompute;
    shape.world = o.world;
    shape.deterministic = !o.nondeterministic;
    if (gpu) shape.target = gpu->target();
    check_fp8(o.fp8, source.config, dtype, o.batch_size * o.seq_len, shape.target);
    const auto activations_of = [&](const Model& planned) {
        shape.fp8 = fp8_options(o.fp8, planned);
        shape.update_bytes = training ? update_workspace_bytes(planned, MUON_ROUND_BYTES, shape.target) : 0;
        return std::make_unique<Activations>(source.config, shape);
    };
    const std::unique_ptr<Activations> acts = activations_of(model);
    const ReduceOptions reduce = reduce_options(o.sharding);
    EngineOptions generation;
    generation.slots = o.batch_size, generation.context = o.seq_len, generation.dtype = dtype;
    // A run that saves checkpoints while it trains.
    const auto plan_of = [&](const Model& planned, const Activations& activations) {
        MemoryPlan plan = memory_plan(planned, activations, reduce);
        if (training) plan.add_host("checkpoint snapshot", snapshot_of(planned).bytes());
        return plan;
    };
    MemoryPlan plan = o.generate ? memory_plan(model, Engine(source.config, generation, {})) : plan_of(model, *acts);
    plan.limit = o.gpu_memory;
    auto [in_use_before, remark] = in_use_on(gpu);
    // With several ranks: what each ZeRO stage needs. In stage 0 each rank keeps the whole state.
    std::vector<int64_t> stages;
    for (int64_t stage = 0; o.world > 1 && stage <= 3; stage++) {
        const Model planned = model_of(stage);
        stages.push_back(plan_of(planned, *activations_of(planned)).total);
    }
    std::vector<PlannedGroup> groups;
    for (size_t g = 0; training && g < NUM_RATE_GROUPS; g++) {
        PlannedGroup group{RATE_GROUP_NAMES[g]};
        for (const Param& p : model.table.params)
            if (size_t(p.rate_group) == g) group.weights += p.numel(), group.optimizer = p.optimizer;
        if (group.weights) groups.push_back(group);
    }
    PlanReport report{source.name,
                      describe(model.config, model.table.num_weights()),
                      model.table.num_weights(),
                      flop_per_token(model, o.seq_len),
                      training,
                      o.world,
                      plan,
                      in_use_before,
                      remark,
                      groups,
                      stages,
                      o.generate ? std::vector<ArenaPlan::Entry>{} : acts->plan.entries()};
    if (plan.limit) {
        const int64_t left = plan.available(plan.limit, in_use_before) - plan.total;
        report.remark += left >= 0 ? str("  fits: ", human_bytes(left), " are left\n")
                                   : str("  does not fit: ", human_bytes(-left), " are missing\n");
    }
    show_plan(report, o);
}

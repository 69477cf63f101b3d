// `plan`: the memory and the FLOP that a run needs.
#include <algorithm>

#include "commands/inference.h"
#include "commands/plan.h"
#include "commands/run.h"
#include "commands/training.h"
#include "runtime/files/log.h"

namespace {

// What is in use before a run, and a remark on it. A context that was not measured is taken to be an H100's.
std::pair<int64_t, std::string> in_use_on(const Gpu* gpu) {
    if (!gpu) return {device_bytes_in_use(), ""};
    if (gpu->context_mib > 0) return {int64_t(gpu->context_mib * 0x1p20), ""};
    return {int64_t(find_gpu("H100 80GB HBM3").context_mib * 0x1p20),
            str("  the CUDA context was not measured on ", gpu->name, "; that of an H100 is planned\n")};
}

// A run, planned.
struct PlannedRun {
    Model model;
    std::unique_ptr<Activations> acts;
    MemoryPlan memory;
};

PlannedRun plan_run(PlanOptions o, const ModelConfig& config, const Target& target) {
    const bool training = !o.inference && !o.generate;
    if (!training) o.master_weights = false;
    PlannedRun run{model_of(o, config, 0, o.world), {}, {}};
    RunShape shape =
        training ? run_shape(o, run.model, target) : inference_shape(o.batch_size, o.seq_len, o.model.type());
    shape.target = target;
    run.acts = std::make_unique<Activations>(config, shape);
    run.memory = memory_plan(run.model, *run.acts, gradient_options(o));
    // A run that saves checkpoints while it trains.
    if (training) run.memory.add("checkpoint snapshot", snapshot_of(run.model).bytes(), MemoryPlace::Host);
    return run;
}

}  // namespace

void run_plan(const Args& args) {
    PlanOptions o = parse_plan(args);
    const ModelSource source = o.model.resolve(0);
    const Gpu* const gpu = planned_gpu(o);
    const Target target = gpu ? gpu->target() : this_target();
    const bool training = !o.inference && !o.generate;
    check_fp8(o.fp8, source.config, o.model.type(), o.batch_size * o.seq_len, target);
    auto [in_use_before, remark] = in_use_on(gpu);
    FitReport fitted;
    if (o.fit) {
        // Drivers report up to 2% less memory than a GPU's name says.
        const int64_t all =
            gpu ? int64_t(gpu->gib * 0.98 * double(1 << 30)) : device_memory_available() + in_use_before;
        const int64_t available = (o.gpu_memory ? std::min(all, o.gpu_memory) : all) - in_use_before;
        require(available > 0, "--fit: ", human_bytes(o.gpu_memory), " of --gpu-memory are less than the ",
                human_bytes(in_use_before), " that are in use before a run; raise --gpu-memory");
        fitted = find_fit(o, o.world, target, available, [&](const RunOptions& tried) {
            PlanOptions other = o;
            static_cast<RunOptions&>(other) = tried;
            return plan_run(other, source.config, target).memory.total;
        });
        require(fitted.found(), "--fit: nothing fits into ", human_bytes(available), "; ", fitted.remedy());
    }
    const PlannedRun run = plan_run(o, source.config, target);
    const Model& model = run.model;
    EngineOptions generation;
    generation.slots = o.batch_size, generation.context = o.seq_len, generation.dtype = o.model.type();
    MemoryPlan plan = o.generate ? memory_plan(model, Engine(source.config, generation, {})) : run.memory;
    plan.limit = o.gpu_memory;
    // With several ranks: what each ZeRO stage needs. In stage 0 each rank keeps the whole state.
    std::vector<int64_t> stages;
    for (int64_t stage = 0; o.world > 1 && stage <= 3; stage++) {
        PlanOptions other = o;
        other.sharding.zero_stage = stage;
        stages.push_back(plan_run(other, source.config, target).memory.total);
    }
    std::vector<PlannedGroup> groups;
    for (size_t g = 0; training && g < NUM_RATE_GROUPS; g++) {
        PlannedGroup group{RATE_GROUP_NAMES[g]};
        for (const Param& p : model.trained().table.params)
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
                      o.generate ? std::vector<ArenaPlan::Entry>{} : run.acts->plan.entries(),
                      fitted};
    if (plan.limit) {
        const int64_t left = plan.available(plan.limit, in_use_before) - plan.total;
        report.remark += left >= 0 ? str("  fits: ", human_bytes(left), " are left\n")
                                   : str("  does not fit: ", human_bytes(-left), " are missing\n");
    }
    show_plan(report, o);
}

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

PlannedRun plan_run(const PlanOptions& o, const ModelConfig& config, const Target& target) {
    const bool training = !o.inference && !o.generate;
    const DType dtype = o.model.type();
    const bool master = dtype != DType::F32 && training && o.master_weights;
    PlannedRun run{
        Model(config, {o.sharding.zero_stage, 0, o.world}, {dtype, master, training_dtype(o.optimizer_dtype)},
              o.optimizer, offload_options(o.offload), o.lora),
        {},
        {}};
    RunShape shape = inference_shape(o.batch_size, o.seq_len, dtype);
    shape.training = training;
    shape.recompute = o.recompute;
    shape.world = o.world;
    shape.deterministic = !o.nondeterministic;
    shape.target = target;
    shape.fp8 = fp8_options(o.fp8, run.model);
    shape.offload_inputs = run.model.offload.moves_inputs(target);
    set_adapters(shape, run.model);
    shape.update_bytes = training ? update_workspace_bytes(run.model, MUON_ROUND_BYTES, target) : 0;
    run.acts = std::make_unique<Activations>(config, shape);
    run.memory = memory_plan(run.model, *run.acts, gradient_options(o.sharding, o.grad_dtype));
    // A run that saves checkpoints while it trains.
    if (training) run.memory.add("checkpoint snapshot", snapshot_of(run.model).bytes(), MemoryPlace::Host);
    return run;
}

// What `--fit` tries, the fastest first, for the batch size as given and then for its divisors. Less recomputation
// comes first: it is what costs time. bf16 moments and weights take less traffic than fp32, bf16 gradients more. Copies
// of the blocks' inputs come last: they are hidden at best.
struct FitStep {
    Recompute recompute;
    int state;           // how many of FIT_STATE are in use
    const char* reason;  // of its place; speeds of docs/experiments/memory.md
    bool offload_inputs = false;
};
constexpr const char* FIT_STATE[] = {" --optimizer-dtype bf16", " --master-weights off", " --grad-dtype bf16"};
constexpr const char *NOT_MEASURED = "speed not measured", *THIRD = "up to a third more time";
constexpr FitStep FIT_STEPS[] = {
    {Recompute::None, 0, "nothing is recomputed"},
    {Recompute::Activation, 0, "96% of the speed with GPT-2 124M on an H100"},
    {Recompute::Norms, 0, NOT_MEASURED},
    {Recompute::None, 1, NOT_MEASURED},
    {Recompute::Activation, 1, NOT_MEASURED},
    {Recompute::Norms, 1, NOT_MEASURED},
    {Recompute::None, 2, NOT_MEASURED},
    {Recompute::Activation, 2, NOT_MEASURED},
    {Recompute::Norms, 2, NOT_MEASURED},
    {Recompute::None, 3, NOT_MEASURED},
    {Recompute::Activation, 3, NOT_MEASURED},
    {Recompute::Norms, 3, NOT_MEASURED},
    {Recompute::Block, 0, THIRD},
    {Recompute::Block, 1, THIRD},
    {Recompute::Block, 2, THIRD},
    {Recompute::Block, 3, THIRD},
    {Recompute::Block, 0, THIRD, true},
    {Recompute::Block, 1, THIRD, true},
    {Recompute::Block, 2, THIRD, true},
    {Recompute::Block, 3, THIRD, true},
};

// The options of a step, as they are written; "" if nothing changes. False: it would undo an option that is given, or
// change nothing.
bool apply(const FitStep& step, int64_t batch_size, const Target& target, PlanOptions& o, std::string& options) {
    const Offload offload = offload_options(o.offload);
    if (step.recompute < o.recompute || (step.state > 1 && (offload.master || o.lora.on()))) return false;
    if (step.offload_inputs && (offload.activations || target.device == Device::CPU)) return false;
    static const char* const levels[] = {"none", "activation", "norms", "block"};
    if (batch_size < o.batch_size) options += str(" --batch-size ", batch_size);
    if (step.recompute > o.recompute) options += str(" --recompute ", levels[size_t(step.recompute)]);
    const bool given[] = {o.optimizer_dtype == "bf16", !o.master_weights || o.model.type() == DType::F32,
                          o.grad_dtype == "bf16"};
    if (step.state > 0 && given[step.state - 1]) return false;  // the step before it is the same
    for (int i = 0; i < step.state; i++)
        if (!given[i]) options += FIT_STATE[i];
    if (step.offload_inputs) {
        o.offload = o.offload == "none" ? "activations" : o.offload + ",activations";
        options += " --offload " + o.offload;
    }
    if (!options.empty()) options.erase(0, 1);
    o.batch_size = batch_size, o.recompute = step.recompute;
    if (step.state > 0) o.optimizer_dtype = "bf16";
    if (step.state > 1) o.master_weights = false;
    if (step.state > 2) o.grad_dtype = "bf16";
    return true;
}

// Changes the options to the first ones that fit into `available` bytes. Throws Error if none do.
FitReport fit(PlanOptions& o, const ModelConfig& config, const Target& target, int64_t available) {
    FitReport report{"", {}, available};
    for (int64_t batch_size = o.batch_size; batch_size >= 1; batch_size--) {
        if (o.batch_size % batch_size) continue;
        for (const FitStep& step : FIT_STEPS) {
            PlanOptions tried = o;
            std::string options;
            if (!apply(step, batch_size, target, tried, options)) continue;
            const int64_t bytes = plan_run(tried, config, target).memory.total;
            report.tried.push_back({options, step.reason, bytes});
            if (bytes > available) continue;
            o = tried, report.options = options;
            return report;
        }
    }
    const int64_t least = std::min_element(report.tried.begin(), report.tried.end(), [](const auto& a, const auto& b) {
                              return a.bytes < b.bytes;
                          })->bytes;
    throw Error(str("--fit: nothing fits into ", human_bytes(available), "; the least is ", human_bytes(least),
                    "; lower --seq-len, use a smaller model, or more processes (--world, --zero-stage)"));
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
        fitted = fit(o, source.config, target, (o.gpu_memory ? std::min(all, o.gpu_memory) : all) - in_use_before);
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

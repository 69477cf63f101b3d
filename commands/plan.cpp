// `plan`: the memory and the FLOP that a run needs.
#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

#include "commands/cli.h"
#include "driver/fit.h"
#include "driver/inference.h"
#include "driver/train_setup.h"
#include "model.h"
#include "runtime/device/arena.h"
#include "runtime/device/gpu_table.h"
#include "runtime/device/memory_plan.h"
#include "runtime/files/log.h"
#include "runtime/host_memory.h"

using nlohmann::json;

namespace {

struct PlanOptions : RunOptions {
    int64_t world = 1;
    std::string gpu;  // a part of its name; empty: this program's device
    bool inference = false, generate = false, json = false, verbose = false;
    std::optional<Packings> packing;  // of --weights
};

// The GPU that a plan with --gpu or --gpu-memory is for; null: this program's device. --gpu-memory does not
// give the number of SMs, so with that option alone the CPU build plans for an H100.
const Gpu* planned_gpu(const PlanOptions& o) {
    if (!o.gpu.empty()) return &find_gpu(o.gpu);
    return o.gpu_memory && backend_device() == Device::CPU ? &find_gpu("H100 80GB HBM3") : nullptr;
}

PlanOptions parse_plan(const Args& args) {
    PlanOptions o;
    CLI::App app("Prints the memory that a run needs and its FLOP per token. Allocates nothing.", "train_gpt plan");
    const CLI::Validator positive = at_least(1);
    add_model_options(app, o.model, true);
    add_weights_option(app, o.model.weights);
    app.add_option("--batch-size", o.batch_size, "sequences per micro-step")->check(positive)->capture_default_str();
    app.add_option("--seq-len", o.seq_len, "tokens per sequence")->check(positive)->capture_default_str();
    auto* optimizer = add_optimizer_option(app, o.optimizer);
    auto* optimizer_dtype = add_optimizer_dtype_option(app, o.optimizer_dtype);
    auto* grad_dtype = add_grad_dtype_option(app, o.grad_dtype);
    auto* grad_rounding = add_grad_rounding_option(app, o.grad_rounding);
    auto* offload = add_offload_option(app, o.offload);
    auto* recompute = add_recompute_option(app, o);
    auto* master_weights = add_master_weights_option(app, o.master_weights);
    auto* nondeterministic = add_nondeterministic_option(app, o.nondeterministic);
    std::vector<CLI::Option*> of_training = add_fp8_options(app, o.fp8);
    const std::vector<CLI::Option*> of_pairs = add_preference_options(app, o.preference);
    of_training.insert(of_training.end(), of_pairs.begin(), of_pairs.end());
    of_training.insert(of_training.end(), {add_lora_options(app, o.lora), optimizer, optimizer_dtype, grad_dtype,
                                           grad_rounding, offload, recompute, master_weights, nondeterministic});
    int64_t rollout = 0;
    of_training.push_back(
        app.add_option(
               "--rollout-batch-size", rollout,
               "plan 'rl', whose rollouts sample so many completions at a time, each with its prompt of at most "
               "--seq-len tokens")
            ->check(positive));
    auto* inference = app.add_flag("--inference", o.inference, "plan a forward pass only");
    auto* generate =
        app.add_flag("--generate", o.generate, "plan 'sample' with --batch-size sequences of --seq-len tokens each")
            ->excludes(inference);
    of_training.push_back(add_rollout_option(app, o.rollout.sampler)->needs("--rollout-batch-size"));
    of_training.push_back(app.add_option("--kl", o.rollout.policy.kl,
                                         "plan 'rl --kl', which without adapters keeps a copy of the first model")
                              ->check(number_in(0, 1e6))
                              ->needs("--rollout-batch-size"));
    for (CLI::Option* option : of_training) {
        inference->excludes(option);
        generate->excludes(option);
    }
    add_sharding_options(app, o.sharding);
    app.add_option("--world", o.world, "number of processes; the plan is for each of them")
        ->check(positive)
        ->check(number_in(1, 65536))
        ->capture_default_str()
        ->excludes(inference)
        ->excludes("--generate");
    app.add_option("--gpu", o.gpu,
                   "plan for this GPU, named by a unique part of its name, such as 'H100 80GB'; it need not be present")
        ->excludes("--generate");
    add_gpu_memory_option(app, o.gpu_memory, "say whether the run fits into this much GPU memory, as in 24GiB")
        ->excludes("--generate");
    auto* fit = app.add_flag("--fit", o.fit,
                             "find the fastest options for recomputation, optimizer state and batch size that fit into "
                             "--gpu-memory, or the memory of --gpu, or what is free here");
    inference->excludes(fit);
    generate->excludes(fit);
    app.add_flag("--verbose", o.verbose, "list every activation with its lifetime: its first and last phase of a step");
    app.add_flag("--json", o.json, "print one JSON object");
    parse(app, args,
          {"--model", "--batch-size", "--seq-len", "--dtype", "--optimizer", "--recompute", "--lora-rank", "--qlora",
           "--zero-stage", "--world", "--gpu", "--gpu-memory", "--fit", "--inference", "--generate", "--json"});
    if (o.model.weights != "model" && !o.inference && !o.generate)
        throw UsageError("--weights is for inference; add --inference or --generate");
    if (o.model.weights != "model" && (!o.gpu.empty() || o.gpu_memory))
        throw UsageError("--weights is planned for this program's device; leave --gpu and --gpu-memory out");
    o.model.for_gpu = !o.gpu.empty() || o.gpu_memory;
    const Gpu* const gpu = planned_gpu(o);
    if (!o.inference && !o.generate)
        choose_training_dtype(o.model, o.master_weights, o.offload, gpu ? gpu->target() : this_target());
    else if (o.model.dtype == "auto")
        o.model.dtype = "fp32";  // the default of commands that don't train
    check_lora_options(o.lora, o.fp8, o.offload, o.model.type() == DType::F32 || o.master_weights,
                       o.sharding.zero_stage);
    check_preference_options(o.preference, o.lora, o.fp8);
    check_reference_options(o.rollout, o.lora, o.fp8);
    const bool streams = offload_options(o.offload).weights;
    if (rollout && (o.preference.on() || streams || o.sharding.zero_stage > 2))
        throw UsageError(str("--rollout-batch-size: 'rl' has no ",
                             o.preference.on() ? "--loss"
                             : streams         ? "--offload weights"
                                               : "--zero-stage 3",
                             "; leave one of them out"));
    o.rollout.completions = 1;
    o.rollout.batch_size = rollout;
    o.rollout.prompts = rollout * o.world;
    if (!o.inference && !o.generate) check_grad_rounding(o, o.world, (gpu ? gpu->target() : this_target()).device);
    return o;
}

// The bytes of the GPU that are in use before a run, and lines on them where they are planned: those of the CUDA
// context, which is taken to be an H100's if it was not measured.
std::pair<int64_t, std::string> in_use_on(const Gpu* gpu) {
    if (!gpu) return {device_bytes_in_use(), ""};
    const bool measured = gpu->context_mib > 0;
    const auto bytes = int64_t((measured ? gpu->context_mib : find_gpu("H100 80GB HBM3").context_mib) * 0x1p20);
    const std::string line = str("  CUDA context            ", human_bytes(bytes), "\n");
    return {bytes, measured ? line
                            : str(line, "  the CUDA context was not measured on ", gpu->name,
                                  "; that of an H100 is planned\n")};
}

// A run, planned.
struct PlannedRun {
    Model model;
    std::unique_ptr<Activations> acts;
    MemoryPlan memory;
};

PlannedRun plan_run(const PlanOptions& o, const ModelConfig& config, const Target& target) {
    const bool training = !o.inference && !o.generate;
    PlannedRun run{
        training ? model_of(o, config, 0, o.world) : Model(config, {}, inference_precision(o.model.type(), o.packing)),
        {},
        {}};
    RunShape shape =
        training ? run_shape(o, run.model, target) : inference_shape(o.batch_size, o.seq_len, o.model.type());
    shape.packing = o.packing;
    shape.target = target;
    run.acts = std::make_unique<Activations>(config, shape);
    run.memory = memory_plan(run.model, *run.acts, gradient_options(o));
    // A run that saves checkpoints while it trains.
    if (training) run.memory.add("checkpoint snapshot", snapshot_of(run.model).bytes(), MemoryPlace::Host);
    return run;
}

// The parameters of a rate group.
struct PlannedGroup {
    std::string name;
    int64_t weights = 0;
    OptimizerType optimizer = OptimizerType::AdamW;
};

struct PlanReport {
    std::string name, description;  // of the model
    int64_t weights;
    double flop_per_token;
    bool training;
    int64_t world;
    MemoryPlan memory;
    int64_t in_use_before;             // bytes of the GPU: the CUDA context and other programs
    bool is_here;                      // the device is: they were asked for, not planned
    std::string remark;                // lines after the memory plan, or ""
    std::vector<PlannedGroup> groups;  // of training
    std::vector<int64_t> stages;       // with several ranks: bytes that each rank needs, by --zero-stage; else empty
    std::vector<ArenaPlan::Entry> activations;  // text output lists the largest, or with --verbose all
    FitReport fit;                              // nothing was tried without --fit

    // Into MemoryPlan::limit.
    bool fits() const { return memory.total <= memory.available(memory.limit, in_use_before); }
};

void show_json(const PlanReport& r) {
    json result = {{"weights", r.weights}, {"flop_per_token", r.flop_per_token}, {"total_bytes", r.memory.total}};
    if (r.memory.limit) result["fits"] = r.fits();
    if (!r.fit.tried.empty()) {
        result["fit"] = {{"options", r.fit.tried.back().options}, {"available_bytes", r.fit.available}};
        for (const auto& [options, reason, bytes, lacks] : r.fit.tried) {
            result["fit"]["tried"].push_back({{"options", options}, {"reason", reason}, {"total_bytes", bytes}});
            if (!lacks.empty()) result["fit"]["tried"].back()["lacks"] = lacks;
        }
    }
    for (const auto& [what, bytes] : r.memory.lines) result["bytes"][what] = bytes;
    for (const auto& [what, bytes] : r.memory.host_lines) result["host_bytes"][what] = bytes;
    result["in_use_before"] = r.in_use_before;
    for (const PlannedGroup& g : r.groups)
        result["parameters"][g.name] = {{"weights", g.weights}, {"optimizer", facts_of(g.optimizer).name}};
    if (!r.stages.empty()) result["total_bytes_by_zero_stage"] = r.stages;
    std::cout << result.dump() << "\n";
}

void show_plan(const PlanReport& r, const PlanOptions& o) {
    if (o.json) return show_json(r);
    std::cout << r.name << ": " << r.description << "\n"
              << r.memory.text(r.is_here ? r.in_use_before : 0) << r.remark << "  FLOP per token          "
              << str(r.flop_per_token / 1e6) << " MFLOP ("
              << (r.training ? "forward and backward" : "of a training step") << ", recomputation not counted)\n";
    const auto& tried = r.fit.tried;
    if (!tried.empty()) {
        const size_t faster = tried.size() - 1;
        std::cout << "to fit into " << human_bytes(r.fit.available);
        if (faster) std::cout << ", the fastest first; " << faster << (faster == 1 ? " takes" : " take") << " more";
        std::cout << (faster && !o.verbose ? " (--verbose lists them)\n" : "\n");
    }
    for (size_t i = tried.empty() || o.verbose ? 0 : tried.size() - 1; i < tried.size(); i++) {
        const auto& [options, reason, bytes, lacks] = tried[i];
        const std::string name = options.empty() ? "as given" : options, fits = bytes > r.fit.available ? ""
                                                                                : lacks.empty()         ? ", fits"
                                                                                                : ", but " + lacks;
        std::cout << "  " << name << ": " << human_bytes(bytes) << fits << " (" << reason << ")\n";
    }
    if (!r.groups.empty()) std::cout << "parameters\n";
    for (const PlannedGroup& g : r.groups) {
        std::string name = g.name;
        std::replace(name.begin(), name.end(), '_', ' ');
        std::cout << "  " << name << std::string(24 - name.size(), ' ') << with_commas(g.weights) << " ("
                  << facts_of(g.optimizer).name << ")\n";
    }
    if (!r.stages.empty()) std::cout << "bytes on each of " << r.world << " ranks, by --zero-stage\n";
    for (size_t stage = 0; stage < r.stages.size(); stage++) {
        std::cout << "  " << stage << std::string(23, ' ') << human_bytes(r.stages[stage])
                  << (stage ? "" : "  (nothing is sharded)") << "\n";
    }
    if (r.activations.empty()) return;
    std::cout << (o.verbose ? "activations\n" : "largest activations\n");
    std::vector<ArenaPlan::Entry> entries = r.activations;
    std::stable_sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
    if (!o.verbose && entries.size() > 12) entries.resize(12);
    for (const ArenaPlan::Entry& e : entries) {
        std::cout << "  " << e.name << std::string(e.name.size() < 24 ? 24 - e.name.size() : 1, ' ')
                  << human_bytes(e.bytes) << (o.verbose ? str("  phases ", e.first, " to ", e.last) : "") << "\n";
    }
}

}  // namespace

void run_plan(const Args& args) {
    PlanOptions o = parse_plan(args);
    const ModelSource source = o.model.resolve(0);
    const Gpu* const gpu = planned_gpu(o);
    const Target target = gpu ? gpu->target() : this_target();
    const bool training = !o.inference && !o.generate;
    o.packing = o.generate ? generation_packing(source, o.model.weights, o.model.type())
                           : std::optional<Packings>(packing_of(source, o.model.weights));
    if (training) refuse_packed(source, "training");
    check_fp8(o.fp8, source.config, o.model.type(), o.batch_size * o.seq_len, target);
    choose_sampler(o, source.config, target);
    auto [in_use_before, remark] = in_use_on(gpu);
    FitReport fitted;
    // Drivers report up to 2% less memory than a GPU's name says.
    const int64_t all = gpu ? int64_t(gpu->gib * 0.98 * double(1 << 30)) : device_memory_available() + in_use_before;
    const int64_t available = (o.gpu_memory ? std::min(all, o.gpu_memory) : all) - in_use_before;
    const auto planned = [&](const RunOptions& tried) {
        PlanOptions other = o;
        static_cast<RunOptions&>(other) = tried;
        return plan_run(other, source.config, target);
    };
    const auto bytes = [&](const RunOptions& tried) { return planned(tried).memory.total; };
    // As if all ranks that the GPUs here can take were on this host. That of a GPU elsewhere may have any memory.
    const std::vector<RankHost> hosts(gpu ? 0 : size_t(std::min<int64_t>(o.world, device_count())), this_host());
    const auto lacks_host = [&](const RunOptions& tried) {
        const PlannedRun run = planned(tried);  // training needs no copy of its state for checkpoints
        return lacks_host_memory(hosts, memory_plan(run.model, *run.acts, gradient_options(tried)));
    };
    choose_fp8_weights(o, available, bytes);
    if (o.fit) {
        require(available > 0, "--fit: ", human_bytes(o.gpu_memory), " of --gpu-memory are less than the ",
                human_bytes(in_use_before), " that are in use before a run; raise --gpu-memory");
        fitted = find_fit(o, source.config.layers, o.world, target, available, bytes, lacks_host);
        require(fitted.found(), "--fit: nothing fits into ", human_bytes(available), "; ", fitted.remedy());
    }
    const PlannedRun run = plan_run(o, source.config, target);
    const Model& model = run.model;
    EngineOptions generation;
    generation.slots = o.batch_size;
    generation.context = o.seq_len;
    generation.dtype = o.model.type();
    generation.packing = o.packing;
    MemoryPlan plan = o.generate ? memory_plan(model, Engine(source.config, generation, {})) : run.memory;
    plan.limit = o.gpu_memory;
    // With several ranks: what each ZeRO stage needs. In stage 0 each rank keeps the whole state.
    std::vector<int64_t> stages;
    for (int64_t stage = 0; o.world > 1 && stage <= (model.offload.weights ? 2 : 3); stage++) {
        PlanOptions other = o;
        other.sharding.zero_stage = stage;
        stages.push_back(plan_run(other, source.config, target).memory.total);
    }
    std::vector<PlannedGroup> groups;
    for (size_t g = 0; training && g < NUM_RATE_GROUPS; g++) {
        PlannedGroup group{RATE_GROUP_NAMES[g]};
        for (const Param& p : model.trained().table.params)
            if (size_t(p.rate_group) == g) {
                group.weights += p.numel();
                group.optimizer = p.optimizer;
            }
        if (group.weights) groups.push_back(group);
    }
    PlanReport report{source.name,
                      str(describe(model.config, model.table.num_weights()), ", ", o.model.dtype,
                          o.model.auto_dtype ? " (--dtype auto)" : "", gpu ? str(", on ", gpu->name) : ""),
                      model.table.num_weights(),
                      flop_per_token(model, o.seq_len),
                      training,
                      o.world,
                      plan,
                      in_use_before,
                      !gpu,
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

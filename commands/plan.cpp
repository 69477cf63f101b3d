#include "commands/plan.h"

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

#include "commands/cli.h"
#include "runtime/files/log.h"

using nlohmann::json;

const Gpu* planned_gpu(const PlanOptions& o) {
    if (!o.gpu.empty()) return &find_gpu(o.gpu);
    return o.gpu_memory && backend_device() == Device::CPU ? &find_gpu("H100 80GB HBM3") : nullptr;
}

PlanOptions parse_plan(const Args& args) {
    PlanOptions o;
    CLI::App app("Prints the memory that a run needs and its FLOP per token. Allocates nothing.", "train_gpt plan");
    const CLI::Validator positive = at_least(1);
    add_model_options(app, o.model, true);
    app.add_option("--batch-size", o.batch_size, "sequences per micro-step")->check(positive)->capture_default_str();
    app.add_option("--seq-len", o.seq_len, "tokens per sequence")->check(positive)->capture_default_str();
    auto* optimizer = add_optimizer_option(app, o.optimizer);
    auto* optimizer_dtype = add_optimizer_dtype_option(app, o.optimizer_dtype);
    auto* grad_dtype = add_grad_dtype_option(app, o.grad_dtype);
    auto* grad_rounding = add_grad_rounding_option(app, o.grad_rounding);
    auto* offload = add_offload_option(app, o.offload);
    auto* recompute = add_recompute_option(app, o.recompute);
    auto* master_weights = add_master_weights_option(app, o.master_weights);
    auto* nondeterministic = add_nondeterministic_option(app, o.nondeterministic);
    std::vector<CLI::Option*> of_training = add_fp8_options(app, o.fp8);
    of_training.insert(of_training.end(), {add_lora_options(app, o.lora), optimizer, optimizer_dtype, grad_dtype,
                                           grad_rounding, offload, recompute, master_weights, nondeterministic});
    auto* inference = app.add_flag("--inference", o.inference, "plan a forward pass only");
    auto* generate =
        app.add_flag("--generate", o.generate, "plan 'sample' with --batch-size sequences of --seq-len tokens each")
            ->excludes(inference);
    for (CLI::Option* option : of_training) inference->excludes(option), generate->excludes(option);
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
    inference->excludes(fit), generate->excludes(fit);
    app.add_flag("--verbose", o.verbose, "list every activation with its lifetime: its first and last phase of a step");
    app.add_flag("--json", o.json, "print one JSON object");
    parse(app, args);
    o.model.for_gpu = !o.gpu.empty() || o.gpu_memory;
    const Gpu* const gpu = planned_gpu(o);
    if (!o.inference && !o.generate)
        choose_training_dtype(o.model, o.master_weights, o.offload, gpu ? gpu->target() : this_target());
    else if (o.model.dtype == "auto")
        o.model.dtype = "fp32";  // the default of commands that don't train
    check_lora_options(o.lora, o.fp8, o.offload, o.model.type() == DType::F32 || o.master_weights,
                       o.sharding.zero_stage);
    if (!o.inference && !o.generate) check_grad_rounding(o, o.world, (gpu ? gpu->target() : this_target()).device);
    return o;
}

namespace {

void show_json(const PlanReport& r) {
    json result = {{"weights", r.weights}, {"flop_per_token", r.flop_per_token}, {"total_bytes", r.memory.total}};
    if (r.memory.limit) result["fits"] = r.fits();
    if (!r.fit.tried.empty()) {
        result["fit"] = {{"options", r.fit.tried.back().options}, {"available_bytes", r.fit.available}};
        for (const auto& [options, reason, bytes] : r.fit.tried)
            result["fit"]["tried"].push_back({{"options", options}, {"reason", reason}, {"total_bytes", bytes}});
    }
    for (const auto& [what, bytes] : r.memory.lines) result["bytes"][what] = bytes;
    for (const auto& [what, bytes] : r.memory.host_lines) result["host_bytes"][what] = bytes;
    result["in_use_before"] = r.in_use_before;
    for (const PlannedGroup& g : r.groups)
        result["parameters"][g.name] = {{"weights", g.weights}, {"optimizer", OPTIMIZER_NAMES[size_t(g.optimizer)]}};
    if (!r.stages.empty()) result["total_bytes_by_zero_stage"] = r.stages;
    std::cout << result.dump() << "\n";
}

}  // namespace

bool PlanReport::fits() const {
    return memory.total <= memory.available(memory.limit, in_use_before);
}

void show_plan(const PlanReport& r, const PlanOptions& o) {
    if (o.json) return show_json(r);
    std::cout << r.name << ": " << r.description << "\n"
              << r.memory.text(r.in_use_before) << r.remark << "  FLOP per token          "
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
        const auto& [options, reason, bytes] = tried[i];
        const std::string name = options.empty() ? "as given" : options;
        std::cout << "  " << name << ": " << human_bytes(bytes) << (bytes <= r.fit.available ? ", fits" : "") << " ("
                  << reason << ")\n";
    }
    if (!r.groups.empty()) std::cout << "parameters\n";
    for (const PlannedGroup& g : r.groups) {
        std::string name = g.name;
        std::replace(name.begin(), name.end(), '_', ' ');
        std::cout << "  " << name << std::string(24 - name.size(), ' ') << with_commas(g.weights) << " ("
                  << OPTIMIZER_NAMES[size_t(g.optimizer)] << ")\n";
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

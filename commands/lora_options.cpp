// The options of LoRA adapters.
#include "commands/cli.h"
#include "commands/help.h"
#include "model.h"

CLI::Option* add_lora_options(CLI::App& app, LoraOptions& o) {
    const InGroup group(app, help_group::LORA);
    CLI::Option* const rank =
        app.add_option("--lora-rank", o.rank, "train adapters of this rank; the model's own weights are frozen")
            ->check(at_least(1))
            ->check(number_in(1, 65536));
    app.add_option("--lora-alpha", o.alpha, "adapters are scaled by this / rank; default: 16")
        ->check(number_in(1e-6, 1e6))
        ->needs(rank);
    app.add_option("--lora-targets", o.targets,
                   "matrices that get an adapter, by their names in the model's files, as in q_proj,v_proj; default: "
                   "all-linear, every matrix of the blocks")
        ->delimiter(',')
        ->needs(rank);
    app.add_flag("--rslora", o.rank_stabilized, "scale adapters by --lora-alpha / √rank");
    app.add_flag("--qlora", o.nf4, "keep the frozen matrices of the blocks in 4 bits (NF4)");
    return rank;
}

void check_lora_options(const LoraOptions& o, const Fp8Options& fp8, const std::string& offload, bool fp32_weights,
                        int64_t zero_stage) {
    for (const auto& [given, name] : {std::pair(o.rank_stabilized, "--rslora"), {o.nf4, "--qlora"}})
        if (!o.on() && given) throw UsageError(str(name, " is an option of LoRA adapters; add --lora-rank"));
    const Offload to_host = offload_options(offload);
    const bool both_orientations = fp8.on && fp8.keep_weights && !fp8.auto_weights;
    if (!o.on() && to_host.weights)
        throw UsageError(str("--offload ", offload,
                             ": an update writes weights, unless they are frozen under adapters; "
                             "add --lora-rank, or leave weights out"));
    if (!o.on()) return;
    if (o.nf4 && both_orientations)
        throw UsageError("--fp8-weights kept: --qlora keeps weights in NF4 alone; leave the option out");
    if (to_host.weights && both_orientations)
        throw UsageError(
            "--fp8-weights kept: --offload weights copies one orientation of a weight; leave the option out");
    if (to_host.optimizer || to_host.master)
        throw UsageError(str("--lora-rank: the state of adapters is small; leave ",
                             to_host.master ? "master" : "optimizer", " out of --offload ", offload));
    if (!fp32_weights) throw UsageError("--lora-rank: adapters are kept in fp32; leave out --master-weights off");
    if (to_host.weights && zero_stage == 3)
        throw UsageError(str("--offload ", offload,
                             ": each rank copies the whole base from its host, and --zero-stage 3 "
                             "divides it over the GPUs; leave weights out, or use --zero-stage 0, 1 or 2"));
}

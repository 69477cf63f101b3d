// The options of fp8 training (docs/use/low_precision.md).
#include "commands/cli.h"
#include "commands/help.h"

std::vector<CLI::Option*> add_fp8_options(CLI::App& app, Fp8Options& o) {
    const InGroup group(app, help_group::FP8);
    const CLI::Validator count = at_least(0);
    std::vector<CLI::Option*> options = {
        app.add_option_function<std::string>(
               "--matmul-dtype", [&o](const std::string& name) { o.on = name == "fp8"; },
               "fp8: the matmuls of the blocks in 8 bits, on GPUs from Ada and Hopper on; model: in --dtype")
            ->check(CLI::IsMember({"model", "fp8"}))
            ->default_str("model"),
        app.add_option_function<std::string>(
               "--fp8-gradients",
               [&o](const std::string& name) { o.gradients = enum_of<Fp8Format>(FP8_FORMAT_NAMES, name); },
               "format of the gradients of activations: e5m2 has the larger range, e4m3 the smaller rounding errors")
            ->check(CLI::IsMember({"e5m2", "e4m3"}))
            ->default_str("e5m2"),
        app.add_option_function<std::string>(
               "--fp8-scaling", [&o](const std::string& name) { o.delayed = name == "delayed"; },
               "scales of activations and gradients: delayed: from the largest values of the last 16 steps; current: "
               "from the tensor itself, which takes another pass over it")
            ->check(CLI::IsMember({"delayed", "current"}))
            ->default_str("delayed"),
        app.add_option_function<std::string>(
               "--fp8-weights",
               [&o](const std::string& name) {
                   o.keep_weights = name != "use";
                   o.auto_weights = name == "auto";
               },
               "kept: weights are quantised once a step and take 2 more bytes each, with --zero-stage 3 1 more, "
               "divided over the ranks, which gather the codes; use: they are quantised at each use. Of a frozen "
               "model: 2 bytes a weight in all; or 1, which --zero-stage 3 divides over the ranks, and weights are "
               "transposed at each use. auto: kept where that fits, else use")
            ->check(CLI::IsMember({"auto", "kept", "use"}))
            ->default_str("auto"),
        app.add_option("--fp8-skip-first", o.skip_first, "number of first layers whose matmuls stay in --dtype")
            ->check(count)
            ->capture_default_str(),
        app.add_option("--fp8-skip-last", o.skip_last, "number of last layers whose matmuls stay in --dtype")
            ->check(count)
            ->capture_default_str()};
    return options;
}

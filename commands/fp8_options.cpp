// The options of fp8 training (docs/low_precision.md) and their checks.
#include "commands/cli.h"
#include "commands/training.h"
#include "kernels/matmul_fp8.h"
#include "runtime/device/device.h"

std::vector<CLI::Option*> add_fp8_options(CLI::App& app, Fp8Options& o) {
    const std::string group = "fp8 matmuls (docs/low_precision.md)";
    const CLI::Validator count = at_least(0);
    std::vector<CLI::Option*> options = {
        app.add_option_function<std::string>(
               "--matmul-dtype", [&o](const std::string& name) { o.on = name == "fp8"; },
               "fp8: the matmuls of the blocks in 8 bits, on GPUs from Ada and Hopper on; model: in --dtype")
            ->check(CLI::IsMember({"model", "fp8"}))
            ->default_str("model"),
        app.add_option_function<std::string>(
               "--fp8-gradients",
               [&o](const std::string& name) { o.gradients = name == "e4m3" ? Fp8Format::E4M3 : Fp8Format::E5M2; },
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
               "--fp8-weights", [&o](const std::string& name) { o.keep_weights = name == "kept"; },
               "kept: weights are quantised once a step and take 2 more bytes each; use: they are quantised at each "
               "use, as always with --zero-stage 3")
            ->check(CLI::IsMember({"kept", "use"}))
            ->default_str("kept"),
        app.add_option("--fp8-skip-first", o.skip_first, "number of first layers whose matmuls stay in --dtype")
            ->check(count)
            ->capture_default_str(),
        app.add_option("--fp8-skip-last", o.skip_last, "number of last layers whose matmuls stay in --dtype")
            ->check(count)
            ->capture_default_str()};
    for (CLI::Option* option : options) option->group(group);
    return options;
}

void check_fp8(const Fp8Options& o, const ModelConfig& c, DType dtype, int64_t tokens, const Target& target) {
    if (!o.on) return;
    const std::string unavailable = matmul_fp8_unavailable(target);
    require(unavailable.empty(), "--matmul-dtype fp8: ", unavailable, "; leave the option out");
    require(target.device == Device::CPU || dtype == DType::BF16,
            "--matmul-dtype fp8 quantises bf16; add --dtype bf16");
    require(
        !c.norm_after,
        "--matmul-dtype fp8 takes norms before attention and the MLP, not --norm-placement after (OLMo2); leave the "
        "option out");
    require(o.skip_first < c.layers && o.skip_last < c.layers - o.skip_first, "--fp8-skip-first ", o.skip_first,
            " and --fp8-skip-last ", o.skip_last, " leave none of the ", c.layers,
            " layers in fp8; lower them or leave out --matmul-dtype fp8");
    const std::pair<const char*, int64_t> sizes[] = {{"--channels", c.channels},
                                                     {"--heads x --head-size", c.heads * c.head_size},
                                                     {"the output of the QKV projection", c.qkv_channels()},
                                                     {"--ffn", c.ffn},
                                                     {"--batch-size x --seq-len", tokens}};
    for (const auto& [name, size] : sizes)
        require(size % 16 == 0, "--matmul-dtype fp8: ", name, " is ", size,
                ", which is not a multiple of 16; change it or leave the option out");
}

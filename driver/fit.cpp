#include "driver/fit.h"

#include <algorithm>
#include <optional>

#include "model.h"
#include "runtime/error.h"
#include "runtime/files/log.h"

namespace {

// The options that are tried for each batch size, in the order of their expected speed. Recomputing whole blocks costs
// most, so it comes after all that spares it. Before that the state goes to bf16 one part after the other, fp32 first:
// moments and weights, which then take less traffic, and last gradients, which take more unless matmuls add to them.
// Copies of the blocks' inputs come last: they are hidden at best. Copies of all frozen weights take a large batch to
// hide, so they come after every batch size without them.
struct FitStep {
    Recompute recompute;
    int state;           // how many of FIT_STATE are in use
    const char* reason;  // its speed, as far as docs/log/memory.md has it
    bool offload_inputs = false, offload_weights = false;
};
constexpr const char* FIT_STATE[] = {" --optimizer-dtype bf16", " --master-weights off", " --grad-dtype bf16"};
constexpr const char *NOT_MEASURED = "speed not measured", *THIRD = "up to a third more time",
                     *SOME_LAYERS = "each of these layers takes up to a third more time",
                     *COPIES = "the weights are copied from the host in each pass: use a large batch";
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

struct Applied {
    RunOptions options;
    std::string changes;  // as they are written
};

// A step added to options and to what they change already, with its level of recomputation in the first `layers`.
// Nothing: it would undo an option that is given, or change nothing.
std::optional<Applied> apply(const FitStep& step, int64_t layers, int64_t world, const Target& target,
                             Applied applied) {
    RunOptions& o = applied.options;
    const Offload offloaded = offload_options(o.offload);
    const struct {
        bool asked, given;
        const char* name;
    } offloads[] = {{step.offload_inputs, offloaded.activations, "activations"},
                    {step.offload_weights, offloaded.weights, "weights"}};
    if (step.recompute < o.recompute || (step.state > 1 && (offloaded.master || o.lora.on()))) return {};
    for (const auto& part : offloads)
        if (part.asked && (part.given || target.device == Device::CPU)) return {};
    if (step.offload_weights && (!o.lora.on() || o.rollout.on())) return {};
    if ((step.offload_weights || offloaded.weights) && o.sharding.zero_stage > 2) return {};
    const bool given[] = {o.optimizer_dtype == "bf16", !o.master_weights || o.model.type() == DType::F32,
                          o.grad_dtype == "bf16"};
    if (step.state > 0 && given[step.state - 1]) return {};  // the step before it is the same
    if (step.recompute > o.recompute) {
        o.recompute = step.recompute;
        o.recompute_layers = layers;
        applied.changes += str(" --recompute ", o.recompute_text());
    }
    for (int i = 0; i < step.state; i++)
        if (!given[i]) applied.changes += FIT_STATE[i];
    const bool whole_gradients = !Sharding{o.sharding.zero_stage, 0, world}.splits_gradients();
    if (step.state > 2 && whole_gradients && target.device == Device::CUDA && o.model.type() == DType::BF16) {
        o.grad_rounding = "nearest";  // faster, and less memory
        applied.changes += " --grad-rounding nearest";
    }
    for (const auto& part : offloads)
        if (part.asked) o.offload = o.offload == "none" ? part.name : o.offload + "," + part.name;
    if (step.offload_inputs || step.offload_weights) applied.changes += " --offload " + o.offload;
    if (step.state > 0) o.optimizer_dtype = "bf16";
    if (step.state > 1) o.master_weights = false;
    if (step.state > 2) o.grad_dtype = "bf16";
    return applied;
}

// In descending order.
std::vector<int64_t> divisors(int64_t n) {
    std::vector<int64_t> large, small;
    for (int64_t d = 1; d <= n / d; d++) {
        if (n % d) continue;
        large.push_back(n / d);
        if (d < n / d) small.push_back(d);
    }
    large.insert(large.end(), small.rbegin(), small.rend());
    return large;
}

}  // namespace

FitReport find_fit(RunOptions& o, int64_t layers, int64_t world, const Target& target, int64_t available,
                   const std::function<int64_t(const RunOptions&)>& bytes,
                   const std::function<std::string(const RunOptions&)>& lacks_host) {
    FitReport report{{}, available};
    if (o.rollout.on()) report.to_lower = "--rollout-batch-size";
    const auto whole = [&](RunOptions tried) {
        choose_fp8_weights(tried, available, bytes);
        return tried;
    };
    const int64_t last_stage = world == 1 ? o.sharding.zero_stage : 3;
    const auto try_out = [&](const FitStep& step, const Applied& tried) {
        const RunOptions options = whole(tried.options);
        const int64_t needed = bytes(options);
        report.tried.push_back({tried.changes.empty() ? "" : tried.changes.substr(1), step.reason, needed,
                                lacks_host && needed <= available ? lacks_host(options) : ""});
        return report.found();
    };
    // Tries a step with one batch size and one stage; true: it fits, and the options are changed.
    const auto take = [&](const FitStep& step, int64_t batch_size, int64_t stage) {
        Applied sizes{o, ""};
        if (batch_size < o.batch_size) sizes.changes += str(" --batch-size ", batch_size);
        if (stage > o.sharding.zero_stage) sizes.changes += str(" --zero-stage ", stage);
        sizes.options.batch_size = batch_size;
        sizes.options.sharding.zero_stage = stage;
        std::optional<Applied> tried = apply(step, ALL_LAYERS, world, target, sizes);
        if (!tried || !try_out(step, *tried)) return false;
        if (step.recompute == Recompute::Block && o.recompute == Recompute::None) {
            // The fewest layers with which it fits: each one more takes less memory.
            int64_t fewest = layers;
            for (int64_t low = 1; low < fewest;) {
                const int64_t middle = (low + fewest) / 2;
                if (bytes(whole(apply(step, middle, world, target, sizes)->options)) <= available)
                    fewest = middle;
                else
                    low = middle + 1;
            }
            if (fewest < layers) {
                report.tried.pop_back();
                tried = apply(step, fewest, world, target, sizes);
                FitStep some = step;
                if (!step.offload_weights) some.reason = SOME_LAYERS;
                try_out(some, *tried);
            }
        }
        o = whole(tried->options);
        return true;
    };
    for (const bool offload_weights : {false, true})
        for (const int64_t batch_size : divisors(o.batch_size))
            for (FitStep step : FIT_STEPS) {
                step.offload_weights = offload_weights;
                if (offload_weights) step.reason = COPIES;
                for (int64_t stage = o.sharding.zero_stage; stage <= last_stage; stage++)
                    if (take(step, batch_size, stage)) return report;
            }
    return report;
}

void choose_fp8_weights(RunOptions& o, int64_t available, const std::function<int64_t(const RunOptions&)>& bytes) {
    if (!o.fp8.on || !o.fp8.auto_weights) return;
    o.fp8.keep_weights = true;
    o.fp8.keep_weights = bytes(o) <= available;
}

std::string FitReport::remedy() const {
    const auto on_host = std::find_if(tried.begin(), tried.end(), [](const Try& t) { return !t.lacks.empty(); });
    const Try& least =
        *std::min_element(tried.begin(), tried.end(), [](const Try& a, const Try& b) { return a.bytes < b.bytes; });
    const std::string nearest =
        on_host == tried.end()
            ? str("the least is ", human_bytes(least.bytes), least.options.empty() ? "" : ", with ", least.options)
            : str("with ", on_host->options.empty() ? "the options as given" : on_host->options, " ", on_host->lacks,
                  "; free memory of the host");
    return str(nearest, "; lower ", to_lower, ", use a smaller model, or more processes with --zero-stage");
}

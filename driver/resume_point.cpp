#include "driver/resume_point.h"

#include <filesystem>

#include "kernels/global_norm.h"
#include "runtime/files/checkpoint_directory.h"
#include "runtime/files/files.h"
#include "runtime/files/json_keys.h"
#include "runtime/files/safetensors.h"
#include "runtime/files/weight_files.h"
#include "runtime/text.h"

namespace {

std::vector<DataUse> read_data_uses(const JsonKeys& keys) {
    std::vector<DataUse> uses;
    if (keys.has("data_history")) {
        for (const JsonKeys& use : keys.objects("data_history"))
            uses.push_back({use.whole_number("first_step", 0), use.text("data"), use.text("fingerprint")});
    }
    const std::string last = keys.text("data");
    if (uses.empty()) uses.push_back({0, "", last});
    require(uses.back().fingerprint == last, keys.path, ": keys 'data' and 'data_history' name different fingerprints");
    return uses;
}

ResumePoint read_trainer_json(const std::string& checkpoint, const std::string& path) {
    const JsonKeys keys{path, read_json(path)};
    ResumePoint r;
    r.checkpoint = checkpoint;
    const std::string name = std::filesystem::path(checkpoint).filename().string();
    r.step = keys.whole_number("step", 0);
    require(r.step == checkpoint_step(name), path, ": key 'step' is ", r.step, ", but the directory is ", name);
    r.adam_steps = keys.whole_number("adam_steps", 0, r.step);
    r.seed = keys.whole_number("seed", 0);
    r.seq_len = keys.whole_number("seq_len", 1);
    r.total_batch_tokens = keys.whole_number("total_batch_tokens", 1);
    r.data = read_data_uses(keys);
    if (keys.has("gemm")) r.gemm = keys.text("gemm");
    if (keys.has("lora")) r.lora = keys.text("lora");
    if (keys.has("preference")) r.preference = keys.text("preference");
    if (keys.has("rollout")) r.rollout = keys.text("rollout");
    if (keys.has("reference")) r.reference = keys.text("reference");
    if (keys.has("idle_steps")) r.idle_steps = keys.whole_number("idle_steps", 0, r.step);
    if (keys.has("pack")) r.pack = keys.text("pack");
    if (keys.has("grad_norms")) {
        r.norm_count = keys.whole_number("norm_count", 0);
        r.grad_norms = keys.numbers("grad_norms");
        require(r.grad_norms.size() == GRAD_NORM_WINDOW, path, ": key 'grad_norms' has ", r.grad_norms.size(),
                " numbers, expected ", GRAD_NORM_WINDOW);
    }
    if (keys.has("fp8")) {
        const JsonKeys fp8 = keys.keys_of("fp8");
        r.fp8_steps = fp8.whole_number("steps", 0);
        r.fp8_history = fp8.numbers("history");
        if (fp8.has("base_scales")) r.fp8_base_scales = fp8.numbers("base_scales");
    }
    if (keys.has("optimizer")) r.optimizer = keys.text("optimizer");
    if (keys.has("learning_rates")) {
        const JsonKeys rates = keys.keys_of("learning_rates");
        r.learning_rates.emplace();
        for (size_t g = 0; g < NUM_RATE_GROUPS; g++) (*r.learning_rates)[g] = rates.number(RATE_GROUP_NAMES[g], 0);
    }
    if (keys.has("lr")) r.lr = keys.number("lr", 0);
    return r;
}

// Both files of tensors repeat the numbers of steps; files of older versions do not.
void check_steps(const SafetensorsFile& file, const ResumePoint& r) {
    const std::pair<const char*, int64_t> repeated[] = {{"step", r.step}, {"adam_steps", r.adam_steps}};
    for (const auto& [key, value] : repeated) {
        const auto found = file.metadata().find(key);
        require(found == file.metadata().end() || found->second == std::to_string(value), file.path(), ": its '", key,
                "' is ", found == file.metadata().end() ? "" : found->second, ", but trainer.json beside it says ",
                value);
    }
}

// The state of older versions holds all weights; then the exported model is not read.
bool needs_exported_weights(const SafetensorsFile& state) {
    int64_t weights = 0, moments = 0;
    for (const auto& [name, entry] : state.entries()) {
        weights += starts_with(name, "params/");
        moments += starts_with(name, "m/");
    }
    return weights < moments;
}

}  // namespace

ResumePoint read_resume_point(const std::string& checkpoint) {
    const std::string trainer = join_path(checkpoint, "trainer.json"),
                      state = join_path(checkpoint, "state.safetensors"),
                      adapter = join_path(checkpoint, ADAPTER_WEIGHTS),
                      weights = path_exists(adapter) ? adapter : join_path(checkpoint, "model.safetensors");
    // A file that cannot be opened is no reason to remove its checkpoint.
    for (const std::string& path : {trainer, state}) FileReader readable(path);
    try {
        const ResumePoint r = read_trainer_json(checkpoint, trainer);
        const SafetensorsFile moments(state);
        check_steps(moments, r);
        if (needs_exported_weights(moments)) check_steps(SafetensorsFile(weights), r);
        return r;
    } catch (const SystemError&) {
        throw;  // tells nothing of the checkpoint
    } catch (const Error& e) {
        throw Error(e.what() + resume_remedy(checkpoint));
    }
}

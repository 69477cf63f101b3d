#include "commands/resume.h"

#include <filesystem>

#include "runtime/files/checkpoint.h"
#include "runtime/files/files.h"
#include "runtime/files/json_keys.h"

namespace {

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
    r.data = keys.text("data");
    if (keys.has("gemm")) r.gemm = keys.text("gemm");
    if (keys.has("optimizer")) r.optimizer = keys.text("optimizer");
    return r;
}

// The state's file repeats both numbers of steps; files of older versions do not.
void check_state(const std::string& path, const ResumePoint& r) {
    const SafetensorsFile state(path);
    const std::pair<const char*, int64_t> repeated[] = {{"step", r.step}, {"adam_steps", r.adam_steps}};
    for (const auto& [key, value] : repeated) {
        const auto found = state.metadata().find(key);
        require(found == state.metadata().end() || found->second == std::to_string(value), path, ": its '", key,
                "' is ", found == state.metadata().end() ? "" : found->second, ", but trainer.json beside it says ",
                value);
    }
}

}  // namespace

ResumePoint read_resume_point(const std::string& checkpoint) {
    const std::string trainer = join_path(checkpoint, "trainer.json"),
                      state = join_path(checkpoint, "state.safetensors");
    // A file that cannot be opened is no reason to remove its checkpoint.
    for (const std::string& path : {trainer, state}) MappedFile readable(path);
    try {
        const ResumePoint r = read_trainer_json(checkpoint, trainer);
        check_state(state, r);
        return r;
    } catch (const Error& e) {
        throw Error(e.what() + resume_remedy(checkpoint));
    }
}

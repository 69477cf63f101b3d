// Model directories in Hugging Face layout and training state, in and out.
//
// A model directory holds config.json, model.safetensors (or model.safetensors.index.json and shards) and, where text
// is read or written, tokenizer.json. A checkpoint directory runs/x/step_00001000/ is a model directory that also holds
// state.safetensors (fp32 master weights and Adam's m and v, tensor by tensor in arena order, so that each rank can
// write its own byte ranges) and trainer.json. A checkpoint appears whole or not at all: it is written beside under a
// temporary name, every file and the directory flushed to disk, then renamed.
//
// Every function throws Error with one line naming file, tensor and remedy; sizes, magic numbers and offsets of what is
// read are checked before use; nothing that was there before is overwritten by a failure.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/model/model_config.h"
#include "runtime/model/params.h"

// Where a model comes from, as the user named it: a preset, a model directory, or a run directory (its newest complete
// checkpoint). Relative paths stay as given. A preset's name is the preset even where a directory has that name
// (write "./gpt2-tiny" for the directory).
struct ModelSource {
    std::string name;       // what the user wrote
    std::string directory;  // model directory; empty for a preset
    ModelConfig config;
    nlohmann::json original_config;  // contents of config.json, {} for a preset
};
ModelSource find_model(const std::string& name);

// Complete checkpoints of a run directory in ascending order of steps ("step_00000100" …): config.json, weights,
// state.safetensors and trainer.json are all there. Temporary and foreign entries are not listed.
std::vector<std::string> list_checkpoints(const std::string& run_dir);
// "step_00000100" → 100; -1 if the name is not of that form.
int64_t checkpoint_step(const std::string& name);

// A parameter's padded_numel() values on the host, rows and columns as in memory, padding rows zero: where they lie
// already, else in buffer.
using FetchParam = std::function<const float*(const Param& p, std::vector<float>& buffer)>;

// Weights outside of a model's memory, of which one parameter at a time is read.
struct WeightSource {
    FetchParam fetch;
    DType dtype;  // as stored (of the token embedding)
};

// The directory's weights, checked as load_weights says.
WeightSource open_weight_source(const std::string& directory, const ParamTable& table);

// Fills the arenas, on host or device, from the directory's weights: one file or shards with their index, fp32, bf16,
// fp16 or fp64, names with or without the family's optional prefix ("transformer." / "model."), every source present
// with the right shape. Tensors in the files that the table doesn't name are an Error unless they are known buffers
// (GPT-2's attn.bias, attn.masked_bias, rotary inv_freq) or a tied model's lm_head.weight that equals the token
// embedding, which is the table's first parameter. (Where they differ, transformers 4 takes the embedding and
// transformers 5 the head: an Error.) Padding rows are set to zero. On an Error the arenas are as they were.
void load_weights(const std::string& directory, const ParamTable& table, const WeightArenas& arenas);

// The processes that write a file together, each calling the same function: this one's number, and what returns when
// all have called it.
struct Writers {
    int64_t rank = 0, count = 1;
    std::function<void()> barrier = [] {};
};

// Writes model.safetensors at path (not atomically: callers write into a temporary directory), tensor by tensor from
// the most exact weights there are; several writers share the groups of parameters. dtype F32, BF16 or F16.
void save_weights(const std::string& path, const ParamTable& table, const WeightArenas& arenas, DType dtype);
void save_weights(const std::string& path, const ParamTable& table, const FetchParam& fetch, DType dtype,
                  const Writers& writers = {});

// A directory that appears whole or not at all. Files are written into path(); commit() flushes them and the directory,
// then renames it to its final name and flushes the parent. Destroyed uncommitted, it removes what it wrote.
class AtomicDirectory {
  public:
    // path must not exist, its parent must. The temporary name is ".tmp-<name>-<process id>" beside it; leftovers of
    // the same name whose process is gone are removed first.
    explicit AtomicDirectory(const std::string& path);
    ~AtomicDirectory();
    AtomicDirectory(const AtomicDirectory&) = delete;
    AtomicDirectory& operator=(const AtomicDirectory&) = delete;
    const std::string& path() const { return temporary; }
    void commit();

  private:
    std::string temporary, final_path;
    bool committed = false;
};

// The model directory's files beside the weights: config.json, and tokenizer.json, tokenizer_config.json,
// generation_config.json, special_tokens_map.json, chat_template.* copied from `carry_from` directories (first found
// wins; empty names are skipped).
void save_model_files(const std::string& directory, const ModelConfig& config, const nlohmann::json& original_config,
                      const std::vector<std::string>& carry_from);

// state.safetensors: "params/<name>", "m/<name>", "v/<name>", each as in files (padding rows left out).
// m and v are fp32; so are the params in the file, which a 16-bit model without master weights widens (nothing is
// lost).
// Several writers, for as many of which the table is laid out, write the parts of each group that are theirs, whatever
// else they hold, and load what their arenas hold: a run goes on with any number of them.
struct TrainingArenas {
    WeightArenas params, m, v;
};
void save_state(const std::string& path, const ParamTable& table, const TrainingArenas& arenas,
                const Writers& writers = {});
void load_state(const std::string& path, const ParamTable& table, const TrainingArenas& arenas);
// The params of a state.safetensors that is there, for save_weights().
FetchParam state_weights(const std::string& path);

// A JSON object, flushed; read back with a clear Error where it is damaged or something else.
void write_json(const std::string& path, const nlohmann::json& json);
nlohmann::json read_json(const std::string& path);

// The sequence length of trainer.json; 0 where the directory has no such file.
int64_t trained_seq_len(const std::string& directory);

// The checkpoint with the lowest val_loss in its trainer.json; empty if none was evaluated.
std::string best_checkpoint(const std::string& run_dir);

// Removes the oldest checkpoints but the newest `keep` ≥ 1 and `spare` (a name; may be empty). Each is first renamed to
// ".old-step_…", so that a half-removed checkpoint is never taken for a complete one. What a killed process left of a
// save or of a removal is removed too.
void remove_old_checkpoints(const std::string& run_dir, int64_t keep, const std::string& spare);

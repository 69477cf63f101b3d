// Reads and writes model directories in Hugging Face layout and training state.
//
// A model directory holds config.json, model.safetensors (or model.safetensors.index.json and shards) and, for commands
// that read or write text, tokenizer.json. A checkpoint directory runs/x/step_00001000/ is a model directory that also
// holds trainer.json and state.safetensors: fp32 master weights and Adam's m and v, tensor by tensor in arena order, so
// that each rank can write its own byte ranges. Checkpoints are written atomically: into a temporary directory, flushed
// to disk, then renamed.
//
// Every function throws Error naming file, tensor and remedy. Sizes, magic numbers and offsets are checked before use.
// A failure overwrites nothing.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/files/safetensors.h"
#include "runtime/model/params.h"

// Complete checkpoints of a run directory in ascending order of steps ("step_00000100" …): config.json, weights,
// state.safetensors and trainer.json are all present. Other entries are skipped.
std::vector<std::string> list_checkpoints(const std::string& run_dir);
// "step_00000100" → 100; -1 if the name is not of that form.
int64_t checkpoint_step(const std::string& name);

// What to do about a damaged checkpoint of a run, for the end of an error: "; remove DIR to continue from step_...", or
// to start again if there is no earlier one.
std::string resume_remedy(const std::string& checkpoint);

// Returns a parameter's padded_numel() values on the host in memory layout, padding rows zero: a pointer to existing
// memory, or to buffer.
using FetchParam = std::function<const float*(const Param& p, std::vector<float>& buffer)>;

// The dtype in which a file holds, or is to hold, one of the tensors that a parameter is made of.
using StoredDType = std::function<DType(const Param& p, const SourceTensor& tensor)>;

// Weights in files, read one parameter at a time.
struct WeightSource {
    FetchParam fetch;
    StoredDType dtype;
};

// Opens a directory's weights with the checks of load_weights().
WeightSource open_weight_source(const std::string& directory, const ParamTable& table);

// Fills the arenas, on host or device, from a directory's weights: one file or shards with an index; fp32, bf16, fp16
// or fp64; names with or without the family's prefix ("transformer." / "model."). Every source tensor must be present
// with its shape. Other tensors are an Error, except known buffers (GPT-2's attn.bias, attn.masked_bias, rotary
// inv_freq) and a tied model's lm_head.weight that equals the token embedding, the table's first parameter. (If they
// differ it is an Error, because transformers 4 uses the embedding and transformers 5 the head.) Padding rows are set
// to zero. After an Error of these checks the arenas are unchanged. A finite value that 16-bit arenas would make
// infinite is an Error that names the tensor. Returns a warning that names the tensors with values that are not finite,
// for stderr; empty if there are none.
std::string load_weights(const std::string& directory, const ParamTable& table, const WeightArenas& arenas);

// Writes model.safetensors at path, tensor by tensor, from the most exact weights available. Several ranks divide the
// parameter groups. dtype: F32, BF16 or F16, of all tensors or of each. Throws Error naming the tensor for a finite
// value that the dtype would make infinite. Not atomic: callers write into an AtomicDirectory.
void save_weights(const std::string& path, const ParamTable& table, const WeightArenas& arenas, DType dtype);
void save_weights(const std::string& path, const ParamTable& table, const FetchParam& fetch, DType dtype,
                  const Ranks& ranks = {});
void save_weights(const std::string& path, const ParamTable& table, const FetchParam& fetch, const StoredDType& dtype,
                  const Ranks& ranks = {});

// A directory that is created atomically. Files are written into path(); commit() flushes them and the directory,
// renames it to its final name and flushes the parent. The destructor removes an uncommitted directory.
class AtomicDirectory {
  public:
    // path must not exist, its parent must. The temporary directory is ".tmp-<name>-<process id>" in the same parent;
    // those of dead processes are removed first.
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

// state.safetensors: "params/<name>", "m/<name>", "v/<name>", each without padding rows, with checksums. What Muon
// updates has no v. All are fp32; 16-bit weights without a master copy are widened, which is exact. Each rank writes
// its part of every group and loads what its arenas hold, so a run can resume with another number of ranks. The table
// must be laid out for ranks.count ranks. Loading compares the checksums of all tensors, if the file has them; each
// rank reads the part that it would write. A wrong one is an Error after the arenas were filled.
struct TrainingArenas {
    WeightArenas params, m, v;
};
void save_state(const std::string& path, const ParamTable& table, const TrainingArenas& arenas, const Ranks& ranks = {},
                const SafetensorsWriter::Metadata& metadata = {});
void load_state(const std::string& path, const ParamTable& table, const TrainingArenas& arenas,
                const Ranks& ranks = {});
// Reads the params of an existing state.safetensors, for save_weights().
FetchParam state_weights(const std::string& path);

// Writes a JSON object and flushes it; reads one, with an Error if it is damaged or not an object.
void write_json(const std::string& path, const nlohmann::json& json);
nlohmann::json read_json(const std::string& path);

// The sequence length in trainer.json; 0 if the directory has no such file.
int64_t trained_seq_len(const std::string& directory);

// The checkpoint with the lowest val_loss in its trainer.json; empty if none was evaluated. A trainer.json that cannot
// be read counts as not evaluated.
std::string best_checkpoint(const std::string& run_dir);

// Removes what dead processes left in a run directory: unfinished checkpoints and files (".tmp-..."), checkpoints that
// were being removed (".old-..."). The caller holds the directory's lock (runtime/files/lock.h).
void remove_leftovers(const std::string& run_dir);

// Removes leftovers, and all checkpoints except the newest `keep` ≥ 1 and `spare` (a name, may be empty). A checkpoint
// is first renamed to ".old-step_...", so that a partly removed one is never taken for complete.
void remove_old_checkpoints(const std::string& run_dir, int64_t keep, const std::string& spare);

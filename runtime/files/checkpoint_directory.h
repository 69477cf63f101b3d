// Model directories in Hugging Face layout, and the checkpoints of a run.
//
// A model directory holds config.json, model.safetensors (or model.safetensors.index.json and shards) and, for commands
// that read or write text, tokenizer.json. A checkpoint directory runs/x/step_00001000/ is a model directory that also
// holds trainer.json and state.safetensors (runtime/files/training_state.h). Checkpoints are written atomically: into a
// temporary directory, flushed to disk, then renamed.
//
// Every function throws Error naming file, tensor and remedy. Sizes, magic numbers and offsets are checked before use.
// A failure overwrites nothing.
#pragma once

#include <string>
#include <vector>

#include "runtime/files/json_keys.h"

// Complete checkpoints of a run directory in ascending order of steps ("step_00000100" …): config.json and weights, or
// the two files of a LoRA adapter, state.safetensors and trainer.json are all present. Other entries are skipped.
std::vector<std::string> list_checkpoints(const std::string& run_dir);
// The entries of a run directory that have a checkpoint's name but are no complete one.
std::vector<std::string> list_incomplete_checkpoints(const std::string& run_dir);
// "step_00000100" → 100; -1 if the name is not of that form.
int64_t checkpoint_step(const std::string& name);

// The remedy for a damaged checkpoint of a run, for the end of an error: "; remove DIR to continue from step_..." if
// there is an earlier one, never to remove the only one.
std::string resume_remedy(const std::string& checkpoint);

// ".tmp-<name>-<process id>" beside path: where this process writes what is then renamed to path. Removes those of dead
// processes.
std::string temporary_path(const std::string& path);

// A directory that is created atomically. Files are written into path(); commit() flushes them and the directory,
// renames it to its final name and flushes the parent. The destructor removes an uncommitted directory.
class AtomicDirectory {
  public:
    // path must not exist, its parent must.
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

// The sequence length in trainer.json; 0 if the directory has no such file.
int64_t trained_seq_len(const std::string& directory);

// The checkpoint with the lowest val_loss in its trainer.json; empty if none was evaluated. A damaged trainer.json
// counts as not evaluated.
std::string best_checkpoint(const std::string& run_dir);

// Removes what other runs left in a run directory: unfinished checkpoints and files (".tmp-..."), checkpoints that were
// being removed (".old-..."). locked: the caller holds the directory's lock (runtime/files/lock.h), so nobody writes
// there. Without locks, unfinished checkpoints of processes that live stay.
void remove_leftovers(const std::string& run_dir, bool locked);

// Removes unfinished checkpoints of dead processes, checkpoints that were being removed, and all except the newest
// `keep` ≥ 1 and `spare` (a name, may be empty). A checkpoint is first renamed to ".old-step_...", so that a partly
// removed one is never taken for complete.
void remove_old_checkpoints(const std::string& run_dir, int64_t keep, const std::string& spare);

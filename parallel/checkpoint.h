// Writes a checkpoint with all ranks of a run (runtime/files/checkpoint.h describes the files).
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "runtime/context.h"
#include "runtime/files/checkpoint.h"
#include "runtime/files/lock.h"

// The ranks of a run, for save_state(), save_weights() and load_state().
Ranks ranks_of(const Context& ctx);

// Rank 0 locks the run directory, if it exists and `lock` does not hold it yet, and removes what dead processes left in
// it. If that fails, all ranks throw its error.
void claim_run_directory(const Context& ctx, const std::string& directory, std::unique_ptr<DirectoryLock>& lock);

// Call it when queued work is done. Each rank writes its part of the training state and then its share of the weights.
// metadata goes into the state's file. Rank 0 calls small_files(directory) and renames the complete checkpoint to path,
// which exists when rank 0 returns.
void write_checkpoint(const Context& ctx, const std::string& path, const ParamTable& table,
                      const TrainingArenas& arenas, const SafetensorsWriter::Metadata& metadata,
                      const std::function<void(const std::string&)>& small_files);

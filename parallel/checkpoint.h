// Writes a checkpoint with all ranks of a run (runtime/files/checkpoint.h describes the files).
#pragma once

#include <functional>
#include <string>

#include "runtime/context.h"
#include "runtime/files/checkpoint.h"

// The ranks of a run, for save_state(), save_weights() and load_state().
Ranks ranks_of(const Context& ctx);

// Call it when queued work is done. Each rank writes its part of the training state and then its share of the weights.
// metadata goes into the state's file. Rank 0 calls small_files(directory) and renames the complete checkpoint to path,
// which exists when rank 0 returns.
void write_checkpoint(const Context& ctx, const std::string& path, const ParamTable& table,
                      const TrainingArenas& arenas, const SafetensorsWriter::Metadata& metadata,
                      const std::function<void(const std::string&)>& small_files);

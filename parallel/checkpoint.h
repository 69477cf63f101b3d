// A checkpoint that all ranks of a run write together (runtime/files/checkpoint.h has the files).
#pragma once

#include <functional>
#include <string>

#include "runtime/context.h"
#include "runtime/files/checkpoint.h"

// What is queued is done by now. Each rank writes its parts of the state, then its share of the weights; rank 0 adds
// what small_files(directory) writes, and makes the whole appear at path: there when this returns on rank 0.
void write_checkpoint(const Context& ctx, const std::string& path, const ParamTable& table,
                      const TrainingArenas& arenas, const std::function<void(const std::string&)>& small_files);

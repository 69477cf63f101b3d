// For tests: the two files of tensors of a checkpoint, written by ranks that are threads or by one.
#pragma once

#include <string>

#include "runtime/files/training_state.h"

// Writes model.safetensors alone.
inline void save_weights(const std::string& path, const ParamTable& table, const WeightArenas& arenas, DType dtype) {
    SafetensorsWriter writer(path);
    write_weights(writer, FileWriter::Open::Create, table, arenas, dtype);
    writer.finish();
}

// Writes both files into a directory. All ranks call it.
inline void save_state(const std::string& directory, const ParamTable& table, const TrainingArenas& arenas,
                       DType export_dtype = DType::F32, const Ranks& ranks = {}) {
    make_directories(directory);
    StateWriter writer(directory, table, arenas, export_dtype, {{"step", "1"}, {"adam_steps", "1"}}, ranks);
    writer.write();
    const StateWriter::Part own = writer.part();
    StateWriter::Part all(own.size() * size_t(ranks.count));
    const auto exchange = [&] { ranks.all_gather(all.data(), own.data(), own.size() * sizeof own[0]); };
    if (ranks.count == 1)
        all = own;
    else
        exchange();
    if (ranks.rank == 0) writer.finish(all);
    if (ranks.count > 1) exchange();  // returns when rank 0 is done
}

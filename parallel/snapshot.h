// A copy of one rank's part of the training state in pinned host memory, from which a checkpoint is written while the
// training goes on.
#pragma once

#include "runtime/device/device.h"
#include "runtime/files/training_state.h"
#include "runtime/model/params.h"

class Snapshot {
  public:
    // Allocates nothing yet. weights: the dtype of the most exact weights that the run keeps; moments: that of m and v.
    // The table is laid out for `parts` ranks.
    Snapshot(const ParamTable& table, DType weights, DType moments, int64_t part, int64_t parts);
    int64_t bytes() const { return total; }
    // Takes the memory and touches it, so that the first copy is as fast as the others. Throws DeviceError.
    void allocate();
    // Copies from arenas that hold at least this rank's part. Returns when the copy is done.
    void copy(const TrainingArenas& arenas, Stream stream);
    const TrainingArenas& arenas() const { return copies; }

  private:
    std::vector<ParamArena*> parts_in_use();
    const ParamTable& table;
    int64_t total = 0;
    HostMemory memory{nullptr, host_free};
    TrainingArenas copies;
};

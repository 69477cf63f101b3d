// The tensors of a checkpoint: model.safetensors, which is the exported model, and state.safetensors, the rest of what
// a run needs to continue: "m/<name>" and "v/<name>", Adam's moments in the dtype that the run keeps them in (what Muon
// updates has no v), and "params/<name>", the fp32 weights, if the export's dtype loses some of their bits. All without
// padding rows, with checksums. Weights are stored once: 12 bytes a weight with an fp32 export and fp32 moments, 14
// with a bf16 export, 4 less with bf16 moments. A run may load moments of another dtype: fp32 ones are rounded to
// nearest.
//
// Each rank writes its part of every group into both files and loads what its arenas hold, so a run can resume with
// another number of ranks. Checkpoints of older versions hold all "params/<name>" and load.
#pragma once

#include <string>

#include "runtime/files/weight_files.h"

struct TrainingArenas {
    WeightArenas params;
    WeightArenas m, v;  // one arena each, in fp32 or bf16 throughout
};

// One rank's work on the two files. The files belong to an AtomicDirectory.
class StateWriter {
  public:
    // export_dtype: F32, BF16 or F16. metadata goes into both files. The table must be laid out for ranks.count ranks;
    // the arenas hold at least this rank's part.
    StateWriter(const std::string& directory, const ParamTable& table, const TrainingArenas& arenas, DType export_dtype,
                const SafetensorsWriter::Metadata& metadata, const Ranks& ranks = {});
    // Writes and flushes this rank's part. Calls no collective.
    void write();
    // The result of write() in a form that ranks can exchange; the same length on all.
    using Part = std::vector<uint64_t>;
    Part part() const;
    // When all ranks have written: completes the files. parts: those of all ranks, one after the other.
    void finish(const Part& parts);

  private:
    void write_state();
    const ParamTable& table;
    const TrainingArenas arenas;
    const DType export_dtype;
    const Ranks ranks;
    SafetensorsWriter weights, state;
    SafetensorsWriter::Part weights_part, state_part;
};

// The bytes of the two files, headers apart.
int64_t checkpoint_bytes(const ParamTable& table, const TrainingArenas& arenas, DType export_dtype);

// Fills the arenas, on host or device, from a checkpoint. Compares the checksums of all tensors that it reads, if the
// files have them; each rank checks a part. Collective. Throws Error for damage. Headers, names and shapes are checked
// before the arenas change; a wrong checksum is found after they were filled.
void load_state(const std::string& checkpoint, const ParamTable& table, const TrainingArenas& arenas,
                const Ranks& ranks = {});

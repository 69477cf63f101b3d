// The frozen weights of the blocks' linear layers for fp8 matmuls (docs/use/low_precision.md): adapters are trained
// beside them, so they are quantised once, when they are loaded, by a scale from their own largest
// magnitude that never changes. The weights in the model's dtype are not kept.
//
// A matmul of the forward pass reads the codes by rows, that of an input's gradient reads them transposed. Both
// orientations are kept (2 bytes a weight), or the rows alone (1 byte), which are transposed at each use. The codes,
// and so all results, are the same.
#pragma once

#include <map>
#include <vector>

#include "driver/frozen_memory.h"
#include "kernels/matmul_fp8.h"
#include "runtime/model/params.h"

struct Fp8Weight {
    Tensor rows;     // [outputs, inputs] E4M3
    Tensor columns;  // [inputs, outputs]; null: not kept
    Tensor scale;    // [FP8_SCALE_FLOATS]

    // As a matmul reads it. transposed: scratch (U8, a byte a weight) takes the columns if they are not kept.
    Fp8Matrix matrix(bool transposed, Tensor scratch, Stream stream) const;
};

class Fp8Base {
  public:
    // The linear layers of layers first <= l < end. dtype: that the weights are rounded to first. Where the memory is
    // not in place, layers come to their uses in one orientation.
    Fp8Base(const ParamTable& table, int64_t first, int64_t end, bool both_orientations, DType dtype,
            const FrozenMemory::Kept& kept = {});
    bool quantises(const Param& p) const;

    // ParamArena::starts of an arena of all other parameters.
    std::vector<int64_t> other_starts(const ParamTable& table) const;

    // Quantises a parameter from fp32 values on the host, in memory order (driver/frozen_weights.h).
    void store(const Param& p, const float* values) const;
    const Fp8Weight* find(const Param& p) const;  // null where the parameter is not quantised

    FrozenMemory memory;

  private:
    const int64_t first_layer, end_layer;
    const DType rounded_to;
    std::map<size_t, Fp8Weight> matrices;  // by Param::index; without memory before memory.allocate()
};

// The matrices of a model in 8 or 4 bits, for inference (runtime/model/packed_weight.h), on the device: the weights of
// the blocks' linear layers, the token embedding and the head. What stays in the model's dtype, in its arenas: norms,
// biases, the position table, the decay gates, and matrices whose rows PACKED_GROUP does not divide.
//
// Matrices are quantised when they are read, a block of rows at a time, or read as they are packed already (`convert
// --weights`; Q8_0 and Q4_0 of a GGUF file): the weights in 16 or 32 bits are never all in memory.
//
// Throws Error naming the file's tensor for weights that are not finite or too large for a scale, and for packed rows
// with a scale that is infinite or NaN.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "kernels/packed_weight.h"
#include "models/model_source.h"
#include "runtime/device/arena.h"
#include "runtime/model/params.h"

class PackedWeights {
  public:
    static constexpr int64_t ROWS = 512;  // of activations that a linear layer of a pass takes at a time

    PackedWeights(const ParamTable& table, const Packings& packings);

    // ParamArena::starts of an arena of all other parameters.
    std::vector<int64_t> other_starts(const ParamTable& table) const;

    const Packings packings;
    int64_t bytes() const { return plan.bytes(); }
    void allocate();

    // Null where the parameter is not packed. Without memory before allocate().
    const PackedWeight* find(const Param& p) const;

    // Reads the packed matrices of a model. Returns load_weights()' warning about values that are not finite, which
    // Bf16 alone may have, and a line for an embedding or head of a GGUF file that is rounded although other matrices
    // keep their codes.
    std::string load(const ModelSource& source, const ParamTable& table) const;
    // Random weights, as initialise_weights() makes them.
    void randomise(const ParamTable& table, uint64_t seed) const;

    // A line that names the matrices that stay in the model's dtype because of their rows; empty if there are none.
    std::string note(const ParamTable& table) const;

  private:
    template <typename Fill>
    void fill_blocks(const Param& p, Fill fill) const;
    void read(const StoredWeights& stored, const std::string& where, const ParamTable& table) const;
    void read_gguf(const std::vector<StoredWeights::Tensor>& tensors, const std::string& where, const Param& p) const;

    std::map<size_t, PackedWeight> matrices;  // by Param::index
    ArenaPlan plan;
    Arena memory;
};

// The packing whose codes and scales a GGUF file has for the matrices of its blocks: all Q8_0, or all Q4_0. An
// embedding or a head of another quantised type is Int8, which is finer. None for other files, and where an adapter is
// added to the weights.
std::optional<Packings> gguf_packing(const ModelSource& source, const ParamTable& table);

// Quantises rows [row, row + rows.rows.shape[0]) of a matrix in host memory, with the checks of PackedWeights. where:
// the file, for errors.
void quantise_rows(const PackedWeight& rows, const Param& p, int64_t row, const float* values,
                   const std::string& where);

// QLoRA: the weights of the blocks' linear layers of a frozen model in NF4 (kernels/nf4.h). Each matrix of the model's
// files is quantised by itself; its blocks of 64 run along its inputs.
//
// Throws Error on a matrix whose number of inputs is not a multiple of 64.
#pragma once

#include <map>
#include <vector>

#include "driver/frozen_memory.h"
#include "kernels/nf4.h"
#include "runtime/model/params.h"

class Nf4Base {
  public:
    explicit Nf4Base(const ParamTable& table, const FrozenMemory::Kept& kept = {});
    static bool quantises(const Param& p);

    // ParamArena::starts of an arena of all other parameters.
    static std::vector<int64_t> other_starts(const ParamTable& table);

    int64_t largest() const { return largest_weight; }  // elements

    // Quantises a parameter from fp32 values on the host, in memory order (driver/frozen_weights.h).
    void store(const Param& p, const float* values) const;
    const Nf4Matrix& matrix(const Param& p) const { return matrices.at(p.index); }
    const Nf4Matrix* find(const Param& p) const { return quantises(p) ? &matrix(p) : nullptr; }

    FrozenMemory memory;

  private:
    std::map<size_t, Nf4Matrix> matrices;  // by Param::index; without memory before memory.allocate()
    int64_t largest_weight = 0;
};

// The trained weights of the blocks' linear layers in fp8 in ZeRO stage 3 (docs/use/low_precision.md). After each
// update a rank quantises its own part of every layer, and matmuls gather the codes: 1 byte a weight instead of 2, and
// no pass over a gathered weight quantises it. A matmul that reads a weight transposed transposes the gathered codes.
// Scales are those of driver/fp8_state.h, so the bits are those of weights that are quantised at each use.
//
// Passes in the model's dtype (samples, for one) gather the weights themselves, into the same buffers. Biases and
// decay gates of these layers, which have no codes, are whole on every rank.
#pragma once

#include <vector>

#include "driver/fp8_state.h"
#include "parallel/sharding.h"
#include "parallel/weight_gatherer.h"
#include "runtime/context.h"
#include "runtime/device/arena.h"
#include "runtime/model/params.h"

class Fp8Shards {
  public:
    // The linear layers of layers first <= l < end. dtype: of the model.
    Fp8Shards(const ParamTable& table, const Sharding& sharding, DType dtype, int64_t first, int64_t end);
    int64_t bytes() const { return plan.bytes(); }

    // groups, of the weights, gets those of the codes appended; arenas.replicated is set.
    void allocate(const Context& ctx, const ParamTable& table, WeightArenas& arenas, std::vector<KeptGroup>& groups);
    int group(int64_t l) const { return weight_groups + 1 + int(l); }  // of a layer's codes, for the gatherer
    Tensor rows(const Param& p) const { return codes.tensor(p); }      // [outputs, inputs] U8, while they are gathered

    // The codes, and the replicated parameters, from the weights, after Fp8State::scale_weights(). All ranks call it.
    void quantise(const Context& ctx, const ParamTable& table, const WeightArenas& arenas, const Fp8State& fp8) const;

  private:
    enum Entry { CODES, REPLICATED };
    bool covers(const Param& p) const { return p.layer >= first_layer && p.layer < end_layer && !p.fp32; }
    Tensor at(Entry entry) const;

    const int64_t first_layer, end_layer;
    const int weight_groups;
    ArenaPlan plan;
    Arena memory;
    ParamArena codes;             // U8, this rank's part of the layers' groups
    std::vector<int64_t> starts;  // of the replicated parameters
};

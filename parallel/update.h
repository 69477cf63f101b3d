// The slices that the optimizer updates, one launch each: everything with one rank; otherwise one slice per group,
// because a rank's parts of different groups are not contiguous in a whole arena.
#pragma once

#include <vector>

#include "kernels/adamw.h"
#include "parallel/gradients.h"

struct UpdateSlice {
    // Views into the arenas of what this rank updates. params: fp32 or null; params_T: 16-bit or null
    // (kernels/adamw.h).
    Tensor params, params_T, m, v, grads;
    std::vector<AdamWSegment> segments;
    // The gradients whose squares this rank sums for the global norm. In stage 0 they are a part of what it updates.
    Tensor own_grads;
    // The whole group's weights, to be all-gathered after the update; params or params_T is this rank's part of them.
    // Null if this rank updates everything, or if weights are gathered before use (stage 3).
    Tensor gathered;
};

std::vector<UpdateSlice> make_update_slices(const ParamTable& table, const Sharding& sharding,
                                            const WeightArenas& weights, const Gradients& grads, const ParamArena& m,
                                            const ParamArena& v, double weight_decay);

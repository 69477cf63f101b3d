// What the optimizer updates, in slices: of a world of one everything that one launch can do, else group by group,
// because a rank's parts of two groups don't lie side by side where the groups are whole.
#pragma once

#include <vector>

#include "kernels/adamw.h"
#include "parallel/gradients.h"

struct UpdateSlice {
    // What this rank updates, in the arenas: params fp32 or null, params_T 16 bits or null (kernels/adamw.h).
    Tensor params, params_T, m, v, grads;
    std::vector<AdamWSegment> segments;
    // This rank's share of the gradient for the norm: in stage 0 a part of what it updates.
    Tensor own_grads;
    // The group's weights on every rank, of which params or params_T is this rank's part: to be gathered after the
    // update. Null where all are updated here, or are gathered when they are used.
    Tensor gathered;
};

std::vector<UpdateSlice> make_update_slices(const ParamTable& table, const Sharding& sharding,
                                            const WeightArenas& weights, const Gradients& grads, const ParamArena& m,
                                            const ParamArena& v, double weight_decay);

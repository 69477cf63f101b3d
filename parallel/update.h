// The slices that the optimizer updates, one launch each: everything with one rank; otherwise one slice per group,
// because a rank's parts of different groups are not contiguous in a whole arena.
#pragma once

#include <array>
#include <vector>

#include "kernels/adamw.h"
#include "parallel/gradients.h"

// How a rate group is updated.
struct GroupHyperparameters {
    float lr_scale = 1;      // its learning rate / that of the step
    float weight_decay = 0;  // of its matrices
};
using HyperparametersByGroup = std::array<GroupHyperparameters, NUM_RATE_GROUPS>;

// Of the optimizers that update each element by itself.
struct ElementwiseOptions {
    AdamWOptions adamw;
};

struct UpdateSlice {
    int first_group, last_group;  // groups [first_group, last_group) of the table
    // Views into the arenas of what this rank updates. params: fp32 or null; params_T: 16-bit or null
    // (kernels/param_update.h). v is the whole arena of this rank: it may be packed.
    Tensor params, params_T, m, v, grads;
    // Of the parameters whose optimizer updates each element by itself, by OptimizerType.
    std::array<std::vector<ParamSegment>, NUM_OPTIMIZERS> segments;
    // The gradients whose squares this rank sums for the global norm. In stage 0 they are a part of what it updates.
    Tensor own_grads;
    // The whole group's weights, to be all-gathered after the update; params or params_T is this rank's part of them.
    // Null if this rank updates everything, or if weights are gathered before use (stage 3).
    Tensor gathered;
};

// The held elements `span` of a parameter (of the arena m) as a segment of the slice that has its group.
ParamSegment param_segment(const ParamTable& table, const UpdateSlice& slice, const ParamArena& m, const Param& p,
                           const ParamArena::Span& span, const HyperparametersByGroup& rates);

std::vector<UpdateSlice> make_update_slices(const ParamTable& table, const Sharding& sharding,
                                            const WeightArenas& weights, const Gradients& grads, const ParamArena& m,
                                            const ParamArena& v, const HyperparametersByGroup& rates);

// Updates the slice's segments. scalars: of the step (kernels/global_norm.h).
void update_elements(const UpdateSlice& slice, const ElementwiseOptions& options, Tensor scalars, Stream stream);

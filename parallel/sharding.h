// The part of each arena that a rank holds, by ZeRO stage (Rajbhandari et al. 2020, "ZeRO: memory optimizations toward
// training trillion parameter models", section 5):
//
//   stage   weights    gradients   master weights, m, v
//     0     whole      whole       whole                 all-reduce; every rank updates everything
//     1     whole      whole       own part              reduce-scatter, update the own part, all-gather
//     2     whole      own part    own part              a group's gradient is whole during its backward pass
//     3     own part   own part    own part              a group's weights are whole while they are used
//
// A rank's own part is 1/world of every group (runtime/model/params.h), so that groups are reduced and gathered one by
// one. The last group (fp32 parameters) is small and used everywhere: every rank holds its weights whole in all stages.
#pragma once

#include <vector>

#include "runtime/model/params.h"

struct Sharding {
    int64_t stage = 0;
    int64_t rank = 0, world = 1;

    bool splits_optimizer() const { return world > 1 && stage >= 1; }
    bool splits_gradients() const { return world > 1 && stage >= 2; }
    bool splits_weights() const { return world > 1 && stage >= 3; }

    int64_t parts(bool split) const { return split ? world : 1; }
    // An arena over memory of table.total / parts(split) elements.
    ParamArena arena(Tensor data, bool split) const {
        ParamArena a = data;
        if (split) {
            a.part = rank;
            a.parts = world;
        }
        return a;
    }
    // This rank's part of a tensor that splits evenly.
    Tensor own(Tensor whole) const {
        const int64_t n = whole.shape[0] / world;
        return whole.rows(rank * n, (rank + 1) * n);
    }
};

// Buffers that hold whole groups. Layers l and l + k·layer_buffers share a buffer; the embedding shares one with the
// head, which is never used at the same time (a tied head is not a group); the fp32 group has its own.
class GroupBuffers {
  public:
    GroupBuffers() = default;
    GroupBuffers(const ParamTable& table, int layer_buffers, bool with_fp32);

    int64_t total() const { return end.empty() ? 0 : end.back(); }  // elements
    int buffer(int group) const { return buffers[size_t(group)]; }  // -1: none
    int num_buffers() const { return int(end.size()); }
    // A whole-group view for each group in memory [total()]; null if the group has no buffer.
    std::vector<Tensor> views(const ParamTable& table, Tensor memory) const;

  private:
    std::vector<int> buffers;  // by group
    std::vector<int64_t> end;  // by buffer: elements
};

// What each rank of a run keeps of the arenas, by stage (Rajbhandari et al. 2020, "ZeRO: memory optimizations toward
// training trillion parameter models", section 5):
//
//   stage   weights    gradients   master weights, m, v
//     0     whole      whole       whole                 gradients are summed; every rank updates everything
//     1     whole      whole       own part              a rank gets its part's sum, updates it and hands it on
//     2     whole      own part    own part              a group's gradient is whole until its backward pass ends
//     3     own part   own part    own part              a group's weights are whole while they are used
//
// A rank's own part is its share of every group (runtime/model/params.h), so that a group is reduced or gathered by
// itself. The last group, which stays fp32, is small and read everywhere: its weights are whole on every rank in all
// stages.
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
        if (split) a.part = rank, a.parts = world;
        return a;
    }
    // This rank's part of something that splits evenly.
    Tensor own(Tensor whole) const {
        const int64_t n = whole.shape[0] / world;
        return whole.rows(rank * n, (rank + 1) * n);
    }
};

// Places that whole groups take in turns: layer l has one with l + k·layer_slots, the embedding one with the head,
// which it never meets (a tied head is no group), and what stays fp32 one of its own.
class GroupSlots {
  public:
    GroupSlots() = default;
    GroupSlots(const ParamTable& table, int layer_slots, bool with_fp32);

    int64_t total() const { return end.empty() ? 0 : end.back(); }  // elements
    int slot(int group) const { return slots[size_t(group)]; }      // -1: it has none
    int num_slots() const { return int(end.size()); }
    // Each group whole in memory [total()], null where it has no slot.
    std::vector<Tensor> views(const ParamTable& table, Tensor memory) const;

  private:
    std::vector<int> slots;    // by group
    std::vector<int64_t> end;  // by slot: elements
};

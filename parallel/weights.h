// Weights of which each rank keeps its part (stage 3): a group is gathered ahead of its use, on a stream beside the
// one that computes, and its slot is taken by another when it is done.
//
//     const GatheredGroup weights(gather, 1 + l, 2 + l, stream);   // layer l whole, layer l + 1 on its way
//
// Places, not groups, are what has to be free: a group is still there when the backward pass begins with the last
// layers of the forward pass. The ranks use the same groups in the same order.
#pragma once

#include <string>
#include <vector>

#include "parallel/sharding.h"
#include "runtime/context.h"

class WeightGatherer {
  public:
    static constexpr int LAYER_SLOTS = 2;  // the layer that computes and the one that comes next

    // weights: parts, with views of the slots.
    WeightGatherer(const Context& ctx, const ParamTable& table, const ParamArena& weights, const GroupSlots& slots);

    // A pass begins: the weights may have changed since the last one.
    void begin(Stream stream);
    // The pass is queued: what follows on the stream comes after its gathering.
    void end(Stream stream);
    void use(int group, Stream stream);   // whole for what is queued on the stream from now on
    void prefetch(int group);             // on its way
    void done(int group, Stream stream);  // what was queued by now was the last to read it, until the next use()

  private:
    void gather(int group);

    const Context& ctx;
    const ParamTable& table;
    const ParamArena& weights;
    const GroupSlots& slots;
    std::vector<std::string> names;  // of the groups' gathering, in a profile
    struct Slot {
        int holds = -1;     // a group
        bool read = false;  // since begin()
        Event filled, free;
    };
    std::vector<Slot> state;
    Event turn;
};

// One use of a group, for as long as this lives. gatherer null: all weights are whole. next: prefetched, -1: nothing.
class GatheredGroup {
  public:
    GatheredGroup(WeightGatherer* gatherer, int group, int next, Stream stream);
    ~GatheredGroup() noexcept(false);
    GatheredGroup(const GatheredGroup&) = delete;
    GatheredGroup& operator=(const GatheredGroup&) = delete;

  private:
    WeightGatherer* gatherer;
    int group;
    Stream stream;
};

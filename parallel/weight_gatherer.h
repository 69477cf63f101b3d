// Gathers sharded weights (stage 3). A group is all-gathered on the side stream ahead of its use; afterwards another
// group reuses its buffer.
//
//     const GatheredGroup weights(gather, 1 + l, 2 + l, stream);   // layer l is whole; layer l + 1 is prefetched
//
// A group stays in its buffer until the buffer is reused, so the backward pass finds the last layers of the forward
// pass still gathered. All ranks must use the same groups in the same order.
#pragma once

#include <string>
#include <vector>

#include "parallel/sharding.h"
#include "runtime/context.h"

class WeightGatherer {
  public:
    static constexpr int LAYER_BUFFERS = 2;  // the current layer and the prefetched one

    // weights: sharded, with views of the buffers.
    WeightGatherer(const Context& ctx, const ParamTable& table, const ParamArena& weights, const GroupBuffers& buffers);

    // Starts a pass. Gathered groups are invalid, because the weights may have changed.
    void begin(Stream stream);
    void use(int group, Stream stream);   // later work on the stream sees the whole group
    void prefetch(int group);             // starts its all-gather
    void done(int group, Stream stream);  // work queued so far was the last to read it

  private:
    void gather(int group);

    const Context& ctx;
    const ParamTable& table;
    const ParamArena& weights;
    const GroupBuffers& buffers;
    std::vector<std::string> names;  // of the all-gathers, in a profile
    struct Buffer {
        int holds = -1;     // the group, -1: none
        bool read = false;  // since begin()
        Event filled;       // its all-gather has ended
        Event free;         // its last reader has ended
    };
    std::vector<Buffer> state;  // by buffer
    Event pass;                 // the work before the pass: its all-gathers wait for it
};

// Holds a group whole during its lifetime and prefetches group `next` (-1: none). gatherer null: weights are not
// sharded.
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

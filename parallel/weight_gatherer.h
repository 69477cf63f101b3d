// Brings weights into their buffers ahead of use: from the parts that the ranks keep (ZeRO stage 3), by an all-gather,
// or from pinned memory of the host (`--offload weights`), by a copy. Both run on a stream of their own beside the
// computation; afterwards another group reuses the buffer.
//
//     const GatheredGroup weights(gather, 1 + l, 2 + l, stream);   // layer l is whole; layer l + 1 is prefetched
//
// A group stays in its buffer until the buffer is reused, so the backward pass finds the last layers of the forward
// pass still there. All ranks must use the same groups in the same order.
#pragma once

#include <string>
#include <vector>

#include "parallel/sharding.h"
#include "runtime/context.h"
#include "runtime/device/arena.h"

// A group of weights as it is kept, and its buffer. kept null: the group is in place, and never moved.
struct KeptGroup {
    std::string name;  // "layer 3, 436 MB", in a profile
    int buffer = -1;
    Tensor kept, whole;
};
// The groups of a model's arena, with views of the buffers.
std::vector<KeptGroup> kept_groups(const ParamTable& table, const ParamArena& weights, const GroupBuffers& buffers);

class WeightGatherer {
  public:
    static constexpr int LAYER_BUFFERS = 2;  // the current layer and the prefetched one

    // place: where the groups are kept. Device: a part of each on every rank.
    WeightGatherer(const Context& ctx, std::vector<KeptGroup> groups, MemoryPlace place);
    ~WeightGatherer();
    WeightGatherer(const WeightGatherer&) = delete;
    WeightGatherer& operator=(const WeightGatherer&) = delete;

    // Starts a pass. Gathered groups are invalid, because the weights may have changed.
    void begin(Stream stream);
    void use(int group, Stream stream);   // later work on the stream sees the whole group
    void prefetch(int group);             // starts its all-gather or copy
    void done(int group, Stream stream);  // work queued so far was the last to read it

  private:
    struct Buffer {
        int holds = -1;     // the group, -1: none
        bool read = false;  // since begin()
        Event filled;       // its all-gather or copy has ended
        Event free;         // its last reader has ended
    };
    Buffer* buffer_of(int group);  // null: the group is in place

    const Context& ctx;
    std::vector<KeptGroup> groups;
    const MemoryPlace place;
    const Stream side;
    std::vector<Buffer> state;  // by buffer
    Event pass;                 // the work before the pass: what is gathered waits for it
};

// Holds a group whole during its lifetime and prefetches group `next` (-1: none). gatherer null: all weights are in
// place.
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

// The gradients of all parameters, and their sums over the ranks.
//
// The backward pass says of each group when it begins to write its gradient and when that is complete (open, close);
// complete ones are summed on a stream beside the one that computes, so that only the last are waited for:
//
//   stage 0      all-reduce, in the arena, by the step's last micro-step
//   stage 1      reduce-scatter, likewise: of each group only the rank's own part holds the sum
//   stages 2, 3  reduce-scatter by every micro-step, from a slot that the group shares with others to its part
//
// In stages 0 and 1 groups are merged into buckets of a least size: small messages leave a network's bandwidth unused
// (Li et al. 2020, "PyTorch distributed", section 3.2). With another dtype than fp32 a bucket is rounded to it, summed
// in it and widened again.
#pragma once

#include <string>
#include <vector>

#include "parallel/sharding.h"
#include "runtime/context.h"

struct ReduceOptions {
    DType dtype = DType::F32;                  // F32 or BF16
    int64_t bucket_bytes = int64_t(32) << 20;  // of fp32 gradients
};

// Groups [first, last), all of whose gradients are complete when the first's is.
struct Bucket {
    int first, last;
};
// In the order in which the backward pass completes them: from the last group down; what stays fp32 comes last.
std::vector<Bucket> make_buckets(const ParamTable& table, const Sharding& sharding, const ReduceOptions& options);

class Gradients {
  public:
    static constexpr int LAYER_SLOTS = 2;  // the layer that is written and the one that is summed

    // What memory it needs: fp32 elements of the arena and of the slots for whole groups; bytes of the buffer for
    // another dtype.
    struct Memory {
        int64_t arena = 0, slots = 0, buffer_bytes = 0;
        int64_t bytes() const { return (arena + slots) * 4 + buffer_bytes; }
    };
    static Memory memory(const ParamTable& table, const Sharding& sharding, const ReduceOptions& options);

    Gradients() = default;
    // memory: bytes() of U8. ctx: whose ranks sum; null where nothing will be summed.
    void allocate(const ParamTable& table, const Sharding& sharding, const ReduceOptions& options, Tensor memory,
                  const Context* ctx);

    ParamArena arena;  // whole, or this rank's parts
    Tensor tensor(const Param& p) const { return arena.tensor(p); }
    // This rank's part of a group, in which the step's sum is when end() was called; of a world of one the group.
    Tensor own(int first, int last) const;

    // A micro-step: the first of a step overwrites, the others add; the last one completes the sums.
    void begin(bool first, bool last);
    void open(int group, Stream stream);   // before the group's gradient is first written
    void close(int group, Stream stream);  // after it was last written
    void end(Stream stream);               // what follows on the stream finds the sums

    // Whether kernels are to add to what is there: not where each micro-step is summed by itself.
    bool accumulate() const { return !first && !sharding.splits_gradients(); }

  private:
    void reduce(const Bucket& bucket, const char* name, Stream stream);

    const ParamTable* table = nullptr;
    Sharding sharding;
    DType dtype = DType::F32;
    const Context* ctx = nullptr;
    GroupSlots slots;
    std::vector<Bucket> buckets;
    std::vector<std::string> names;  // of the buckets' sums, in a profile
    Tensor buffer;                   // a bucket in dtype
    bool first = true, last = true;
    bool waiting = false;  // for a sum that began in this micro-step
    struct Slot {
        Event free;
        bool used = false;
    };
    std::vector<Slot> state;
    Event complete, summed;
};

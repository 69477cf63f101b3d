// The gradients of all parameters and their reduction over the ranks.
//
// The backward pass calls open() before it writes a group's gradient and close() when the gradient is complete. Closed
// groups are reduced on the side stream, overlapped with computation; only the last ones are waited for:
//
//   stage 0      all-reduce in the arena, in the step's last micro-step
//   stage 1      reduce-scatter in the arena, in the last micro-step: only the rank's own part of a group holds the sum
//   stages 2, 3  reduce-scatter in every micro-step, from a shared slot that holds the whole group to the rank's part
//
// In stages 0 and 1 groups are merged into buckets of a minimum size, because small messages do not use the network's
// bandwidth (Li et al. 2020, "PyTorch distributed", section 3.2). With ReduceOptions::dtype BF16 a bucket is rounded to
// bf16, reduced in it and converted back to fp32.
#pragma once

#include <string>
#include <vector>

#include "parallel/sharding.h"
#include "runtime/context.h"

struct ReduceOptions {
    DType dtype = DType::F32;                  // F32 or BF16
    int64_t bucket_bytes = int64_t(32) << 20;  // of fp32 gradients
};

// Groups [first, last). The backward pass completes group `first` last.
struct Bucket {
    int first, last;
};
// The buckets in the order in which the backward pass completes them: from the head down to the embedding, then the
// fp32 group.
std::vector<Bucket> make_buckets(const ParamTable& table, const Sharding& sharding, const ReduceOptions& options);

class Gradients {
  public:
    static constexpr int LAYER_SLOTS = 2;  // one layer's gradients are computed while another's are reduced

    // Memory requirement: fp32 elements of the arena, fp32 elements of the slots for whole groups (stages 2 and 3), and
    // bytes of the bf16 buffer.
    struct Memory {
        int64_t arena = 0, slots = 0, buffer_bytes = 0;
        int64_t bytes() const { return (arena + slots) * 4 + buffer_bytes; }
    };
    static Memory memory(const ParamTable& table, const Sharding& sharding, const ReduceOptions& options);

    Gradients() = default;
    // memory: Memory::bytes() of U8. ctx: null if nothing will be reduced.
    void allocate(const ParamTable& table, const Sharding& sharding, const ReduceOptions& options, Tensor memory,
                  const Context* ctx);

    ParamArena arena;  // whole, or this rank's parts
    Tensor tensor(const Param& p) const { return arena.tensor(p); }
    // This rank's part of groups [first, last), which holds the step's sum after end(); with one rank the whole groups.
    Tensor own(int first, int last) const;

    // Starts a micro-step. The first of a step overwrites gradients, the others accumulate; the last completes the
    // sums.
    void begin(bool first, bool last);
    void open(int group, Stream stream);   // before the group's gradient is written
    void close(int group, Stream stream);  // after its last write
    void end(Stream stream);               // later work on the stream sees the sums

    // Whether kernels accumulate into existing gradients. In stages 2 and 3 each micro-step is reduced separately.
    bool accumulate() const { return !first && !sharding.splits_gradients(); }

  private:
    void reduce(const Bucket& bucket, const char* name, Stream stream);

    const ParamTable* table = nullptr;
    Sharding sharding;
    DType dtype = DType::F32;
    const Context* ctx = nullptr;
    GroupSlots slots;
    std::vector<Bucket> buckets;
    std::vector<std::string> names;  // of the reductions, in a profile
    Tensor buffer;                   // a bucket in dtype
    bool first = true, last = true;
    bool reducing = false;  // a reduction began in this micro-step
    struct Slot {
        Event free;  // its group is reduced
        bool used = false;
    };
    std::vector<Slot> state;  // by slot
    Event complete;           // a bucket's gradients are computed
    Event summed;             // the last reduction has ended
};

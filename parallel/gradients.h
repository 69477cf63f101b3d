// The gradients of all parameters and their reduction over the ranks.
//
// The backward pass calls open() before it writes a group's gradient and close() when the gradient is complete. Closed
// groups are reduced on the side stream, overlapped with computation; only the last ones are waited for:
//
//   stage 0      all-reduce in the arena, in the step's last micro-step
//   stage 1      reduce-scatter in the arena, in the last micro-step: only the rank's own part of a group holds the sum
//   stages 2, 3  reduce-scatter in every micro-step, from a shared buffer that holds the whole group to the rank's part
//
// In stages 0 and 1 groups are merged into buckets of a minimum size, because small messages do not use the network's
// bandwidth (Li et al. 2020, "PyTorch distributed", section 3.2). With GradientOptions::reduce BF16 a bucket is rounded
// to bf16, reduced in it and converted back to fp32.
//
// With GradientOptions::kept BF16 the arena holds bf16, in all stages. The backward pass writes a group's gradient of
// one micro-step in fp32 into a buffer; close() adds it to the arena's bf16 in fp32 and rounds the sum stochastically
// (kernels/accumulate.h). Stages 0 and 1 add the arena to the buffer in the last micro-step, reduce it there in fp32,
// and round once.
//
// With GradientOptions::in_matmul, in stages 0 and 1, the matmuls of the blocks and of an untied head add to the
// arena's bf16 themselves, rounded to nearest: no pass of its own, no buffers. The other parameters (embeddings,
// biases, norms) have fp32 sums, which are rounded into the arena in the last micro-step. Ranks then add up their sums,
// in fp32 a bucket at a time, and round them once more. docs/understand/numerics.md has the errors of both.
#pragma once

#include <string>
#include <vector>

#include "parallel/sharding.h"
#include "runtime/context.h"

struct GradientOptions {
    DType reduce = DType::F32;                 // in which ranks exchange them: F32 or BF16
    int64_t bucket_bytes = int64_t(32) << 20;  // of fp32 gradients
    DType kept = DType::F32;                   // in which sums of micro-steps are kept: F32 or BF16
    uint64_t seed = 0;                         // of the rounding to BF16
    bool in_matmul = false;                    // sums in BF16 are added to by the matmuls; stages 0 and 1

    // Whether the backward pass writes into buffers for whole groups.
    bool uses_buffers(const Sharding& sharding) const { return sharding.splits_gradients() || rounds_stochastically(); }
    bool rounds_stochastically() const { return kept != DType::F32 && !in_matmul; }
    // The dtype of what is added up over the ranks, before it is converted to `reduce`.
    DType computed() const { return in_matmul ? DType::BF16 : DType::F32; }
    // Whether the parameter's gradient is a sum in fp32 until the last micro-step.
    bool sums_apart(const Param& p) const {
        return in_matmul && p.rate_group != RateGroup::HiddenMatrices && p.rate_group != RateGroup::Head;
    }
};

// Groups [first, last). The backward pass completes group `first` last.
struct Bucket {
    int first, last;
};
// The buckets in the order in which the backward pass completes them: from the head down to the embedding, then the
// fp32 group.
std::vector<Bucket> make_buckets(const ParamTable& table, const Sharding& sharding, const GradientOptions& options);

class Gradients {
  public:
    static constexpr int LAYER_BUFFERS = 2;  // one layer's gradients are computed while another's are reduced

    // Memory requirement in bytes: of the arena, of the fp32 buffers for whole groups, of fp32 sums beside the arena,
    // and of a bucket in the dtype of the exchange.
    struct Memory {
        int64_t arena = 0, buffers = 0, sums = 0, exchanged = 0;
        int64_t bytes() const { return arena + buffers + sums + exchanged; }
    };
    static Memory memory(const ParamTable& table, const Sharding& sharding, const GradientOptions& options);

    Gradients() = default;
    // bytes: Memory::bytes() of U8. ctx: null if nothing will be reduced.
    void allocate(const ParamTable& table, const Sharding& sharding, const GradientOptions& options, Tensor bytes,
                  const Context* ctx);

    ParamArena arena;  // whole, or this rank's parts
    // The tensor that the backward pass writes: [padded_rows, cols] or [padded_rows], fp32, or bf16 for a matmul that
    // adds to it.
    Tensor tensor(const Param& p) const { return (options.sums_apart(p) ? fp32_sums : arena).tensor(p); }
    // This rank's part of groups [first, last), which holds the step's sum after end(); with one rank the whole groups.
    Tensor own(int first, int last) const;

    // Whether begin() needs the number of the micro-step.
    bool numbers_micro_steps() const { return options.rounds_stochastically(); }
    // Whether the last micro-step of a step does other work than those before it.
    bool completes_sums() const { return sharding.world > 1 || options.in_matmul; }

    // Starts a micro-step. The first of a step overwrites gradients, the others accumulate; the last completes the
    // sums. micro_step: [1] int64 on the device, its number in the run, which keys the rounding to bf16; else null.
    void begin(bool first, bool last, Tensor micro_step = {});
    void open(int group, Stream stream);   // before the group's gradient is written
    void close(int group, Stream stream);  // after its last write
    void end(Stream stream);               // later work on the stream sees the sums

    // Whether kernels accumulate into existing gradients. A buffer holds those of one micro-step.
    bool accumulate() const { return !first && state.empty(); }

  private:
    void reduce(const Bucket& bucket, const char* name, Stream stream);
    void round_fp32_sums(int group, Stream stream) const;  // into the arena
    void keep(int group, Tensor sum, Tensor gradient, int64_t first_element, bool add, Stream stream) const;

    const ParamTable* table = nullptr;
    Sharding sharding;
    GradientOptions options;
    const Context* ctx = nullptr;
    GroupBuffers buffers;
    ParamArena fp32_sums;  // of the parameters with sums_apart()
    std::vector<Bucket> buckets;
    std::vector<std::string> names;  // of the reductions, in a profile
    std::vector<uint64_t> keys;      // of the groups' noise
    Tensor exchanged;                // a bucket in the dtype of the exchange; null: it is exchanged as it was computed
    bool first = true, last = true;
    Tensor micro_step;
    bool reducing = false;  // a reduction began in this micro-step
    struct BufferState {
        Event free;  // its group is reduced
        bool used = false;
    };
    std::vector<BufferState> state;  // by buffer; empty: the backward pass writes into the arena
    Event complete;                  // a bucket's gradients are computed
    Event summed;                    // the last reduction has ended
};

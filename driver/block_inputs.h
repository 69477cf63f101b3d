// The inputs of the blocks in pinned host memory (`--offload activations`). Between a block's forward and backward pass
// its input, the residual, waits there; with `--recompute block` it is all that the block keeps. The copies run
// on a stream of their own beside the computation: to the host during the block's forward pass, back during the
// backward pass of the next block, l + 1. The last block's input stays on the device: backward begins with it.
//
//     inputs.store(l, input);     // forward: as soon as the input is there
//     ...                         // the block
//     inputs.wait();              // the input may be overwritten
//
//     inputs.wait();              // backward: the input of block l is back
//     inputs.fetch(l - 1, ...);   // during the backward pass of block l
//
// At most one copy is in flight. A pass waits for all that it starts, so that a Graph records whole passes.
// Rhu et al. 2016, "vDNN: virtualized deep neural networks", which moves the inputs of layers in the same way.
#pragma once

#include "runtime/context.h"
#include "runtime/device/arena.h"

class BlockInputs {
  public:
    // One buffer of host memory for each of `blocks` inputs of input_bytes. Throws Error if the allocation fails.
    BlockInputs(const Context& ctx, int64_t blocks, int64_t input_bytes);
    ~BlockInputs();
    BlockInputs(const BlockInputs&) = delete;
    BlockInputs& operator=(const BlockInputs&) = delete;

    // Queue copies behind the work on ctx.stream. input [n, C] contiguous, at most input_bytes.
    void store(int64_t block, Tensor input);
    void fetch(int64_t block, Tensor input);
    // Later work on ctx.stream runs after the copies queued so far.
    void wait();

  private:
    void* begin(int64_t block, const Tensor& input);  // returns the buffer

    const Context& ctx;
    const int64_t buffer_bytes;
    Arena memory;
    Stream copies;
    Event computed, copied;
};

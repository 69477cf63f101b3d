// Rollouts through training's own forward pass (`rl --rollout exact`): a token's recorded log-probability has the bits
// of the one that training computes for it: in fp32 on the CPU, in bf16 on a Hopper GPU.
//
// Blocks, final norm and head are those of train_gpt.cu, over the rows of a pass of the engine instead of a packed
// batch; the engine's cache stands in for the batch's keys and values. What makes a row independent of the others:
//
//   matmuls    one order of the sum for any number of rows: matmul_batch_invariant(), which training uses too
//   attention  blocks of keys counted from the sequence's first key (attention.cpp and attention_forward_hopper.cu in
//              kernels/attention)
//   the rest   row by row
//   head       tokens are drawn from the matmul's sums in fp32. Their losses are linear_cross_entropy_forward()'s; on
//              Hopper it needs the target first, so that the head's matmul runs twice
//
// So neither the sizes of batches and prefill chunks nor shared prefixes nor pages nor recomputation change a bit.
#pragma once

#include "driver/pass.h"
#include "infer/engine.h"

class ExactForward : public EngineForward {
  public:
    // shape: that of rollout_forward(). run: the activations of the run, whose RoPE table and temperature it takes.
    ExactForward(const Context& ctx, const Model& model, const Activations& run, const RunShape& shape);
    int64_t bytes() const { return acts.plan.bytes(); }
    void allocate(const Tensor& shared);  // U8 [bytes()]
    void blocks(Tensor out, Tensor rows, Tensor tokens, Tensor positions, const Attend& attend) override;
    void head(Tensor out, Tensor inp) override;
    void losses(Tensor out, Tensor targets, Tensor inp, Tensor logits) override;

  private:
    const Context& ctx;
    const Model& model;
    const Activations& run;
    Activations acts;
};

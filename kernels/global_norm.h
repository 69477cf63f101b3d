// The global gradient norm in one pass, and the scalars of a step that live on the device.
//
//   grad_norm = unit·√Σ grad²,   grad_scale = unit·min(1, grad_clip / grad_norm)   (Pascanu et al. 2013, algorithm 1)
//   loss = loss_sum·loss_scale;   skip = loss or grad_norm is not finite;   t += 1 unless skipped
//
// The scalars are kept where the kernels read them, so that nothing waits for the host and nothing is frozen in a
// captured graph. Sums run in a fixed order, in fp64 across blocks: the same gradients give the same bits.
// Errors: wrong shape or dtype.
#pragma once

#include "runtime/device.h"
#include "runtime/tensor.h"

struct StepScalars {
    // written by the host before a step
    float lr;
    float grad_clip;  // clip the global norm to this; ≤ 0: no clipping
    // written by step_control
    float loss;        // mean loss of the step's tokens
    float grad_norm;   // global norm before clipping
    float grad_scale;  // what the gradients are to be multiplied by
    int32_t skip;      // 1: loss or norm is not finite, the update is skipped
    int64_t t;         // updates done, this one included (Adam's t)
};

// Sum of losses [n] fp32 into *loss_sum (F64, one element), in a fixed order. accumulate: add, else overwrite.
void sum_losses(Tensor loss_sum, Tensor losses, bool accumulate, Stream stream);

// One pass over grads [n] fp32: the global norm; then fills in the scalars. loss_sum [1] fp64; loss_scale: 1/tokens.
// grad_unit > 0: what makes the gradients those of the mean loss: 1, or more where they were divided by more tokens
// than had a target. scalars: StepScalars as U8 [sizeof(StepScalars)] on the device. scratch: step_control_scratch
// bytes (U8).
void step_control(Tensor scalars, Tensor grads, Tensor loss_sum, double loss_scale, double grad_unit, Tensor scratch,
                  Stream stream);
int64_t step_control_scratch(int64_t n);

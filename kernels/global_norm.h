// The global gradient norm, and the scalars of a step that live on the device.
//
//   grad_norm = unit·√Σ grad²,   grad_scale = unit·min(1, grad_clip / grad_norm)   (Pascanu et al. 2013, algorithm 1)
//   loss = loss_scale·Σ loss;   skip = loss or grad_norm is not finite;   t += 1 unless skipped
//
// Each rank sums what is its own into a row of three numbers; the ranks' rows, gathered, are added in their order, so
// that all ranks have the same bits.
// The scalars are kept where the kernels read them, so that nothing waits for the host and nothing is frozen in a
// captured graph. Sums run in a fixed order, in fp64 across blocks: the same gradients give the same bits.
// Errors: wrong shape or dtype.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

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
    int32_t stop = 0;  // 1: a rank was asked to stop
};

// Of a rank's row of sums, fp64.
enum StepSum { SUM_SQUARES, SUM_LOSS, SUM_STOP, NUM_STEP_SUMS };

// Sum of losses [n] fp32 into *loss_sum (F64, one element), in a fixed order. accumulate: add, else overwrite.
void sum_losses(Tensor loss_sum, Tensor losses, bool accumulate, Stream stream);

// Σ grad² of grads [n] fp32 into *sum (F64, one element), in one pass. accumulate: add, else overwrite. scratch:
// sum_squares_scratch bytes (U8).
void sum_squares(Tensor sum, Tensor grads, bool accumulate, Tensor scratch, Stream stream);
int64_t sum_squares_scratch(int64_t n);

// Fills in the scalars. sums [ranks, NUM_STEP_SUMS] fp64; loss_scale: 1/tokens. grad_unit > 0: what makes the gradients
// those of the mean loss: 1, or more where they were divided by more tokens than had a target. scalars: StepScalars as
// U8 [sizeof(StepScalars)] on the device.
void step_control(Tensor scalars, Tensor sums, double loss_scale, double grad_unit, Stream stream);

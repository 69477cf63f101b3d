// The global gradient norm, and the scalars of a step that live on the device.
//
//   grad_norm = grad_unit·√Σ grad²,   grad_scale = grad_unit·min(1, grad_clip / grad_norm)
//                                                                                  (Pascanu et al. 2013, algorithm 1)
//   loss = loss_scale·Σ loss;   skip = loss or grad_norm is not finite, or a spike;   t += 1 unless skipped
//   spike: grad_norm > spike_factor·median of the last GRAD_NORM_WINDOW finite norms, spikes included
//
// Each rank computes a row of NUM_STEP_SUMS sums over its own data. All ranks add the gathered rows in rank order, so
// they get the same bits. The scalars are on the device, where kernels read them: nothing waits for the host, and a
// captured graph holds no values of a step. Sums have a fixed order, with fp64 across blocks: the same gradients give
// the same bits. Throws Error on a wrong shape or dtype.
#pragma once

#include "kernels/preference_loss.h"
#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

constexpr int GRAD_NORM_WINDOW = 63;  // odd, so that the median is one of the norms
enum StepSkip : int32_t { SKIP_NONE, SKIP_NOT_FINITE, SKIP_SPIKE };

struct StepScalars {
    // written by the host before a step
    float lr;
    float grad_clip;     // clip the global norm to this; ≤ 0: no clipping
    float momentum;      // μ of Muon (muon.h)
    float spike_factor;  // ≤ 0: no step is a spike
    // written by step_control
    float loss;        // mean loss of the step's tokens
    float grad_norm;   // global norm before clipping
    float grad_scale;  // factor for the gradients in the update
    int32_t skip;      // StepSkip: not 0, the update is skipped
    int64_t t;         // number of updates including this one (Adam's t)
    // The last finite norms: number i, counted from 0, is norms[i % GRAD_NORM_WINDOW].
    int64_t norm_count;
    float norms[GRAD_NORM_WINDOW];
    float pair_stats[NUM_PAIR_STATS];  // Σ of each PairStat
};

// Columns of a rank's row of sums, fp64. From SUM_LOSS on they are those of PairStat (PAIR_LOSS is the loss), so that
// sum_pair_stats() can write them; without preference pairs those behind SUM_LOSS are 0.
enum StepSum { SUM_SQUARES, SUM_LOSS, NUM_STEP_SUMS = SUM_LOSS + NUM_PAIR_STATS };

// Sum of losses [n] fp32 into *loss_sum (F64, one element), in a fixed order. accumulate: add, else overwrite.
void sum_losses(Tensor loss_sum, Tensor losses, bool accumulate, Stream stream);

// Σ grad² of grads [n] fp32 or bf16 into *sum (F64, one element), in one pass. accumulate: add, else overwrite.
// scratch: sum_squares_scratch bytes (U8).
void sum_squares(Tensor sum, Tensor grads, bool accumulate, Tensor scratch, Stream stream);
int64_t sum_squares_scratch(int64_t n);

// Computes the scalars of the step. sums [ranks, NUM_STEP_SUMS] fp64; loss_scale: 1/tokens. grad_unit > 0: the factor
// that makes the gradients those of the mean loss: 1, or more if they were divided by more tokens than have a target.
// scalars: StepScalars as U8 [sizeof(StepScalars)] on the device. No step is a spike before the window of norms is
// full.
void step_control(Tensor scalars, Tensor sums, double loss_scale, double grad_unit, Stream stream);

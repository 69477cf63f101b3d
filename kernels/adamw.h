// AdamW over a whole arena in one launch.
//
//   g = grad·grad_scale,  m = β1·m + (1−β1)·g,  v = β2·v + (1−β2)·g²
//   p = p − lr·( m/(1−β1^t) / (√(v/(1−β2^t)) + eps) + weight_decay·p )
//
// Loshchilov, Hutter 2019 (algorithm 2, decoupled decay). lr is the step's learning rate times the segment's lr_scale.
// The step's learning rate, grad_scale, skip and t are read from the step's scalars on the device (global_norm.h); a
// skipped step changes none of p, m, v.
//
// kernels/param_update.h states where parameters are and how they are stored. Throws Error on a wrong shape or dtype,
// and on what that header names.
#pragma once

#include "kernels/global_norm.h"
#include "kernels/param_update.h"
#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

struct AdamWOptions {
    float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f;
    uint64_t seed = 0;  // for stochastic rounding
};

// grads [n] fp32 or bf16, m [n] fp32 or bf16: whole arenas. v [any size] of m's dtype, which may pack the segments.
// params [any size] fp32, or null if no segment is in it. params_T [n] bf16 or fp16, or null. segments: on the host,
// ascending in all of them. t ≥ 1 is checked on the CPU.
void adamw_update(Tensor params, Tensor params_T, Tensor m, Tensor v, Tensor grads, const ParamSegment* segments,
                  int64_t num_segments, const AdamWOptions& options, Tensor scalars, Stream stream);

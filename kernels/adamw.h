// AdamW over a whole arena in one launch.
//
//   g = grad·grad_scale,  m = β1·m + (1−β1)·g,  v = β2·v + (1−β2)·g²
//   p = p − lr·( m/(1−β1^t) / (√(v/(1−β2^t)) + eps) + weight_decay·p )
//
// Loshchilov, Hutter 2019 (algorithm 2, decoupled decay). lr, grad_scale, skip and t are read from the step's scalars
// on the device (global_norm.h); a skipped step changes none of p, m, v. Errors: wrong shape or dtype, segments out of
// order or outside the arena.
#pragma once

#include "kernels/global_norm.h"
#include "runtime/device.h"
#include "runtime/tensor.h"

// Elements [begin, end) of the arena share one weight decay. Gaps between segments (padding) are not touched.
struct AdamWSegment {
    int64_t begin, end;
    float weight_decay;
};

struct AdamWOptions {
    float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f;
};

// params, m, v, grads [n] fp32: whole arenas; segments in ascending order, on the host.
// params_T [n] fp32, bf16 or fp16, or null: receives each updated parameter rounded to T, at the same offset: what the
// forward pass reads where params are master weights. The CPU takes null only. t ≥ 1 is checked on the CPU.
void adamw_update(Tensor params, Tensor params_T, Tensor m, Tensor v, Tensor grads, const AdamWSegment* segments,
                  int64_t num_segments, const AdamWOptions& options, Tensor scalars, Stream stream);

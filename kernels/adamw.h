// AdamW over a whole arena in one launch.
//
//   g = grad·grad_scale,  m = β1·m + (1−β1)·g,  v = β2·v + (1−β2)·g²
//   p = p − lr·( m/(1−β1^t) / (√(v/(1−β2^t)) + eps) + weight_decay·p )
//
// Loshchilov, Hutter 2019 (algorithm 2, decoupled decay). lr, grad_scale, skip and t are read from the step's scalars
// on the device (global_norm.h); a skipped step changes none of p, m, v.
//
// Where p lies is said segment by segment, and there are three uses:
//   fp32 training:              every segment in params, params_T null
//   16-bit training:            the same, and params_T receives each updated parameter rounded to nearest: what the
//                               forward pass reads
//   without master weights:     a segment lives in params_T alone, in bf16, and is rounded stochastically; params holds
//                               only those that stay fp32 (norm weights), closely packed
//
// Stochastic rounding (Gupta et al. 2015, section 3): of the two bf16 neighbours of p the one away from zero is taken
// with probability (p − nearer to zero)/(their distance), so that the mean is p and steps far below a bf16 digit are
// not lost. The noise of a parameter is 16 bits of Philox keyed by the seed, counting (t, key, element of its tensor):
// where the tensor lies, and how it is divided into segments, does not matter. Infinities, NaN and what bf16 holds
// exactly stay as they are.
//
// Errors: wrong shape or dtype, segments out of order or outside the arenas, fp16 parameters without master weights;
// on the CPU, which trains in fp32, whatever asks for params_T.
#pragma once

#include "kernels/global_norm.h"
#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// Elements [begin, end) of m, v, grads and params_T: a tensor or a part of one. Gaps between segments (padding) are not
// touched.
struct AdamWSegment {
    int64_t begin, end;
    float weight_decay;
    int64_t fp32_begin = -1;    // where they begin in params; -1: they live in params_T alone
    uint64_t key = 0;           // names the tensor's noise (name_hash), where they do
    int64_t first_element = 0;  // index of `begin` within its tensor, < 2³⁸
};

struct AdamWOptions {
    float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f;
    uint64_t seed = 0;  // of stochastic rounding
};

// m, v, grads [n] fp32: whole arenas. params [any size] fp32, or null where no segment lies there. params_T [n] bf16 or
// fp16, or null. segments: on the host, ascending in the arenas and in params. t ≥ 1 is checked on the CPU.
void adamw_update(Tensor params, Tensor params_T, Tensor m, Tensor v, Tensor grads, const AdamWSegment* segments,
                  int64_t num_segments, const AdamWOptions& options, Tensor scalars, Stream stream);

// AdamW over a whole arena in one launch.
//
//   g = grad·grad_scale,  m = β1·m + (1−β1)·g,  v = β2·v + (1−β2)·g²
//   p = p − lr·( m/(1−β1^t) / (√(v/(1−β2^t)) + eps) + weight_decay·p )
//
// Loshchilov, Hutter 2019 (algorithm 2, decoupled decay). lr, grad_scale, skip and t are read from the step's scalars
// on the device (global_norm.h); a skipped step changes none of p, m, v.
//
// Each segment says where its p is. There are three uses:
// - fp32 training: every segment is in params; params_T is null.
// - 16-bit training: the same, and params_T receives each updated parameter rounded to nearest, for the forward pass.
// - 16-bit training without master weights: a segment is only in params_T, in bf16, and is rounded stochastically.
//   params packs the segments that stay fp32 (norm weights).
//
// Stochastic rounding (Gupta et al. 2015, section 3) picks, of the two bf16 neighbours of p, the one away from zero
// with probability (p − neighbour nearer to zero)/(distance of the neighbours). The mean is p, so steps far below one
// bf16 unit are not lost. The noise of a parameter is 16 bits of Philox with the seed as key and (t, key, element of
// its tensor) as counter, so neither the location of the tensor nor its division into segments matters. Infinities, NaN
// and numbers that are exact in bf16 stay unchanged.
//
// Throws Error on a wrong shape or dtype, on segments out of order or outside the arenas, and on fp16 parameters
// without master weights; on the CPU, which trains in fp32, also if params_T is given.
#pragma once

#include "kernels/global_norm.h"
#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// Elements [begin, end) of m, v, grads and params_T: a tensor or a part of one. Gaps between segments (padding) stay
// unchanged.
struct AdamWSegment {
    int64_t begin, end;
    float weight_decay;
    int64_t fp32_begin = -1;    // index of `begin` in params; -1: the segment is only in params_T
    uint64_t key = 0;           // identifies the noise of the tensor (name_hash); only without fp32 parameters
    int64_t first_element = 0;  // index of `begin` within its tensor, < 2³⁸
};

struct AdamWOptions {
    float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f;
    uint64_t seed = 0;  // for stochastic rounding
};

// m, v, grads [n] fp32: whole arenas. params [any size] fp32, or null if no segment is in it. params_T [n] bf16 or
// fp16, or null. segments: on the host, ascending in the arenas and in params. t ≥ 1 is checked on the CPU.
void adamw_update(Tensor params, Tensor params_T, Tensor m, Tensor v, Tensor grads, const AdamWSegment* segments,
                  int64_t num_segments, const AdamWOptions& options, Tensor scalars, Stream stream);

// Common definitions of the optimizers (kernels/adamw.h, kernels/muon.h): which parameters a launch updates, where they
// are and how they are stored.
//
// Each segment says where its parameters p are. There are three uses:
// - fp32 training: every segment is in params; params_T is null.
// - 16-bit training: the same, and params_T receives each updated parameter rounded to nearest, for the forward pass.
// - 16-bit training without master weights: a segment is only in params_T, in bf16, and is rounded stochastically.
//   params packs the segments that stay fp32 (norm weights).
//
// Stochastic rounding (Gupta et al. 2015, section 3) picks, of the two bf16 neighbours of p, the one away from zero
// with probability (p − neighbour nearer to zero)/(distance of the neighbours). The mean is p, so steps far below one
// bf16 unit are not lost. The noise of a parameter is 16 bits of Philox with the seed as key and (t, key, element of
// its tensor) as counter (kernels/stochastic_rounding.h), so neither the location of the tensor nor its division into
// segments matters. Infinities, NaN and values that bf16 holds exactly stay unchanged.
//
// Moments in bf16 are rounded the same way, each with noise of its own. Rounded to nearest, a moving average with β2 =
// 0.999 would stall: a step that changes it by 0.1% stays below half a bf16 unit, which is 0.2% of it or more. The
// update is computed from the moments before they are rounded.
//
// An update throws Error on segments out of order or outside the arenas, and on fp16 parameters without master weights;
// on the CPU, which trains in fp32, also if params_T is given.
#pragma once

#include <cstdint>

// Elements [begin, end) of the optimizer's arenas, of grads and of params_T: a tensor or a part of one. Gaps between
// segments (padding) stay unchanged.
struct ParamSegment {
    int64_t begin, end;
    float weight_decay = 0;
    int64_t fp32_begin = -1;    // index of `begin` in params; -1: the segment is only in params_T
    uint64_t key = 0;           // identifies the noise of the tensor (name_hash)
    int64_t first_element = 0;  // index of `begin` within its tensor, < 2³⁸
    float lr_scale = 1;         // learning rate of its group / the step's learning rate
    int64_t v_begin = -1;       // of an optimizer with a second moment v: index of `begin` in v; -1: the same as in m
};

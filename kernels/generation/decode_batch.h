// Where the sequences of a decode step keep their past: for decode_attention.h and decode_step.h.
#pragma once

#include "kernels/kv_page.h"
#include "runtime/device/tensor.h"

// N sequences with one new token each.
struct DecodeBatch {
    Tensor slots, positions;  // [N] int32: the sequence's row of `pages`, position of its new token; < 0: finished
    Tensor pages;             // [slots, n] int32: the layer's page table (kernels/kv_page.h)
    Tensor angles, table;    // RoPE: [N] int32 row of the table for each token, [T, R/2, 2] fp32 (rope.h); or both null
    int64_t max_length = 0;  // upper bound of the sequences' lengths, new token included; sizes the launch
    // True if an ordinary launch, which waits for all earlier work, lies between this call and the writers of slots,
    // positions, angles and the cache. The GPU then reads them while the previous kernel still runs (pdl.cuh).
    bool inputs_ready = false;
};

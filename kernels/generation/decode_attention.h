// Attention of one new token for each of N sequences over all their past: a step of generation.
//
//   q, k, v of token n lie side by side in qkv[n]; RoPE turns q and k by row positions[n] of the table, k and v become
//   row positions[n] of the sequence's stretch of the cache, and then, with head h reading KV head h / (NH/NKV):
//   S_j = scale·q·k_j for j ≤ positions[n],   P = softmax(S),   out = Σ_j P_j v_j
//
// The cache of a layer is k, v [slots, capacity, NKV, HS]; sequence n lives in slot slots[n]. positions[n] < 0 marks a
// sequence that is finished: its out is 0, nothing is appended. The same where positions[n] ≥ capacity.
//
// The context is cut into pieces that are worked on side by side and combined in order (Flash-Decoding, Dao et al.
// 2023), so that a single long sequence fills the machine too. Where a piece ends depends on the sequence's own length
// alone: its result does not depend, bit for bit, on who shares the batch, on threads or on how often it is run.
//
// T is the dtype of qkv, cache and out: fp32; on CUDA also bf16 and fp16. Sums are fp32.
// Errors: wrong shapes or dtypes, NKV not dividing NH, a scale that is not positive, HS > 256 on CUDA; on the CPU also
// slots outside the cache, positions of max_length or more, and an angle outside the table.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// Where the new tokens stand.
struct DecodeLocation {
    Tensor slots, positions;  // [N] int32
    Tensor angles, table;     // [N] int32, [T, R/2, 2] fp32: rope.h's table, and the row for each token; or both null
    int64_t max_length = 0;   // no sequence is longer, its new token included: decides the launch's size
    // Between whoever wrote slots, positions, angles and the cache as it stands, and this call, lies an ordinary
    // launch, one that waits for all before it. Then a GPU reads them while the kernel before is at work
    // (pdl.cuh).
    bool inputs_ready = false;
};

// out [N, NH·HS]; qkv [N, (NH + 2·NKV)·HS] (may be overwritten); k_cache, v_cache [slots, capacity, NKV, HS].
// scratch: decode_attention_scratch bytes (U8) or more, zeroed once before the first call, and left as the next call
// needs it, whatever that one's N and max_length.
void decode_attention(Tensor out, Tensor qkv, Tensor k_cache, Tensor v_cache, const DecodeLocation& place, float scale,
                      Tensor scratch, Stream stream);
int64_t decode_attention_scratch(int64_t N, int64_t NH, int64_t HS, int64_t max_length);

// After a step: positions [N] int32 that are not negative, and steps [N] int64 (of a sequence's draws), go up by one;
// the tokens drawn, ids [N] int32, go to row turn[0] of told [2, N or more] int32, page-locked memory of the host, and
// turn [1] int32 from 0 to 1 or from 1 to 0. So the host reads one step's tokens while the device is at the next,
// without a copy between them.
void advance(Tensor positions, Tensor steps, Tensor ids, Tensor told, Tensor turn, Stream stream);

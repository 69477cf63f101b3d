// Keys and values of past tokens, kept for generation: what a pass over new tokens appends to them.
//
// The cache of a layer is two tensors k, v [rows, NKV, HS] of T, in which a sequence owns a stretch of rows; which, is
// the caller's business (infer/kv_cache.h). Token n's key and value go to row rows[n]; a row outside the cache is not
// written, so that nothing is ever stored past a sequence's end by a token that has no place left (rows[n] = −1).
//
//   q, k and v lie side by side in qkv [N, (NH + 2·NKV)·HS], the output of the QKV layer.
//   q is rotated in place, k on its way to the cache, by row angles[n] of the table (rope.h); without a table neither.
//
// T is the dtype of qkv and cache: fp32; on CUDA also bf16 and fp16. Errors: wrong shape or dtype; on the CPU also a
// row of the table that does not exist (CUDA: the token is not turned).
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// k_cache, v_cache [rows, NKV, HS]; qkv [N, (NH + 2·NKV)·HS]; rows, angles [N] int32; table [T, R/2, 2] fp32 or null.
void kv_append(Tensor k_cache, Tensor v_cache, Tensor qkv, Tensor rows, Tensor angles, Tensor table, int64_t NH,
               Stream stream);

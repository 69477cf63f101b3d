// Appends the keys and values of new tokens to a KV cache, and copies rows from one cache to another.
//
// The cache of a layer is two tensors k, v [rows, NKV, HS] of T. A sequence owns consecutive rows, which the caller
// assigns (infer/kv_cache.h). Token n's key and value go to row rows[n]. A token whose row is outside the cache is not
// stored, and its q is not rotated: rows[n] = −1 marks a token for which its sequence has no room left.
//
//   q, k and v lie side by side in qkv [N, (NH + 2·NKV)·HS], the output of the QKV layer.
//   q is rotated in place and k as it is copied, by row angles[n] of the table (rope.h); without a table neither is.
//   The k of qkv may be overwritten.
//
// T is the dtype of qkv and cache: fp32; on CUDA also bf16 and fp16. Errors: wrong shape or dtype; on the CPU also a
// row of the table that does not exist (CUDA: the token is not rotated).
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// k_cache, v_cache [rows, NKV, HS]; qkv [N, (NH + 2·NKV)·HS]; rows, angles [N] int32; table [T, R/2, 2] fp32 or null.
void kv_append(Tensor k_cache, Tensor v_cache, Tensor qkv, Tensor rows, Tensor angles, Tensor table, int64_t NH,
               Stream stream);

// Row to_rows[i] of k_to and v_to becomes row from_rows[i] of k_from and v_from; i is skipped where one of the two rows
// is outside its cache. No row is given twice in to_rows. k_to, v_to, k_from, v_from [rows, NKV, HS] of T; to_rows,
// from_rows [N] int32.
void kv_copy(Tensor k_to, Tensor v_to, Tensor to_rows, Tensor k_from, Tensor v_from, Tensor from_rows, Stream stream);

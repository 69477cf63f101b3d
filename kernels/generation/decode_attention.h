// Attention of one new token for each of N sequences over its KV cache: a decode step of one layer.
//
//   q, k, v of sequence n lie side by side in qkv[n]. RoPE rotates q and k by row angles[n] of the table; k and v are
//   written to the row of position positions[n]. Query head h reads KV head h / (NH/NKV):
//   S_j = scale·q·k_j for j ≤ positions[n],   P = softmax(S),   out = Σ_j P_j v_j
//   With a window w > 0 the sum is over positions[n] − w < j ≤ positions[n].
//
// The cache of a layer is paged, k, v [pages, KV_PAGE, NKV, HS] (kernels/kv_page.h); sequence n has the pages in row
// slots[n] of the table. Pages before the window are not read. The page of positions[n] must not be shared.
// positions[n] < 0 marks a finished sequence, and so does a position that the table has no column for: its out is 0 and
// its cache is not written.
//
// The context is split into KV splits, which are processed in parallel and combined in order (Flash-Decoding, Dao et
// al. 2023), so that a single long sequence keeps all SMs or CPU threads busy. The size of a split depends only on the
// number of keys that the sequence sees, so its result has the same bits whatever the batch, the number of threads or
// the run.
//
// T is the dtype of qkv, cache and out: fp32; on CUDA also bf16 and fp16. Sums are fp32.
// Errors: wrong shapes or dtypes, NKV that does not divide NH, a negative window, a scale that is not positive; on CUDA
// also HS > 256, and more than 65,535 sequences or heads. On the CPU also slots outside the page table, pages outside
// the cache, positions of max_length or more, and a row outside the table of angles. CUDA treats such slots as finished
// sequences and stays within the cache whatever the pages are.
#pragma once

#include "kernels/generation/decode_batch.h"
#include "runtime/device/device.h"

// out [N, NH·HS]; qkv [N, (NH + 2·NKV)·HS] (may be overwritten); k_cache, v_cache [pages, KV_PAGE, NKV, HS].
// scratch: at least decode_attention_scratch bytes (U8). Zero it once before the first call; each call leaves it ready
// for the next, whatever the N and max_length of that call.
void decode_attention(Tensor out, Tensor qkv, Tensor k_cache, Tensor v_cache, const DecodeBatch& batch, int64_t window,
                      float scale, Tensor scratch, Stream stream);
int64_t decode_attention_scratch(int64_t N, int64_t NH, int64_t HS, int64_t max_length);

// Ends a decode step. Adds 1 to each of positions [N] int32 that is not negative and to each of steps [N] int64, the
// number of tokens sampled for a sequence. Copies the sampled tokens, ids [N] int32, to row buffer_index[0] of
// host_tokens [2, N or more] int32 (page-locked host memory) and flips buffer_index [1] int32 between 0 and 1: the host
// reads the tokens of one step while the device runs the next, without a copy between the two.
void advance(Tensor positions, Tensor steps, Tensor ids, Tensor host_tokens, Tensor buffer_index, Stream stream);

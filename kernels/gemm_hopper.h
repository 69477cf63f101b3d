// CUDA only, Hopper: GEMMs in bf16 with sums in fp32 and the epilogues of GemmEpilogue (runtime/device/blas.h).
// Persistent blocks, warp specialisation and ping-pong, as CUTLASS describes them ("Efficient GEMM in CUDA", Hopper:
// ping-pong).
//
// kernels/cuda/fastest_gemm.h times them beside cuBLASLt and two separate kernels, and takes the fastest. The result
// has the same bits every time, and does not depend on the number of blocks or on `cluster`.
#pragma once

#include "runtime/device/blas.h"

// The rows of a tile of out: GemmOperands::column_sums has a row for each tile.
constexpr int64_t HOPPER_GEMM_ROWS = 128;
// Its columns: GemmOperands::row_sums has a row for each tile.
constexpr int64_t HOPPER_GEMM_COLUMNS = 192;

// Whether hopper_gemm() takes this GEMM: a Hopper GPU; a, b and out bf16, or out fp32 if b is transposed and nothing
// follows the matmul; a not transposed; no batch; `accumulate` only without an activation function; 0 < K; M, N, K, K2
// < 2^30; N a multiple of 8; rows aligned to 16 bytes, those of a second pair too, the bias to 4. With an activation
// function or Exp b is transposed, with a gradient it is not. Exp has no bias. Shapes: a [M, K], out and aux [M, N], b
// [N, K] or [K, N], bias [N]; with Swiglu b [2·N, K], bias [2·N] and aux [M, 2·N]; with SwigluBackward aux and out [M,
// 2·N]; with `accumulate` add [M, N], which has the row stride of out and may be out. a2 and b2 as a and b, with K2
// instead of K.
bool hopper_gemm_takes(const GemmKey& key);

// Runs it. cluster: 1 or 2 blocks that share the tiles of b. alpha must be 1 with an activation function or a gradient,
// and beta 1. Throws Error if hopper_gemm_takes() is false, and if the driver or the launch fails.
void hopper_gemm(const char* op, const GemmKey& key, const GemmOperands& operands, int cluster, Stream stream);

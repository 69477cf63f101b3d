// CUDA only, Hopper: bf16 GEMMs of our own that apply what follows them, and sum in fp32.
//
//   out = op(a)·op(b) (+ bias)            as GemmEpilogue (runtime/device/blas.h) describes, and the epilogues below
//
// kernels/matmul.cu times them beside cuBLASLt and two separate kernels, and takes the fastest. The result is the same
// every time, and does not depend on the number of blocks or on `cluster`.
#pragma once

#include "runtime/device/blas.h"

// The rows of a tile of out: GemmOperands::column_sums has a row for each tile.
constexpr int64_t HOPPER_GEMM_ROWS = 128;

// Whether hopper_gemm() takes this GEMM: a Hopper GPU; a, b and out bf16; a not transposed; no batch, no `accumulate`;
// K > 0, N a multiple of 8, and all rows aligned to 16 bytes.
bool hopper_gemm_takes(const GemmKey& key);

// Runs it. cluster: 1 or 2 blocks that share the tiles of b. operands.alpha must be 1. Throws Error if
// hopper_gemm_takes() is false, and if the driver or the launch fails.
void hopper_gemm(const char* op, const GemmKey& key, const GemmOperands& operands, int cluster, Stream stream);

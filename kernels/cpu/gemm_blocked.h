// Our own GEMM for machines without a GEMM library: packed, blocked for the caches, register-tiled, OpenMP.
// The structure is that of Goto, van de Geijn 2008, "Anatomy of high-performance matrix multiplication", and of BLIS
// (Van Zee, van de Geijn 2015): panels of both operands are copied into the order in which the innermost loop reads
// them, so that it streams contiguous memory for all transposes and strides.
#pragma once

#include <cstdint>

// c [M, N] = alpha·op(a)·op(b), added to c if accumulate; row-major fp32. op(x) is x or, if transpose_x, its transpose;
// op(a) is [M, K], op(b) is [K, N]. lda, ldb, ldc: row strides of the matrices as stored. c must not overlap a or b. M,
// N, K may be 0.
//
// K is summed in blocks of 256, each in ascending order, and the blocks in ascending order: the bits depend neither on
// the number of threads nor on the location of an element in c. Throws Error if the packing buffers cannot be
// allocated.
//
// The general form takes matrices of any strides: element (i, j) of m is at
// m.data[i·m.row_stride + j·m.column_stride].
struct StridedMatrix {
    const float* data;
    int64_t row_stride, column_stride;
    const float* at(int64_t row, int64_t column) const { return data + row * row_stride + column * column_stride; }
};
void gemm_blocked(int64_t M, int64_t N, int64_t K, StridedMatrix a, StridedMatrix b, bool accumulate, float* c,
                  int64_t c_row_stride, int64_t c_column_stride, float alpha = 1);
void gemm_blocked(bool transpose_a, bool transpose_b, int64_t M, int64_t N, int64_t K, const float* a, int64_t lda,
                  const float* b, int64_t ldb, bool accumulate, float* c, int64_t ldc, float alpha = 1);

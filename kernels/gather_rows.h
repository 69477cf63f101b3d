// Gathers rows of a matrix by index, and scatters rows to these indices.
//
//   gather_rows:   out[i] = scale·inp[rows[i]], zeros where rows[i] = −1
//   scatter_rows:  out[rows[i]] = scale·inp[i], nothing where rows[i] = −1; zeros in all other rows of out
//
// n indices, N rows, C channels. An index other than −1 occurs at most once: scattering a row twice would be a race. T
// is the dtype of the matrices: fp32, on CUDA also bf16 and fp16. Tensors may not overlap, but may have any row
// stride. A product is computed in fp32 and rounded once; with a scale of 1 rows are copied bit for bit.
//
// Throws Error on a wrong shape or dtype. An index outside [−1, N) is an Error on the CPU, which then writes nothing;
// on CUDA, where the launch does not wait for the kernel, it counts as −1.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// out [n, C] T; inp [N, C] T; rows [n] int32.
void gather_rows(Tensor out, Tensor inp, Tensor rows, Stream stream, float scale = 1);

// out [N, C] T; inp [n, C] T; rows [n] int32.
void scatter_rows(Tensor out, Tensor inp, Tensor rows, Stream stream, float scale = 1);

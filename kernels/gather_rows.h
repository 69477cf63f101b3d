// Rows of a matrix by their numbers, and back to their places.
//
//   gather_rows:   out[i] = inp[rows[i]], zeros where rows[i] = −1
//   scatter_rows:  out[rows[i]] = inp[i], nothing where rows[i] = −1; zeros in all other rows of out
//
// n numbers, N rows, C channels. A number other than −1 occurs at most once. T is the dtype of the matrices: fp32, on
// CUDA also bf16 and fp16.
//
// Throws Error on a wrong shape or dtype. A number outside [−1, N) is an Error on the CPU; on CUDA, where the launch
// does not wait for the kernel, it counts as −1.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// out [n, C] T; inp [N, C] T; rows [n] int32.
void gather_rows(Tensor out, Tensor inp, Tensor rows, Stream stream);

// out [N, C] T; inp [n, C] T; rows [n] int32.
void scatter_rows(Tensor out, Tensor inp, Tensor rows, Stream stream);

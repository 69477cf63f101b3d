// linear() with weights in Int8 or Int4, on the CPU: integer dot products.
//
// Each row of inp is quantised in groups of 32: d = max |x| / 127, code = x / d to the nearest, half to even. With the
// groups of a row of weight numbered from 0, partial sum l of an output adds up the groups g = l, l + 16, l + 32, …:
//   partial[l] = fma(Σ code_x·code_w, d_x·d_w, partial[l])      the integer sum is exact
// and the 16 partial sums are added as vec_sum() adds them. So an output has the same bits whatever N is, and whichever
// instructions compute it.
//
// One row of inp runs along the rows of weight, and memory limits it. For several rows, weights are first transposed to
// a panel of 32 outputs, whose groups are then multiplied with tiles of rows of inp: AVX-512 VNNI or AMX where the
// CPU has them, else AVX2.
#pragma once

#include "runtime/device/tensor.h"
#include "runtime/model/packed_weight.h"

// out [N, OC] fp32 = inp [N, C] · weightᵀ + bias + residual; bias [OC] and residual [N, OC] may be null, and residual
// may be out. scratch: packed_linear_scratch bytes. The caller has checked shapes and dtypes.
void packed_linear(Tensor out, Tensor inp, const PackedWeight& weight, Tensor bias, Tensor residual, Tensor scratch);
int64_t packed_linear_scratch(int64_t N, int64_t C);

// The instructions that packed_linear() uses here, for tests and `info`: "AMX", "AVX-512 VNNI", "AVX2" or "C++".
const char* packed_linear_instructions();
// Uses these instructions from now on, "": the best ones; for tests. False where the CPU has not these. Not while
// another thread runs packed_linear().
bool packed_linear_use(const char* instructions);

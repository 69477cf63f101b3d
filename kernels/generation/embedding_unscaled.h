// Token and position embedding of the rows of a decode step (kernels/embedding.h), which also makes the UnscaledRows
// (linear.h) of the norm before the first layer.
//
// Throws Error on a wrong shape or dtype.
#pragma once

#include "kernels/generation/linear.h"

// out, next.rows [N, C] bf16; tokens [N] int32; positions [N] int32; wte [V, C], wpe [P, C] bf16 or null; next: as in
// linear.h, of out. False, with nothing done, on the CPU, for more than UNSCALED_MAX_ROWS rows, for rows that are not
// aligned to 4 bytes, and for odd C.
bool embedding_unscaled(Tensor out, const UnscaledRows& next, Tensor tokens, Tensor positions, Tensor wte, Tensor wpe,
                        Stream stream);

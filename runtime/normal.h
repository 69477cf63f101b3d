// Many standard normal numbers at once: those of normal01() (runtime/rng.h), bit for bit as floats.
//
// The loops are written for vectors: Philox on 32-bit lanes, then Box-Muller with a logarithm and a cosine of our own
// in fp64. Their result differs from that of the C library by less than a relative 1e-14. A number that lies so close
// to the middle between two floats that this could round it to the other one is computed by normal01(): about 3 in a
// million (the rounding test of Ziv 1991, "Fast evaluation of elementary mathematical functions with correctly rounded
// last bit").
#pragma once

#include <cstdint>

#include "runtime/rng.h"

// out[i] = float(normal01(key, stream, first + i)), i < n.
void normal_numbers(float* out, uint64_t key, uint64_t stream, uint64_t first, int64_t n);

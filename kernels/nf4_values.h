// The numbers behind the codes of nf4.h.
#pragma once

#include <array>
#include <cmath>

#include "runtime/rng.h"

// QLoRA, appendix E.
constexpr float NF4_VALUES[16] = {-1.0f,
                                  -0.6961928009986877f,
                                  -0.5250730514526367f,
                                  -0.39491748809814453f,
                                  -0.28444138169288635f,
                                  -0.18477343022823334f,
                                  -0.09105003625154495f,
                                  0.0f,
                                  0.07958029955625534f,
                                  0.16093020141124725f,
                                  0.24611230194568634f,
                                  0.33791524171829224f,
                                  0.44070982933044434f,
                                  0.5626170039176941f,
                                  0.7229568362236023f,
                                  1.0f};

// The 8-bit dynamic tree numbers of Dettmers 2015 ("8-Bit Approximations for Parallelism in Deep Learning", section
// 2.1), ascending: a decimal exponent from -6 to 0, and 2^exponent linear fractions between 0.1 and 1; both signs,
// 0, 1.
std::array<float, 256> nf4_absmax_values();

// The largest magnitude of a block, from its code: group_absmax and mean as in Nf4Weights.
HOST_DEVICE inline float nf4_absmax(float value, float group_absmax, float mean) {
    return fmaf(value, group_absmax, mean);
}

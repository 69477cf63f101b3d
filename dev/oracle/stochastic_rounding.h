// For the tests of optimizers: stochastic rounding to bf16 as kernels/param_update.h defines it.
#pragma once

#include <cmath>
#include <cstdint>

#include "runtime/rng.h"

// By arithmetic instead of bits: of the two bf16 neighbours of x the one away from zero if noise, uniform in [0, 1), is
// in the last part(x) of its range. part(x) is the distance of x from the neighbour nearer to zero, in units.
inline double round_by(double x, double noise) {
    if (x == 0 || !std::isfinite(x)) return x;
    const double unit = std::ldexp(1, std::max(std::ilogb(x), -126) - 7);  // of bf16 at x
    const double near_zero = std::trunc(x / unit) * unit, part = std::fabs(x - near_zero) / unit;
    return near_zero + (noise >= 1 - part ? std::copysign(unit, x) : 0);
}

// The noise of an element of a tensor: 16 bits of a word. The first moment uses the low ones, the second moment another
// block.
enum class NoiseOf : uint8_t { Param, FirstMoment, SecondMoment };
inline double noise_of(uint64_t seed, int64_t t, uint64_t key, int64_t element, NoiseOf what = NoiseOf::Param) {
    if (what == NoiseOf::SecondMoment) key ^= 0x9E3779B97F4A7C15;
    const uint32_t word = philox(seed, uint64_t(t) << 36 | uint64_t(element / 4), key).v[element % 4];
    return (what == NoiseOf::FirstMoment ? word & 0xFFFF : word >> 16) * 0x1p-16;
}

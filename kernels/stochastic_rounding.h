// The noise of stochastic rounding to bf16 (kernels/param_update.h), the same on CPU and GPU.
//
// bf16 drops the low 16 bits of an fp32 number. Adding 16 random bits there carries into the last kept bit with a
// probability equal to the dropped fraction, which is exactly unbiased. Sign and magnitude are separate bits, so this
// also holds for negative numbers. A carry into the exponent gives the next bf16 number. Where the dropped bits are 0,
// as in infinities, nothing carries.
#pragma once

#include "runtime/rng.h"

// The number that is rounded: a parameter, or the first or second moment of its gradient. Each has 16 bits of noise of
// its own.
enum class Rounded : uint8_t { Param, M, V };

// Four elements of a tensor share one Philox block: its key is the seed, the low half of its counter is (t, element/4)
// and the high half the tensor's key. element/4 takes 36 bits of the low half and t the other 28: the noise repeats
// after 268 million steps. For element e, Param uses the upper 16 bits of word e % 4 and M the lower 16; V uses the
// upper 16 bits of the same word of a block with another counter.
HOST_DEVICE inline Philox4 rounding_noise(uint64_t seed, uint64_t t, uint64_t key, int64_t element, Rounded what) {
    const uint64_t other = what == Rounded::V ? 0x9E3779B97F4A7C15ull : 0;
    Philox4 noise = philox(seed, t << 36 | uint64_t(element) / 4, key ^ other);
    for (uint32_t& word : noise.v) word = what == Rounded::M ? word & 0xFFFF : word >> 16;
    return noise;
}

// The upper half of the bits of x, a number or infinity, rounded with 16 bits of noise.
HOST_DEVICE inline uint16_t rounded_bits(uint32_t x, uint32_t noise) {
    return uint16_t((x + noise) >> 16);
}

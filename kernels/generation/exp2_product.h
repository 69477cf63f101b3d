// 2^(x·rate) in double for x ≤ 0 < rate: the weight of a token relative to the most likely one. x is the token's logit
// minus the largest logit, rate is log2(e)/temperature.
//
// CUDA's exp() branches because its argument may be large, and the compiler can't interleave code across a branch. This
// function has no branch, so that a thread's exponentials hide each other's latency, and it takes 13 FP64 instructions
// instead of 16.
//
// The relative error is below 5e-16: the product is not rounded, its distance from an integer once; the error of the
// polynomial is 2.3e-16. Below 2^−1021 the result is 0; 2^0 is exactly 1.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "runtime/rng.h"

HOST_DEVICE inline int64_t double_bits(double x) {
    int64_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

HOST_DEVICE inline double exp2_product(double x, double rate) {
    // In [2^52, 2^53) doubles are integers: the sum is rounded to one, ROUND + n.
    constexpr double ROUND = 0x1.8p52;
    const double shifted = fma(x, rate, ROUND), r = fma(x, rate, ROUND - shifted);  // x·rate − n
    // 2^r for |r| ≤ 1/2 by the polynomial of degree 10 that is 1 at 0 and has the least relative error.
    double p = 0x1.e3a906d08f82fp-28;
    p = fma(p, r, 0x1.b671b358a5bdep-24);
    p = fma(p, r, 0x1.62c147a3e2637p-20);
    p = fma(p, r, 0x1.ffcb58c9b9570p-17);
    p = fma(p, r, 0x1.4309126c00aeap-13);
    p = fma(p, r, 0x1.5d87fe9b8f2bbp-10);
    p = fma(p, r, 0x1.3b2ab6fbd6d09p-7);
    p = fma(p, r, 0x1.c6b08d703e179p-5);
    p = fma(p, r, 0x1.ebfbdff82c431p-3);
    p = fma(p, r, 0x1.62e42fefa3a12p-1);
    p = fma(p, r, 1.0);
    // Adds n to p's exponent. Compares bits, because a comparison of doubles takes as long as a multiplication.
    const uint64_t scaled =
        uint64_t(double_bits(p)) + (uint64_t(double_bits(shifted)) << 52);  // ROUND's low bits are 0
    const uint64_t result = double_bits(shifted) < double_bits(ROUND - 1021) ? 0 : scaled;
    memcpy(&p, &result, sizeof(p));
    return p;
}

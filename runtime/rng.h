// Counter-based random numbers: a value depends on (key, counter) alone, not on the caller, the order of calls or the
// rank. Philox4x32-10: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

struct Philox4 {
    uint32_t v[4];
};

HOST_DEVICE inline Philox4 philox(uint64_t key, uint64_t counter_low, uint64_t counter_high) {
    uint32_t c[4] = {uint32_t(counter_low), uint32_t(counter_low >> 32), uint32_t(counter_high),
                     uint32_t(counter_high >> 32)};
    uint32_t k[2] = {uint32_t(key), uint32_t(key >> 32)};
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = uint64_t(0xD2511F53u) * c[0], p1 = uint64_t(0xCD9E8D57u) * c[2];
        const uint32_t n[4] = {uint32_t(p1 >> 32) ^ c[1] ^ k[0], uint32_t(p1), uint32_t(p0 >> 32) ^ c[3] ^ k[1],
                               uint32_t(p0)};
        for (int i = 0; i < 4; i++) c[i] = n[i];
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    return {{c[0], c[1], c[2], c[3]}};
}

// Uniform in [0, 1) with 53 bits.
HOST_DEVICE inline double uniform01(uint32_t high, uint32_t low) {
    return double((uint64_t(high) << 32 | low) >> 11) * 0x1p-53;
}

// Standard normal number i of random stream (key, stream): Box-Muller on the two halves of one Philox block.
inline double normal01(uint64_t key, uint64_t stream, uint64_t i) {
    const Philox4 r = philox(key, i, stream);
    const double u = 1.0 - uniform01(r.v[0], r.v[1]);  // in (0, 1], so that the logarithm is finite
    return std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586476925 * uniform01(r.v[2], r.v[3]));
}

// FNV-1a hash. A tensor's random stream is keyed by its name, so adding a tensor does not change the others' numbers.
inline uint64_t name_hash(const std::string& name) {
    uint64_t h = 14695981039346656037ull;
    for (const unsigned char ch : name) h = (h ^ ch) * 1099511628211ull;
    return h;
}

#include "runtime/normal.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/device/cpu_dispatch.h"

namespace {

constexpr int LANES = 64;  // numbers at a time; their state stays in registers and the first-level cache

ALWAYS_INLINE double from_bits(uint64_t bits) {
    double x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

ALWAYS_INLINE uint64_t to_bits(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

// A number below 2^52 as a double: the mantissa of 2^52 + n. Vectors have no conversion from 64-bit integers.
ALWAYS_INLINE double small_to_double(uint64_t n) {
    return from_bits(n | 0x4330000000000000u) - 0x1p52;
}

// log(u) for u in (0, 1]: u = m·2^e with m in (√½, √2], log m = 2 atanh(s), s = (m − 1)/(m + 1), |s| < 0.172. The
// series' first missing term is s^21/21.
ALWAYS_INLINE double logarithm(double u) {
    const uint64_t bits = to_bits(u);
    double m = from_bits((bits & 0x000FFFFFFFFFFFFFu) | 0x3FF0000000000000u);
    double e = small_to_double(bits >> 52) - 1023;
    const bool large = m > 1.4142135623730951;
    m = large ? m * 0.5 : m;
    e = large ? e + 1 : e;
    const double s = (m - 1) / (m + 1), z = s * s;
    double sum = 1.0 / 19;
    sum = sum * z + 1.0 / 17;
    sum = sum * z + 1.0 / 15;
    sum = sum * z + 1.0 / 13;
    sum = sum * z + 1.0 / 11;
    sum = sum * z + 1.0 / 9;
    sum = sum * z + 1.0 / 7;
    sum = sum * z + 1.0 / 5;
    sum = sum * z + 1.0 / 3;
    return e * 0.693147180559945309417 + (2 * s + 2 * s * z * sum);
}

// cos(t) for t in [0, 2π]: t = q·π/2 + y with |y| ≤ π/4, then Taylor series of cosine or sine. π/2 is split so that
// q times its first part is exact (Cody, Waite 1980).
ALWAYS_INLINE double cosine(double t) {
    constexpr double PIO2_HIGH = 0x1.921fb544p+0, PIO2_LOW = 0x1.0b4611a626331p-34, MAGIC = 0x1.8p52;
    const double rounded = t * 0.636619772367581343 + MAGIC, q = rounded - MAGIC;
    const uint64_t quadrant = to_bits(rounded) & 3;
    const double y = (t - q * PIO2_HIGH) - q * PIO2_LOW, z = y * y;
    double c = 1.0 / 20922789888000;
    c = c * z - 1.0 / 87178291200;
    c = c * z + 1.0 / 479001600;
    c = c * z - 1.0 / 3628800;
    c = c * z + 1.0 / 40320;
    c = c * z - 1.0 / 720;
    c = c * z + 1.0 / 24;
    c = c * z - 0.5;
    c = c * z + 1;
    double s = 1.0 / 355687428096000;
    s = s * z - 1.0 / 1307674368000;
    s = s * z + 1.0 / 6227020800;
    s = s * z - 1.0 / 39916800;
    s = s * z + 1.0 / 362880;
    s = s * z - 1.0 / 5040;
    s = s * z + 1.0 / 120;
    s = s * z - 1.0 / 6;
    s = s * z * y + y;
    const double value = quadrant & 1 ? s : c;  // cos(y + q·π/2): c, −s, −c, s
    return quadrant == 1 || quadrant == 2 ? -value : value;
}

struct PhiloxLanes {
    uint32_t c0[LANES], c1[LANES], c2[LANES], c3[LANES];
};

// philox() of runtime/rng.h for counters (first + lane, stream).
ALWAYS_INLINE void philox_lanes(PhiloxLanes& c, uint64_t key, uint64_t stream, uint64_t first) {
    for (int i = 0; i < LANES; i++) {
        const uint64_t counter = first + uint64_t(i);
        c.c0[i] = uint32_t(counter);
        c.c1[i] = uint32_t(counter >> 32);
        c.c2[i] = uint32_t(stream);
        c.c3[i] = uint32_t(stream >> 32);
    }
    uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
    for (int round = 0; round < 10; round++) {
#pragma omp simd
        for (int i = 0; i < LANES; i++) {
            const uint64_t p0 = uint64_t(0xD2511F53u) * c.c0[i], p1 = uint64_t(0xCD9E8D57u) * c.c2[i];
            c.c0[i] = uint32_t(p1 >> 32) ^ c.c1[i] ^ k0;
            c.c2[i] = uint32_t(p0 >> 32) ^ c.c3[i] ^ k1;
            c.c1[i] = uint32_t(p1);
            c.c3[i] = uint32_t(p0);
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

}  // namespace

MULTIARCH void normal_numbers(float* out, uint64_t key, uint64_t stream, uint64_t first, int64_t n) {
    constexpr double BOUND = 1e-13;  // ten times the largest difference
    PhiloxLanes r;
    float low[LANES], high[LANES];
    for (int64_t at = 0; at < n; at += LANES) {
        philox_lanes(r, key, stream, first + uint64_t(at));
        uint64_t a[LANES], b[LANES];
        for (int i = 0; i < LANES; i++) {
            a[i] = uint64_t(r.c0[i]) << 32 | r.c1[i];
            b[i] = uint64_t(r.c2[i]) << 32 | r.c3[i];
        }
        int doubtful = 0;
#pragma omp simd reduction(+ : doubtful)
        for (int i = 0; i < LANES; i++) {
            // uniform01(): 53 bits, in two parts that fit into a mantissa.
            const double high_a = small_to_double(a[i] >> 32), low_a = small_to_double(a[i] >> 11 & 0x1FFFFF),
                         high_b = small_to_double(b[i] >> 32), low_b = small_to_double(b[i] >> 11 & 0x1FFFFF);
            const double u = 1 - (high_a * 0x1p-32 + low_a * 0x1p-53), w = high_b * 0x1p-32 + low_b * 0x1p-53;
            const double x = std::sqrt(-2 * logarithm(u)) * cosine(6.283185307179586476925 * w);
            low[i] = float(x * (1 - BOUND));
            high[i] = float(x * (1 + BOUND));
            doubtful += low[i] != high[i] || x == 0;
        }
        const int64_t count = std::min<int64_t>(LANES, n - at);
        std::copy_n(low, count, out + at);
        for (int64_t i = 0; i < count && doubtful; i++)
            if (low[i] != high[i] || low[i] == 0) out[at + i] = float(normal01(key, stream, first + uint64_t(at + i)));
    }
}

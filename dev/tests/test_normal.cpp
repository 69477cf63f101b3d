// runtime/normal.h: vectors of normal numbers are those of normal01(), bit for bit.
#include "runtime/normal.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

namespace {

int64_t differences(uint64_t key, uint64_t stream, uint64_t first, int64_t n) {
    std::vector<float> found(static_cast<size_t>(n));
    normal_numbers(found.data(), key, stream, first, n);
    int64_t different = 0;
#pragma omp parallel for reduction(+ : different)
    for (int64_t i = 0; i < n; i++) {
        const float wanted = static_cast<float>(normal01(key, stream, first + static_cast<uint64_t>(i)));
        different += std::memcmp(&wanted, &found[static_cast<size_t>(i)], sizeof wanted) != 0;
    }
    return different;
}

TEST(Normal, EqualsTheScalarFunction) {
    // About 50 of 16 million numbers are in doubt.
    EXPECT_EQ(differences(42, name_hash("layers.3.qkv.weight"), 0, 1 << 24), 0);
    EXPECT_EQ(differences(7, 1, (uint64_t(1) << 32) - 1000, 100000), 0);  // the counter's upper half changes
    EXPECT_EQ(differences(~uint64_t(0), ~uint64_t(0), 12345, 100000), 0);
}

TEST(Normal, AnyNumberAtATime) {
    for (const int64_t n : {0, 1, 3, 63, 64, 65, 127, 1000}) EXPECT_EQ(differences(1, 2, 77, n), 0) << n;
    std::vector<float> guarded(70, -1);
    normal_numbers(guarded.data(), 1, 2, 0, 65);
    EXPECT_EQ(guarded[65], -1);
}

}  // namespace

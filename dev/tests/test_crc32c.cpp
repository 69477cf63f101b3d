// runtime/files/crc32c.h: the vectors of RFC 3720, every length and alignment around the blocks, parts in any order.
#include "runtime/files/crc32c.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace {

std::vector<unsigned char> random_bytes(size_t n) {
    std::mt19937 random(7);
    std::vector<unsigned char> bytes(n);
    for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
    return bytes;
}

// One bit at a time, from the definition.
uint32_t crc32c_of_bits(const unsigned char* p, size_t n) {
    uint32_t crc = 0xFFFFFFFF;
    for (size_t i = 0; i < 8 * n; i++) {
        const uint32_t bit = (crc ^ p[i / 8] >> i % 8) & 1;
        crc = crc >> 1 ^ (bit ? 0x82F63B78 : 0);
    }
    return ~crc;
}

TEST(Crc32c, KnownVectors) {
    std::string up(32, '\0'), down(32, '\0');
    std::iota(up.begin(), up.end(), '\0');
    std::iota(down.rbegin(), down.rend(), '\0');
    const std::pair<std::string, uint32_t> vectors[] = {{"", 0},
                                                        {"123456789", 0xE3069283},
                                                        {std::string(32, '\0'), 0x8A9136AA},
                                                        {std::string(32, '\xFF'), 0x62A8AB43},
                                                        {up, 0x46DD794E},
                                                        {down, 0x113FDB5C}};
    for (const auto& [text, expected] : vectors) {
        EXPECT_EQ(crc32c(text.data(), int64_t(text.size())), expected);
        EXPECT_EQ(crc32c_by_table(text.data(), int64_t(text.size())), expected);
    }
}

TEST(Crc32c, EveryLengthAndAlignment) {
    const std::vector<unsigned char> bytes = random_bytes(40000);
    for (const size_t n : {1, 7, 8, 9, 63, 4095, 4096, 12287, 12288, 12289, 24576, 24583, 39000}) {
        for (size_t offset = 0; offset < 9; offset++) {
            const unsigned char* const p = bytes.data() + offset;
            const uint32_t expected = crc32c_of_bits(p, n);
            EXPECT_EQ(crc32c(p, int64_t(n)), expected) << n << " bytes at " << offset;
            EXPECT_EQ(crc32c_by_table(p, int64_t(n)), expected) << n << " bytes at " << offset;
        }
    }
}

TEST(Crc32c, PartsInAnyOrder) {
    const std::vector<unsigned char> bytes = random_bytes(30000);
    const auto all = int64_t(bytes.size());
    std::mt19937 random(8);
    for (int round = 0; round < 50; round++) {
        uint32_t sum = 0;
        for (int64_t begin = 0; begin < all;) {
            const int64_t n = std::min<int64_t>(all - begin, random() % 9000);  // some are empty
            sum ^= crc32c_shift(crc32c(bytes.data() + begin, n), all - begin - n);
            begin += n;
        }
        EXPECT_EQ(sum, crc32c(bytes.data(), all));
    }
    EXPECT_EQ(crc32c_shift(0x12345678, 0), 0x12345678u);
    EXPECT_EQ(crc32c_shift(crc32c_shift(0x12345678, int64_t(1) << 40), 5),
              crc32c_shift(0x12345678, (int64_t(1) << 40) + 5));
}

// A flipped bit anywhere changes the checksum.
TEST(Crc32c, NoticesEveryFlippedBit) {
    std::vector<unsigned char> bytes = random_bytes(1500);
    const uint32_t whole = crc32c(bytes.data(), 1500);
    for (size_t bit = 0; bit < 8 * bytes.size(); bit++) {
        bytes[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
        EXPECT_NE(crc32c(bytes.data(), 1500), whole) << bit;
        bytes[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
    }
}

}  // namespace

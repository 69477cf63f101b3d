#include "runtime/files/crc32c.h"

#include <array>
#include <cstring>

#if defined(__SSE4_2__)
#include <nmmintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace {

constexpr uint32_t POLYNOMIAL = 0x82F63B78;  // reflected: the highest bit is the coefficient of x^0
constexpr uint32_t ONES = 0xFFFFFFFF;

constexpr uint32_t times_x(uint32_t a) {
    return a >> 1 ^ (a & 1 ? POLYNOMIAL : 0);
}

// a·b modulo the polynomial.
uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (int power = 0; power < 32; power++, a = times_x(a))
        if (b >> (31 - power) & 1) product ^= a;
    return product;
}

// TABLES[k][b] is the remainder of byte b with k zero bytes after it.
constexpr std::array<std::array<uint32_t, 256>, 8> make_tables() {
    std::array<std::array<uint32_t, 256>, 8> tables{};
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = times_x(crc);
        tables[0][byte] = crc;
    }
    for (size_t k = 1; k < 8; k++)
        for (size_t byte = 0; byte < 256; byte++)
            tables[k][byte] = tables[k - 1][byte] >> 8 ^ tables[0][tables[k - 1][byte] & 255];
    return tables;
}
constexpr auto TABLES = make_tables();

uint32_t add_word_by_table(uint32_t crc, uint64_t word) {
    word ^= crc;
    uint32_t next = 0;
    for (size_t k = 0; k < 8; k++) next ^= TABLES[7 - k][word >> (8 * k) & 255];
    return next;
}

uint32_t add_byte_by_table(uint32_t crc, uint8_t byte) {
    return crc >> 8 ^ TABLES[0][(crc ^ byte) & 255];
}

#if defined(__SSE4_2__)
uint64_t add_word(uint64_t crc, uint64_t word) {  // 64 bits, so that nothing is widened between two instructions
    return _mm_crc32_u64(crc, word);
}
uint32_t add_byte(uint32_t crc, uint8_t byte) {
    return _mm_crc32_u8(crc, byte);
}
#elif defined(__ARM_FEATURE_CRC32)
uint32_t add_word(uint32_t crc, uint64_t word) {
    return __crc32cd(crc, word);
}
uint32_t add_byte(uint32_t crc, uint8_t byte) {
    return __crc32cb(crc, byte);
}
#else
constexpr auto add_word = add_word_by_table;
constexpr auto add_byte = add_byte_by_table;
#endif

uint64_t word_at(const unsigned char* p) {  // files and all supported processors are little-endian
    uint64_t word;
    std::memcpy(&word, p, sizeof word);
    return word;
}

}  // namespace

uint32_t crc32c_shift(uint32_t crc, int64_t bytes) {
    uint32_t power = uint32_t(1) << 23;  // x^8, squared for each bit of `bytes`
    for (auto n = uint64_t(bytes); n; n >>= 1) {
        if (n & 1) crc = multiply(crc, power);
        power = multiply(power, power);
    }
    return crc;
}

uint32_t crc32c_by_table(const void* data, int64_t bytes) {
    const auto* p = static_cast<const unsigned char*>(data);
    uint32_t crc = ONES;
    for (; bytes >= 8; p += 8, bytes -= 8) crc = add_word_by_table(crc, word_at(p));
    for (; bytes > 0; p++, bytes--) crc = add_byte_by_table(crc, *p);
    return ~crc;
}

uint32_t crc32c(const void* data, int64_t bytes) {
    const auto* p = static_cast<const unsigned char*>(data);
    uint32_t crc = ONES;
    // The instruction has a latency of 3 cycles and a throughput of 1: three blocks at a time keep it busy.
    constexpr int64_t BLOCK = 8192;
    static const uint32_t one_block = crc32c_shift(uint32_t(1) << 31, BLOCK),
                          two_blocks = multiply(one_block, one_block);
    for (; bytes >= 3 * BLOCK; p += 3 * BLOCK, bytes -= 3 * BLOCK) {
        auto a = add_word(crc, word_at(p)), b = add_word(0, word_at(p + BLOCK)),
             c = add_word(0, word_at(p + 2 * BLOCK));
        for (int64_t i = 8; i < BLOCK; i += 8) {
            a = add_word(a, word_at(p + i));
            b = add_word(b, word_at(p + BLOCK + i));
            c = add_word(c, word_at(p + 2 * BLOCK + i));
        }
        crc = multiply(uint32_t(a), two_blocks) ^ multiply(uint32_t(b), one_block) ^ uint32_t(c);
    }
    for (; bytes >= 8; p += 8, bytes -= 8) crc = uint32_t(add_word(crc, word_at(p)));
    for (; bytes > 0; p++, bytes--) crc = add_byte(crc, *p);
    return ~crc;
}

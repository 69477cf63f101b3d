// The types of tensors in GGUF files (ggml of llama.cpp defines them): plain numbers, and blocks of quantised ones.
//
// A row is a whole number of blocks. x = d·q, or d·q + m; scales d and minima m are fp16. In a block of 32 of four bits
// byte j holds value j in its low half and value j + 16 in its high half.
//
//   Q8_0  34 bytes: d, int8 q[32]                     Q4_0  18 bytes: d, q[32] of 4 bits; x = d·(q − 8)
//   Q4_1  20 bytes: d, m, q[32] of 4 bits             Q5_0  22 bytes: d, fifth bits, q[32]; x = d·(q − 16)
//   Q5_1  24 bytes: d, m, fifth bits, q[32]
//   Q4_K  144 bytes, 256 values: d, m, eight pairs (scale, minimum) of 6 bits, q of 4 bits: x = d·scale·q − m·minimum
//   Q5_K  176 bytes: the same with fifth bits         Q6_K  210 bytes: q of 6 bits, int8 scale[16], d
//
// Everything is computed in fp32, one operation after the other, without fused multiply-adds, so that values are those
// of ggml's reference functions bit for bit.
#pragma once

#include <cstdint>

enum class GgufType : uint32_t {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    BF16 = 30
};

struct GgufTypeFacts {
    uint32_t number;  // in files
    const char* name;
    int64_t block_size, block_bytes;
    // The values of n blocks. Returns false if a scale or a minimum is infinite or NaN. Null: the type is not read.
    bool (*dequantise)(float* dst, const uint8_t* src, int64_t n);
    bool in_python;  // not read here, but scripts/import_gguf.py does

    GgufType type() const { return GgufType(number); }
    bool quantised() const { return block_size > 1; }
    int64_t bytes(int64_t elements) const { return elements / block_size * block_bytes; }
};
// Null for a number that stands for no type.
const GgufTypeFacts* find_gguf_type(uint32_t number);
const GgufTypeFacts& facts_of(GgufType type);

// n blocks of 32 finite values, in ggml's reference rounding. Q8_0: d = max|x|/127; q = x·(1/d), rounded half away from
// zero. Q4_0: d = x of the largest magnitude (the first one) / −8; q = ⌊x·(1/d) + 8.5⌋, at most 15. d is rounded to
// fp16 after it was inverted, to infinity if fp16 cannot hold it. A block of zeros has d = 0.
void quantise_q8_0(uint8_t* dst, const float* src, int64_t n);
void quantise_q4_0(uint8_t* dst, const float* src, int64_t n);

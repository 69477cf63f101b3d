// Weights in 8 and 4 bits for inference: a matrix [OC, C] as rows of bytes, each row by itself. And in 16 bits on the
// CPU, whose activations are fp32.
//
//   Fp8   w = scale · code     code: E4M3; one fp32 scale a row, the row's largest magnitude / 448
//   Int8  w = d · code         groups of 32 along the row; code: int8; d: fp16. The values of GGUF's Q8_0, bit for bit
//   Int4  w = d · (code − 8)   groups of 32; code: 4 bits, element i of a group in the low half of byte i, element
//                              16 + i in the high half; d: fp16. The values of GGUF's Q4_0, bit for bit
//   Bf16  w = code             the CPU only, in memory only: what the engine makes of a directory in bf16
//
// A row is its codes, then its scales, then zeros up to a multiple of 16 bytes: packed_row_bytes(). So a kernel loads a
// row, or several, by one aligned copy.
#pragma once

#include "runtime/device/tensor.h"
#include "runtime/names.h"

enum class Packing : uint8_t { Fp8, Int8, Int4, Bf16 };
constexpr Names<3> PACKING_NAMES = {"fp8", "int8", "int4"};  // those that options and files name
constexpr const char* packing_name(Packing packing) {
    return packing == Packing::Bf16 ? "bf16" : PACKING_NAMES[size_t(packing)];
}

// How a model's matrices are packed. Only in a GGUF file embedding and head have a packing of their own: llama-quantize
// writes Q4_0 with a head, or a tied embedding, in Q6_K.
struct Packings {
    Packing blocks, embedding, head;

    constexpr Packings(Packing all) : blocks(all), embedding(all), head(all) {}
    constexpr bool uniform() const { return blocks == embedding && blocks == head; }
};

constexpr int64_t PACKED_GROUP = 32;  // weights that share a scale of Int8 and Int4

struct PackedWeight {
    Packing packing;
    int64_t cols;  // C
    Tensor rows;   // [OC, packed_row_bytes] U8
};

// Bytes of the codes of a row of C weights, and of the whole row.
constexpr int64_t packed_code_bytes(Packing packing, int64_t C) {
    return packing == Packing::Int4 ? C / 2 : packing == Packing::Bf16 ? 2 * C : C;
}
constexpr int64_t packed_row_bytes(Packing packing, int64_t C) {
    const int64_t scales = packing == Packing::Bf16 ? 0 : packing == Packing::Fp8 ? 4 : C / PACKED_GROUP * 2;
    return (packed_code_bytes(packing, C) + scales + 15) / 16 * 16;
}
// Rows of C weights have packed rows only where the groups divide them; in bf16 always.
constexpr bool can_pack(int64_t C) {
    return C > 0 && C % PACKED_GROUP == 0;
}
constexpr bool can_pack(Packing packing, int64_t C) {
    return packing == Packing::Bf16 ? C > 0 : can_pack(C);
}

// One row of a packed weight as fp32, on the CPU. Not for .cu files.
#pragma once

#include <array>
#include <cstring>

#include "runtime/device/convert_dtype.h"
#include "runtime/device/fp8_codes.h"
#include "runtime/model/packed_weight.h"

inline const std::array<float, 256>& e4m3_values() {
    static const std::array<float, 256> values = [] {
        std::array<float, 256> all{};
        for (size_t code = 0; code < 256; code++) all[code] = fp8_decode(uint8_t(code), Fp8Format::E4M3);
        return all;
    }();
    return values;
}

inline float packed_scale(const uint8_t* scales, int64_t group) {
    fp16 d;
    std::memcpy(&d, scales + 2 * group, sizeof d);
    return to_float(d);
}

// out [C] = row o.
inline void dequantise_row(float* out, const PackedWeight& weight, int64_t o) {
    constexpr int64_t G = PACKED_GROUP;
    const int64_t C = weight.cols;
    const uint8_t* const row = weight.rows.as<uint8_t>() + o * packed_row_bytes(weight.packing, C);
    const uint8_t* const scales = row + packed_code_bytes(weight.packing, C);
    switch (weight.packing) {
        case Packing::Fp8: {
            const std::array<float, 256>& values = e4m3_values();
            float scale;
            std::memcpy(&scale, scales, sizeof scale);
            for (int64_t c = 0; c < C; c++) out[c] = values[row[c]] * scale;
            return;
        }
        case Packing::Int8:
            for (int64_t g = 0; g < C / G; g++) {
                const float d = packed_scale(scales, g);
                for (int64_t i = g * G; i < (g + 1) * G; i++) out[i] = d * float(int8_t(row[i]));
            }
            return;
        case Packing::Int4:
            for (int64_t g = 0; g < C / G; g++) {
                const float d = packed_scale(scales, g);
                for (int64_t i = 0; i < G / 2; i++) {
                    const uint8_t pair = row[g * G / 2 + i];
                    out[g * G + i] = d * float((pair & 15) - 8);
                    out[g * G + G / 2 + i] = d * float((pair >> 4) - 8);
                }
            }
            return;
        case Packing::Bf16:
            return convert_to_float(out, row, DType::BF16, C);
    }
}

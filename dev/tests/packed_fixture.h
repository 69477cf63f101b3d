// Weights packed on the host, and decoded in float64 from the formulas of runtime/model/packed_weight.h.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "dev/tests/test_util.h"
#include "kernels/packed_weight.h"
#include "runtime/device/convert_dtype.h"
#include "runtime/device/fp8_codes.h"

constexpr Packing ALL_PACKINGS[] = {Packing::Fp8, Packing::Int8, Packing::Int4};

inline const char* name_of(Packing packing) {
    return packing_name(packing);
}

class HostPacked {
  public:
    // Without values until they are quantised or written.
    HostPacked(Packing how, int64_t rows, int64_t columns)
        : packing(how),
          OC(rows),
          C(columns),
          row_bytes(packed_row_bytes(how, columns)),
          bytes(size_t(rows * row_bytes), 0xA5) {}
    HostPacked(Packing how, const std::vector<double>& values, int64_t rows, int64_t columns)
        : HostPacked(how, rows, columns) {
        std::vector<float> w(values.begin(), values.end());
        packed_quantise(view(), host_tensor(w.data(), {OC, C}));
    }

    PackedWeight view() { return {packing, C, host_tensor(bytes.data(), {OC, row_bytes})}; }
    uint8_t* row(int64_t o) { return bytes.data() + o * row_bytes; }
    const uint8_t* row(int64_t o) const { return bytes.data() + o * row_bytes; }

    double scale(int64_t o, int64_t c) const {
        if (packing == Packing::Bf16) return 1;
        const uint8_t* const scales = row(o) + packed_code_bytes(packing, C);
        if (packing == Packing::Fp8) {
            float s;
            std::memcpy(&s, scales, sizeof s);
            return s;
        }
        fp16 d;
        std::memcpy(&d, scales + 2 * (c / PACKED_GROUP), sizeof d);
        return to_float(d);
    }
    double code(int64_t o, int64_t c) const {
        if (packing == Packing::Fp8) return fp8_decode(row(o)[c], Fp8Format::E4M3);
        if (packing == Packing::Int8) return int8_t(row(o)[c]);
        if (packing == Packing::Bf16) {
            bf16 code;
            std::memcpy(&code, row(o) + 2 * c, sizeof code);
            return to_float(code);
        }
        const int64_t i = c % PACKED_GROUP;
        const uint8_t pair = row(o)[c / PACKED_GROUP * 16 + i % 16];
        return (i < 16 ? pair & 15 : pair >> 4) - 8;
    }
    std::vector<double> decoded() const {
        std::vector<double> w;
        for (int64_t o = 0; o < OC; o++)
            for (int64_t c = 0; c < C; c++) w.push_back(scale(o, c) * code(o, c));
        return w;
    }

    const Packing packing;
    const int64_t OC, C, row_bytes;
    std::vector<uint8_t> bytes;
};

// The same on the device.
class DevicePacked {
  public:
    explicit DevicePacked(const HostPacked& host)
        : bytes(TestArray::bytes(host.bytes.data(), int64_t(host.bytes.size()))),
          weight{host.packing, host.C,
                 make_tensor(bytes.tensor().data, DType::U8, bytes.tensor().device, {host.OC, host.row_bytes})} {}
    operator const PackedWeight&() const { return weight; }
    const PackedWeight* operator&() const { return &weight; }

  private:
    TestArray bytes;
    PackedWeight weight;
};

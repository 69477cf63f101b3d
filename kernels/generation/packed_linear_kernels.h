// What packed_linear() gives to the kernels of each instruction set, and what these share. Not for .cu files.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/cpu.h"
#include "runtime/device/cpu_dispatch.h"
#include "runtime/model/packed_weight.h"

constexpr int64_t PANEL_OUTPUTS = 32, PARTIALS = 16;

// All strides in elements.
struct PackedLinear {
    // inp, quantised. Rows are padded with zeros to whole blocks of PARTIALS groups, and to a multiple of 16 rows.
    int64_t N, C;
    const int8_t* codes;     // [N, C], code_stride
    const float* scales;     // [N, C / 32], group_stride
    const int32_t* offsets;  // as scales: what the kernels add to a group's sum where they add an offset to the codes
                             // of weights so that these are not negative: −offset · Σ code_x
    int64_t code_stride, group_stride;
    // weight
    Packing packing;
    const uint8_t* rows;
    int64_t OC, row_bytes;
    // output
    float* out;
    const float *bias, *residual;
    int64_t out_stride, residual_stride;

    int64_t groups() const { return C / PACKED_GROUP; }
    const uint8_t* row(int64_t o) const { return rows + o * row_bytes; }
    const uint8_t* weight_scales(int64_t o) const { return row(o) + packed_code_bytes(packing, C); }
    void store(int64_t n, int64_t o, float y) const {
        if (bias) y += bias[o];
        if (residual) y += residual[n * residual_stride + o];
        out[n * out_stride + o] = y;
    }
    // store() of outputs [begin, begin + n_outputs) of a row, which are at y and are lost.
    void store_row(int64_t n, int64_t begin, int64_t n_outputs, float* y) const {
        const auto add = [&](const float* x) {
#pragma GCC ivdep
            for (int64_t i = 0; i < n_outputs; i++) y[i] += x[i];
        };
        if (bias) add(bias + begin);
        if (residual) add(residual + n * residual_stride + begin);
        std::copy_n(y, n_outputs, out + n * out_stride + begin);
    }
};

// 32 outputs of a weight as two halves of 16: codes [C / 32][2][8][16][4], four codes of an output side by side; scales
// [C / 32][2][16].
struct Panel {
    uint8_t* codes;
    float* scales;
    static constexpr int64_t HALF = 16, GROUP_BYTES = 2 * HALF * PACKED_GROUP;

    const uint8_t* group(int64_t g, int64_t half) const { return codes + g * GROUP_BYTES + half * GROUP_BYTES / 2; }
    const float* scale(int64_t g, int64_t half) const { return scales + (2 * g + half) * HALF; }
    static int64_t bytes(int64_t C) { return C / PACKED_GROUP * (GROUP_BYTES + 2 * HALF * int64_t(sizeof(float))); }
    static Panel at(uint8_t* memory, int64_t C) {
        return {memory, reinterpret_cast<float*>(memory + C / PACKED_GROUP * GROUP_BYTES)};
    }
};

// The kernels of an instruction set compute outputs [begin, end). one_row: of an inp with N = 1. panel: of any inp, at
// most PANEL_OUTPUTS of them. Codes of weights have `offset` added, which PackedLinear::offsets undoes.
struct PackedKernels {
    const char* name;
    void (*one_row)(const PackedLinear& p, int64_t begin, int64_t end);
    void (*panel)(const PackedLinear& p, const Panel& panel, int64_t begin, int64_t end);
    int (*offset)(Packing packing);
};
// Null where the binary or the CPU has not the instructions.
const PackedKernels* packed_kernels_avx2();
const PackedKernels* packed_kernels_vnni();
const PackedKernels* packed_kernels_amx();

// The fp16 scales of groups [g, g + n) of a row of weight as floats.
void packed_scales(float* out, const uint8_t* scales, int64_t g, int64_t n);
// Fills panel.scales for outputs [begin, end); those beyond `end` repeat the last one.
void fill_panel_scales(const PackedLinear& p, const Panel& panel, int64_t begin, int64_t end);

// Partial sums in the order in which vec_sum() adds them, so that few of them are in registers at a time: after the
// i-th one as many pairs are added as i ends in ones, and PARTIAL_LEVELS sums wait at most.
constexpr int PARTIAL_ORDER[PARTIALS] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
constexpr int PARTIAL_LEVELS = 5;

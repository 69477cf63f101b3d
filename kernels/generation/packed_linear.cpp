#include "kernels/generation/packed_linear.h"

#include <omp.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

#include <cmath>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_loops.h"
#include "kernels/cpu/packed_rows.h"
#include "kernels/generation/packed_linear_kernels.h"

namespace {

constexpr int64_t G = PACKED_GROUP;

int64_t round_up(int64_t n, int64_t to) {
    return (n + to - 1) / to * to;
}

// The parts of the scratch, in bytes. Rows of codes have 64 bytes more than a multiple of 512, so that those of a tile
// do not fall into the same sets of a cache.
struct Layout {
    int64_t rows, code_stride, group_stride, codes, scales, offsets, panel, bytes;

    Layout(int64_t N, int64_t C)
        : rows(N == 1 ? 1 : round_up(N, 16)),
          code_stride(round_up(C, PARTIALS * G) + 64),
          group_stride(round_up(C / G, PARTIALS)),
          codes(0),
          scales(codes + round_up(rows * code_stride, 64)),
          offsets(scales + rows * group_stride * 4),
          panel(offsets + rows * group_stride * 4),
          bytes(panel + (N == 1 ? 0 : threads() * panel_bytes(C))) {}

    // Threads that have a panel. Not omp_get_max_threads(), which may change after the scratch is planned.
    static int threads() { return omp_get_num_procs(); }
    static int64_t panel_bytes(int64_t C) { return round_up(Panel::bytes(C), 64); }
};

// Quantises a row. codes beyond C and scales beyond the last group become 0.
MULTIARCH void quantise_row(int8_t* codes, float* scales, int32_t* offsets, const float* x, int64_t C, int64_t padded,
                            int offset) {
    for (int64_t g = 0; g < C / G; g++) {
        const float* const group = x + g * G;
        uint32_t largest = 0;  // of the bits of |x|: NaN and infinity stay what they are
        for (int64_t i = 0; i < G; i++) {
            uint32_t bits;
            std::memcpy(&bits, group + i, sizeof bits);
            largest = std::max(largest, bits & 0x7fffffffu);
        }
        float d;
        std::memcpy(&d, &largest, sizeof d);
        d /= 127;
        const float inverse = d > 0 && std::isfinite(d) && std::isfinite(1 / d) ? 1 / d : 0;
        int32_t sum = 0;
        for (int64_t i = 0; i < G; i++) {
            // Adding 1.5·2²³ rounds to an integer, which the low bits then hold.
            const float shifted = group[i] * inverse + 0x1.8p23f;
            int32_t code;
            std::memcpy(&code, &shifted, sizeof code);
            code -= 0x4b400000;
            codes[g * G + i] = int8_t(code);
            sum += int8_t(code);
        }
        scales[g] = d;
        offsets[g] = -offset * sum;
    }
    std::memset(codes + C, 0, size_t(padded - C));
    std::fill(scales + C / G, scales + padded / G, 0.0f);
    std::fill(offsets + C / G, offsets + padded / G, 0);
}

// The kernels in plain C++, for CPUs that have no others here. They don't use the panel.
void portable_rows(const PackedLinear& p, int64_t begin, int64_t end) {
    std::vector<float> w(static_cast<size_t>(p.groups()));
    for (int64_t o = begin; o < end; o++) {
        packed_scales(w.data(), p.weight_scales(o), 0, p.groups());
        for (int64_t n = 0; n < p.N; n++) {
            vec16 partial = {};
            for (int64_t g = 0; g < p.groups(); g++) {
                const int8_t* const x = p.codes + n * p.code_stride + g * G;
                const uint8_t* const codes = p.row(o) + packed_code_bytes(p.packing, g * G);
                int32_t sum = 0;
                for (int64_t i = 0; i < G && p.packing == Packing::Int8; i++) sum += x[i] * int8_t(codes[i]);
                for (int64_t i = 0; i < G / 2 && p.packing == Packing::Int4; i++)
                    sum += x[i] * ((codes[i] & 15) - 8) + x[G / 2 + i] * ((codes[i] >> 4) - 8);
                partial[g % PARTIALS] =
                    std::fma(float(sum), p.scales[n * p.group_stride + g] * w[size_t(g)], partial[g % PARTIALS]);
            }
            p.store(n, o, vec_sum(partial));
        }
    }
}

constexpr PackedKernels PORTABLE = {
    "C++", portable_rows,
    [](const PackedLinear& p, const Panel&, int64_t begin, int64_t end) { portable_rows(p, begin, end); },
    [](Packing) { return 0; }};

const PackedKernels* const* all_kernels() {
    static const PackedKernels* const all[] = {packed_kernels_amx(), packed_kernels_vnni(), packed_kernels_avx2(),
                                               &PORTABLE};
    return all;
}

const PackedKernels* best_kernels(const std::string& name) {
    for (int i = 0; i < 4; i++)
        if (all_kernels()[i] && (name.empty() || name == all_kernels()[i]->name)) return all_kernels()[i];
    return nullptr;
}

const PackedKernels*& kernels_in_use() {
    static const PackedKernels* in_use = best_kernels("");
    return in_use;
}

}  // namespace

void packed_scales(float* out, const uint8_t* scales, int64_t g, int64_t n) {
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8) {
        __m128i halves;
        std::memcpy(&halves, scales + 2 * (g + i), sizeof halves);
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(halves));
    }
#endif
    for (; i < n; i++) out[i] = packed_scale(scales, g + i);
}

void fill_panel_scales(const PackedLinear& p, const Panel& panel, int64_t begin, int64_t end) {
    float scales[PARTIALS];
    for (int64_t i = 0; i < PANEL_OUTPUTS; i++) {
        const uint8_t* const of_row = p.weight_scales(std::min(begin + i, end - 1));
        for (int64_t g0 = 0; g0 < p.groups(); g0 += PARTIALS) {
            const int64_t n = std::min(PARTIALS, p.groups() - g0);
            packed_scales(scales, of_row, g0, n);
            for (int64_t g = 0; g < n; g++) panel.scales[(g0 + g) * PANEL_OUTPUTS + i] = scales[g];
        }
    }
}

const char* packed_linear_instructions() {
    return kernels_in_use()->name;
}

bool packed_linear_use(const char* instructions) {
    const PackedKernels* const found = best_kernels(instructions);
    if (found) kernels_in_use() = found;
    return found;
}

int64_t packed_linear_scratch(int64_t N, int64_t C) {
    return C % G == 0 ? Layout(N, C).bytes + 64 : 0;
}

void packed_linear(Tensor out, Tensor inp, const PackedWeight& weight, Tensor bias, Tensor residual, Tensor scratch) {
    const int64_t N = inp.shape[0], C = inp.shape[1], OC = out.shape[1];
    const Layout at(N, C);
    const PackedKernels& kernels = *kernels_in_use();
    uint8_t* const memory = scratch.as<uint8_t>() + (64 - reinterpret_cast<uintptr_t>(scratch.data) % 64) % 64;
    int8_t* const codes = reinterpret_cast<int8_t*>(memory + at.codes);
    float* const scales = reinterpret_cast<float*>(memory + at.scales);
    int32_t* const offsets = reinterpret_cast<int32_t*>(memory + at.offsets);
    const Rows<const float> x(inp);
    const int offset = kernels.offset(weight.packing);
#pragma omp parallel for schedule(static) if (N * C > PARALLEL_MIN)
    for (int64_t n = 0; n < N; n++)
        quantise_row(codes + n * at.code_stride, scales + n * at.group_stride, offsets + n * at.group_stride, x[n], C,
                     at.group_stride * G, offset);
    const PackedLinear p{.N = N,
                         .C = C,
                         .codes = codes,
                         .scales = scales,
                         .offsets = offsets,
                         .code_stride = at.code_stride,
                         .group_stride = at.group_stride,
                         .packing = weight.packing,
                         .rows = weight.rows.as<uint8_t>(),
                         .OC = OC,
                         .row_bytes = packed_row_bytes(weight.packing, C),
                         .out = out.as<float>(),
                         .bias = bias.as<float>(),
                         .residual = residual.as<float>(),
                         .out_stride = row_stride(out),
                         .residual_stride = residual ? row_stride(residual) : 0};
    const int64_t parts = (OC + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS;
    const int threads = std::min(omp_get_max_threads(), Layout::threads());
#pragma omp parallel for schedule(static) num_threads(threads) if (N * C * OC > PARALLEL_MIN)
    for (int64_t part = 0; part < parts; part++) {
        const int64_t begin = part * PANEL_OUTPUTS, end = std::min(begin + PANEL_OUTPUTS, OC);
        if (N == 1)
            kernels.one_row(p, begin, end);
        else
            kernels.panel(p, Panel::at(memory + at.panel + omp_get_thread_num() * at.panel_bytes(C), C), begin, end);
    }
}

// packed_linear() with AMX: a tile is 16 rows of inp times 16 outputs, one group at a time. One row of inp is left to
// AVX-512 VNNI, and so is what makes floats of the tiles.
//
// The panel is already what a tile of the second operand holds: 8 rows of 16 outputs with four codes each.
#include "kernels/generation/packed_linear_kernels.h"

#if !defined(__x86_64__) || !defined(__linux__) || !defined(__GNUC__) || defined(__clang__) || defined(NO_AVX512)
const PackedKernels* packed_kernels_amx() {
    return nullptr;
}
#else
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/generation/packed_linear_panel.h"

namespace {

using namespace packed_panel;

#define AMX __attribute__((target("arch=x86-64-v4,avx512vnni,amx-tile,amx-int8")))

constexpr int ROWS = 16;  // of inp in a tile; PackedLinear pads to as many
// Tiles, as macros because the intrinsics paste their numbers: two of sums, so that one is computed while the other
// becomes floats; codes of inp; codes of weights.
#define SUMS_0 0
#define SUMS_1 1
#define INP 2
#define WEIGHTS 3

// The operand of ldtilecfg (Intel 64 manual, volume 1, section 18.3).
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    TileConfig() {
        const auto set = [&](int tile, uint8_t count, uint16_t bytes) {
            rows[tile] = count;
            row_bytes[tile] = bytes;
        };
        set(SUMS_0, ROWS, 64);
        set(SUMS_1, ROWS, 64);
        set(INP, ROWS, G);
        set(WEIGHTS, G / 4, 64);
    }
};
static_assert(sizeof(TileConfig) == 64);

// Sums of group g: 16 rows of inp from n on, 16 outputs. The intrinsics name tiles by constants.
AMX inline void multiply(int32_t (*sums)[Panel::HALF], bool odd, const PackedLinear& p, const Panel& panel, int64_t n,
                         int64_t half, int64_t g) {
    _tile_loadd(INP, p.codes + n * p.code_stride + g * G, p.code_stride);
    _tile_loadd(WEIGHTS, panel.group(g, half), 64);
    if (odd) {
        _tile_zero(SUMS_1);
        _tile_dpbsud(SUMS_1, INP, WEIGHTS);
        _tile_stored(SUMS_1, sums, 64);
    } else {
        _tile_zero(SUMS_0);
        _tile_dpbsud(SUMS_0, INP, WEIGHTS);
        _tile_stored(SUMS_0, sums, 64);
    }
}

// Rows of inp from n on, one half of the panel.
AMX void tile(const PackedLinear& p, const Panel& panel, int64_t n, int64_t half, float (*out)[PANEL_OUTPUTS]) {
    alignas(64) int32_t sums[2][ROWS][Panel::HALF];
    __m512 waiting[PARTIAL_LEVELS][ROWS];
    for (int i = 0; i < PARTIALS; i++) {
        __m512 partial[ROWS];
        for (int r = 0; r < ROWS; r++) partial[r] = _mm512_setzero_ps();
        int64_t g = PARTIAL_ORDER[i];
        if (g < p.groups()) multiply(sums[0], false, p, panel, n, half, g);
        for (bool odd = false; g < p.groups(); g += PARTIALS, odd = !odd) {
            if (g + PARTIALS < p.groups()) multiply(sums[!odd], !odd, p, panel, n, half, g + PARTIALS);
            const __m512 d = _mm512_load_ps(panel.scale(g, half));
            const int64_t at = n * p.group_stride + g;
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                const __m512i sum = _mm512_add_epi32(_mm512_load_si512(sums[odd][r]),
                                                     _mm512_set1_epi32(p.offsets[at + r * p.group_stride]));
                const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(p.scales[at + r * p.group_stride]), d);
                partial[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, partial[r]);
            }
        }
        add_partials(waiting, partial, i);
    }
    for (int r = 0; r < ROWS; r++) _mm512_storeu_ps(out[r] + half * Panel::HALF, waiting[PARTIAL_LEVELS - 1][r]);
}

AMX void panel_rows(const PackedLinear& p, const Panel& panel, int64_t begin, int64_t end) {
    fill(p, panel, begin, end);
    const TileConfig config;
    _tile_loadconfig(&config);
    float out[ROWS][PANEL_OUTPUTS];
    for (int64_t n = 0; n < p.N; n += ROWS) {
        for (int64_t half = 0; half * Panel::HALF < end - begin; half++) tile(p, panel, n, half, out);
        for (int64_t r = 0; r < std::min<int64_t>(ROWS, p.N - n); r++) p.store_row(n + r, begin, end - begin, out[r]);
    }
    _tile_release();
}

// CPUID leaf 7: AMX-TILE and AMX-INT8. Linux gives a process the 8 KiB of tile state only after it has asked.
bool may_use_amx() {
    uint32_t a = 7, b, c = 0, d;
    asm("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    const bool tiles = d >> 24 & 1, int8 = d >> 25 & 1;
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return tiles && int8 && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

}  // namespace

const PackedKernels* packed_kernels_amx() {
    static const PackedKernels* const vnni = packed_kernels_vnni();
    static const bool amx = vnni && may_use_amx();
    static const PackedKernels kernels = {"AMX", vnni ? vnni->one_row : nullptr, panel_rows, offset};
    return amx ? &kernels : nullptr;
}
#endif

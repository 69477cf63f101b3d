// FlashAttention on a CPU. All products are outer-product GEMMs over small tiles: scalars of A are broadcast against
// vectors of a row of B, sums stay in registers. The layouts are chosen so that nothing but the tile of the outer loop
// is ever packed or transposed:
//
//   forward    outer loop: 64 queries, one in each vector lane. Sᵀ = K·Qᵀ and Oᵀ += Vᵀ·Pᵀ broadcast K and V from
//              where they lie; the softmax runs over rows, so that it needs no horizontal maximum or sum.
//   backward   outer loop: 64 keys, one in each vector lane. S = Q·Kᵀ, dP = dO·Vᵀ; dV += Pᵀ·dO, dK += dSᵀ·Q stay with
//              the keys; dQ rows are added to in memory, key tiles ascending.
//
// Causal tiles are cut into steps of 16 along the diagonal and only the 16×16 blocks on it are masked. No product adds
// a masked element, not even as 0·x: what a query must not see can be NaN.
#include "kernels/attention.h"

#include <omp.h>

#include <algorithm>
#include <cfloat>
#include <limits>

#include "kernels/attention_check.h"
#include "kernels/cpu.h"

namespace {

constexpr int64_t LANES = 16;
constexpr int64_t MAX_TILE = 64;           // queries and keys of a tile
constexpr int64_t TILE_FLOATS = 64 * 256;  // tile · head size: 64 KiB, several of them on the stack
constexpr int64_t MAX_HS = 1024;
constexpr float INF = std::numeric_limits<float>::infinity();

// Tiles of large heads are narrower, so that the buffers stay on the stack.
int64_t tile_size(int64_t HS) {
    return HS * MAX_TILE <= TILE_FLOATS ? MAX_TILE : LANES;
}

int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// ---------------------------------------------------------------------------------------------------------------------
// Tile products

// The products are templates over the vector, vec16 for AVX-512 and vec8 for AVX2: GCC keeps no sums in registers when
// they are vec16 and the registers are half as wide.
template <typename V>
ALWAYS_INLINE V load(const float* p) {
    V v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}

template <typename V>
ALWAYS_INLINE void store(float* p, V v) {
    std::memcpy(p, &v, sizeof(v));
}

template <typename V>
constexpr int64_t WIDTH = sizeof(V) / sizeof(float);

// c [R, NV vectors] (+)= a·b: a is [R, K] with rows lda apart or, TRANSPOSED, stored as [K, R]; b is [K, NV vectors].
template <typename V, int R, int NV, bool TRANSPOSED>
ALWAYS_INLINE void product_block(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb,
                                 int64_t K, bool accumulate) {
    V sum[R][NV];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) sum[r][v] = accumulate ? load<V>(c + r * ldc + v * WIDTH<V>) : V{};
    }
    for (int64_t k = 0; k < K; k++) {
        V row[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) row[v] = load<V>(b + k * ldb + v * WIDTH<V>);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const float x = TRANSPOSED ? a[k * lda + r] : a[r * lda + k];
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) sum[r][v] += x * row[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) store(c + r * ldc + v * WIDTH<V>, sum[r][v]);
    }
}

template <typename V, int R, int NV, bool TRANSPOSED>
ALWAYS_INLINE void product_rows(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb,
                                int64_t M, int64_t K, bool accumulate) {
    const int64_t step = TRANSPOSED ? 1 : lda;
    int64_t m = 0;
    for (; m + R <= M; m += R) {
        product_block<V, R, NV, TRANSPOSED>(c + m * ldc, ldc, a + m * step, lda, b, ldb, K, accumulate);
    }
    for (; m < M; m++) {
        product_block<V, 1, NV, TRANSPOSED>(c + m * ldc, ldc, a + m * step, lda, b, ldb, K, accumulate);
    }
}

// c [M, vecs·16] (+)= a [M, K] · b [K, vecs·16]. Each element of c is summed in the order of k, whatever the blocking.
// With the 32 registers of AVX-512 a block is 4×4 or 8×2 vectors, with AVX2's 16 registers of half the width 4×2.
template <typename V, bool TRANSPOSED>
ALWAYS_INLINE void product(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t M,
                           int64_t vecs, int64_t K, bool accumulate) {
    int64_t v = 0;
    if constexpr (WIDTH<V> == LANES) {
        for (; v + 4 <= vecs; v += 4) {
            product_rows<V, 4, 4, TRANSPOSED>(c + v * LANES, ldc, a, lda, b + v * LANES, ldb, M, K, accumulate);
        }
        if (v + 3 == vecs) {
            product_rows<V, 4, 3, TRANSPOSED>(c + v * LANES, ldc, a, lda, b + v * LANES, ldb, M, K, accumulate);
            return;
        }
        for (; v + 2 <= vecs; v += 2) {
            product_rows<V, 8, 2, TRANSPOSED>(c + v * LANES, ldc, a, lda, b + v * LANES, ldb, M, K, accumulate);
        }
    }
    constexpr int NV = LANES / WIDTH<V>;
    for (; v < vecs; v++) {
        product_rows<V, 8 / NV, NV, TRANSPOSED>(c + v * LANES, ldc, a, lda, b + v * LANES, ldb, M, K, accumulate);
    }
}

// All bits set in the lanes from `first` on, of the lanes begin, begin + 1 … that V holds; 0 ≤ first ≤ 16. Masks come
// from a table and are applied with & and |: vector comparisons would not survive in the AVX2 version (see vec_max).
template <typename V>
ALWAYS_INLINE auto lanes_from(int64_t first, int64_t begin = 0) {
    alignas(64) static constexpr int32_t bits[2 * LANES] = {
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    decltype(V{} == V{}) mask;
    std::memcpy(&mask, bits + LANES - first + begin, sizeof(mask));
    return mask;
}

ALWAYS_INLINE vec16 blend(ivec16 mask, vec16 a, vec16 b) {
    return reinterpret_cast<vec16>((reinterpret_cast<ivec16>(a) & mask) | (reinterpret_cast<ivec16>(b) & ~mask));
}

// Oᵀ [HS, 16] += Vᵀ·Pᵀ for a block on the diagonal: lane l takes keys k ≤ l − shift only.
template <typename V, int R>
ALWAYS_INLINE void diagonal_block(float* ot, int64_t ldo, const float* v, int64_t ldv, const float* p, int64_t ldp,
                                  int64_t keys, int64_t shift) {
    for (int64_t lane = 0; lane < LANES; lane += WIDTH<V>) {
        V sum[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sum[r] = load<V>(ot + r * ldo + lane);
        for (int64_t k = 0; k < keys; k++) {
            const auto seen = lanes_from<V>(k + shift, lane);
            const V row = load<V>(p + k * ldp + lane);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                int32_t bits;
                std::memcpy(&bits, v + k * ldv + r, sizeof(bits));
                sum[r] += reinterpret_cast<V>(bits & seen) * row;
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) store(ot + r * ldo + lane, sum[r]);
    }
}

template <typename V>
ALWAYS_INLINE void diagonal(float* ot, int64_t ldo, const float* v, int64_t ldv, const float* p, int64_t ldp,
                            int64_t HS, int64_t keys, int64_t shift) {
    int64_t c = 0;
    for (; c + 8 <= HS; c += 8) diagonal_block<V, 8>(ot + c * ldo, ldo, v + c, ldv, p, ldp, keys, shift);
    for (; c < HS; c++) diagonal_block<V, 1>(ot + c * ldo, ldo, v + c, ldv, p, ldp, keys, shift);
}

// The products as the rest of this file calls them: a is [M, K] for product_n, stored as [K, M] for product_t.
template <bool TRANSPOSED>
WITH_AVX512 void product_avx512(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb,
                                int64_t M, int64_t vecs, int64_t K, bool accumulate) {
    product<vec16, TRANSPOSED>(c, ldc, a, lda, b, ldb, M, vecs, K, accumulate);
}

template <bool TRANSPOSED>
void product_avx2(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t M,
                  int64_t vecs, int64_t K, bool accumulate) {
    product<vec8, TRANSPOSED>(c, ldc, a, lda, b, ldb, M, vecs, K, accumulate);
}

void product_n(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t M, int64_t vecs,
               int64_t K, bool accumulate) {
    (has_avx512() ? product_avx512<false> : product_avx2<false>)(c, ldc, a, lda, b, ldb, M, vecs, K, accumulate);
}

void product_t(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t M, int64_t vecs,
               int64_t K, bool accumulate) {
    (has_avx512() ? product_avx512<true> : product_avx2<true>)(c, ldc, a, lda, b, ldb, M, vecs, K, accumulate);
}

WITH_AVX512 void diagonal_avx512(float* ot, int64_t ldo, const float* v, int64_t ldv, const float* p, int64_t ldp,
                                 int64_t HS, int64_t keys, int64_t shift) {
    diagonal<vec16>(ot, ldo, v, ldv, p, ldp, HS, keys, shift);
}

void product_diagonal(float* ot, int64_t ldo, const float* v, int64_t ldv, const float* p, int64_t ldp, int64_t HS,
                      int64_t keys, int64_t shift) {
    if (has_avx512())
        diagonal_avx512(ot, ldo, v, ldv, p, ldp, HS, keys, shift);
    else
        diagonal<vec8>(ot, ldo, v, ldv, p, ldp, HS, keys, shift);
}

// ---------------------------------------------------------------------------------------------------------------------
// Packing

// dst [cols, rows] = scale · src [rows, cols] transposed, in 8×8 blocks.
MULTIARCH void transpose(float* dst, int64_t ldd, const float* src, int64_t lds, int64_t rows, int64_t cols,
                         float scale) {
    const int64_t rows8 = rows / 8 * 8, cols8 = cols / 8 * 8;
    for (int64_t r = 0; r < rows8; r += 8) {
        for (int64_t c = 0; c < cols8; c += 8) {
            vec8 a[8], b[8];
            for (int i = 0; i < 8; i++) std::memcpy(&a[i], src + (r + i) * lds + c, sizeof(vec8));
            for (int i = 0; i < 8; i += 2) {  // pairs of rows: elements 0, 1, 4, 5 and 2, 3, 6, 7 interleaved
                b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
                b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
            }
            for (int i = 0; i < 8; i += 4) {  // columns 0 … 3 of four rows in the low half, 4 … 7 in the high half
                a[i] = __builtin_shufflevector(b[i], b[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
                a[i + 1] = __builtin_shufflevector(b[i], b[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
                a[i + 2] = __builtin_shufflevector(b[i + 1], b[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
                a[i + 3] = __builtin_shufflevector(b[i + 1], b[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
            }
            for (int i = 0; i < 4; i++) {
                b[i] = __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
                b[i + 4] = __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
            }
            for (int i = 0; i < 8; i++) {
                b[i] *= scale;
                std::memcpy(dst + (c + i) * ldd + r, &b[i], sizeof(vec8));
            }
        }
        for (int64_t c = cols8; c < cols; c++) {
            for (int64_t i = r; i < r + 8; i++) dst[c * ldd + i] = src[i * lds + c] * scale;
        }
    }
    for (int64_t i = rows8; i < rows; i++) {
        for (int64_t c = 0; c < cols; c++) dst[c * ldd + i] = src[i * lds + c] * scale;
    }
}

// dst [HS, round16(rows)] = scale · srcᵀ, the lanes beyond rows zero.
void pack_lanes(float* dst, int64_t ldd, const float* src, int64_t lds, int64_t rows, int64_t HS, float scale) {
    transpose(dst, ldd, src, lds, rows, HS, scale);
    const int64_t padded = ceil_div(rows, LANES) * LANES;
    if (padded > rows) {
        for (int64_t c = 0; c < HS; c++) std::fill(dst + c * ldd + rows, dst + c * ldd + padded, 0.0f);
    }
}

// dst [rows, round16(HS)] = scale · src, the columns beyond HS zero.
void pack_rows(float* dst, const float* src, int64_t lds, int64_t rows, int64_t HS, float scale) {
    const int64_t padded = ceil_div(HS, LANES) * LANES;
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < HS; c++) dst[r * padded + c] = src[r * lds + c] * scale;
        std::fill(dst + r * padded + HS, dst + (r + 1) * padded, 0.0f);
    }
}

// Row i of one head: data + i·stride.
struct Rows {
    float* data = nullptr;
    int64_t stride = 0;
    float* operator[](int64_t i) const { return data + i * stride; }
};

Rows head_rows(const Tensor& t, int64_t first_token, int64_t head) {
    return {static_cast<float*>(t.data) + first_token * t.stride[0] + head * t.stride[1], t.stride[0]};
}

void zero_rows(Rows rows, int64_t begin, int64_t end, int64_t HS) {
    for (int64_t i = begin; i < end; i++) std::fill(rows[i], rows[i] + HS, 0.0f);
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

// Online softmax of 16 queries over n more keys: s [n, 16] becomes exp(s − max), and what was summed under the previous
// maximum is rescaled. From row `diagonal` on, lane l sees the rows ≤ diagonal + l − shift only.
MULTIARCH void softmax_lanes(float* s, int64_t n, int64_t diagonal, int64_t shift, float* max, float* sum, float* ot,
                             int64_t ldo, int64_t HS) {
    const vec16 old = vec_load(max);
    vec16 m = old;
    for (int64_t r = 0; r < n; r++) {
        vec16 x = vec_load(s + r * MAX_TILE);
        if (r >= diagonal) {
            x = blend(lanes_from<vec16>(r - diagonal + shift), x, vec_set(-INF));
            vec_store(s + r * MAX_TILE, x);
        }
        m = vec_max(m, x);
    }
    const vec16 base = vec_max(vec_set(-FLT_MAX), m);  // −∞ − −∞ would be NaN in a lane that has seen nothing yet
    vec16 total = {};
    for (int64_t r = 0; r < n; r++) {
        const vec16 p = vec_exp(vec_load(s + r * MAX_TILE) - base);
        vec_store(s + r * MAX_TILE, p);
        total += p;
    }
    const vec16 rescale = vec_exp(old - base);
    vec_store(max, m);
    vec_store(sum, vec_load(sum) * rescale + total);
    for (int64_t c = 0; c < HS; c++) vec_store(ot + c * ldo, vec_load(ot + c * ldo) * rescale);
}

// out [nq, HS] and lse [nq] (or null) of queries i0 … i0 + nq − 1 of one head.
void forward_tile(Rows out, float* lse, Rows q, Rows k, Rows v, int64_t i0, int64_t nq, int64_t klen, int64_t offset,
                  int64_t HS, float scale) {
    alignas(64) float qt[TILE_FLOATS], ot[TILE_FLOATS], s[MAX_TILE * MAX_TILE], max[MAX_TILE], sum[MAX_TILE];
    const int64_t ld = tile_size(HS), vecs = ceil_div(nq, LANES);
    pack_lanes(qt, ld, q[i0], q.stride, nq, HS, scale);
    std::fill(ot, ot + HS * ld, 0.0f);
    std::fill(max, max + MAX_TILE, -INF);
    std::fill(sum, sum + MAX_TILE, 0.0f);

    // Lane l sees keys j ≤ last + l. The keys before `last` are seen by all lanes.
    const int64_t last = i0 + offset, full = std::max<int64_t>(last, 0);
    for (int64_t j = 0; j < full; j += MAX_TILE) {
        const int64_t n = std::min(MAX_TILE, full - j);
        product_n(s, MAX_TILE, k[j], k.stride, qt, ld, n, vecs, HS, false);
        for (int64_t u = 0; u < vecs * LANES; u += LANES) {
            softmax_lanes(s + u, n, n, 0, max + u, sum + u, ot + u, ld, HS);
        }
        product_t(ot, ld, v[j], v.stride, s, MAX_TILE, HS, vecs, n, true);
    }

    // The other keys in steps of 16: step u is on the diagonal for vector u and seen by all lanes of those after it.
    auto step_begin = [&](int64_t u) { return std::max<int64_t>(last + u * LANES, 0); };
    auto step_end = [&](int64_t u) { return std::max<int64_t>(std::min(last + (u + 1) * LANES, klen), 0); };
    for (int64_t u = 0; u < vecs; u++) {
        const int64_t begin = step_begin(u), n = step_end(u) - begin;
        if (n <= 0) continue;
        product_n(s + (begin - full) * MAX_TILE + u * LANES, MAX_TILE, k[begin], k.stride, qt + u * LANES, ld, n,
                  vecs - u, HS, false);
    }
    for (int64_t u = 0; u < vecs; u++) {
        const int64_t begin = step_begin(u), n = step_end(u) - full;
        if (n <= 0) continue;
        softmax_lanes(s + u * LANES, n, begin - full, begin - (last + u * LANES), max + u * LANES, sum + u * LANES,
                      ot + u * LANES, ld, HS);
    }
    for (int64_t u = 0; u < vecs; u++) {
        const int64_t begin = step_begin(u), n = step_end(u) - begin, next = (u + 1) * LANES;
        if (n <= 0) continue;
        const float* p = s + (begin - full) * MAX_TILE;
        product_diagonal(ot + u * LANES, ld, v[begin], v.stride, p + u * LANES, MAX_TILE, HS, n,
                         begin - (last + u * LANES));
        if (u + 1 < vecs) product_t(ot + next, ld, v[begin], v.stride, p + next, MAX_TILE, HS, vecs - u - 1, n, true);
    }

    for (int64_t i = 0; i < nq; i++) {
        if (lse) lse[i] = max[i] + std::log(sum[i]);  // −∞ where no key was seen
        sum[i] = sum[i] == 0 ? 0.0f : 1 / sum[i];
    }
    for (int64_t c = 0; c < HS; c++) {
        for (int64_t i = 0; i < nq; i++) ot[c * ld + i] *= sum[i];
    }
    transpose(out[i0], out.stride, ot, ld, HS, nq, 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// Keys of one tile, what is summed for them, and the queries being worked on. p, ds: [queries, keys].
struct BackwardTile {
    alignas(64) float kt[TILE_FLOATS], vt[TILE_FLOATS];                    // [HS, keys]: scale·Kᵀ, Vᵀ
    alignas(64) float k[TILE_FLOATS], dk[TILE_FLOATS], dv[TILE_FLOATS];    // [keys, round16(HS)]; k times scale
    alignas(64) float q[TILE_FLOATS], dout[TILE_FLOATS], dq[TILE_FLOATS];  // [queries, round16(HS)]
    alignas(64) float p[MAX_TILE * MAX_TILE], ds[MAX_TILE * MAX_TILE];
};

// One query head of one sequence.
struct BackwardHead {
    Rows q, dout, dq;
    const float *lse, *delta;
};

struct BackwardShape {
    int64_t HS, offset;  // offset = klen − qlen
    float scale;
    bool want_dq, want_dkv;
};

void load_keys(BackwardTile& t, Rows k, Rows v, int64_t j0, int64_t nk, const BackwardShape& shape) {
    const int64_t ld = tile_size(shape.HS);
    pack_lanes(t.kt, ld, k[j0], k.stride, nk, shape.HS, shape.scale);
    pack_lanes(t.vt, ld, v[j0], v.stride, nk, shape.HS, 1);
    if (shape.want_dq) pack_rows(t.k, k[j0], k.stride, nk, shape.HS, shape.scale);
}

// p holds S and becomes P = exp(S − lse), ds holds dP and becomes P·(dP − delta): one query, vecs·16 keys. The lanes of
// the last vector from `seen` on are masked.
MULTIARCH void softmax_gradient(float* p, float* ds, int64_t vecs, float lse, float delta, int64_t seen) {
    for (int64_t v = 0; v < vecs; v++) {
        vec16 x = vec_exp(vec_load(p + v * LANES) - lse);
        vec16 g = x * (vec_load(ds + v * LANES) - delta);
        if (v == vecs - 1) {
            x = blend(lanes_from<vec16>(seen), vec16{}, x);
            g = blend(lanes_from<vec16>(seen), vec16{}, g);
        }
        vec_store(p + v * LANES, x);
        vec_store(ds + v * LANES, g);
    }
}

void add_query_gradient(Rows dq, int64_t i0, const float* tile, int64_t n, int64_t HS, bool accumulate) {
    const int64_t padded = ceil_div(HS, LANES) * LANES;
    for (int64_t i = 0; i < n; i++) {
        float* row = dq[i0 + i];
        const float* add = tile + i * padded;
        if (accumulate) {
            for (int64_t c = 0; c < HS; c++) row[c] += add[c];
        } else {
            std::copy(add, add + HS, row);
        }
    }
}

// Queries i0 … i0 + n − 1, all of which see all nk keys of the tile.
void backward_full(BackwardTile& t, const BackwardHead& head, int64_t i0, int64_t n, int64_t j0, int64_t nk,
                   const BackwardShape& shape) {
    const int64_t HS = shape.HS, ld = tile_size(HS), columns = ceil_div(HS, LANES), width = columns * LANES;
    const int64_t vecs = ceil_div(nk, LANES);
    pack_rows(t.q, head.q[i0], head.q.stride, n, HS, 1);
    pack_rows(t.dout, head.dout[i0], head.dout.stride, n, HS, 1);
    product_n(t.p, MAX_TILE, t.q, width, t.kt, ld, n, vecs, HS, false);
    product_n(t.ds, MAX_TILE, t.dout, width, t.vt, ld, n, vecs, HS, false);
    for (int64_t i = 0; i < n; i++) {
        softmax_gradient(t.p + i * MAX_TILE, t.ds + i * MAX_TILE, vecs, head.lse[i0 + i], head.delta[i0 + i], LANES);
    }
    if (shape.want_dkv) {
        product_t(t.dv, width, t.p, MAX_TILE, t.dout, width, nk, columns, n, true);
        product_t(t.dk, width, t.ds, MAX_TILE, t.q, width, nk, columns, n, true);
    }
    if (shape.want_dq) {
        product_n(t.dq, width, t.ds, MAX_TILE, t.k, width, n, columns, nk, false);
        add_query_gradient(head.dq, i0, t.dq, n, HS, j0 > 0);
    }
}

// Queries begin … end − 1 on the diagonal: query i sees keys 0 … i − base of the tile. Vector u of the keys is partly
// seen by the queries of step u (base + 16u … base + 16u + 15) and wholly by those after them.
void backward_diagonal(BackwardTile& t, const BackwardHead& head, int64_t begin, int64_t end, int64_t base, int64_t j0,
                       int64_t nk, const BackwardShape& shape) {
    const int64_t HS = shape.HS, ld = tile_size(HS), columns = ceil_div(HS, LANES), width = columns * LANES;
    const int64_t vecs = ceil_div(nk, LANES), n = end - begin;
    pack_rows(t.q, head.q[begin], head.q.stride, n, HS, 1);
    pack_rows(t.dout, head.dout[begin], head.dout.stride, n, HS, 1);
    auto step_begin = [&](int64_t u) { return std::clamp(base + u * LANES, begin, end) - begin; };
    for (int64_t u = 0; u < vecs; u++) {
        const int64_t row = step_begin(u), rows = step_begin(u + 1) - row;
        float *p = t.p + row * MAX_TILE, *ds = t.ds + row * MAX_TILE;
        product_n(p, MAX_TILE, t.q + row * width, width, t.kt, ld, rows, u + 1, HS, false);
        product_n(ds, MAX_TILE, t.dout + row * width, width, t.vt, ld, rows, u + 1, HS, false);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t i = begin + row + r;
            softmax_gradient(p + r * MAX_TILE, ds + r * MAX_TILE, u + 1, head.lse[i], head.delta[i],
                             i - base - u * LANES + 1);
        }
    }
    for (int64_t u = 0; u < vecs && shape.want_dkv; u++) {
        // Each key of vector u takes the queries of step u that see it, then all keys together the queries after them.
        const int64_t key = u * LANES, keys = std::min(LANES, nk - key), next = step_begin(u + 1);
        for (int64_t j = key; j < key + keys; j++) {
            const int64_t first = std::clamp(base + j, begin, end) - begin;
            if (first >= next) continue;
            product_t(t.dv + j * width, width, t.p + first * MAX_TILE + j, MAX_TILE, t.dout + first * width, width, 1,
                      columns, next - first, true);
            product_t(t.dk + j * width, width, t.ds + first * MAX_TILE + j, MAX_TILE, t.q + first * width, width, 1,
                      columns, next - first, true);
        }
        if (next == n) continue;
        product_t(t.dv + key * width, width, t.p + next * MAX_TILE + key, MAX_TILE, t.dout + next * width, width, keys,
                  columns, n - next, true);
        product_t(t.dk + key * width, width, t.ds + next * MAX_TILE + key, MAX_TILE, t.q + next * width, width, keys,
                  columns, n - next, true);
    }
    if (!shape.want_dq) return;
    for (int64_t u = 0; u < vecs; u++) {
        const int64_t row = step_begin(u), rows = step_begin(u + 1) - row, key = u * LANES;
        product_n(t.dq + row * width, width, t.ds + row * MAX_TILE, MAX_TILE, t.k, width, rows, columns, key, false);
        for (int64_t r = row; r < row + rows; r++) {
            const int64_t seen = std::min(begin + r - base + 1, nk) - key;
            product_n(t.dq + r * width, width, t.ds + r * MAX_TILE + key, MAX_TILE, t.k + key * width, width, 1,
                      columns, seen, true);
        }
    }
    add_query_gradient(head.dq, begin, t.dq, n, HS, j0 > 0);
}

// The key tile's part of queries begin … end − 1 of one head. Every element of dq gets one sum per key tile, in the
// order of the keys, however the queries are cut: the two schedules of attention_backward give the same bits.
void backward_queries(BackwardTile& t, const BackwardHead& head, int64_t begin, int64_t end, int64_t j0, int64_t nk,
                      const BackwardShape& shape) {
    const int64_t base = j0 - shape.offset;  // the first query that sees key j0
    const int64_t full = std::clamp(base + ceil_div(nk, LANES) * LANES, begin, end);
    const int64_t first = std::clamp(base, begin, end);
    if (first < full) backward_diagonal(t, head, first, full, base, j0, nk, shape);
    const int64_t step = tile_size(shape.HS);
    for (int64_t i = full; i < end; i += step) {
        backward_full(t, head, i, std::min(step, end - i), j0, nk, shape);
    }
}

// delta[h, i] = Σ_c dout·out of one token's head.
MULTIARCH float dot(const float* a, const float* b, int64_t n) {
    vec16 sum = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) sum += vec_load(a + i) * vec_load(b + i);
    if (i < n) sum += vec_load_partial(a + i, n - i) * vec_load_partial(b + i, n - i);
    return vec_sum(sum);
}

// ---------------------------------------------------------------------------------------------------------------------
// Arguments

struct Sizes : AttentionSizes {
    const int32_t *cum_q, *cum_k;
};

void check_cum(const char* op, const char* name, const Tensor& cum, int64_t tokens, int64_t max) {
    const int32_t* c = cum.as<int32_t>();
    const int64_t S = cum.shape[0] - 1;
    require(c[0] == 0, op, ": ", name, "[0] is ", c[0], ", expected 0");
    for (int64_t s = 0; s < S; s++) {
        require(c[s] <= c[s + 1], op, ": ", name, " decreases after sequence ", s);
        require(c[s + 1] - c[s] <= max, op, ": sequence ", s, " of ", name, " has ", c[s + 1] - c[s],
                " tokens, more than the maximum given, ", max);
    }
    require(c[S] <= tokens, op, ": ", name, " ends at ", c[S], ", past the ", tokens, " tokens of the tensor");
}

Sizes check_sizes(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                  const AttentionSequences& sequences, float scale) {
    Sizes z{check_attention(op, DType::F32, q, k, v, sequences, scale), nullptr, nullptr};
    check_cum(op, "cum_q", sequences.cum_q, z.Nq, sequences.max_q);
    check_cum(op, "cum_k", sequences.cum_k, z.Nk, sequences.max_k);
    z.cum_q = sequences.cum_q.as<int32_t>();
    z.cum_k = sequences.cum_k.as<int32_t>();
    return z;
}

}  // namespace

int64_t attention_max_head_size() {
    return MAX_HS;
}

void attention_forward(Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, const AttentionSequences& sequences,
                       float scale, Stream) {
    const char* op = "attention_forward";
    const Sizes z = check_sizes(op, q, k, v, sequences, scale);
    check_tensor(op, "out", out, DType::F32, {z.Nq, z.NH, z.HS});
    check_tensor(op, "lse", lse, DType::F32, {z.NH, z.Nq}, Given::Optional);

    const int64_t tile = tile_size(z.HS), tiles = ceil_div(sequences.max_q, tile), group = z.NH / z.NKV;
    auto lse_row = [&](int64_t h) { return lse ? lse.as<float>() + h * lse.stride[0] : nullptr; };
#pragma omp parallel for schedule(dynamic)
    for (int64_t task = 0; task < z.S * z.NH * tiles; task++) {
        const int64_t s = task / tiles / z.NH, h = task / tiles % z.NH;
        const int64_t i0 = (tiles - 1 - task % tiles) * tile;  // the late queries see most keys: first
        const int64_t q0 = z.cum_q[s], k0 = z.cum_k[s], qlen = z.cum_q[s + 1] - q0, klen = z.cum_k[s + 1] - k0;
        if (i0 >= qlen) continue;
        forward_tile(head_rows(out, q0, h), lse ? lse_row(h) + q0 + i0 : nullptr, head_rows(q, q0, h),
                     head_rows(k, k0, h / group), head_rows(v, k0, h / group), i0, std::min(tile, qlen - i0), klen,
                     klen - qlen, z.HS, scale);
    }
    for (int64_t h = 0; h < z.NH; h++) {  // tokens after the last sequence
        zero_rows(head_rows(out, 0, h), z.cum_q[z.S], z.Nq, z.HS);
        if (lse) std::fill(lse_row(h) + z.cum_q[z.S], lse_row(h) + z.Nq, -INF);
    }
}

int64_t attention_backward_scratch(int64_t Nq, int64_t NH, int64_t) {
    return Nq * NH * static_cast<int64_t>(sizeof(float));
}

void attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out,
                        Tensor lse, const AttentionSequences& sequences, float scale, Tensor scratch, Stream) {
    const char* op = "attention_backward";
    const Sizes z = check_sizes(op, q, k, v, sequences, scale);
    check_tensor(op, "dq", dq, DType::F32, {z.Nq, z.NH, z.HS});
    check_tensor(op, "dk", dk, DType::F32, {z.Nk, z.NKV, z.HS});
    check_tensor(op, "dv", dv, DType::F32, {z.Nk, z.NKV, z.HS});
    check_tensor(op, "dout", dout, DType::F32, {z.Nq, z.NH, z.HS});
    check_tensor(op, "out", out, DType::F32, {z.Nq, z.NH, z.HS});
    check_tensor(op, "lse", lse, DType::F32, {z.NH, z.Nq});
    check_scratch(op, scratch, attention_backward_scratch(z.Nq, z.NH, z.HS));
    float* delta = static_cast<float*>(scratch.data);

#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < z.Nq; i++) {
        for (int64_t h = 0; h < z.NH; h++) {
            delta[h * z.Nq + i] = dot(head_rows(dout, i, h).data, head_rows(out, i, h).data, z.HS);
        }
    }

    const int64_t tile = tile_size(z.HS), group = z.NH / z.NKV;
    auto qlen = [&](int64_t s) -> int64_t { return z.cum_q[s + 1] - z.cum_q[s]; };
    auto klen = [&](int64_t s) -> int64_t { return z.cum_k[s + 1] - z.cum_k[s]; };
    auto head = [&](int64_t s, int64_t h) {
        const int64_t q0 = z.cum_q[s];
        return BackwardHead{head_rows(q, q0, h), head_rows(dout, q0, h), head_rows(dq, q0, h),
                            lse.as<float>() + h * lse.stride[0] + q0, delta + h * z.Nq + q0};
    };
    // dk and dv of one tile of keys from all query heads that share them; dq too, if asked, of all queries.
    auto key_tile = [&](BackwardTile& t, int64_t s, int64_t kv, int64_t j0, bool want_dq) {
        const int64_t nk = std::min(tile, klen(s) - j0), width = ceil_div(z.HS, LANES) * LANES;
        const BackwardShape shape{z.HS, klen(s) - qlen(s), scale, want_dq, true};
        load_keys(t, head_rows(k, z.cum_k[s], kv), head_rows(v, z.cum_k[s], kv), j0, nk, shape);
        std::fill(t.dk, t.dk + nk * width, 0.0f);
        std::fill(t.dv, t.dv + nk * width, 0.0f);
        for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
            backward_queries(t, head(s, h), 0, qlen(s), j0, nk, shape);
        }
        const Rows dk_rows = head_rows(dk, z.cum_k[s], kv), dv_rows = head_rows(dv, z.cum_k[s], kv);
        for (int64_t j = 0; j < nk; j++) {
            for (int64_t c = 0; c < z.HS; c++) {
                dk_rows[j0 + j][c] = t.dk[j * width + c] * scale;
                dv_rows[j0 + j][c] = t.dv[j * width + c];
            }
        }
    };

    // One task for each sequence and KV head does five products per tile. Where these tasks don't fill the threads, dq
    // gets a pass of its own over tiles of queries: seven products, but as many tasks as tiles.
    const int64_t tasks = z.S * z.NKV, threads = omp_get_max_threads();
    if (5 * ceil_div(tasks, threads) * threads <= 7 * tasks) {
#pragma omp parallel for schedule(dynamic)
        for (int64_t task = 0; task < tasks; task++) {
            BackwardTile t;
            const int64_t s = task / z.NKV, kv = task % z.NKV;
            for (int64_t j0 = 0; j0 < klen(s); j0 += tile) key_tile(t, s, kv, j0, true);
        }
    } else {
        const int64_t key_tiles = ceil_div(sequences.max_k, tile), query_tiles = ceil_div(sequences.max_q, tile);
#pragma omp parallel
        {
            BackwardTile t;
#pragma omp for schedule(dynamic) nowait
            for (int64_t task = 0; task < tasks * key_tiles; task++) {
                const int64_t s = task / key_tiles / z.NKV, kv = task / key_tiles % z.NKV, j0 = task % key_tiles * tile;
                if (j0 < klen(s)) key_tile(t, s, kv, j0, false);
            }
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < z.S * z.NH * query_tiles; task++) {
                const int64_t s = task / query_tiles / z.NH, h = task / query_tiles % z.NH;
                const int64_t begin = (query_tiles - 1 - task % query_tiles) * tile,
                              end = std::min(begin + tile, qlen(s));
                const BackwardShape shape{z.HS, klen(s) - qlen(s), scale, true, false};
                for (int64_t j0 = 0; j0 < std::min(end + shape.offset, klen(s)) && begin < end; j0 += tile) {
                    const int64_t nk = std::min(tile, klen(s) - j0);
                    load_keys(t, head_rows(k, z.cum_k[s], h / group), head_rows(v, z.cum_k[s], h / group), j0, nk,
                              shape);
                    backward_queries(t, head(s, h), begin, end, j0, nk, shape);
                }
            }
        }
    }

    for (int64_t h = 0; h < z.NH; h++) {  // queries that see no key, and tokens after the last sequence
        for (int64_t s = 0; s < z.S; s++) zero_rows(head(s, h).dq, 0, std::min(qlen(s), qlen(s) - klen(s)), z.HS);
        zero_rows(head_rows(dq, 0, h), z.cum_q[z.S], z.Nq, z.HS);
    }
    for (int64_t kv = 0; kv < z.NKV; kv++) {
        zero_rows(head_rows(dk, 0, kv), z.cum_k[z.S], z.Nk, z.HS);
        zero_rows(head_rows(dv, 0, kv), z.cum_k[z.S], z.Nk, z.HS);
    }
}

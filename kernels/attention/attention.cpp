// FlashAttention on a CPU. All matmuls are outer-product GEMMs over small tiles: scalars of A are broadcast against
// vectors of a row of B, and accumulators stay in registers. The layouts are chosen so that only the tile of the outer
// loop is packed or transposed:
//
//   forward    outer loop: 64 queries, one in each vector lane. Sᵀ = K·Qᵀ and Oᵀ += Vᵀ·Pᵀ broadcast K and V
//              in place; the softmax runs over rows, so that it needs no horizontal maximum or sum.
//   backward   outer loop: 64 keys, one in each vector lane. S = Q·Kᵀ, dP = dO·Vᵀ; dV += Pᵀ·dO, dK += dSᵀ·Q stay with
//              the keys; rows of dQ are accumulated in memory, in the order of the key tiles.
//
// Each query sees one contiguous range of keys, which moves by one from query to query: a band. Tiles on an edge of the
// band are cut into steps of 16 along its later edge, the diagonal of causal attention, and only the 16×16 blocks that
// an edge crosses are masked. No matmul adds a masked element, not even as 0·x: it may be NaN.
//
// The forward pass takes the keys of a sequence in blocks of 64, counted from key 0. A block updates the online softmax
// of a query once, and keys that the query does not see add 0 to its sums. So the bits of a query's output depend on
// the keys that it sees alone, and not on which queries the pass has beside it or where keys lie in pages: a lone query
// after the keys of its sequence has the bits that it has in a pass over the whole sequence.
#include "kernels/attention/attention.h"

#include <omp.h>

#include <algorithm>
#include <cfloat>
#include <limits>

#include "kernels/attention/attention_check.h"
#include "kernels/attention/cum_seqlens_check.h"
#include "kernels/cpu/cpu_loops.h"
#include "kernels/cpu/cpu_tile.h"

namespace {

constexpr int64_t MAX_TILE = 64;           // queries and keys of a tile
constexpr int64_t TILE_FLOATS = 64 * 256;  // tile · head size: 64 KiB; several such buffers are on the stack
constexpr int64_t MAX_HS = 1024;
constexpr float INF = std::numeric_limits<float>::infinity();

// Tiles of large heads are narrower, so that the buffers stay on the stack.
int64_t tile_size(int64_t HS) {
    return HS * MAX_TILE <= TILE_FLOATS ? MAX_TILE : LANES;
}

// The keys that the queries of a sequence see: query i sees the keys i + first … i + last that exist. On a side without
// a limit, first or last lies beyond all keys.
struct Band {
    int64_t first, last;

    int64_t begin(int64_t i) const { return std::max<int64_t>(i + first, 0); }
    int64_t end(int64_t i, int64_t klen) const { return std::clamp<int64_t>(i + last + 1, 0, klen); }
};

Band band_of(const AttentionSequences& sequences, int64_t qlen, int64_t klen) {
    const int64_t offset = klen - qlen, w = sequences.window;
    const int64_t beyond = qlen + klen + MAX_TILE;  // beyond all keys for lanes without a query too
    return {w ? offset - w + 1 : -beyond, sequences.causal ? offset : w ? offset + w - 1 : beyond};
}

// The least of origin, origin ± 16, origin ± 32 … that is larger than x.
int64_t step_end(int64_t x, int64_t origin) {
    const int64_t past = (x - origin) % LANES;
    return x + LANES - (past < 0 ? past + LANES : past);
}

// ---------------------------------------------------------------------------------------------------------------------
// Matmuls on the edges of the band

// All bits set in the lanes from `first` on; 0 ≤ first ≤ 16. Masks come from a table and are applied with & and |:
// vector comparisons would not survive in the AVX2 version (see vec_max).
ALWAYS_INLINE ivec16 lanes_from(int64_t first) {
    alignas(64) static constexpr int32_t bits[2 * LANES] = {
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    ivec16 mask;
    std::memcpy(&mask, bits + LANES - first, sizeof(mask));
    return mask;
}

// All bits set in the lanes begin … end − 1; either bound may lie outside the vector.
ALWAYS_INLINE ivec16 lanes_between(int64_t begin, int64_t end) {
    return lanes_from(std::clamp<int64_t>(begin, 0, LANES)) & ~lanes_from(std::clamp<int64_t>(end, 0, LANES));
}

ALWAYS_INLINE vec16 blend(ivec16 mask, vec16 a, vec16 b) {
    return reinterpret_cast<vec16>((reinterpret_cast<ivec16>(a) & mask) | (reinterpret_cast<ivec16>(b) & ~mask));
}

// All bits set in the lanes l that see key j: l + first ≤ j ≤ l + last.
ALWAYS_INLINE ivec16 lanes_seeing(int64_t j, const Band& band) {
    return lanes_between(j - band.last, j - band.first + 1);
}

// Oᵀ [HS, 16] += Vᵀ·Pᵀ for a block that an edge of the band crosses: a lane takes those of the keys 0 … keys − 1 whose
// bits in seen [keys, 16] are set.
template <typename V, int R>
ALWAYS_INLINE void masked_AtB_block(float* ot, int64_t ldo, const float* v, int64_t ldv, const float* p, int64_t ldp,
                                    int64_t keys, const int32_t* seen) {
    for (int64_t lane = 0; lane < LANES; lane += WIDTH<V>) {
        V sum[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sum[r] = load<V>(ot + r * ldo + lane);
        for (int64_t k = 0; k < keys; k++) {
            decltype(V{} == V{}) mask;
            std::memcpy(&mask, seen + k * LANES + lane, sizeof(mask));
            const V row = load<V>(p + k * ldp + lane);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                int32_t bits;
                std::memcpy(&bits, v + k * ldv + r, sizeof(bits));
                sum[r] += reinterpret_cast<V>(bits & mask) * row;
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) store(ot + r * ldo + lane, sum[r]);
    }
}

template <typename V>
ALWAYS_INLINE void masked_AtB(float* ot, int64_t ldo, const float* v, int64_t ldv, const float* p, int64_t ldp,
                              int64_t HS, int64_t keys, const Band& band) {
    alignas(64) int32_t seen[LANES * LANES];
    for (int64_t k = 0; k < keys; k++) {
        const ivec16 mask = lanes_seeing(k, band);
        std::memcpy(seen + k * LANES, &mask, sizeof(mask));
    }
    int64_t c = 0;
    for (; c + 8 <= HS; c += 8) masked_AtB_block<V, 8>(ot + c * ldo, ldo, v + c, ldv, p, ldp, keys, seen);
    for (; c < HS; c++) masked_AtB_block<V, 1>(ot + c * ldo, ldo, v + c, ldv, p, ldp, keys, seen);
}

WITH_AVX512 void masked_AtB_avx512(float* ot, int64_t ldo, const float* v, int64_t ldv, const float* p, int64_t ldp,
                                   int64_t HS, int64_t keys, const Band& band) {
    masked_AtB<vec16>(ot, ldo, v, ldv, p, ldp, HS, keys, band);
}

void masked_tile_AtB(float* ot, int64_t ldo, const float* v, int64_t ldv, const float* p, int64_t ldp, int64_t HS,
                     int64_t keys, const Band& band) {
    if (has_avx512())
        masked_AtB_avx512(ot, ldo, v, ldv, p, ldp, HS, keys, band);
    else
        masked_AtB<vec8>(ot, ldo, v, ldv, p, ldp, HS, keys, band);
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

// Online softmax of 16 queries over n more keys: s [n, 16] becomes exp(s − max), and the sums of the previous maximum
// are rescaled. Lane l sees row r if l + band.first ≤ r ≤ l + band.last.
MULTIARCH void softmax_lanes(float* s, int64_t n, const Band& band, float* max, float* sum, float* ot, int64_t ldo,
                             int64_t HS) {
    const int64_t whole_begin = LANES - 1 + band.first, whole_end = band.last + 1;  // the rows that all lanes see
    for (int64_t r = 0; r < n; r++) {
        if (r >= whole_begin && r < whole_end) continue;
        vec_store(s + r * MAX_TILE, blend(lanes_seeing(r, band), vec_load(s + r * MAX_TILE), vec_set(-INF)));
    }
    const vec16 old = vec_load(max);
    vec16 m = old;
    for (int64_t r = 0; r < n; r++) m = vec_max(m, vec_load(s + r * MAX_TILE));
    const vec16 base = vec_max(vec_set(-FLT_MAX), m);  // −∞ − −∞ would be NaN in a lane that has seen no key yet
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

// The keys or values of one head of a sequence: one row after another, or in pages.
struct KeyRows : HeadRows {  // of key 0; with pages, of the cache's first row
    const int32_t* pages = nullptr;

    float* operator[](int64_t j) const {
        return HeadRows::operator[](pages ? pages[j / KV_PAGE] * KV_PAGE + j % KV_PAGE : j);
    }
};

// Queries of one tile, one in each lane, and their accumulators.
struct ForwardTile {
    alignas(64) float qt[TILE_FLOATS], ot[TILE_FLOATS];  // [HS, queries]: scale·Qᵀ, Oᵀ
    alignas(64) float s[MAX_TILE * MAX_TILE];            // [keys, queries]
    alignas(64) float max[MAX_TILE], sum[MAX_TILE];
};

// Keys j … j + n − 1: all queries of the tile see all of them.
void forward_full(ForwardTile& t, KeyRows k, KeyRows v, int64_t j, int64_t n, int64_t vecs, int64_t HS) {
    const int64_t ld = tile_size(HS);
    const Band all{-MAX_TILE, MAX_TILE};
    tile_AB(t.s, MAX_TILE, k[j], k.stride, t.qt, ld, n, vecs, HS, Into::Overwritten);
    for (int64_t u = 0; u < vecs * LANES; u += LANES)
        softmax_lanes(t.s + u, n, all, t.max + u, t.sum + u, t.ot + u, ld, HS);
    tile_AtB(t.ot, ld, v[j], v.stride, t.s, MAX_TILE, HS, vecs, n, Into::Continued);
}

// Keys begin … end − 1 on an edge of the band, where lane l sees the keys l + band.first … l + band.last.
void forward_edge(ForwardTile& t, KeyRows k, KeyRows v, int64_t begin, int64_t end, const Band& band, int64_t vecs,
                  int64_t HS) {
    const int64_t ld = tile_size(HS);
    // f(j, n, first, last) for the steps of keys: vectors first … last − 1 see at least some of j … j + n − 1.
    auto for_each_step = [&](auto f) {
        for (int64_t j = begin, next; j < end; j = next) {
            next = std::min(step_end(j, band.last), end);
            f(j, next - j, std::max<int64_t>(ceil_div(j - band.last - LANES + 1, LANES), 0),
              std::min(ceil_div(std::max<int64_t>(next - band.first, 0), LANES), vecs));
        }
    };
    for_each_step([&](int64_t j, int64_t n, int64_t first, int64_t last) {
        if (first < last)
            tile_AB(t.s + (j - begin) * MAX_TILE + first * LANES, MAX_TILE, k[j], k.stride, t.qt + first * LANES, ld, n,
                    last - first, HS, Into::Overwritten);
    });
    auto of_vector = [&](int64_t u, int64_t j) {  // the band relative to vector u and key j
        return Band{u * LANES + band.first - j, u * LANES + band.last - j};
    };
    // Limits from … to − 1 to the keys that some lane of vector u sees: the others have no P.
    auto clamp_to_seen = [&](int64_t u, int64_t& from, int64_t& to) {
        from = std::clamp(u * LANES + band.first, from, to);
        to = std::clamp(u * LANES + LANES + band.last, from, to);
    };
    for (int64_t u = 0; u < vecs; u++) {
        int64_t from = begin, to = end;
        clamp_to_seen(u, from, to);
        const int64_t at = u * LANES;
        if (from < to)
            softmax_lanes(t.s + (from - begin) * MAX_TILE + at, to - from, of_vector(u, from), t.max + at, t.sum + at,
                          t.ot + at, ld, HS);
    }
    for_each_step([&](int64_t j, int64_t n, int64_t first, int64_t last) {
        auto whole = [&](int64_t u) {
            const Band b = of_vector(u, j);
            return n - 1 <= b.last && LANES - 1 + b.first <= 0;
        };
        for (int64_t u = first, next; u < last; u = next) {
            for (next = u; next < last && whole(next); next++) continue;
            int64_t from = j, to = j + n;
            if (next == u) clamp_to_seen(u, from, to);
            float* ot = t.ot + u * LANES;
            const float* p = t.s + (from - begin) * MAX_TILE + u * LANES;
            if (next > u) {
                tile_AtB(ot, ld, v[from], v.stride, p, MAX_TILE, HS, next - u, to - from, Into::Continued);
            } else {
                masked_tile_AtB(ot, ld, v[from], v.stride, p, MAX_TILE, HS, to - from, of_vector(u, from));
                next = u + 1;
            }
        }
    });
}

// out [nq, HS] and lse [nq] (or null) of queries i0 … i0 + nq − 1 of one head.
void forward_tile(HeadRows out, float* lse, HeadRows q, KeyRows k, KeyRows v, int64_t i0, int64_t nq, int64_t klen,
                  const Band& band, int64_t HS, float scale) {
    ForwardTile t;
    float *ot = t.ot, *max = t.max, *sum = t.sum;
    const int64_t ld = tile_size(HS), vecs = ceil_div(nq, LANES);
    pack_lanes(t.qt, ld, q[i0], q.stride, nq, HS, scale);
    std::fill(ot, ot + HS * ld, 0.0f);
    std::fill(max, max + MAX_TILE, -INF);
    std::fill(sum, sum + MAX_TILE, 0.0f);

    // All queries see the keys full_begin … full_end − 1.
    const int64_t end = band.end(i0 + nq - 1, klen), full_begin = band.begin(i0 + nq - 1),
                  full_end = band.end(i0, klen);
    static_assert(KV_PAGE % MAX_TILE == 0, "a block of keys lies in one page");
    for (int64_t j = band.begin(i0), next; j < end; j = next) {
        next = std::min((j / MAX_TILE + 1) * MAX_TILE, end);
        if (j >= full_begin && next <= full_end)
            forward_full(t, k, v, j, next - j, vecs, HS);
        else
            forward_edge(t, k, v, j, next, {i0 + band.first, i0 + band.last}, vecs, HS);
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

// Keys of one tile, their accumulators, and the current queries. p, ds: [queries, keys].
struct BackwardTile {
    alignas(64) float kt[TILE_FLOATS], vt[TILE_FLOATS];                    // [HS, keys]: scale·Kᵀ, Vᵀ
    alignas(64) float k[TILE_FLOATS], dk[TILE_FLOATS], dv[TILE_FLOATS];    // [keys, round16(HS)]; k is scaled
    alignas(64) float q[TILE_FLOATS], dout[TILE_FLOATS], dq[TILE_FLOATS];  // [queries, round16(HS)]
    alignas(64) float p[MAX_TILE * MAX_TILE], ds[MAX_TILE * MAX_TILE];
};

// One query head of one sequence.
struct BackwardHead {
    HeadRows q, dout, dq;
    const float *lse, *delta;
};

struct BackwardShape {
    int64_t HS;
    Band band;
    float scale;
    bool want_dq, want_dkv;
};

void load_keys(BackwardTile& t, HeadRows k, HeadRows v, int64_t j0, int64_t nk, const BackwardShape& shape) {
    const int64_t ld = tile_size(shape.HS);
    pack_lanes(t.kt, ld, k[j0], k.stride, nk, shape.HS, shape.scale);
    pack_lanes(t.vt, ld, v[j0], v.stride, nk, shape.HS, 1);
    if (shape.want_dq) pack_rows(t.k, k[j0], k.stride, nk, shape.HS, shape.scale);
}

// S in p becomes P = exp(S − lse), dP in ds becomes dS = P·(dP − delta): one query and vecs·16 keys, of which it sees
// begin … end − 1.
MULTIARCH void softmax_gradient(float* p, float* ds, int64_t vecs, float lse, float delta, int64_t begin, int64_t end) {
    for (int64_t v = 0; v < vecs; v++) {
        vec16 x = vec_exp(vec_load(p + v * LANES) - lse);
        vec16 g = x * (vec_load(ds + v * LANES) - delta);
        if (begin > v * LANES || end < (v + 1) * LANES) {
            const ivec16 seen = lanes_between(begin - v * LANES, end - v * LANES);
            x = blend(seen, x, vec16{});
            g = blend(seen, g, vec16{});
        }
        vec_store(p + v * LANES, x);
        vec_store(ds + v * LANES, g);
    }
}

void add_query_gradient(HeadRows dq, int64_t i0, const float* tile, int64_t n, int64_t HS) {
    const int64_t padded = ceil_div(HS, LANES) * LANES;
    for (int64_t i = 0; i < n; i++) {
        float* row = dq[i0 + i];
        for (int64_t c = 0; c < HS; c++) row[c] += tile[i * padded + c];
    }
}

// Queries i0 … i0 + n − 1: all of them see all nk keys of the tile.
void backward_full(BackwardTile& t, const BackwardHead& head, int64_t i0, int64_t n, int64_t nk,
                   const BackwardShape& shape) {
    const int64_t HS = shape.HS, ld = tile_size(HS), columns = ceil_div(HS, LANES), width = columns * LANES;
    const int64_t vecs = ceil_div(nk, LANES);
    pack_rows(t.q, head.q[i0], head.q.stride, n, HS, 1);
    pack_rows(t.dout, head.dout[i0], head.dout.stride, n, HS, 1);
    tile_AB(t.p, MAX_TILE, t.q, width, t.kt, ld, n, vecs, HS, Into::Overwritten);
    tile_AB(t.ds, MAX_TILE, t.dout, width, t.vt, ld, n, vecs, HS, Into::Overwritten);
    for (int64_t i = 0; i < n; i++) {
        softmax_gradient(t.p + i * MAX_TILE, t.ds + i * MAX_TILE, vecs, head.lse[i0 + i], head.delta[i0 + i], 0,
                         vecs * LANES);
    }
    if (shape.want_dkv) {
        tile_AtB(t.dv, width, t.p, MAX_TILE, t.dout, width, nk, columns, n, Into::Continued);
        tile_AtB(t.dk, width, t.ds, MAX_TILE, t.q, width, nk, columns, n, Into::Continued);
    }
    if (shape.want_dq) {
        tile_AB(t.dq, width, t.ds, MAX_TILE, t.k, width, n, columns, nk, Into::Overwritten);
        add_query_gradient(head.dq, i0, t.dq, n, HS);
    }
}

// Queries begin … end − 1 on an edge of the band: query i sees the keys i + band.first … i + band.last of the nk in the
// tile, at least one.
void backward_edge(BackwardTile& t, const BackwardHead& head, int64_t begin, int64_t end, const Band& band, int64_t nk,
                   const BackwardShape& shape) {
    const int64_t HS = shape.HS, ld = tile_size(HS), columns = ceil_div(HS, LANES), width = columns * LANES;
    const int64_t n = end - begin;
    pack_rows(t.q, head.q[begin], head.q.stride, n, HS, 1);
    pack_rows(t.dout, head.dout[begin], head.dout.stride, n, HS, 1);
    auto first_key = [&](int64_t r) { return band.begin(begin + r); };
    auto key_end = [&](int64_t r) { return band.end(begin + r, nk); };
    // f(row, rows) for the steps of queries, counted from `begin`.
    auto for_each_step = [&](auto f) {
        for (int64_t r = 0, next; r < n; r = next) {
            next = std::min(step_end(begin + r, -band.last) - begin, n);
            f(r, next - r);
        }
    };
    for_each_step([&](int64_t row, int64_t rows) {
        const int64_t key = first_key(row) / LANES * LANES, vecs = ceil_div(key_end(row + rows - 1) - key, LANES);
        float *p = t.p + row * MAX_TILE + key, *ds = t.ds + row * MAX_TILE + key;
        tile_AB(p, MAX_TILE, t.q + row * width, width, t.kt + key, ld, rows, vecs, HS, Into::Overwritten);
        tile_AB(ds, MAX_TILE, t.dout + row * width, width, t.vt + key, ld, rows, vecs, HS, Into::Overwritten);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t i = begin + row + r;
            softmax_gradient(p + r * MAX_TILE, ds + r * MAX_TILE, vecs, head.lse[i], head.delta[i],
                             first_key(row + r) - key, key_end(row + r) - key);
        }
    });
    // Adds the terms of queries [from, to) to dk and dv of the keys from `key` on.
    auto add_to_keys = [&](int64_t key, int64_t keys, int64_t from, int64_t to) {
        if (from >= to) return;
        tile_AtB(t.dv + key * width, width, t.p + from * MAX_TILE + key, MAX_TILE, t.dout + from * width, width, keys,
                 columns, to - from, Into::Continued);
        tile_AtB(t.dk + key * width, width, t.ds + from * MAX_TILE + key, MAX_TILE, t.q + from * width, width, keys,
                 columns, to - from, Into::Continued);
    };
    for (int64_t key = 0; key < nk && shape.want_dkv; key += LANES) {
        // Queries from … to − 1 see all keys of the vector: one matmul. Those before and after them are added key by
        // key.
        const int64_t keys = std::min(LANES, nk - key);
        auto first_query = [&](int64_t j) { return std::clamp<int64_t>(j - band.last - begin, 0, n); };
        auto query_end = [&](int64_t j) { return std::clamp<int64_t>(j - band.first - begin + 1, 0, n); };
        const int64_t from = first_query(key + keys - 1), to = std::max(from, query_end(key));
        for (int64_t j = key; j < key + keys; j++) add_to_keys(j, 1, first_query(j), std::min(from, query_end(j)));
        add_to_keys(key, keys, from, to);
        for (int64_t j = key; j < key + keys; j++) add_to_keys(j, 1, std::max(to, first_query(j)), query_end(j));
    }
    if (!shape.want_dq) return;
    std::fill(t.dq, t.dq + n * width, 0.0f);
    auto add_to_queries = [&](int64_t row, int64_t rows, int64_t from, int64_t to) {
        if (from < to)
            tile_AB(t.dq + row * width, width, t.ds + row * MAX_TILE + from, MAX_TILE, t.k + from * width, width, rows,
                    columns, to - from, Into::Continued);
    };
    for_each_step([&](int64_t row, int64_t rows) {  // likewise: keys that all rows see in one matmul
        const int64_t from = first_key(row + rows - 1), to = std::max(from, key_end(row));
        for (int64_t r = row; r < row + rows; r++) add_to_queries(r, 1, first_key(r), std::min(from, key_end(r)));
        add_to_queries(row, rows, from, to);
        for (int64_t r = row; r < row + rows; r++) add_to_queries(r, 1, std::max(to, first_key(r)), key_end(r));
    });
    add_query_gradient(head.dq, begin, t.dq, n, HS);
}

// Queries begin … end − 1 of one head with one key tile. Every element of dq gets one sum per key tile, in the order of
// the keys, however the queries are split: both schedules of attention_backward give the same bits.
void backward_queries(BackwardTile& t, const BackwardHead& head, int64_t begin, int64_t end, int64_t j0, int64_t nk,
                      const BackwardShape& shape) {
    const Band band{shape.band.first - j0, shape.band.last - j0};  // with key j0 as key 0
    // The queries full_begin … full_end − 1 see all keys; from query full_end on, the window hides key 0.
    const int64_t full_begin = std::clamp(ceil_div(nk, LANES) * LANES - band.last, begin, end);
    const int64_t full_end = std::clamp(1 - band.first, begin, end);
    const int64_t last = std::clamp(nk - band.first, begin, end), tile = tile_size(shape.HS);
    for (int64_t i = std::clamp(-band.last, begin, end), next; i < last; i = next) {
        next = std::min(i + tile, last);
        if (i >= full_begin && i < full_end) {
            next = std::min(next, full_end);
            backward_full(t, head, i, next - i, nk, shape);
        } else {
            if (i < full_begin && full_begin < full_end) next = std::min(next, full_begin);
            backward_edge(t, head, i, next, band, nk, shape);
        }
    }
}

// delta[h, i] = Σ_c dout·out of one token's head.
MULTIARCH float dot(const float* a, const float* b, int64_t n) {
    return vec_dot(a, b, n);
}

// ---------------------------------------------------------------------------------------------------------------------
// Arguments

struct Sizes : AttentionSizes {
    const int32_t *cum_q, *cum_k;
};

Sizes check_sizes(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                  const AttentionSequences& sequences, float scale) {
    Sizes z{check_attention(op, DType::F32, q, k, v, sequences, scale), nullptr, nullptr};
    check_cumulative(op, "cum_q", sequences.cum_q, z.Nq, sequences.max_q);
    check_cumulative(op, "cum_k", sequences.cum_k, z.keys, sequences.max_k);
    z.cum_q = sequences.cum_q.as<int32_t>();
    z.cum_k = sequences.cum_k.as<int32_t>();
    for (int64_t s = 0; z.pages.table && s < z.S; s++) {
        const int64_t row = sequences.page_rows.as<int32_t>()[s], rows = sequences.pages.shape[0];
        require(row >= 0 && row < rows, op, ": page_rows[", s, "] is ", row, "; pages has ", rows, " rows");
        const int64_t qlen = z.cum_q[s + 1] - z.cum_q[s], klen = z.cum_k[s + 1] - z.cum_k[s];
        require(klen <= z.pages.columns * KV_PAGE, op, ": sequence ", s, " has ", klen, " keys, more than ",
                z.pages.columns, " pages hold");
        check_page_ids(op, z.pages.of_sequence(row), band_of(sequences, qlen, klen).begin(0), klen, z.pages.pages);
    }
    return z;
}

}  // namespace

int64_t attention_max_head_size() {
    return MAX_HS;
}

void attention_forward(Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, const AttentionSequences& sequences,
                       float scale, Tensor, Stream) {
    const char* op = "attention_forward";
    const Sizes z = check_sizes(op, q, k, v, sequences, scale);
    check_tensor(op, "out", out, DType::F32, {z.Nq, z.NH, z.HS});
    check_tensor(op, "lse", lse, DType::F32, {z.NH, z.Nq}, Given::Optional);

    const int64_t tile = tile_size(z.HS), tiles = ceil_div(sequences.max_q, tile), group = z.NH / z.NKV;
    auto lse_row = [&](int64_t h) { return lse ? lse.as<float>() + h * lse.stride[0] : nullptr; };
#pragma omp parallel for schedule(dynamic)
    for (int64_t task = 0; task < z.S * z.NH * tiles; task++) {
        const int64_t s = task / tiles / z.NH, h = task / tiles % z.NH;
        const int64_t i0 = (tiles - 1 - task % tiles) * tile;  // the last queries see the most keys, so they come first
        const int64_t q0 = z.cum_q[s], k0 = z.cum_k[s], qlen = z.cum_q[s + 1] - q0, klen = z.cum_k[s + 1] - k0;
        if (i0 >= qlen) continue;
        const int32_t* const pages =
            z.pages.table ? z.pages.of_sequence(sequences.page_rows.as<int32_t>()[s]) : nullptr;
        const auto key_rows = [&](const Tensor& t) { return KeyRows{head_rows(t, pages ? 0 : k0, h / group), pages}; };
        forward_tile(head_rows(out, q0, h), lse ? lse_row(h) + q0 + i0 : nullptr, head_rows(q, q0, h), key_rows(k),
                     key_rows(v), i0, std::min(tile, qlen - i0), klen, band_of(sequences, qlen, klen), z.HS, scale);
    }
    for (int64_t h = 0; h < z.NH; h++) {  // tokens after the last sequence
        zero_rows(head_rows(out, 0, h), z.cum_q[z.S], z.Nq, z.HS);
        if (lse) std::fill(lse_row(h) + z.cum_q[z.S], lse_row(h) + z.Nq, -INF);
    }
}

void attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out,
                        Tensor lse, const AttentionSequences& sequences, float scale, Tensor scratch, Stream, bool,
                        const AttentionGradientSums& sums) {
    const char* op = "attention_backward";
    const Sizes z = check_sizes(op, q, k, v, sequences, scale);
    require(!z.pages.table, op, ": keys in pages have no gradient");
    require(!sums.dq && !sums.dkv, op, ": sums of the gradients are not computed here (attention.h)");
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
    // dk and dv of one tile of keys, from all query heads that share them, and with want_dq its terms of dq.
    auto key_tile = [&](BackwardTile& t, int64_t s, int64_t kv, int64_t j0, bool want_dq) {
        const int64_t nk = std::min(tile, klen(s) - j0), width = ceil_div(z.HS, LANES) * LANES;
        const BackwardShape shape{z.HS, band_of(sequences, qlen(s), klen(s)), scale, want_dq, true};
        load_keys(t, head_rows(k, z.cum_k[s], kv), head_rows(v, z.cum_k[s], kv), j0, nk, shape);
        std::fill(t.dk, t.dk + nk * width, 0.0f);
        std::fill(t.dv, t.dv + nk * width, 0.0f);
        for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
            backward_queries(t, head(s, h), 0, qlen(s), j0, nk, shape);
        }
        const HeadRows dk_rows = head_rows(dk, z.cum_k[s], kv), dv_rows = head_rows(dv, z.cum_k[s], kv);
        for (int64_t j = 0; j < nk; j++) {
            for (int64_t c = 0; c < z.HS; c++) {
                dk_rows[j0 + j][c] = t.dk[j * width + c] * scale;
                dv_rows[j0 + j][c] = t.dv[j * width + c];
            }
        }
    };

    // One task for each sequence and KV head takes five matmuls per tile. If these tasks do not fill the threads, dq is
    // computed in a pass of its own over tiles of queries: seven matmuls, but as many tasks as tiles.
    const int64_t tasks = z.S * z.NKV, threads = omp_get_max_threads();
    if (5 * ceil_div(tasks, threads) * threads <= 7 * tasks) {
#pragma omp parallel for schedule(dynamic)
        for (int64_t task = 0; task < tasks; task++) {
            BackwardTile t;
            const int64_t s = task / z.NKV, kv = task % z.NKV;
            for (int64_t h = kv * group; h < (kv + 1) * group; h++) zero_rows(head(s, h).dq, 0, qlen(s), z.HS);
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
                if (begin >= end) continue;
                const BackwardShape shape{z.HS, band_of(sequences, qlen(s), klen(s)), scale, true, false};
                zero_rows(head(s, h).dq, begin, end, z.HS);
                for (int64_t j0 = shape.band.begin(begin) / tile * tile; j0 < shape.band.end(end - 1, klen(s));
                     j0 += tile) {
                    const int64_t nk = std::min(tile, klen(s) - j0);
                    load_keys(t, head_rows(k, z.cum_k[s], h / group), head_rows(v, z.cum_k[s], h / group), j0, nk,
                              shape);
                    backward_queries(t, head(s, h), begin, end, j0, nk, shape);
                }
            }
        }
    }

    // Tokens after the last sequence.
    for (int64_t h = 0; h < z.NH; h++) zero_rows(head_rows(dq, 0, h), z.cum_q[z.S], z.Nq, z.HS);
    for (int64_t kv = 0; kv < z.NKV; kv++) {
        zero_rows(head_rows(dk, 0, kv), z.cum_k[z.S], z.Nk, z.HS);
        zero_rows(head_rows(dv, 0, kv), z.cum_k[z.S], z.Nk, z.HS);
    }
}

// GEMV of packed and of NF4 weights: 1 to 8 rows of inp, 16-bit elements, mma.sync. The time is that of reading the
// weights once, 8 or 4 bits each.
//
// Warps compute tiles of 16 outputs (with SwiGLU 8 of gate and their 8 of up), the rows of an mma; the rows of inp are
// its 8 columns. The tensor cores add up what the GEMV of weights in T leaves to the lanes, and the lanes convert codes
// (packed_codes.cuh). As there, several warps share a tile where there are too few, a block starts by loading its first
// weights before it waits for the previous kernel, and every sum has one order, which follows from C and OC alone:
// groups of 32 in order, the splits in order.
//
//   bf16 by      registers: 1 row   2 to 8 rows   in flight a lane                shared memory (8 rows)
//   fp8          119                86            64 B of codes                   4.5 KiB + 16·C B
//   int8         115                116           64 B of codes, 16 B of scales   4.5 KiB + 16·C B
//   int4         110                117           64 B of codes, 32 B of scales   4.5 KiB + 16·C B
//   NF4          128                111           32 B of codes, 20 B of scales   6.5 KiB + 16·C B
//
// (sm_90a, CUDA 13.0; 256 threads, two blocks an SM.)
//
// LLaMA 1B, gate and up at N = 1: OC = 16384 are 1024 tiles of 16, a warp each: 128 blocks of eight, which is fewer
// than two for each of an H100's 132 SMs, so two warps share a tile.
#include <array>

#include "kernels/cuda/mlp_activation.cuh"
#include "kernels/cuda/packed_codes.cuh"
#include "kernels/cuda/pdl.cuh"
#include "kernels/generation/linear_gemv_rows.cuh"
#include "kernels/nf4.h"
#include "kernels/nf4_values.h"

namespace {

using namespace gemv_rows;

constexpr int TILE = 16;      // outputs of a tile
constexpr int MAX_PARTS = 4;  // matrices of an NF4 weight: q, k and v, or gate and up

template <typename T>
struct TileParams : LinearParams<T> {
    int64_t tiles;
    int splits;  // of C
};

// The codes of a lane's two rows of weight: rows g and g + 8 of a tile. A chunk is the columns that are loaded
// together.
template <Packing P, typename T>
struct PackedRows {
    static constexpr int GROUPS = 128 / group_bytes(P);  // of a chunk
    static constexpr bool SCALES_ROWS = P == Packing::Fp8;
    struct Weights {
        const uint8_t* rows;
        int64_t row_bytes, code_bytes;
    };
    struct Tables {};

    const uint8_t* row[2];
    int64_t code_bytes;
    uint32_t word[GROUPS][2][LANE_WORDS];
    uint32_t scales[2][GROUPS / 2];

    __device__ __forceinline__ static void fill(Tables&, const Weights&) {}
    __device__ __forceinline__ void select(const Weights& w, int64_t o0, int64_t o1) {
        row[0] = w.rows + o0 * w.row_bytes;
        row[1] = w.rows + o1 * w.row_bytes;
        code_bytes = w.code_bytes;
    }
    // Of the scales a row has whole vectors, of which the last may be padded.
    __device__ __forceinline__ void load(int64_t chunk, int64_t groups, int t) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const char* const codes = reinterpret_cast<const char*>(row[r]) + group_bytes(P) / 4 * t;
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
                if (chunk * GROUPS + g < groups)
                    load_codes<P>(word[g][r], codes + (chunk * GROUPS + g) * group_bytes(P));
            if constexpr (!SCALES_ROWS) {
                using Vector = Pack<uint32_t, GROUPS / 2>;
                const Vector v = *reinterpret_cast<const Vector*>(row[r] + code_bytes + chunk * int(sizeof(Vector)));
#pragma unroll
                for (int i = 0; i < GROUPS / 2; i++) scales[r][i] = v.word[i];
            }
        }
    }
    __device__ __forceinline__ void pairs(uint32_t (&pair)[4], int g, int r, const Tables&) const {
        code_pairs<P, T>(pair, word[g][r]);
    }
    __device__ __forceinline__ float scale(int g, int r, const Tables&) const {
        return as_float(fp16{uint16_t(scales[r][g / 2] >> 16 * (g % 2))});
    }
    __device__ __forceinline__ float row_scale(int r) const {
        return *reinterpret_cast<const float*>(row[r] + code_bytes);
    }
    __device__ __forceinline__ static void activations(uint32_t (&pair)[4], const T* x, int t) {
        activation_pairs<P>(pair, x, t);
    }
};

// The same for NF4: a chunk is two blocks of 64.
template <typename T>
struct Nf4Rows {
    static constexpr int GROUPS = 4, BLOCKS = 2;
    static constexpr bool SCALES_ROWS = false;
    struct Part {
        const uint8_t *codes, *absmax_codes;
        const float *group_absmax, *mean;
        int64_t first_row;
    };
    struct Weights {
        Part part[MAX_PARTS];
        int parts;
        int64_t C;
        float values[16], absmax[256];
    };
    struct Tables {
        uint32_t pairs[256];  // of values, for each byte of codes
        float absmax[256];
    };

    const uint8_t *codes[2], *absmax_codes[2];
    const float* group_absmax[2];
    int64_t first_block[2];
    float mean[2];
    uint32_t word[GROUPS][2];
    uint8_t code_of_absmax[2][BLOCKS];
    float factor[2][BLOCKS];

    __device__ __forceinline__ static void fill(Tables& tables, const Weights& w) {
        static_assert(THREADS == 256);
        tables.pairs[threadIdx.x] = pack_two<T>(w.values[threadIdx.x >> 4], w.values[threadIdx.x & 15]);
        tables.absmax[threadIdx.x] = w.absmax[threadIdx.x];
        __syncthreads();
    }
    __device__ __forceinline__ void select(const Weights& w, int64_t o0, int64_t o1) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int i = 0;
            while (i + 1 < w.parts && (r ? o1 : o0) >= w.part[i + 1].first_row) i++;
            const Part& part = w.part[i];
            const int64_t o = (r ? o1 : o0) - part.first_row;
            first_block[r] = o * w.C / NF4_BLOCK;
            codes[r] = part.codes + o * w.C / 2;
            absmax_codes[r] = part.absmax_codes;
            group_absmax[r] = part.group_absmax;
            mean[r] = *part.mean;
        }
    }
    __device__ __forceinline__ void load(int64_t chunk, int64_t groups, int t) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
                if (chunk * GROUPS + g < groups)
                    word[g][r] = *reinterpret_cast<const uint32_t*>(codes[r] +
                                                                    (chunk * GROUPS + g) * (PACKED_GROUP / 2) + 4 * t);
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) {
                if ((chunk * BLOCKS + b) * 2 >= groups) continue;
                const int64_t block = first_block[r] + chunk * BLOCKS + b;
                code_of_absmax[r][b] = absmax_codes[r][block];
                factor[r][b] = group_absmax[r][block / NF4_GROUP];
            }
        }
    }
    __device__ __forceinline__ void pairs(uint32_t (&pair)[4], int g, int r, const Tables& tables) const {
#pragma unroll
        for (int i = 0; i < 4; i++) pair[i] = tables.pairs[word[g][r] >> 8 * i & 0xff];
    }
    __device__ __forceinline__ float scale(int g, int r, const Tables& tables) const {
        return fmaf(tables.absmax[code_of_absmax[r][g / 2]], factor[r][g / 2], mean[r]);
    }
    __device__ __forceinline__ float row_scale(int) const {
        return 1;
    }
    __device__ __forceinline__ static void activations(uint32_t (&pair)[4], const T* x, int t) {
        activation_pairs<Packing::Int8>(pair, x, t);  // eight columns, too
    }
};

// Adds a chunk to c [rows g and g + 8, columns 2t and 2t + 1]. x: the lane's row of inp.
template <typename Rows, typename T>
__device__ __forceinline__ void multiply_chunk(float (&c)[4], const Rows& rows, const typename Rows::Tables& tables,
                                               const T* x, int64_t first_group, int64_t groups, int t) {
#pragma unroll
    for (int g = 0; g < Rows::GROUPS; g++) {
        if (first_group + g >= groups) break;
        uint32_t upper[4], lower[4], b[4];
        rows.pairs(upper, g, 0, tables);
        rows.pairs(lower, g, 1, tables);
        Rows::activations(b, x + (first_group + g) * PACKED_GROUP, t);
        float y[4] = {};
        if (Rows::SCALES_ROWS)
#pragma unroll
            for (int k = 0; k < 4; k++) y[k] = c[k];
#pragma unroll
        for (int k = 0; k < 4; k += 2)
            mma_m16n8k16<T>(y, {upper[k], lower[k], upper[k + 1], lower[k + 1]}, b[k], b[k + 1]);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float scale = Rows::SCALES_ROWS ? 1.0f : rows.scale(g, r, tables);
#pragma unroll
            for (int k = 2 * r; k < 2 * r + 2; k++) c[k] = Rows::SCALES_ROWS ? y[k] : fmaf(scale, y[k], c[k]);
        }
    }
}

template <int NB, typename Rows, typename T>
__global__ void __launch_bounds__(THREADS, 2)
    packed_gemv_kernel(const TileParams<T> p, const __grid_constant__ typename Rows::Weights weights) {
    extern __shared__ uint4 shared[];
    __shared__ float partial[WARPS][NB][TILE + 1];
    __shared__ typename Rows::Tables tables;
    T* const x = reinterpret_cast<T*>(shared);  // [NB, C]
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const int teams = WARPS / p.splits, team = warp / p.splits, split = warp % p.splits;
    const bool gated = is_gated(p.activation);
    const int outputs = gated ? TILE / 2 : TILE;
    const int64_t groups = p.C / PACKED_GROUP, chunks = ceil_div(groups, Rows::GROUPS);
    pdl_launch_dependents();
    Rows::fill(tables, weights);

    bool rows_loaded = false;
    for (int64_t base = int64_t(blockIdx.x) * teams; base < p.tiles; base += int64_t(gridDim.x) * teams) {
        const int64_t first = min(base + team, p.tiles - 1) * outputs;  // output
        const int64_t o0 = min(first + g, p.columns - 1);
        const int64_t o1 = gated ? p.columns + o0 : min(first + g + TILE / 2, p.columns - 1);
        Rows next;
        next.select(weights, o0, o1);
        if (split < chunks) next.load(split, groups, t);
        if (p.bias && t == 0) {
            prefetch_line(p.bias + o0);
            prefetch_line(p.bias + o1);
        }
        if (!rows_loaded) {
            prefetch_vector<THREADS>(p.norm_weight, p.C);
            prefetch_vector<THREADS>(p.norm_bias, p.C);
            pdl_wait();
            load_rows<FULL_WIDTH<T>, NB>(x, p);
            __syncthreads();
            rows_loaded = true;
        }
        float c[4] = {};
        const T* const in = x + min(g, p.N - 1) * p.C;
        for (int64_t chunk = split; chunk < chunks; chunk += p.splits) {
            const Rows rows = next;
            if (chunk + p.splits < chunks) next.load(chunk + p.splits, groups, t);
            multiply_chunk(c, rows, tables, in, chunk * Rows::GROUPS, groups, t);
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float scale = Rows::SCALES_ROWS ? next.row_scale(k / 2) : 1.0f;
            if (2 * t + k % 2 < NB) partial[warp][2 * t + k % 2][g + k / 2 * 8] = c[k] * scale;
        }
        // A warp that does not share its tile need not wait for the others.
        const auto sync = [&] { p.splits > 1 ? __syncthreads() : __syncwarp(); };
        sync();
        const int count = split == 0 && base + team < p.tiles ? outputs * p.N : 0;
        for (int i = lane; i < count; i += WARP) {
            const int n = i / outputs, r = i % outputs;
            const int64_t o = first + r;
            if (o >= p.columns) continue;
            float y = p.bias ? as_float(p.bias[o]) : 0.0f,
                  up = gated && p.bias ? as_float(p.bias[p.columns + o]) : 0.0f;
            for (int s = 0; s < p.splits; s++) {
                y += partial[warp + s][n][r];
                if (gated) up += partial[warp + s][n][r + TILE / 2];
            }
            y = gated ? activate(p.activation, y, up) : activate(p.activation, y);
            if (p.residual) y += as_float(p.residual[n * p.residual_stride + o]);
            p.out[n * p.out_stride + o] = from_float<T>(y);
        }
        sync();  // partial is written again
    }
}

// The least power of two of splits that gives two blocks for every SM, but no more than there are chunks in a row.
int splits_of(int64_t tiles, int64_t chunks) {
    int splits = 1;
    while (splits < WARPS && ceil_div(tiles, WARPS / splits) < 2 * num_sms() && splits < chunks) splits *= 2;
    return splits;
}

template <typename Rows, typename T>
bool launch_gemv(const char* op, const LinearParams<T>& layer, const typename Rows::Weights& weights, Stream stream) {
    const int64_t step = rows_per_launch(layer.C, dtype_of<T>());
    if (!layer.aligned || step == 0 || layer.C % PACKED_GROUP) return false;
    TileParams<T> p{layer, 0, 0};
    p.tiles = ceil_div(p.columns, is_gated(p.activation) ? TILE / 2 : TILE);
    p.splits = splits_of(p.tiles, ceil_div(p.C / PACKED_GROUP, Rows::GROUPS));
    const int64_t blocks = std::min(ceil_div(p.tiles, WARPS / p.splits), 8 * num_sms());
    for (int64_t n = 0; n < layer.N; n += step) {
        p.N = int(std::min(step, layer.N - n));
        const size_t bytes = size_t(p.N) * size_t(p.C) * sizeof(T);
        const auto kernel = p.N == 1 ? packed_gemv_kernel<1, Rows, T> : packed_gemv_kernel<8, Rows, T>;
        request_shared_bytes(op, kernel, bytes);
        launch_pdl(op, kernel, grid_of(blocks), THREADS, bytes, stream, p, weights);
        p.inp += step * p.inp_stride;
        p.out += step * p.out_stride;
        if (p.residual) p.residual += step * p.residual_stride;
    }
    return true;
}

}  // namespace

template <typename T>
bool linear_packed_gemv(const char* op, const LinearParams<T>& p, const PackedWeight& weight, Stream stream) {
    if (!rows_aligned({weight.rows})) return false;
    bool done = false;
    dispatch_packing(weight.packing, [&](auto packing) {
        using Rows = PackedRows<decltype(packing)::value, T>;
        done = launch_gemv<Rows>(op, p,
                                 {weight.rows.as<const uint8_t>(), packed_row_bytes(weight.packing, p.C),
                                  packed_code_bytes(weight.packing, p.C)},
                                 stream);
    });
    return done;
}

template <typename T>
bool linear_nf4_gemv(const char* op, const LinearParams<T>& p, const Nf4Matrix& weight, Stream stream) {
    if (p.C % NF4_BLOCK || weight.parts.size() > MAX_PARTS) return false;
    typename Nf4Rows<T>::Weights w{};
    w.C = p.C;
    for (const Nf4Matrix::Part& part : weight.parts) {
        const Nf4Weights& q = part.weights;
        if (!start_aligned(q.codes)) return false;
        w.part[w.parts++] = {q.codes.as<const uint8_t>(), q.absmax_codes.as<const uint8_t>(),
                             q.group_absmax.as<const float>(), q.mean.as<const float>(), part.row};
    }
    static const std::array<float, 256> absmax = nf4_absmax_values();
    std::copy(std::begin(NF4_VALUES), std::end(NF4_VALUES), w.values);
    std::copy(absmax.begin(), absmax.end(), w.absmax);
    return launch_gemv<Nf4Rows<T>>(op, p, w, stream);
}

template bool linear_packed_gemv(const char*, const LinearParams<bf16>&, const PackedWeight&, Stream);
template bool linear_packed_gemv(const char*, const LinearParams<fp16>&, const PackedWeight&, Stream);
template bool linear_nf4_gemv(const char*, const LinearParams<bf16>&, const Nf4Matrix&, Stream);
template bool linear_nf4_gemv(const char*, const LinearParams<fp16>&, const Nf4Matrix&, Stream);

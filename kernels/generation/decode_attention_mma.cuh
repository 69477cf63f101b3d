// Attention of one token over one KV split on tensor cores, for 16-bit dtypes. Each warp streams its own keys and
// values through shared memory and keeps their maximum, sum and Σ p·v in registers (FlashAttention-2, Dao 2023), so
// that it waits for memory alone until the split is done.
//
// The query heads that read a KV head are rows of the left operand of mma.sync. Reading the cache takes far longer than
// the mma instructions, so there are rows to spare: 8 of the 16 hold q rounded to T and 8 hold the rounding error;
// likewise for p. A lane has both sums of a head and adds them, so that q and p have 16 bits of mantissa (fp16: 22).
#pragma once

#include "kernels/cuda/warp_tile.cuh"
#include "kernels/generation/paged_keys.cuh"

constexpr int MMA_HEADS = 8;       // query heads of a block
constexpr int MMA_TILE_KEYS = 16;  // keys of a tile

// KV splits of a context and keys of a split. Up to MMA_UNSPLIT_KEYS keys there is one split, because combining two
// would cost more. Longer contexts have splits of 256 keys, or longer ones where that would give more than
// MMA_MAX_SPLITS. Both are functions of the length of the sequence alone, and so are the bits of the result.
// 1,024 keys: 4 splits of 256; 32,768 keys: 32 splits of 1,024.
constexpr unsigned MMA_MAX_SPLITS = 32, MMA_UNSPLIT_KEYS = 512;
__host__ __device__ inline unsigned mma_splits(unsigned length) {
    const unsigned wanted = length <= MMA_UNSPLIT_KEYS ? 1 : (length + 255) / 256;
    return wanted < MMA_MAX_SPLITS ? wanted : MMA_MAX_SPLITS;
}
__host__ __device__ inline unsigned mma_split_keys(unsigned length) {
    constexpr unsigned GRANULE = 64;
    const unsigned splits = mma_splits(length);
    return (length + splits * GRANULE - 1) / (splits * GRANULE) * GRANULE;
}

// The keys and values that a block reads: one KV head of one split. The newest key and value may not be in the cache
// yet; then they are read from shared memory.
template <typename T>
struct KvSplit {
    PagedKeys<T> k;
    const T* v;                // of the KV head in the cache's first row
    int HS, keys, cached;      // HS a multiple of 8; cached: keys or keys − 1
    const T *last_k, *last_v;  // [HS], in shared memory: the newest, if it is not cached
};

// D ≥ HS, a multiple of 32. Each warp has STAGES tiles in flight at a time.
template <typename T, int D, int STAGES, int WARPS>
class MmaSplit {
  public:
    static constexpr int64_t BYTES = int64_t(WARPS) * STAGES * 2 * MMA_TILE_KEYS * PITCH<T, D> * int64_t(sizeof(T));

    // memory: BYTES, shared by the block. Starts the loads of the first tiles.
    __device__ __forceinline__ MmaSplit(char* memory, const KvSplit<T>& split)
        : s(split),
          warp(int(threadIdx.x) / WARP),
          tiles((split.keys + MMA_TILE_KEYS - 1) / MMA_TILE_KEYS),
          ring(memory + warp * (BYTES / WARPS)) {
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) fetch(stage, warp + stage * WARPS);
    }

    // q: [2·heads, D] in shared memory, rows PITCH apart: first the rounded heads, scaled so that scores are in units
    // of ln 2, then their rounding errors. Ends with a barrier; after it weights() and sum() are valid for these heads.
    __device__ __forceinline__ void run(const T* q, int heads) {
        // Rows beyond the last head repeat it; their sums are not used.
        const int lane = lane_id(), row = min(lane % MMA_HEADS, heads - 1) + (lane & MMA_HEADS ? heads : 0);
        uint32_t queries[D / 16][4];
#pragma unroll
        for (int k = 0; k < D / 16; k++)
            ldmatrix_x4(queries[k], shared_address(q + row * PITCH<T, D> + lane / 16 * 8 + k * 16));
        float max = -INFINITY, sum = 0, o[1][D / 8][4] = {};
        int stage = 0;
#pragma unroll 1
        for (int tile = warp; tile < tiles; tile += WARPS) {
            cp_async_wait<STAGES - 1>();
            __syncwarp();
            if (tile * MMA_TILE_KEYS + MMA_TILE_KEYS > s.cached) insert_newest(stage, s.cached - tile * MMA_TILE_KEYS);
            float S[1][MMA_TILE_KEYS / 8][4] = {};
            score(S[0], queries, keys(stage));
            softmax(S, s.keys - tile * MMA_TILE_KEYS, max, sum, o);
            mma_AB<T, D>(o, S, values(stage));
            __syncwarp();
            fetch(stage, tile + STAGES * WARPS);
            stage = stage + 1 < STAGES ? stage + 1 : 0;
        }
        // The results go to the warp's own ring, which is empty now.
        sum = row_sum(sum);
        const int g = lane / 4, t = lane % 4;
        WarpResult& result = result_of(warp);
        if (t == 0) {
            result.maxima[g] = max;
            result.totals[g] = sum;
        }
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            *reinterpret_cast<float2*>(&result.sums[g][n * 8 + t * 2]) = {o[0][n][0] + o[0][n][2],
                                                                          o[0][n][1] + o[0][n][3]};
        __syncthreads();
    }

    // Over the keys of the block: the maximum M of the scores of head h, Σ exp(S − M), and the weight of each warp's
    // sums in sum(), which is Σ exp(S − M)·v[c].
    struct WarpWeights {
        float max, total, of_warp[WARPS];
    };
    __device__ __forceinline__ WarpWeights weights(int h) const {
        WarpWeights w;
        w.max = result_of(0).maxima[h];
        w.total = 0;
#pragma unroll
        for (int i = 1; i < WARPS; i++) w.max = fmaxf(w.max, result_of(i).maxima[h]);
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            w.of_warp[i] = exp2_fast(result_of(i).maxima[h] - w.max);
            w.total += w.of_warp[i] * result_of(i).totals[h];
        }
        w.max *= 1 / LOG2E;
        return w;
    }
    __device__ __forceinline__ float sum(const WarpWeights& w, int h, int c) const {
        float x = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) x += w.of_warp[i] * result_of(i).sums[h][c];
        return x;
    }

  private:
    // A warp's result for its keys.
    struct WarpResult {
        float sums[MMA_HEADS][D + 8];  // the pitch spreads 8 rows over all banks
        float maxima[MMA_HEADS], totals[MMA_HEADS];
    };
    static_assert(sizeof(WarpResult) <= size_t(BYTES / WARPS));

    __device__ __forceinline__ WarpResult& result_of(int i) const {
        return *reinterpret_cast<WarpResult*>(ring + (i - warp) * (BYTES / WARPS));
    }
    __device__ __forceinline__ T* keys(int stage) const {
        return reinterpret_cast<T*>(ring) + stage * 2 * MMA_TILE_KEYS * PITCH<T, D>;
    }
    __device__ __forceinline__ T* values(int stage) const {
        return keys(stage) + MMA_TILE_KEYS * PITCH<T, D>;
    }

    // Starts one group of copies: the tile, with zeros where it reaches beyond the cache; an empty group after the
    // last. A tile of a window may begin in one page and end in the next.
    __device__ __forceinline__ void fetch(int stage, int tile) const {
        constexpr int W = FULL_WIDTH<T>, PACKS = D / W, PAGE = int(KV_PAGE);
        static_assert(MMA_TILE_KEYS * PACKS % WARP == 0);
        if (tile < tiles) {
            const int first = s.k.first + tile * MMA_TILE_KEYS, left = PAGE - first % PAGE;  // keys of the first page
            const int64_t here = s.k.pages.row(first),
                          next = left < MMA_TILE_KEYS ? s.k.pages.row(first + left) - left : here;
#pragma unroll
            for (int i = 0; i < MMA_TILE_KEYS * PACKS / WARP; i++) {
                const int pack = i * WARP + lane_id(), row = pack / PACKS, column = pack % PACKS * W;
                const int key = tile * MMA_TILE_KEYS + row, to = row * PITCH<T, D> + column;
                const bool inside = key < s.cached && column < s.HS;
                const int64_t from = inside ? ((row < left ? here : next) + row) * s.k.row + column : 0;
                cp_async_16_once(keys(stage) + to, s.k.cache + from, inside);
                cp_async_16_once(values(stage) + to, s.v + from, inside);
            }
        }
        cp_async_commit();
    }

    // Writes the newest key and value to a tile that has arrived, if they are not cached.
    __device__ __forceinline__ void insert_newest(int stage, int row) const {
        if (s.cached == s.keys) return;
        for (int c = lane_id(); c < s.HS; c += WARP) {
            keys(stage)[row * PITCH<T, D> + c] = s.last_k[c];
            values(stage)[row * PITCH<T, D> + c] = s.last_v[c];
        }
        __syncwarp();
    }

    // S += Q·Kᵀ of a tile.
    __device__ __forceinline__ static void score(float (&S)[MMA_TILE_KEYS / 8][4], const uint32_t (&q)[D / 16][4],
                                                 const T* k) {
        static_assert(MMA_TILE_KEYS == 16);
        const int lane = lane_id();
        const uint32_t at = shared_address(k + (lane % 8 + lane / 16 * 8) * PITCH<T, D> + lane / 8 % 2 * 8);
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t right[4];
            ldmatrix_x4(right, at + i * 16 * int(sizeof(T)));
            mma_m16n8k16<T>(S[0], q[i], right[0], right[1]);
            mma_m16n8k16<T>(S[1], q[i], right[2], right[3]);
        }
    }

    // Replaces scores by p = 2^(S − max): rounded to T in rows 0 … 7, the rounding error in rows 8 … 15. Rescales the
    // earlier sums where the maximum grows. Only the first `valid` keys count.
    __device__ __forceinline__ static void softmax(float (&S)[1][MMA_TILE_KEYS / 8][4], int valid, float& max,
                                                   float& sum, float (&o)[1][D / 8][4]) {
        const int first = lane_id() % 4 * 2;
        float highest = max;
#pragma unroll
        for (int n = 0; n < MMA_TILE_KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                S[0][n][i] = n * 8 + first + i < valid ? S[0][n][i] + S[0][n][2 + i] : -INFINITY;
                highest = fmaxf(highest, S[0][n][i]);
            }
        highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, 2));
        const float rescale = exp2_fast(max - highest);
        max = highest;
        sum *= rescale;
#pragma unroll
        for (int n = 0; n < MMA_TILE_KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float p = exp2_fast(S[0][n][i] - max);
                sum += p;
                S[0][n][i] = p;
                S[0][n][2 + i] = p - rounded_to<T>(p);
            }
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[0][n][i] *= rescale;
    }

    const KvSplit<T> s;
    const int warp, tiles;
    char* const ring;
};

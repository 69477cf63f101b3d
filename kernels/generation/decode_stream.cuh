// Attention of one token over a piece of its context on tensor cores, for heads of 16-bit numbers: each warp streams
// keys and values of its own through shared memory and keeps the maximum, sum and Σ p·v of its keys in registers
// (FlashAttention-2, Dao 2023), so that it waits for nothing but memory until the piece is done.
//
// The query heads that read a KV head are rows of mma.sync's left operand. Reading the cache takes far longer than the
// products, so rows are not scarce: of the 16, 8 hold q rounded to T and 8 what the rounding left of it; likewise p. A
// lane has both sums of a head and adds them, so that q and p are worth 16 bits of mantissa (fp16: 22).
#pragma once

#include "kernels/cuda/warp_tile.cuh"

constexpr int STREAM_HEADS = 8;  // query heads of a block
constexpr int STREAM_KEYS = 16;  // keys of a tile

// Keys of a piece of a context: one piece up to STREAM_WHOLE keys, which is faster than to combine two; then pieces of
// 256, or longer ones, as there are at most STREAM_PIECES. It is a function of the context's own length, as the
// result's bits are.
constexpr unsigned STREAM_PIECES = 32, STREAM_WHOLE = 512;
__host__ __device__ inline unsigned stream_pieces(unsigned length) {
    const unsigned wanted = length <= STREAM_WHOLE ? 1 : (length + 255) / 256;
    return wanted < STREAM_PIECES ? wanted : STREAM_PIECES;
}
__host__ __device__ inline unsigned stream_piece(unsigned length) {
    constexpr unsigned UNIT = 64;
    const unsigned pieces = stream_pieces(length);
    return (length + pieces * UNIT - 1) / (pieces * UNIT) * UNIT;
}

// What a block reads: keys and values of one KV head, of which the last may not be in the cache but beside it.
template <typename T>
struct Stretch {
    const T *k, *v;            // of the first key in the cache
    int64_t row;               // elements from one key to the next
    int HS, keys, cached;      // HS a multiple of 8; cached: keys or keys − 1
    const T *last_k, *last_v;  // [HS], in shared memory: the key that is not cached
};

// D: HS or more, a multiple of 32. STAGES tiles of a warp are under way at a time.
template <typename T, int D, int STAGES, int WARPS>
class KeyStream {
  public:
    static constexpr int64_t BYTES = int64_t(WARPS) * STAGES * 2 * STREAM_KEYS * PITCH<T, D> * int64_t(sizeof(T));

    // memory: BYTES, shared by the block. The first tiles are asked for at once.
    __device__ __forceinline__ KeyStream(char* memory, const Stretch<T>& stretch)
        : s(stretch),
          warp(int(threadIdx.x) / WARP),
          tiles((stretch.keys + STREAM_KEYS - 1) / STREAM_KEYS),
          ring(memory + warp * (BYTES / WARPS)) {
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) fetch(stage, warp + stage * WARPS);
    }

    // q: [2·heads, D] in shared memory, PITCH apart: heads scaled to scores in units of ln 2, rounded, and behind them
    // what that left. Ends with a barrier; then weights() and sum() of these heads may be asked.
    __device__ __forceinline__ void run(const T* q, int heads) {
        // Rows that no head needs repeat the last one: nobody asks for their sums.
        const int lane = lane_id(), row = min(lane % STREAM_HEADS, heads - 1) + (lane & STREAM_HEADS ? heads : 0);
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
            if (tile * STREAM_KEYS + STREAM_KEYS > s.cached) append(stage, s.cached - tile * STREAM_KEYS);
            float S[1][STREAM_KEYS / 8][4] = {};
            score(S[0], queries, keys(stage));
            weigh(S, s.keys - tile * STREAM_KEYS, max, sum, o);
            mma_AB<T, D>(o, S, values(stage));
            __syncwarp();
            fetch(stage, tile + STAGES * WARPS);
            stage = stage + 1 < STAGES ? stage + 1 : 0;
        }
        // In the warp's own ring, which is empty.
        sum = row_sum(sum);
        const int g = lane / 4, t = lane % 4;
        Left& left = left_by(warp);
        if (t == 0) left.maxima[g] = max, left.totals[g] = sum;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            *reinterpret_cast<float2*>(&left.sums[g][n * 8 + t * 2]) = {o[0][n][0] + o[0][n][2],
                                                                        o[0][n][1] + o[0][n][3]};
        __syncthreads();
    }

    // Of the block's keys: the maximum M of the scores of head h, Σ exp(S − M), and, with the weight that each warp's
    // sums have then, Σ exp(S − M)·v[c].
    struct Weights {
        float max, total, of_warp[WARPS];
    };
    __device__ __forceinline__ Weights weights(int h) const {
        Weights w;
        w.max = left_by(0).maxima[h], w.total = 0;
#pragma unroll
        for (int i = 1; i < WARPS; i++) w.max = fmaxf(w.max, left_by(i).maxima[h]);
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            w.of_warp[i] = exp2_fast(left_by(i).maxima[h] - w.max);
            w.total += w.of_warp[i] * left_by(i).totals[h];
        }
        w.max *= 1 / LOG2E;
        return w;
    }
    __device__ __forceinline__ float sum(const Weights& w, int h, int c) const {
        float x = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) x += w.of_warp[i] * left_by(i).sums[h][c];
        return x;
    }

  private:
    // What a warp leaves of its keys.
    struct Left {
        float sums[STREAM_HEADS][D + 8];  // the pitch spreads 8 rows over all banks
        float maxima[STREAM_HEADS], totals[STREAM_HEADS];
    };
    static_assert(sizeof(Left) <= size_t(BYTES / WARPS));

    __device__ __forceinline__ Left& left_by(int i) const {
        return *reinterpret_cast<Left*>(ring + (i - warp) * (BYTES / WARPS));
    }
    __device__ __forceinline__ T* keys(int stage) const {
        return reinterpret_cast<T*>(ring) + stage * 2 * STREAM_KEYS * PITCH<T, D>;
    }
    __device__ __forceinline__ T* values(int stage) const {
        return keys(stage) + STREAM_KEYS * PITCH<T, D>;
    }

    // A group of copies: the tile, zeros where the cache holds nothing, or nothing beyond the last tile.
    __device__ __forceinline__ void fetch(int stage, int tile) const {
        constexpr int W = FULL_WIDTH<T>, PACKS = D / W;
        static_assert(STREAM_KEYS * PACKS % WARP == 0);
        if (tile < tiles) {
#pragma unroll
            for (int i = 0; i < STREAM_KEYS * PACKS / WARP; i++) {
                const int pack = i * WARP + lane_id(), row = pack / PACKS, column = pack % PACKS * W;
                const int key = tile * STREAM_KEYS + row, to = row * PITCH<T, D> + column;
                const bool inside = key < s.cached && column < s.HS;
                const int64_t from = inside ? key * s.row + column : 0;
                cp_async_16(keys(stage) + to, s.k + from, inside);
                cp_async_16(values(stage) + to, s.v + from, inside);
            }
        }
        cp_async_commit();
    }

    // The key that is not cached, if the tile that has landed has a row for it.
    __device__ __forceinline__ void append(int stage, int row) const {
        if (s.cached == s.keys) return;
        for (int c = lane_id(); c < s.HS; c += WARP) {
            keys(stage)[row * PITCH<T, D> + c] = s.last_k[c];
            values(stage)[row * PITCH<T, D> + c] = s.last_v[c];
        }
        __syncwarp();
    }

    // S += Q·Kᵀ of a tile.
    __device__ __forceinline__ static void score(float (&S)[STREAM_KEYS / 8][4], const uint32_t (&q)[D / 16][4],
                                                 const T* k) {
        static_assert(STREAM_KEYS == 16);
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

    // Scores to p = 2^(S − max), in rows 0 … 7 as T will round them, in rows 8 … 15 what that leaves; earlier sums
    // shrink where the maximum grows. Only the first `left` keys count.
    __device__ __forceinline__ static void weigh(float (&S)[1][STREAM_KEYS / 8][4], int left, float& max, float& sum,
                                                 float (&o)[1][D / 8][4]) {
        const int first = lane_id() % 4 * 2;
        float highest = max;
#pragma unroll
        for (int n = 0; n < STREAM_KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                S[0][n][i] = n * 8 + first + i < left ? S[0][n][i] + S[0][n][2 + i] : -INFINITY;
                highest = fmaxf(highest, S[0][n][i]);
            }
        highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, 2));
        const float shrink = exp2_fast(max - highest);
        max = highest, sum *= shrink;
#pragma unroll
        for (int n = 0; n < STREAM_KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float p = exp2_fast(S[0][n][i] - max);
                sum += p;
                S[0][n][i] = p, S[0][n][2 + i] = p - rounded_to<T>(p);
            }
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[0][n][i] *= shrink;
    }

    const Stretch<T> s;
    const int warp, tiles;
    char* const ring;
};

// Tiles of attention on Hopper GPUs: how the producer warp loads them, and how scores are masked.
//
// Heads narrower than D = 64 or 128 are padded with columns of zeros by TMA. Rows of a tile past the end of their
// sequence hold the next sequence. That is harmless where rows stay separate; where the matmul contracts over rows, the
// producer warp overwrites them with zeros.
#pragma once

#include "kernels/attention/hopper_tasks.cuh"

namespace hopper {

// Tiles [begin, end) of BLOCK rows.
template <int BLOCK>
struct BlockRange {
    int begin, end;
    __device__ __forceinline__ explicit BlockRange(RowRange rows)
        : begin(rows.begin / BLOCK), end(rows.end > rows.begin ? (rows.end + BLOCK - 1) / BLOCK : rows.begin / BLOCK) {}
    __device__ __forceinline__ bool empty() const { return end <= begin; }
    __device__ __forceinline__ bool contains(int block) const { return block >= begin && block < end; }
};

// Writes zeros to the rows of a tile of ROWS rows from `first` on, by THREADS threads. fence_async_proxy() follows.
template <int ROWS, int D, int THREADS>
__device__ __forceinline__ void zero_rows(unsigned char* tile, int first) {
    for (int i = threadIdx.x % THREADS; i < (ROWS - first) * (D / 8); i += THREADS)
        *reinterpret_cast<uint4*>(tile + swizzled_offset<ROWS>(first + i / (D / 8), i % (D / 8) * 8)) = {};
}

// Loads the first `count` rows of a tile of ROWS rows, or more, for one phase of `full`, in boxes of BOX rows. Rows
// after the last box keep what they held: the consumers mask rows from `count` on or write zeros to them.
template <int ROWS, int D, int BOX>
__device__ __forceinline__ void load_first_rows(unsigned char* tile, const CUtensorMap* map, int head, int token,
                                                Mbarrier* full, int count) {
    const int boxes = (min(count, ROWS) + BOX - 1) / BOX;
    if (lane_id() > 0) return;
    mbarrier_arrive_expect_tx(full, boxes * BOX * D * 2);
#pragma unroll 1
    for (int b = 0; b < boxes; b++)
#pragma unroll
        for (int p = 0; p < D / PANEL_COLUMNS; p++)
            tma_load(tile + (p * ROWS + b * BOX) * PANEL_ROW_BYTES, map, p * PANEL_COLUMNS, head, token + b * BOX,
                     full);
}

// Loads N tiles of ROWS rows of the same head, from the same token on, for one phase of `full`. Rows from `count` on
// become zeros: such tiles, the last of their sequence, first complete an mbarrier of the producer warp's own. Where
// rows stay separate, count is ROWS.
class TileLoader {
  public:
    __device__ explicit TileLoader(Mbarrier* own) : own_(own) {}

    template <int ROWS, int D, int N>
    __device__ __forceinline__ void load(unsigned char* const (&tiles)[N], const CUtensorMap* const (&maps)[N],
                                         int head, int token, Mbarrier* full, int count = ROWS) {
        const bool whole = count >= ROWS;
        Mbarrier* loaded = whole ? full : own_;
        if (lane_id() == 0) {
            mbarrier_arrive_expect_tx(loaded, N * ROWS * D * 2);
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int p = 0; p < D / PANEL_COLUMNS; p++)
                    tma_load(tiles[n] + p * ROWS * PANEL_ROW_BYTES, maps[n], p * PANEL_COLUMNS, head, token, loaded);
        }
        if (whole) return;
        mbarrier_wait(own_, parity_);
        parity_ ^= 1;
#pragma unroll
        for (int n = 0; n < N; n++) zero_rows<ROWS, D, WARP>(tiles[n], count);
        fence_async_proxy();
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(full);
    }

  private:
    Mbarrier* own_;
    int parity_ = 0;
};

// Sets the columns past `last` (before `first`) to `to`; the two bounds are for the thread's two rows. Each bound is
// made relative to the thread's own first column, so that all columns are compared with constants.
template <int NT>
__device__ __forceinline__ void mask_after(float (&c)[NT][4], int last, int last_8, float to) {
    const int own = lane_id() % 4 * 2, bound[2] = {last - own, last_8 - own};
    for_each(c, 0, -own, [&](float& x, int row, int column) { x = column > bound[row / 8] ? to : x; });
}
template <int NT>
__device__ __forceinline__ void mask_before(float (&c)[NT][4], int first, int first_8, float to) {
    const int own = lane_id() % 4 * 2, bound[2] = {first - own, first_8 - own};
    for_each(c, 0, -own, [&](float& x, int row, int column) { x = column < bound[row / 8] ? to : x; });
}

// Scores S of a warpgroup's 64 queries from r0 on, this thread's being `row` and row + 8, and the keys from j0 on: keys
// that a query does not see become `to`. STEP: queries from one row to the next; 0: all 64 rows are of query r0 = row.
template <int STEP = 1, int NT>
__device__ __forceinline__ void mask_keys(float (&s)[NT][4], const Sequence& seq, int r0, int row, int j0, float to) {
    const int row_8 = row + 8 * STEP;
    if (j0 + NT * 8 - 1 > min(r0 + seq.last, seq.klen - 1))
        mask_after(s, min(row + seq.last, seq.klen - 1) - j0, min(row_8 + seq.last, seq.klen - 1) - j0, to);
    if (j0 < r0 + 63 * STEP + seq.first) mask_before(s, row + seq.first - j0, row_8 + seq.first - j0, to);
}
// Likewise Sᵀ of a warpgroup's 64 keys from r0 on and the queries from i0 on. The caller masks keys past the last.
template <int NT>
__device__ __forceinline__ void mask_queries(float (&s)[NT][4], const Sequence& seq, int r0, int row, int i0,
                                             float to) {
    if (i0 < r0 + 63 - seq.last) mask_before(s, row - seq.last - i0, row + 8 - seq.last - i0, to);
    if (i0 + NT * 8 - 1 > r0 - seq.first) mask_after(s, row - seq.first - i0, row + 8 - seq.first - i0, to);
}

}  // namespace hopper

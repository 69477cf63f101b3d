// What kernels of linear layers share that read UnscaledRows (linear.h): the norm's statistics of a row of inp, from
// those of its parts.
#pragma once

#include "kernels/cuda/row_statistics.cuh"
#include "kernels/generation/linear.cuh"

struct RowScale {
    float mean, rstd;
};

// Of the row that is given to lanes l, l + 8, l + 16 and l + 24 of a warp, which read a quarter of its parts each.
//
// One pass: means are summed as differences from the first part's (shifted data: Chan, Golub and LeVeque, 1983), since
// M2 = Σ part.m2 + Σ n·mean² − (Σ n·mean)²/C would cancel where the mean is large.
template <typename T>
__device__ __forceinline__ RowScale scale_of_row(const LinearParams<T>& p, const RowPart* parts, int row) {
    const float shift = parts[row].mean;
    float sum = 0, m2 = 0;
#pragma unroll 8
    for (int i = int(threadIdx.x) % WARP / 8; i < int(unscaled_parts(p.C)); i += 4) {
        const RowPart part = parts[i * UNSCALED_MAX_ROWS + row];
        const float count = float(min(UNSCALED_COLUMNS, p.C - i * UNSCALED_COLUMNS)), difference = part.mean - shift;
        sum = fmaf(count, difference, sum);
        m2 += fmaf(count * difference, difference, part.m2);
    }
#pragma unroll
    for (int offset = 8; offset < WARP; offset *= 2) {
        sum += __shfl_xor_sync(ALL_LANES, sum, offset);
        m2 += __shfl_xor_sync(ALL_LANES, m2, offset);
    }
    const float offset = sum / float(p.C);
    return {shift + offset, rsqrtf(fmaxf(fmaf(-sum, offset, m2), 0) / float(p.C) + p.eps)};
}

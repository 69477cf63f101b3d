// Statistics of a row for LayerNorm and RMSNorm: its mean and M2, the sum of squared deviations from the mean, so that
// rstd = 1/√(M2/C + eps). RMSNorm is the case mean = 0.
//
// M2 is summed from x − mean and not as Σx² − (Σx)²/C, which cancels where the mean is large. Threads that share a row
// sum in two passes: first Σx, then M2 around the mean. Where every pass costs an exchange between warps or blocks,
// each part of the row has a mean and an M2 of its own, and one exchange combines them (Chan, Golub and LeVeque, 1983):
//
//   mean = Σ_parts count·part.mean / C,   M2 = Σ_parts (part.m2 + count·(part.mean − mean)²).
#pragma once

#include "kernels/cuda/vector.cuh"

// sum + Σx, in order.
template <int W>
__device__ __forceinline__ float add_elements(float sum, const Floats<W>& x) {
#pragma unroll
    for (int k = 0; k < W; k++) sum += x[k];
    return sum;
}

// m2 + Σ(x − mean)², in order.
template <int W>
__device__ __forceinline__ float add_squared_deviations(float m2, const Floats<W>& x, float mean) {
#pragma unroll
    for (int k = 0; k < W; k++) m2 = fmaf(x[k] - mean, x[k] - mean, m2);
    return m2;
}

// Part of a row: the mean of its elements and their M2 around that mean.
struct alignas(8) RowPart {
    float mean, m2;
};

// The contribution of a part of `count` elements to the M2 of the whole row.
__device__ __forceinline__ float m2_around(float row_mean, const RowPart& part, float count) {
    const float difference = part.mean - row_mean;
    return fmaf(count, difference * difference, part.m2);
}

__device__ __forceinline__ float row_rstd(float m2, float C, float eps) {
    return 1 / sqrtf(m2 / C + eps);
}

// (x − mean)·rstd·weight + bias; without a bias pass zeros. The last step is one fmaf, so that the rounding does not
// depend on what the compiler fuses.
template <int W>
__device__ __forceinline__ Floats<W> normalize(Floats<W> x, float mean, float rstd, const Floats<W>& weight,
                                               const Floats<W>& bias) {
#pragma unroll
    for (int k = 0; k < W; k++) x[k] = fmaf((x[k] - mean) * rstd, weight[k], bias[k]);
    return x;
}

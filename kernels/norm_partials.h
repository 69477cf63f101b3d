// CPU: how the backward passes of the norms sum the gradients of their weights over the rows. The rows are divided into
// partitions; each partition adds its rows in order, then the partitions are added in order. The division depends only
// on N, so the bits do not depend on the number of threads. Not for .cu files.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/cpu_loops.h"

// At least 32 rows each, so that adding the partials stays a few percent of the work; at most 64 partitions.
inline int64_t norm_partition_rows(int64_t N) {
    return std::max<int64_t>(32, (N + 63) / 64);
}
inline int64_t norm_partitions(int64_t N) {
    return (N + norm_partition_rows(N) - 1) / norm_partition_rows(N);
}

// Scratch for `width` sums in each partition.
inline int64_t norm_partials_bytes(int64_t N, int64_t width) {
    return norm_partitions(N) * width * int64_t(sizeof(float));
}

// Clears partials [partitions, width] and calls row(n, partial) for every row n, in order within a partition.
template <typename Row>
void norm_partials(float* partials, int64_t N, int64_t width, Row row) {
    const int64_t rows = norm_partition_rows(N);
#pragma omp parallel for schedule(static) if (N * width > PARALLEL_MIN)
    for (int64_t p = 0; p < norm_partitions(N); p++) {
        float* partial = partials + p * width;
        std::fill_n(partial, width, 0.0f);
        for (int64_t n = p * rows; n < std::min(N, (p + 1) * rows); n++) row(n, partial);
    }
}

// out[C] (+)= Σ_p partials[p, offset + c]
void norm_partials_sum(float* out, const float* partials, int64_t N, int64_t width, int64_t offset, int64_t C,
                       bool accumulate);

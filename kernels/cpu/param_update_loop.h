// The loop of an optimizer over the segments of its arenas. Not for .cu files.
#pragma once

#include <omp.h>

#include "kernels/cpu/cpu_loops.h"
#include "kernels/param_update.h"

// Calls body(segment, begin, end) for parts [begin, end) of the segments that together cover them. Each thread has an
// equal part of the n elements of the arenas. Parts end at multiples of 16 elements of the arena or where segments end.
template <typename Segment, typename Body>
void parallel_segments(int64_t n, const Segment* segments, int64_t num_segments, Body body) {
#pragma omp parallel if (n > PARALLEL_MIN)
    {
        const int64_t vectors = (n + 15) / 16, threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t low = vectors * thread / threads * 16, high = std::min(n, vectors * (thread + 1) / threads * 16);
        for (int64_t i = 0; i < num_segments; i++) {
            const int64_t begin = std::max(low, segments[i].begin), end = std::min(high, segments[i].end);
            if (begin < end) body(segments[i], begin, end);
        }
    }
}

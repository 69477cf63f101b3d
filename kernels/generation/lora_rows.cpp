// Both products are dot products of a row with rows of A, then of B. The rows of a batch are divided among threads.
#include "kernels/generation/lora_rows.h"

#include "kernels/cpu/cpu_loops.h"
#include "kernels/generation/lora_rows_check.h"

namespace {

// to[i] = x·rows[i], or added to it. Rows are `stride` apart.
MULTIARCH void dot_rows(float* to, const float* x, const float* rows, int64_t stride, int64_t count, int64_t C,
                        bool add) {
    for (int64_t i = 0; i < count; i++) {
        const float y = vec_dot(x, rows + i * stride, C);
        to[i] = add ? to[i] + y : y;
    }
}

// y [OC] += B·h of each part. Rows of B are `stride` apart.
void expand_row(float* y, const float* h, const float* b, int64_t stride, const AdapterWeights& w,
                const AdapterSizes& z) {
    for (int64_t part = 0, o = 0; part < z.parts; o = w.part_ends[size_t(part++)])
        dot_rows(y + o, h + part * z.R, b + o * stride, stride, w.part_ends[size_t(part)] - o, z.R, true);
}

// Calls f(row, adapter) for the rows that have an adapter.
template <typename F>
void for_rows(const AdapterTiles& tiles, const AdapterSizes& z, F f) {
    const int32_t *rows = tiles.rows.as<int32_t>(), *adapters = tiles.adapters.as<int32_t>();
#pragma omp parallel for schedule(dynamic) if (z.N > 1)
    for (int64_t i = 0; i < z.tiles * LORA_TILE; i++) {
        const int64_t row = rows[i], adapter = adapters[i / LORA_TILE];
        if (row >= 0 && row < z.N && adapter >= 0 && adapter < z.adapters) f(row, adapter);
    }
}

}  // namespace

int64_t adapter_splits(int64_t) {
    return 1;
}

void adapters_shrink(Tensor low_rank, Tensor x, const AdapterWeights& w, const AdapterTiles& tiles, Stream) {
    const AdapterSizes z = check_adapters("adapters_shrink", DType::F32, low_rank, "x", x, w, tiles);
    const int64_t width = z.parts * z.R, C = z.columns;
    for_rows(tiles, z, [&](int64_t row, int64_t adapter) {
        const float *from = x.as<float>() + row * row_stride(x), *a = w.a.as<float>() + adapter * width * C;
        float* const to = low_rank.as<float>() + row * width;
        dot_rows(to, from, a, C, width, C, false);
    });
}

bool linear_with_adapters(const LinearOutput&, Tensor, const LinearWeights&, const AdapterWeights&, const AdapterTiles&,
                          Tensor, Stream) {
    return false;
}

void adapters_expand(Tensor y, Tensor low_rank, const AdapterWeights& w, const AdapterTiles& tiles, Stream) {
    const AdapterSizes z = check_adapters("adapters_expand", DType::F32, low_rank, "y", y, w, tiles);
    for_rows(tiles, z, [&](int64_t row, int64_t adapter) {
        const float *h = low_rank.as<float>() + row * z.parts * z.R, *b = w.b.as<float>() + adapter * z.R;
        expand_row(y.as<float>() + row * row_stride(y), h, b, z.adapters * z.R, w, z);
    });
}

void adapter_expand_all(Tensor y, Tensor h, const AdapterWeights& w, Stream) {
    const AdapterSizes z = check_only_adapter("adapter_expand_all", DType::F32, y, h, w);
#pragma omp parallel for schedule(static) if (z.N > 1)
    for (int64_t row = 0; row < z.N; row++)
        expand_row(y.as<float>() + row * row_stride(y), h.as<float>() + row * row_stride(h), w.b.as<float>(), z.R, w,
                   z);
}

// map, zip and bin_bcast of tensor_ops.h: one elementwise loop over strided operands.
#include <unistd.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

#include <algorithm>

#include "tensor_library/strided_rows.h"
#include "tensor_library/tensor_ops_check.h"
#include "tensor_library/vec_functions.h"

namespace {

using namespace tensor_detail;

// out[i] = f(x[i], y[i]); y is x for functions of one argument.
MULTIARCH void apply_to(TensorFunction f, float* out, const float* x, const float* y, int64_t n) {
    switch (f) {
#define CASE(enumerator, name, arguments)                                                                              \
    case TensorFunction::enumerator:                                                                                   \
        for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {                                               \
            vec_store_lanes(                                                                                           \
                out + i,                                                                                               \
                apply<TensorFunction::enumerator>(vec_load_lanes(x + i, lanes), vec_load_lanes(y + i, lanes)), lanes); \
        });                                                                                                            \
        break;
        TENSOR_FUNCTIONS(CASE)
#undef CASE
    }
}

constexpr int64_t BUFFER = 2048;  // elements at a time: three buffers fit in L1
constexpr int64_t SHORT_ROW =
    128;  // rows up to this length are gathered into one buffer: a call costs as much as a row

// Bypasses the caches. Ordinary stores first read a cache line, which is wasted if the whole line is overwritten.
void store_streaming(float* to, const float* from, int64_t n) {
    int64_t i = 0;
#ifdef __AVX__
    for (; i < n && reinterpret_cast<uintptr_t>(to + i) % 32; i++) to[i] = from[i];
    for (; i + 8 <= n; i += 8) _mm256_stream_ps(to + i, _mm256_loadu_ps(from + i));
#endif
    for (; i < n; i++) to[i] = from[i];
}

void finish_streaming() {
#ifdef __AVX__
    _mm_sfence();
#endif
}

// The size of the last-level cache. Results that exceed it together with their operands would not stay in it.
int64_t last_cache_bytes() {
    static const int64_t bytes = [] {
        const long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
        return l3 > 0 ? int64_t(l3) : int64_t(32) << 20;
    }();
    return bytes;
}

// A chunk is several short rows, or a part of a long row.
void run_elementwise(const StridedLoop& loop, TensorFunction f) {
    const int64_t numel = loop.numel(), inner = loop.inner(), rows = numel / inner;
    const int64_t row_chunks = (inner + BUFFER - 1) / BUFFER, rows_at_once = inner <= SHORT_ROW ? BUFFER / inner : 1;
    const int64_t groups = (rows + rows_at_once - 1) / rows_at_once;
    int64_t bytes = 0;
    for (int k = 0; k < loop.operands; k++) bytes += numel * dtype_size(loop.operand[k].dtype);
    const bool streaming = bytes > last_cache_bytes();
#pragma omp parallel if (numel > PARALLEL_MIN)
    {
#pragma omp for schedule(static)
        for (int64_t chunk = 0; chunk < groups * row_chunks; chunk++) {
            alignas(64) float buffer[MAX_OPERANDS][BUFFER];
            const int64_t row0 = chunk / row_chunks * rows_at_once, row_end = std::min(rows, row0 + rows_at_once);
            const int64_t begin = chunk % row_chunks * BUFFER, n = std::min(BUFFER, inner - begin),
                          total = n * (row_end - row0);
            // inp: the values of the operands, in a buffer unless they are a contiguous row.
            const float* inp[MAX_OPERANDS] = {};
            for (int k = 1; k < loop.operands; k++) {
                const Operand& o = loop.operand[k];
                const int64_t stride = o.stride[loop.rank - 1];
                RowOffset at(loop, k, row0);
                inp[k] = row_end - row0 == 1 ? in_place(o, *at + begin * stride, stride) : nullptr;
                if (inp[k]) continue;
                inp[k] = buffer[k];
                for (int64_t i = 0; i < total; i += n, ++at) gather(o, *at + begin * stride, stride, n, buffer[k] + i);
            }
            const Operand& o = loop.operand[0];
            const int64_t stride = o.stride[loop.rank - 1];
            RowOffset at(loop, 0, row0);
            float* direct = row_end - row0 == 1 ? in_place(o, *at + begin * stride, stride) : nullptr;
            float* out = direct && !streaming ? direct : buffer[0];
            apply_to(f, out, inp[1], inp[loop.operands - 1], total);
            if (direct && streaming)
                store_streaming(direct, out, n);
            else if (!direct)
                for (int64_t i = 0; i < total; i += n, ++at) scatter(o, *at + begin * stride, stride, n, buffer[0] + i);
        }
        if (streaming) finish_streaming();
    }
}

}  // namespace

void tensor_map(Tensor out, TensorFunction f, Tensor inp, Stream) {
    const StridedLoop loop = map_loop("tensor_map", out, f, inp);
    if (out.numel() > 0) run_elementwise(loop, f);
}

void tensor_zip(Tensor out, TensorFunction f, Tensor x, Tensor y, Stream) {
    const StridedLoop loop = zip_loop("tensor_zip", out, f, x, y);
    if (out.numel() > 0) run_elementwise(loop, f);
}

void tensor_bin_bcast(Tensor out, TensorFunction f, Tensor x, Tensor y, Stream) {
    const BinBcast b = bin_bcast_loop("tensor_bin_bcast", out, f, x, y);
    if (out.numel() > 0) run_elementwise(b.loop, b.f);
}

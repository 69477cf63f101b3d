// reduce of tensor_ops.h.
//
// At most BUFFER numbers are summed or multiplied in fp32, in 64 lanes (`along` the axis) or in blocks of BLOCK_ROWS
// rows (`across` the axis); the results of those are summed or multiplied in double. A long axis is split into ranges
// of fixed length that threads share; their results go to the scratch as doubles, [results, splits].
#include <algorithm>
#include <cmath>

#include "tensor_library/strided_rows.h"
#include "tensor_library/tensor_ops_check.h"
#include "tensor_library/vec_functions.h"

namespace {

using namespace tensor_detail;

constexpr int64_t ALONG_SPLIT = 1 << 16, ACROSS_SPLIT = 2048, BUFFER = 2048, BLOCK_ROWS = 64, COLUMNS = 512;

double combined(TensorFunction f, double a, double b) {
    if (f == TensorFunction::Add) return a + b;
    if (f == TensorFunction::Mul) return a * b;
    return a > b || a != a ? a : b;
}

template <TensorFunction F>
ALWAYS_INLINE float reduce_vectors(const float* x, int64_t n) {
    constexpr int VECTORS = 4;
    const float neutral = F == TensorFunction::Add ? 0.0f : F == TensorFunction::Mul ? 1.0f : -INF;
    vec16 sum[VECTORS];
    for (vec16& s : sum) s = vec_set(neutral);
    int64_t i = 0;
    for (; i + VECTORS * 16 <= n; i += VECTORS * 16)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sum[v] = apply<F>(sum[v], vec_load(x + i + v * 16));
    for (; i < n; i += 16)
        sum[0] = apply<F>(sum[0], n - i >= 16 ? vec_load(x + i) : vec_load_partial(x + i, n - i, vec_set(neutral)));
    alignas(64) float lane[16];
    vec_store(lane, apply<F>(apply<F>(sum[0], sum[1]), apply<F>(sum[2], sum[3])));
    double total = lane[0];
    for (int l = 1; l < 16; l++) total = combined(F, total, lane[l]);
    return float(total);
}

MULTIARCH float reduce_floats(TensorFunction f, const float* x, int64_t n) {
    if (f == TensorFunction::Add) return reduce_vectors<TensorFunction::Add>(x, n);
    if (f == TensorFunction::Mul) return reduce_vectors<TensorFunction::Mul>(x, n);
    return reduce_vectors<TensorFunction::Max>(x, n);
}

// sum[c] = sum[c] ∘ rows[0][c] ∘ rows[1][c] ∘ …, with eight rows for each pass over the sums.
constexpr int64_t ROWS = 8;
template <TensorFunction F>
ALWAYS_INLINE void reduce_row_vectors(float* sum, const float* const* rows, int64_t count, int64_t n) {
    for_each_vector(n, [&](int64_t c, int64_t lanes) INLINE_LAMBDA {
        vec16 s = vec_load_lanes(sum + c, lanes);
        if (count == ROWS)
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) s = apply<F>(s, vec_load_lanes(rows[r] + c, lanes));
        else
            for (int64_t r = 0; r < count; r++) s = apply<F>(s, vec_load_lanes(rows[r] + c, lanes));
        vec_store_lanes(sum + c, s, lanes);
    });
}

MULTIARCH void reduce_rows(TensorFunction f, float* sum, const float* const* rows, int64_t count, int64_t n) {
    if (f == TensorFunction::Add)
        reduce_row_vectors<TensorFunction::Add>(sum, rows, count, n);
    else if (f == TensorFunction::Mul)
        reduce_row_vectors<TensorFunction::Mul>(sum, rows, count, n);
    else
        reduce_row_vectors<TensorFunction::Max>(sum, rows, count, n);
}

// Reduces elements [begin, end) of the axis for the result whose first element is at `at`.
double reduce_along(TensorFunction f, const Reduction& r, int64_t at, int64_t begin, int64_t end) {
    const Operand& inp = r.loop.operand[0];
    double total = tensor_reduce_start(f);
    for (int64_t i = begin; i < end; i += BUFFER) {
        const int64_t n = std::min(BUFFER, end - i);
        alignas(64) float buffer[BUFFER];
        const float* x = in_place(inp, at + i * r.stride, r.stride);
        if (!x) {
            gather(inp, at + i * r.stride, r.stride, n, buffer);
            x = buffer;
        }
        total = combined(f, total, reduce_floats(f, x, n));
    }
    return total;
}

// The same for n ≤ COLUMNS neighbouring results.
void reduce_across(double* total, TensorFunction f, const Reduction& r, int64_t at, int64_t n, int64_t begin,
                   int64_t end) {
    const Operand& inp = r.loop.operand[0];
    const int64_t inner = inp.stride[r.loop.rank - 1];
    std::fill_n(total, n, double(tensor_reduce_start(f)));
    for (int64_t block = begin; block < end; block += BLOCK_ROWS) {
        alignas(64) float sum[COLUMNS], buffer[ROWS][COLUMNS];
        std::fill_n(sum, n, tensor_reduce_start(f));
        const int64_t block_end = std::min(end, block + BLOCK_ROWS);
        for (int64_t first = block; first < block_end; first += ROWS) {
            const int64_t count = std::min(ROWS, block_end - first);
            const float* rows[ROWS];
            for (int64_t i = 0; i < count; i++) {
                rows[i] = in_place(inp, at + (first + i) * r.stride, inner);
                if (!rows[i]) {
                    gather(inp, at + (first + i) * r.stride, inner, n, buffer[i]);
                    rows[i] = buffer[i];
                }
            }
            reduce_rows(f, sum, rows, count, n);
        }
        for (int64_t c = 0; c < n; c++) total[c] = combined(f, total[c], double(sum[c]));
    }
}

struct ReducePlan {
    bool along;
    int64_t split_length, splits;
};

ReducePlan plan_reduction(const Reduction& r) {
    const int64_t inner = std::llabs(r.loop.operand[0].stride[r.loop.rank - 1]), axis = std::llabs(r.stride);
    ReducePlan plan{};
    plan.along = r.loop.inner() == 1 || axis < inner;
    plan.split_length = plan.along ? ALONG_SPLIT : ACROSS_SPLIT;
    plan.splits = std::max<int64_t>(1, (r.length + plan.split_length - 1) / plan.split_length);
    return plan;
}

int64_t scratch_of(const Reduction& r) {
    const int64_t splits = plan_reduction(r).splits;
    return splits > 1 ? splits * r.loop.numel() * int64_t(sizeof(double)) : 0;
}

void run_reduce(const Reduction& r, TensorFunction f, float start, double* partial) {
    const ReducePlan plan = plan_reduction(r);
    const StridedLoop& loop = r.loop;
    const int last = loop.rank - 1;
    const int64_t results = loop.numel(), inner = loop.inner();
    const int64_t inner_inp = loop.operand[0].stride[last], inner_out = loop.operand[1].stride[last];
    // A task is `width` results of a row and one split of the axis.
    const int64_t width = plan.along
                              ? std::min<int64_t>(inner, std::max<int64_t>(1, BUFFER / std::max<int64_t>(1, r.length)))
                              : std::min(inner, COLUMNS);
    const int64_t per_row = (inner + width - 1) / width, tasks = results / inner * per_row * plan.splits;
    const bool parallel = results * std::max<int64_t>(1, r.length) > PARALLEL_MIN;
#pragma omp parallel for schedule(static) if (parallel)
    for (int64_t task = 0; task < tasks; task++) {
        double total[BUFFER];
        const int64_t split = task % plan.splits, row = task / plan.splits / per_row;
        const int64_t column = task / plan.splits % per_row * width, n = std::min(width, inner - column);
        const int64_t begin = split * plan.split_length, end = std::min(begin + plan.split_length, r.length);
        const int64_t at = *RowOffset(loop, 0, row) + column * inner_inp;
        if (plan.along)
            for (int64_t c = 0; c < n; c++) total[c] = reduce_along(f, r, at + c * inner_inp, begin, end);
        else
            reduce_across(total, f, r, at, n, begin, end);
        const int64_t at_out = *RowOffset(loop, 1, row) + column * inner_out;
        for (int64_t c = 0; c < n; c++)
            if (plan.splits > 1)
                partial[(row * inner + column + c) * plan.splits + split] = total[c];
            else
                store_one(loop.operand[1], at_out + c * inner_out, float(combined(f, start, total[c])));
    }
    if (plan.splits == 1) return;
#pragma omp parallel for schedule(static) if (results * plan.splits > PARALLEL_MIN)
    for (int64_t i = 0; i < results; i++) {
        double total = start;
        for (int64_t p = 0; p < plan.splits; p++) total = combined(f, total, partial[i * plan.splits + p]);
        store_one(loop.operand[1], *RowOffset(loop, 1, i / inner) + i % inner * inner_out, float(total));
    }
}

}  // namespace

int64_t tensor_reduce_scratch(Tensor out, Tensor inp, int axis) {
    return scratch_of(check_reduction("tensor_reduce_scratch", out, TensorFunction::Add, inp, axis));
}

void tensor_reduce(Tensor out, TensorFunction f, Tensor inp, int axis, float start, Tensor scratch, Stream) {
    const char* op = "tensor_reduce";
    const Reduction r = check_reduction(op, out, f, inp, axis);
    check_scratch(op, scratch, scratch_of(r));
    if (out.numel() > 0) run_reduce(r, f, start, static_cast<double*>(scratch.data));
}

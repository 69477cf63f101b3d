#include "kernels/tensor_library/tensor_ops.h"

#include <unistd.h>
#if defined(__AVX__) || defined(__F16C__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/cpu_loops.h"
#include "kernels/cpu/gemm_blocked.h"
#include "kernels/matmul.h"
#include "kernels/tensor_library/tensor_ops_check.h"
#include "runtime/files/convert.h"

namespace {

constexpr float INF = std::numeric_limits<float>::infinity(), NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

// --- functions of 16 floats. Written with loops over the lanes where they choose, as in cpu.h.

template <typename Choose>
ALWAYS_INLINE vec16 vec_select(Choose choose, vec16 a, vec16 b) {
    vec16 r;
    for (int i = 0; i < 16; i++) r[i] = choose(i) ? a[i] : b[i];
    return r;
}

// NaN where a or b is; else the larger.
ALWAYS_INLINE vec16 vec_nan_max(vec16 a, vec16 b) {
    return vec_select([&](int i) INLINE_LAMBDA { return a[i] > b[i] || a[i] != a[i]; }, a, b);
}

// ln x = k·ln 2 + ln m with √½ ≤ m < √2, and ln m = 2·artanh s = 2s·(1 + s²/3 + s⁴/5 + …), s = (m − 1)/(m + 1): |s| ≤
// 0.172, so that the first term left out is 2e-9 of the sum. ln 2 in two parts, of which k times the first is exact.
ALWAYS_INLINE vec16 vec_log(vec16 x) {
    const auto subnormal = [&](int i) INLINE_LAMBDA { return x[i] < 0x1p-126f; };
    const vec16 normal = vec_select(subnormal, x * 0x1p23f, x),
                exponent0 = vec_select(subnormal, vec_set(-23), vec16{});
    typedef uint32_t uvec16 __attribute__((vector_size(64)));  // wraps for numbers below 0, whose result is NaN anyway
    const uvec16 bits = reinterpret_cast<uvec16>(normal);
    const ivec16 k = reinterpret_cast<ivec16>(bits - 0x3f3504f3u) >> 23;  // the bits of √½: m begins there
    const vec16 m = reinterpret_cast<vec16>(bits - (reinterpret_cast<uvec16>(k) << 23));
    vec16 exponent;
    for (int i = 0; i < 16; i++) exponent[i] = float(k[i]);
    exponent += exponent0;
    const vec16 f = m - 1.0f, s = f / (2.0f + f), s2 = s * s;
    const vec16 series = s2 * (1.0f / 3 + s2 * (1.0f / 5 + s2 * (1.0f / 7 + s2 * (1.0f / 9))));
    // 2s = f − s·f: so f, which is exact, carries the digits.
    const vec16 log_m = f - (s * f - 2 * s * series);
    vec16 r = exponent * 0x1.62e4p-1f + (log_m + exponent * 0x1.7f7d1cp-20f);
    r = vec_select([&](int i) INLINE_LAMBDA { return x[i] > 0 && x[i] < INF; }, r, x);  // ∞ and NaN stay
    r = vec_select([&](int i) INLINE_LAMBDA { return x[i] == 0; }, vec_set(-INF), r);
    return vec_select([&](int i) INLINE_LAMBDA { return x[i] < 0; }, vec_set(NOT_A_NUMBER), r);
}

ALWAYS_INLINE vec16 vec_sigmoid(vec16 x) {
    const vec16 e = vec_exp(-vec_abs(x)), r = 1.0f / (1.0f + e), er = e * r;
    return vec_select([&](int i) INLINE_LAMBDA { return x[i] < 0; }, er, r);
}

// (1 − e)/(1 + e) with e = exp(−2|x|), which cancels for small x: there the odd series up to x¹³, whose first term left
// out, 929569/638512875·x¹⁵, is 1e-8 of the sum at |x| = 0.45.
ALWAYS_INLINE vec16 vec_tanh(vec16 x) {
    const vec16 magnitude = vec_abs(x), e = vec_exp(-2.0f * magnitude), x2 = x * x;
    const vec16 large = (1.0f - e) / (1.0f + e);
    const vec16 series =
        x2 * (-1.0f / 3 +
              x2 * (2.0f / 15 +
                    x2 * (-17.0f / 315 + x2 * (62.0f / 2835 + x2 * (-1382.0f / 155925 + x2 * (21844.0f / 6081075))))));
    vec16 r;
    for (int i = 0; i < 16; i++)
        r[i] = std::copysign(magnitude[i] < 0.45f ? magnitude[i] + magnitude[i] * series[i] : large[i], x[i]);
    return r;
}

template <typename F>
ALWAYS_INLINE vec16 each_lane(F f) {
    vec16 r;
    for (int i = 0; i < 16; i++) r[i] = f(i);
    return r;
}

template <TensorFunction F>
ALWAYS_INLINE vec16 apply(vec16 x, vec16 y) {
    using Fn = TensorFunction;
    if constexpr (F == Fn::Id) return x;
    if constexpr (F == Fn::Neg) return -x;
    if constexpr (F == Fn::Inv) return 1.0f / x;
    if constexpr (F == Fn::Exp) return vec_exp(x);
    if constexpr (F == Fn::Log) return vec_log(x);
    if constexpr (F == Fn::Sigmoid) return vec_sigmoid(x);
    if constexpr (F == Fn::Tanh) return vec_tanh(x);
    if constexpr (F == Fn::Relu) return vec_nan_max(x, vec16{});
    if constexpr (F == Fn::Add) return x + y;
    if constexpr (F == Fn::Sub) return x - y;
    if constexpr (F == Fn::Mul) return x * y;
    if constexpr (F == Fn::Div) return x / y;
    if constexpr (F == Fn::Max) return vec_nan_max(x, y);
    // exp(y·ln x) would need twice the digits of ln x.
    if constexpr (F == Fn::Pow) return each_lane([&](int i) { return std::pow(x[i], y[i]); });
    if constexpr (F == Fn::Lt) return each_lane([&](int i) INLINE_LAMBDA { return x[i] < y[i] ? 1.0f : 0.0f; });
    if constexpr (F == Fn::Eq) return each_lane([&](int i) INLINE_LAMBDA { return x[i] == y[i] ? 1.0f : 0.0f; });
    if constexpr (F == Fn::IsClose)
        return each_lane([&](int i)
                             INLINE_LAMBDA { return std::fabs(double(x[i]) - double(y[i])) < 1e-2 ? 1.0f : 0.0f; });
    if constexpr (F == Fn::InvBack) return -(y / x) / x;  // x² might overflow where the result does not
    if constexpr (F == Fn::LogBack) return y / x;
    if constexpr (F == Fn::ReluBack) return vec_select([&](int i) INLINE_LAMBDA { return x[i] > 0; }, y, vec16{});
}

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

// --- rows of any dtype and stride, to and from floats

using Operand = StridedLoop::Operand;

void widened(const uint16_t* from, DType dtype, float* to, int64_t n) {
    int64_t i = 0;
#ifdef __F16C__
    if (dtype == DType::F16)
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
    for (; i < n; i++) to[i] = dtype == DType::BF16 ? to_float(bf16{from[i]}) : to_float(fp16{from[i]});
}

void narrowed(const float* from, DType dtype, uint16_t* to, int64_t n) {
    int64_t i = 0;
#ifdef __F16C__
    if (dtype == DType::F16)
        for (; i + 8 <= n; i += 8)
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                             _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++) to[i] = dtype == DType::BF16 ? to_bf16(from[i]).bits : to_fp16(from[i]).bits;
}

float load_one(const Operand& o, int64_t at) {
    if (o.dtype == DType::F32) return static_cast<const float*>(o.data)[at];
    float x;
    widened(static_cast<const uint16_t*>(o.data) + at, o.dtype, &x, 1);
    return x;
}

void store_one(const Operand& o, int64_t at, float x) {
    if (o.dtype == DType::F32)
        static_cast<float*>(o.data)[at] = x;
    else
        narrowed(&x, o.dtype, static_cast<uint16_t*>(o.data) + at, 1);
}

// n elements from `at` on, `stride` apart, into a buffer.
void gather(const Operand& o, int64_t at, int64_t stride, int64_t n, float* to) {
    if (stride == 0) {
        std::fill_n(to, n, load_one(o, at));
    } else if (o.dtype == DType::F32) {
        const float* from = static_cast<const float*>(o.data) + at;
        if (stride == 1)
            std::copy_n(from, n, to);
        else
            for (int64_t i = 0; i < n; i++) to[i] = from[i * stride];
    } else if (stride == 1) {
        widened(static_cast<const uint16_t*>(o.data) + at, o.dtype, to, n);
    } else {
        for (int64_t i = 0; i < n; i++) to[i] = load_one(o, at + i * stride);
    }
}

void scatter(const Operand& o, int64_t at, int64_t stride, int64_t n, const float* from) {
    if (o.dtype == DType::F32) {
        float* to = static_cast<float*>(o.data) + at;
        if (stride == 1)
            std::copy_n(from, n, to);
        else
            for (int64_t i = 0; i < n; i++) to[i * stride] = from[i];
    } else if (stride == 1) {
        narrowed(from, o.dtype, static_cast<uint16_t*>(o.data) + at, n);
    } else {
        for (int64_t i = 0; i < n; i++) store_one(o, at + i * stride, from[i]);
    }
}

// Where they lie, if they are contiguous fp32.
float* in_place(const Operand& o, int64_t at, int64_t stride) {
    return o.dtype == DType::F32 && stride == 1 ? static_cast<float*>(o.data) + at : nullptr;
}

// The offset of an operand at the rows of a loop one after the other: all dimensions but the innermost.
class RowOffset {
  public:
    RowOffset(const StridedLoop& loop_, int operand, int64_t row) : loop(loop_), stride(loop.operand[operand].stride) {
        for (int d = loop.rank - 2; d >= 0; d--) {
            index[d] = row % loop.shape[d], row /= loop.shape[d];
            at += index[d] * stride[d];
        }
    }
    int64_t operator*() const { return at; }
    void operator++() {
        for (int d = loop.rank - 2; d >= 0; d--) {
            at += stride[d];
            if (++index[d] < loop.shape[d]) return;
            at -= index[d] * stride[d], index[d] = 0;
        }
    }

  private:
    const StridedLoop& loop;
    const int64_t* stride;
    int64_t index[MAX_DIMS] = {}, at = 0;
};

// --- elementwise

constexpr int64_t PIECE = 2048;     // elements at a time: three buffers stay in L1
constexpr int64_t SHORT_ROW = 128;  // up to here several rows are gathered, because each call costs as much as a row

// Past the caches: a line that is written whole need not be read first, which ordinary stores do.
void store_streaming(float* to, const float* from, int64_t n) {
    int64_t i = 0;
#ifdef __AVX__
    for (; i < n && reinterpret_cast<uintptr_t>(to + i) % 32; i++) to[i] = from[i];
    for (; i + 8 <= n; i += 8) _mm256_stream_ps(to + i, _mm256_loadu_ps(from + i));
#endif
    for (; i < n; i++) to[i] = from[i];
}

void streaming_done() {
#ifdef __AVX__
    _mm_sfence();
#endif
}

// What the last cache holds; a result that is larger together with its operands would not be found there anyway.
int64_t last_cache_bytes() {
    static const int64_t bytes = [] {
        const long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
        return l3 > 0 ? int64_t(l3) : int64_t(32) << 20;
    }();
    return bytes;
}

// Several short rows at once, or a piece of a long one.
void run_elementwise(const StridedLoop& loop, TensorFunction f) {
    const int64_t numel = loop.numel(), inner = loop.inner(), rows = numel / inner;
    const int64_t pieces = (inner + PIECE - 1) / PIECE, rows_at_once = inner <= SHORT_ROW ? PIECE / inner : 1;
    const int64_t groups = (rows + rows_at_once - 1) / rows_at_once;
    int64_t bytes = 0;
    for (int k = 0; k < loop.operands; k++) bytes += numel * dtype_size(loop.operand[k].dtype);
    const bool streaming = bytes > last_cache_bytes();
#pragma omp parallel if (numel > PARALLEL_MIN)
    {
#pragma omp for schedule(static)
        for (int64_t chunk = 0; chunk < groups * pieces; chunk++) {
            alignas(64) float buffer[MAX_OPERANDS][PIECE];
            const int64_t row0 = chunk / pieces * rows_at_once, row_end = std::min(rows, row0 + rows_at_once);
            const int64_t begin = chunk % pieces * PIECE, n = std::min(PIECE, inner - begin),
                          total = n * (row_end - row0);
            // inp: the operands' values, in a buffer unless they are a contiguous row.
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
        if (streaming) streaming_done();
    }
}

// --- reduce
//
// Sums and products run over at most PIECE numbers in fp32, in 64 lanes (`along` the axis) or blocks of BLOCK_ROWS
// (`across` it), and on from there in double. A long axis is cut into pieces of fixed length for threads to share,
// whose results wait in the scratch as doubles, [results, pieces].

constexpr int64_t ALONG_PIECE = 1 << 16, ACROSS_PIECE = 2048, BLOCK_ROWS = 64, COLUMNS = 512;

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

// sum[c] = sum[c] ∘ rows[0][c] ∘ rows[1][c] ∘ …: eight rows for one pass over the sums.
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

// Elements [begin, end) of the axis, for the result whose first element lies at `at`.
double reduce_along(TensorFunction f, const Reduction& r, int64_t at, int64_t begin, int64_t end) {
    const Operand& inp = r.loop.operand[0];
    double total = tensor_reduce_start(f);
    for (int64_t i = begin; i < end; i += PIECE) {
        const int64_t n = std::min(PIECE, end - i);
        alignas(64) float buffer[PIECE];
        const float* x = in_place(inp, at + i * r.stride, r.stride);
        if (!x) gather(inp, at + i * r.stride, r.stride, n, buffer), x = buffer;
        total = combined(f, total, reduce_floats(f, x, n));
    }
    return total;
}

// The same for n ≤ COLUMNS results side by side.
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
                if (!rows[i]) gather(inp, at + (first + i) * r.stride, inner, n, buffer[i]), rows[i] = buffer[i];
            }
            reduce_rows(f, sum, rows, count, n);
        }
        for (int64_t c = 0; c < n; c++) total[c] = combined(f, total[c], double(sum[c]));
    }
}

struct ReducePlan {
    bool along;
    int64_t piece, pieces;
};

ReducePlan plan_reduction(const Reduction& r) {
    const int64_t inner = std::llabs(r.loop.operand[0].stride[r.loop.rank - 1]), axis = std::llabs(r.stride);
    ReducePlan plan{};
    plan.along = r.loop.inner() == 1 || axis < inner;
    plan.piece = plan.along ? ALONG_PIECE : ACROSS_PIECE;
    plan.pieces = std::max<int64_t>(1, (r.length + plan.piece - 1) / plan.piece);
    return plan;
}

int64_t scratch_of(const Reduction& r) {
    const int64_t pieces = plan_reduction(r).pieces;
    return pieces > 1 ? pieces * r.loop.numel() * int64_t(sizeof(double)) : 0;
}

void run_reduce(const Reduction& r, TensorFunction f, float start, double* partial) {
    const ReducePlan plan = plan_reduction(r);
    const StridedLoop& loop = r.loop;
    const int last = loop.rank - 1;
    const int64_t results = loop.numel(), inner = loop.inner();
    const int64_t inner_inp = loop.operand[0].stride[last], inner_out = loop.operand[1].stride[last];
    // A task is `width` results of a row and a piece of the axis.
    const int64_t width = plan.along
                              ? std::min<int64_t>(inner, std::max<int64_t>(1, PIECE / std::max<int64_t>(1, r.length)))
                              : std::min(inner, COLUMNS);
    const int64_t per_row = (inner + width - 1) / width, tasks = results / inner * per_row * plan.pieces;
    const bool parallel = results * std::max<int64_t>(1, r.length) > PARALLEL_MIN;
#pragma omp parallel for schedule(static) if (parallel)
    for (int64_t task = 0; task < tasks; task++) {
        double total[PIECE];
        const int64_t piece = task % plan.pieces, row = task / plan.pieces / per_row;
        const int64_t column = task / plan.pieces % per_row * width, n = std::min(width, inner - column);
        const int64_t begin = piece * plan.piece, end = std::min(begin + plan.piece, r.length);
        const int64_t at = *RowOffset(loop, 0, row) + column * inner_inp;
        if (plan.along)
            for (int64_t c = 0; c < n; c++) total[c] = reduce_along(f, r, at + c * inner_inp, begin, end);
        else
            reduce_across(total, f, r, at, n, begin, end);
        const int64_t at_out = *RowOffset(loop, 1, row) + column * inner_out;
        for (int64_t c = 0; c < n; c++)
            if (plan.pieces > 1)
                partial[(row * inner + column + c) * plan.pieces + piece] = total[c];
            else
                store_one(loop.operand[1], at_out + c * inner_out, float(combined(f, start, total[c])));
    }
    if (plan.pieces == 1) return;
#pragma omp parallel for schedule(static) if (results * plan.pieces > PARALLEL_MIN)
    for (int64_t i = 0; i < results; i++) {
        double total = start;
        for (int64_t p = 0; p < plan.pieces; p++) total = combined(f, total, partial[i * plan.pieces + p]);
        store_one(loop.operand[1], *RowOffset(loop, 1, i / inner) + i % inner * inner_out, float(total));
    }
}

// --- matmul

// A matrix that the library takes: contiguous along rows, or along columns (then it is the transpose of what is given).
struct LibraryMatrix {
    Tensor tensor;
    bool transposed, fits;
};

LibraryMatrix library_matrix(float* data, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride) {
    if (rows == 1) row_stride = std::max<int64_t>(columns, 1);
    if (columns == 1) column_stride = row_stride == 1 ? rows : 1;
    LibraryMatrix m{host_tensor(data, {rows, columns}), false, true};
    if (column_stride == 1 && row_stride >= columns) {
        m.tensor.stride[0] = row_stride;
    } else if (row_stride == 1 && column_stride >= rows) {
        m.tensor = host_tensor(data, {columns, rows});
        m.tensor.stride[0] = column_stride, m.transposed = true;
    } else {
        m.fits = false;
    }
    return m;
}

// out = a·b by the library, or outᵀ = bᵀ·aᵀ where out is column-major. False if it doesn't take these strides.
bool multiply_by_library(const BatchedProduct& p, float* out, float* a, float* b, Stream stream) {
    const LibraryMatrix o = library_matrix(out, p.M, p.N, p.out_row, p.out_column);
    const LibraryMatrix x = library_matrix(a, p.M, p.K, p.a_row, p.a_column);
    const LibraryMatrix y = library_matrix(b, p.K, p.N, p.b_row, p.b_column);
    if (!o.fits || !x.fits || !y.fits) return false;
    if (o.transposed)
        matmul(o.tensor, y.tensor, x.tensor, !y.transposed, !x.transposed, false, stream);
    else
        matmul(o.tensor, x.tensor, y.tensor, x.transposed, y.transposed, false, stream);
    return true;
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

int64_t tensor_reduce_scratch(Tensor out, Tensor inp, int axis) {
    return scratch_of(check_reduction("tensor_reduce_scratch", out, TensorFunction::Add, inp, axis));
}

void tensor_reduce(Tensor out, TensorFunction f, Tensor inp, int axis, float start, Tensor scratch, Stream) {
    const char* op = "tensor_reduce";
    const Reduction r = check_reduction(op, out, f, inp, axis);
    check_scratch(op, scratch, scratch_of(r));
    if (out.numel() > 0) run_reduce(r, f, start, static_cast<double*>(scratch.data));
}

void tensor_matmul(Tensor out, Tensor a, Tensor b, Stream stream) {
    const char* op = "tensor_matmul";
    const BatchedProduct p = check_product(op, out, a, b);
    if (out.numel() == 0) return;
    const int64_t matrices = p.batch.numel();
    const auto of_matrix = [&](int operand, int64_t matrix) {
        // The batch is walked as rows of one element.
        int64_t at = 0;
        for (int d = p.batch.rank - 1; d >= 0; d--) {
            at += matrix % p.batch.shape[d] * p.batch.operand[operand].stride[d];
            matrix /= p.batch.shape[d];
        }
        return static_cast<float*>(p.batch.operand[operand].data) + at;
    };
    const auto multiply = [&](int64_t i) {
        gemm_blocked(p.M, p.N, p.K, {of_matrix(1, i), p.a_row, p.a_column}, {of_matrix(2, i), p.b_row, p.b_column},
                     false, of_matrix(0, i), p.out_row, p.out_column);
    };
    // Several matrices that are not large are shared among threads one by one; on others all threads work together.
    constexpr double SMALL = 1 << 18, LARGE = 1 << 24;
    if (double(p.M) * double(p.N) * double(p.K) >= (matrices < 4 ? SMALL : LARGE)) {
        for (int64_t i = 0; i < matrices; i++)
            if (!multiply_by_library(p, of_matrix(0, i), of_matrix(1, i), of_matrix(2, i), stream)) multiply(i);
        return;
    }
    bool failed = false;  // an exception must not leave the parallel region
#pragma omp parallel for schedule(static) if (matrices > 1)
    for (int64_t i = 0; i < matrices; i++) {
        try {
            multiply(i);
        } catch (const Error&) {
#pragma omp atomic write
            failed = true;
        }
    }
    require(!failed, op, ": no memory for packing buffers");
}

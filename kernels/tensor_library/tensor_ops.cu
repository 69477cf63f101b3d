#include "kernels/tensor_library/tensor_ops.h"

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/pdl.cuh"
#include "kernels/tensor_library/tensor_ops_check.h"

namespace {

constexpr int THREADS = 256;

// --- operands of any dtype
//
// Kernels are not compiled for each mixture of dtypes: memory is loaded as bits, by a branch that all threads take
// alike, and made floats later, so that the loads of all operands are in flight together.

struct Operand {
    void* data;
    int64_t stride[MAX_DIMS];
    DType dtype;
};

// W elements as they lie in memory: fp32 in all words, 16-bit ones in pairs in the first half. Packs of 8 are for
// 16-bit operands alone.
template <int W>
struct alignas(W == 1 ? 4 : 16) Stored {
    uint32_t word[W == 8 ? 4 : W];
};

// The W elements at `at`, or that one W times if the operand repeats it along the innermost dimension.
template <int W>
__device__ __forceinline__ Stored<W> load_stored(const void* data, DType dtype, bool repeats, int64_t at) {
    Stored<W> s;
    if (W < 8 && dtype == DType::F32) {
        const uint32_t* p = static_cast<const uint32_t*>(data) + at;
        if (W == 1 || repeats) {
            const uint32_t word = *p;
#pragma unroll
            for (uint32_t& to : s.word) to = word;
        } else {
            *reinterpret_cast<uint4*>(s.word) = *reinterpret_cast<const uint4*>(p);
        }
    } else {
        const uint16_t* p = static_cast<const uint16_t*>(data) + at;
        if (W == 1 || repeats) {
            const uint32_t word = *p * 0x10001u;
#pragma unroll
            for (uint32_t& to : s.word) to = word;
        } else if (W == 4) {
            *reinterpret_cast<uint2*>(s.word) = *reinterpret_cast<const uint2*>(p);
        } else {
            *reinterpret_cast<uint4*>(s.word) = *reinterpret_cast<const uint4*>(p);
        }
    }
    return s;
}

template <int W>
__device__ __forceinline__ Floats<W> as_floats(const Stored<W>& s, DType dtype) {
    Floats<W> x;
    if (W < 8 && dtype == DType::F32) {
#pragma unroll
        for (int i = 0; i < W; i++) x[i] = __uint_as_float(s.word[W == 8 ? 0 : i]);
    } else if (dtype == DType::BF16) {
#pragma unroll
        for (int i = 0; i < W; i++) x[i] = __uint_as_float(i % 2 ? s.word[i / 2] & 0xffff0000u : s.word[i / 2] << 16);
    } else {
#pragma unroll
        for (int i = 0; i < W; i++) x[i] = as_float(fp16{uint16_t(s.word[i / 2] >> (i % 2 * 16))});
    }
    return x;
}

template <int W>
__device__ __forceinline__ void store_as(void* data, DType dtype, int64_t at, const Floats<W>& x) {
    if (W < 8 && dtype == DType::F32)
        store_floats<W>(static_cast<float*>(data) + at, x);
    else if (dtype == DType::BF16)
        store_floats<W>(static_cast<bf16*>(data) + at, x);
    else
        store_floats<W>(static_cast<fp16*>(data) + at, x);
}

// --- functions

template <TensorFunction F>
__device__ __forceinline__ float apply(float x, float y) {
    using Fn = TensorFunction;
    if constexpr (F == Fn::Id) return x;
    if constexpr (F == Fn::Neg) return -x;
    if constexpr (F == Fn::Inv) return 1 / x;
    if constexpr (F == Fn::Exp) return expf(x);
    if constexpr (F == Fn::Log) return logf(x);
    if constexpr (F == Fn::Sigmoid) {
        const float e = expf(-fabsf(x)), r = 1 / (1 + e);
        return x < 0 ? e * r : r;
    }
    if constexpr (F == Fn::Tanh) return tanhf(x);
    if constexpr (F == Fn::Relu) return nan_max(x, 0);
    if constexpr (F == Fn::Add) return x + y;
    if constexpr (F == Fn::Sub) return x - y;
    if constexpr (F == Fn::Mul) return x * y;
    if constexpr (F == Fn::Div) return x / y;
    if constexpr (F == Fn::Max) return nan_max(x, y);
    if constexpr (F == Fn::Pow) return powf(x, y);
    if constexpr (F == Fn::Lt) return x < y;
    if constexpr (F == Fn::Eq) return x == y;
    if constexpr (F == Fn::IsClose) return fabs(double(x) - double(y)) < 1e-2;
    if constexpr (F == Fn::InvBack) return -(y / x) / x;  // x² might overflow where the result does not
    if constexpr (F == Fn::LogBack) return y / x;
    if constexpr (F == Fn::ReluBack) return x > 0 ? y : 0;
}

// bf16: operands and result are. ln by the special function unit is off by up to 2⁻²¹ from 1/2 to 2, and by 3 units in
// the last place elsewhere. The bf16 number next to 1 is 1 − 2⁻⁸, so that this is at most 2⁻¹³ of a result that is not
// 0, a sixteenth of half a unit of bf16. (fp16's 1 − 2⁻¹¹ would have results that are off by a unit.)
template <TensorFunction F, int W>
__device__ __forceinline__ Floats<W> apply_each(const Floats<W>& x, const Floats<W>& y, bool bf16) {
    Floats<W> z;
    if (F == TensorFunction::Log && bf16) {
#pragma unroll
        for (int i = 0; i < W; i++) z[i] = __logf(x[i]);
    } else {
#pragma unroll
        for (int i = 0; i < W; i++) z[i] = apply<F>(x[i], y[i]);
    }
    return z;
}

// body(F) with f as a constant, for the functions of as many arguments.
template <int ARGUMENTS, typename Body>
__device__ __forceinline__ void with_function(TensorFunction f, Body body) {
    switch (f) {
#define CASE(enumerator, name, arguments)                                               \
    case TensorFunction::enumerator:                                                    \
        if constexpr (arguments == ARGUMENTS)                                           \
            body(std::integral_constant<TensorFunction, TensorFunction::enumerator>{}); \
        break;
        TENSOR_FUNCTIONS(CASE)
#undef CASE
    }
}

// --- elementwise

// Dimensions of the loop with the innermost one counted in packs of W.
template <int INPUTS>
struct Elementwise {
    int rank;
    int64_t size[MAX_DIMS];
    int64_t packs, pieces;  // of all; row_pieces_kernel: pieces of a row
    Operand out, inp[INPUTS];
    TensorFunction f;
    bool bf16;  // all operands are
};

// A thread does PACKS packs, THREADS apart: one where a pack is 16 bytes, and several loads have to be in flight where
// it is an element.
template <int W, int INPUTS>
__global__ void __launch_bounds__(THREADS) elementwise_kernel(const __grid_constant__ Elementwise<INPUTS> a) {
    constexpr int PACKS = W == 1 ? 4 : 1;
    int64_t at_out[PACKS];
    Stored<W> stored[PACKS][INPUTS];
    const int last = a.rank - 1;
    const int64_t first = blockIdx.x * int64_t(PACKS * THREADS) + threadIdx.x;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        int64_t rest = first + p * THREADS, at_inp[INPUTS] = {};
        if (rest >= a.packs) continue;
        at_out[p] = 0;
        for (int d = last; d >= 0; d--) {
            const RowItem at = d == 0 ? RowItem{0, rest} : row_item(rest, a.size[d]);
            rest = at.row;
            at_out[p] += at.item * a.out.stride[d];
#pragma unroll
            for (int k = 0; k < INPUTS; k++) at_inp[k] += at.item * a.inp[k].stride[d];
        }
#pragma unroll
        for (int k = 0; k < INPUTS; k++)
            stored[p][k] = load_stored<W>(a.inp[k].data, a.inp[k].dtype, a.inp[k].stride[last] == 0, at_inp[k]);
    }
    with_function<INPUTS>(a.f, [&](auto f) {
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            if (first + p * THREADS >= a.packs) continue;
            const Floats<W> x = as_floats(stored[p][0], a.inp[0].dtype),
                            y = as_floats(stored[p][INPUTS - 1], a.inp[INPUTS - 1].dtype);
            store_as<W>(a.out.data, a.out.dtype, at_out[p], apply_each<decltype(f)::value>(x, y, a.bf16));
        }
    });
}

// Long rows that packs don't fit: a warp does a piece of a row, RUN elements a thread, a warp's width apart, so that
// the row is divided out once for all of them and their loads are in flight together.
constexpr int RUN = 8, PIECE = RUN * WARP;

struct Run {
    uint32_t word[RUN];  // an element each
};

// Elements at, at + step, …: those below `left` of the piece that begins at this thread's first one.
template <typename Bits>
__device__ __forceinline__ Run load_run(const void* data, int64_t at, int64_t step, int left) {
    const Bits* p = static_cast<const Bits*>(data) + at;
    Run run;
#pragma unroll
    for (int i = 0; i < RUN; i++) run.word[i] = i * WARP < left ? p[i * step] : Bits(0);
    return run;
}

__device__ __forceinline__ Floats<RUN> as_floats(const Run& run, DType dtype) {
    Floats<RUN> x;
    if (dtype == DType::F32) {
#pragma unroll
        for (int i = 0; i < RUN; i++) x[i] = __uint_as_float(run.word[i]);
    } else if (dtype == DType::BF16) {
#pragma unroll
        for (int i = 0; i < RUN; i++) x[i] = __uint_as_float(run.word[i] << 16);
    } else {
#pragma unroll
        for (int i = 0; i < RUN; i++) x[i] = as_float(fp16{uint16_t(run.word[i])});
    }
    return x;
}

template <typename T>
__device__ __forceinline__ void store_run(void* data, int64_t at, int64_t step, int left, const Floats<RUN>& x) {
    T* p = static_cast<T*>(data) + at;
#pragma unroll
    for (int i = 0; i < RUN; i++)
        if (i * WARP < left) p[i * step] = from_float<T>(x[i]);
}

template <int INPUTS>
__global__ void __launch_bounds__(THREADS) row_pieces_kernel(const __grid_constant__ Elementwise<INPUTS> a) {
    const int last = a.rank - 1;
    const int64_t piece = blockIdx.x * int64_t(THREADS / WARP) + threadIdx.x / WARP;
    if (piece >= a.packs) return;
    const RowItem at = row_item(piece, a.pieces);
    const int64_t column = at.item * PIECE + threadIdx.x % WARP;
    const int left = int(min(a.size[last] - column, int64_t(PIECE)));
    int64_t at_out = column * a.out.stride[last], at_inp[INPUTS], rest = at.row;
#pragma unroll
    for (int k = 0; k < INPUTS; k++) at_inp[k] = column * a.inp[k].stride[last];
    for (int d = last - 1; d >= 0; d--) {
        const RowItem outer = d == 0 ? RowItem{0, rest} : row_item(rest, a.size[d]);
        rest = outer.row;
        at_out += outer.item * a.out.stride[d];
#pragma unroll
        for (int k = 0; k < INPUTS; k++) at_inp[k] += outer.item * a.inp[k].stride[d];
    }
    Run run[INPUTS];
#pragma unroll
    for (int k = 0; k < INPUTS; k++) {
        const int64_t step = WARP * a.inp[k].stride[last];
        run[k] = a.inp[k].dtype == DType::F32 ? load_run<uint32_t>(a.inp[k].data, at_inp[k], step, left)
                                              : load_run<uint16_t>(a.inp[k].data, at_inp[k], step, left);
    }
    const Floats<RUN> x = as_floats(run[0], a.inp[0].dtype), y = as_floats(run[INPUTS - 1], a.inp[INPUTS - 1].dtype);
    Floats<RUN> z;
    with_function<INPUTS>(a.f, [&](auto f) { z = apply_each<decltype(f)::value>(x, y, a.bf16); });
    const int64_t step = WARP * a.out.stride[last];
    if (a.out.dtype == DType::F32)
        store_run<float>(a.out.data, at_out, step, left, z);
    else if (a.out.dtype == DType::BF16)
        store_run<bf16>(a.out.data, at_out, step, left, z);
    else
        store_run<fp16>(a.out.data, at_out, step, left, z);
}

// Whether operand k can be read and written W elements at a time along the innermost dimension.
bool packable(const StridedLoop& loop, int k, int W, bool may_repeat) {
    const StridedLoop::Operand& operand = loop.operand[k];
    const int last = loop.rank - 1;
    if (operand.stride[last] == 0 && may_repeat) return true;
    if (operand.stride[last] != 1) return false;
    const int64_t bytes = W * dtype_size(operand.dtype), alignment = std::min<int64_t>(bytes, 16);
    if (reinterpret_cast<uintptr_t>(operand.data) % uintptr_t(alignment)) return false;
    for (int d = 0; d < last; d++)
        if (operand.stride[d] * dtype_size(operand.dtype) % alignment) return false;
    return true;
}

// 8, 4 or 1: 16 bytes of the narrowest operand if all are 16-bit, else of fp32.
int pack_width(const StridedLoop& loop, int64_t inner) {
    bool half = true;
    for (int k = 0; k < loop.operands; k++) half = half && dtype_size(loop.operand[k].dtype) == 2;
    for (const int W : {8, 4}) {
        bool fits = inner % W == 0 && (W == 4 || half);
        for (int k = 0; fits && k < loop.operands; k++) fits = packable(loop, k, W, k > 0);
        if (fits) return W;
    }
    return 1;
}

template <int INPUTS>
void launch_elementwise(const char* op, const StridedLoop& loop, TensorFunction f, Stream stream) {
    const int last = loop.rank - 1, W = pack_width(loop, loop.inner());
    // One long row whose end is no whole pack: all but the end, and the end.
    const int64_t whole = loop.inner() / 8 * 8;
    if (W == 1 && loop.rank == 1 && whole > 0 && pack_width(loop, whole) > 1) {
        StridedLoop part = loop;
        part.shape[0] = whole;
        launch_elementwise<INPUTS>(op, part, f, stream);
        part.shape[0] = loop.inner() - whole;
        for (int k = 0; k < loop.operands; k++)
            part.operand[k].data = static_cast<char*>(part.operand[k].data) +
                                   whole * part.operand[k].stride[0] * dtype_size(part.operand[k].dtype);
        launch_elementwise<INPUTS>(op, part, f, stream);
        return;
    }
    Elementwise<INPUTS> a{};
    a.rank = loop.rank, a.f = f, a.packs = loop.numel() / W;
    a.bf16 = std::all_of(loop.operand, loop.operand + loop.operands,
                         [](const StridedLoop::Operand& operand) { return operand.dtype == DType::BF16; });
    for (int d = 0; d < loop.rank; d++) a.size[d] = d == last ? loop.shape[d] / W : loop.shape[d];
    for (int k = 0; k <= INPUTS; k++) {
        Operand& operand = k == 0 ? a.out : a.inp[k - 1];
        operand.data = loop.operand[k].data, operand.dtype = loop.operand[k].dtype;
        for (int d = 0; d < loop.rank; d++) operand.stride[d] = loop.operand[k].stride[d] * (d == last ? W : 1);
    }
    if (W == 1 && loop.inner() >= 2 * WARP) {
        a.pieces = ceil_div(loop.inner(), PIECE), a.packs = loop.numel() / loop.inner() * a.pieces;
        row_pieces_kernel<INPUTS><<<grid_of(ceil_div(a.packs, THREADS / WARP)), THREADS, 0, cuda_stream(stream)>>>(a);
        check_launch(op, stream);
        return;
    }
    const auto launch = [&](auto width) {
        constexpr int PACKS = width == 1 ? 4 : 1;
        elementwise_kernel<width, INPUTS>
            <<<grid_of(ceil_div(a.packs, PACKS * THREADS)), THREADS, 0, cuda_stream(stream)>>>(a);
    };
    if (W == 8)
        launch(std::integral_constant<int, 8>{});
    else if (W == 4)
        launch(std::integral_constant<int, 4>{});
    else
        launch(std::integral_constant<int, 1>{});
    check_launch(op, stream);
}

// --- reduce
//
// Two kernels. `along`: threads side by side along the axis share a result, for an axis that is contiguous. `across`:
// each thread has results of its own (W side by side) and walks the axis, for one that is not. Where there are too few
// results to fill the GPU, blocks take pieces of the axis and leave partial results in the scratch, [pieces, results]
// fp32, which `across` then reduces. A thread adds up FLUSH packs before it adds the sum to its total: running sums
// stay short, and so do rounding errors.

constexpr int FLUSH = 64, IN_FLIGHT = 4;

struct Reduce {
    int rank;
    int64_t size[MAX_DIMS];  // of the results; `across`: the innermost dimension in packs
    Operand inp, out;
    int64_t items;           // results, or packs of them
    int64_t blocks;          // for all items of a piece
    int group;               // along_kernel: threads that share a result, a power of two
    int64_t length, stride;  // of the axis
    int64_t pieces, piece;   // the axis is cut into pieces of `piece` elements
    float start;
    float* partial;  // [pieces, results], or null: results go to out
    int64_t results;
};

template <TensorFunction F>
__device__ __forceinline__ float neutral() {
    return F == TensorFunction::Add ? 0.0f : F == TensorFunction::Mul ? 1.0f : -INFINITY;
}

struct Offsets {
    int64_t inp, out;
};
__device__ __forceinline__ Offsets offsets_of(const Reduce& a, int64_t item) {
    Offsets at{0, 0};
    for (int d = a.rank - 1; d >= 0; d--) {
        const RowItem next = d == 0 ? RowItem{0, item} : row_item(item, a.size[d]);
        item = next.row;
        at.inp += next.item * a.inp.stride[d];
        at.out += next.item * a.out.stride[d];
    }
    return at;
}

// Packs first, first + step, … below `end`, each `pack_stride` elements from the one before, reduced lane by lane.
template <TensorFunction F, int W>
__device__ __forceinline__ Floats<W> reduce_packs(const Reduce& a, int64_t at, int64_t pack_stride, int64_t first,
                                                  int64_t end, int step) {
    Floats<W> total, sum;
#pragma unroll
    for (int i = 0; i < W; i++) total[i] = sum[i] = neutral<F>();
    int64_t p = first;
    while (p < end) {
        for (int round = 0; round < FLUSH / IN_FLIGHT && p < end; round++, p += IN_FLIGHT * step) {
            Stored<W> stored[IN_FLIGHT];
#pragma unroll
            for (int u = 0; u < IN_FLIGHT; u++)
                if (p + u * step < end)
                    stored[u] = load_stored<W>(a.inp.data, a.inp.dtype, false, at + (p + u * step) * pack_stride);
#pragma unroll
            for (int u = 0; u < IN_FLIGHT; u++) {
                if (p + u * step >= end) continue;
                const Floats<W> x = as_floats(stored[u], a.inp.dtype);
#pragma unroll
                for (int i = 0; i < W; i++) sum[i] = apply<F>(sum[i], x[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < W; i++) total[i] = apply<F>(total[i], sum[i]), sum[i] = neutral<F>();
    }
    return total;
}

template <TensorFunction F>
__device__ __forceinline__ void store_result(const Reduce& a, int64_t piece, int64_t result, int64_t at_out, float x) {
    if (a.partial)
        a.partial[piece * a.results + result] = x;
    else
        store_as<1>(a.out.data, a.out.dtype, at_out, Floats<1>{{apply<F>(a.start, x)}});
}

// A group of threads for each result: the block, or a.group threads of a warp.
template <TensorFunction F, int W, bool BLOCK>
__global__ void __launch_bounds__(THREADS) along_kernel(const __grid_constant__ Reduce a) {
    pdl_launch_dependents();
    pdl_wait();
    const int group = BLOCK ? THREADS : a.group, lane = int(threadIdx.x) & (group - 1);
    const RowItem block = row_item(blockIdx.x, a.blocks);
    const int64_t result = (block.item * THREADS + threadIdx.x) >> (31 - __clz(group));
    const bool mine = result < a.items;
    const Offsets at = offsets_of(a, mine ? result : 0);
    const int64_t begin = block.row * a.piece, end = min(begin + a.piece, a.length);
    const Floats<W> lanes = reduce_packs<F, W>(a, at.inp, a.stride * W, begin / W + lane, mine ? end / W : 0, group);
    float x = lanes[0];
#pragma unroll
    for (int i = 1; i < W; i++) x = apply<F>(x, lanes[i]);
    for (int offset = (BLOCK ? WARP : group) / 2; offset > 0; offset /= 2)
        x = apply<F>(x, __shfl_xor_sync(ALL_LANES, x, offset));
    if constexpr (BLOCK) {
        __shared__ float partial[THREADS / WARP];
        if (lane % WARP == 0) partial[lane / WARP] = x;
        __syncthreads();
        x = partial[0];
#pragma unroll
        for (int w = 1; w < THREADS / WARP; w++) x = apply<F>(x, partial[w]);
    }
    if (mine && lane == 0) store_result<F>(a, block.row, result, at.out, x);
}

// ROWS threads share the axis of a pack of results, and THREADS / ROWS packs stand side by side.
template <TensorFunction F, int W, int ROWS>
__global__ void __launch_bounds__(THREADS) across_kernel(const __grid_constant__ Reduce a) {
    pdl_launch_dependents();
    pdl_wait();
    constexpr int COLUMNS = THREADS / ROWS;
    const int column = threadIdx.x % COLUMNS, row = threadIdx.x / COLUMNS;
    const RowItem block = row_item(blockIdx.x, a.blocks);
    const int64_t item = block.item * COLUMNS + column;
    const bool mine = item < a.items;
    const Offsets at = offsets_of(a, mine ? item : 0);
    const int64_t begin = block.row * a.piece, end = min(begin + a.piece, a.length);
    Floats<W> x = reduce_packs<F, W>(a, at.inp, a.stride, begin + row, mine ? end : 0, ROWS);
    if constexpr (ROWS > 1) {
        __shared__ float partial[ROWS][W][COLUMNS];
#pragma unroll
        for (int i = 0; i < W; i++) partial[row][i][column] = x[i];
        __syncthreads();
        if (row > 0) return;
#pragma unroll
        for (int r = 1; r < ROWS; r++)
#pragma unroll
            for (int i = 0; i < W; i++) x[i] = apply<F>(x[i], partial[r][i][column]);
    }
    if (!mine) return;
    const int64_t out_step = a.out.stride[a.rank - 1] / W;
#pragma unroll
    for (int i = 0; i < W; i++) store_result<F>(a, block.row, item * W + i, at.out + i * out_step, x[i]);
}

// How a reduction runs; the same for its scratch and for its launch.
struct ReducePlan {
    bool along;
    int W, group;  // group: threads that share a result (`along`), or a pack of them (`across`)
    int64_t pieces, piece;
};

ReducePlan plan_reduction(const Reduction& r, bool in_pieces = true) {
    const StridedLoop& loop = r.loop;  // of (inp, out)
    const StridedLoop::Operand& inp = loop.operand[0];
    const int last = loop.rank - 1;
    const int64_t size = dtype_size(inp.dtype), results = std::max<int64_t>(loop.numel(), 1), n = r.length;
    ReducePlan plan{};
    // The contiguous dimension is the one to stand side by side in; where there is none, the one of the smaller steps.
    const int64_t inner = std::llabs(inp.stride[last]), axis = std::llabs(r.stride);
    plan.along = loop.inner() == 1 || (axis == 1 ? inner != 1 || n >= loop.inner() : axis < inner && inner != 1);
    const auto aligned = [&](int64_t stride, int64_t W) {
        return stride * size % std::min<int64_t>(W * size, 16) == 0;
    };
    plan.W = 1;
    for (const int W : {4, 8}) {
        if (size * W > 16) continue;
        bool fits = reinterpret_cast<uintptr_t>(inp.data) % uintptr_t(W * size) == 0;
        for (int d = 0; d < last; d++) fits = fits && aligned(inp.stride[d], W);
        if (plan.along)
            fits = fits && r.stride == 1 && n % W == 0 && (loop.inner() == 1 || aligned(inp.stride[last], W));
        else
            fits = fits && inp.stride[last] == 1 && loop.inner() % W == 0 && aligned(r.stride, W);
        if (fits) plan.W = W;
    }
    // `along`: as many threads of a warp as have IN_FLIGHT packs each, a warp up to 1,024 packs, or 256 where there
    // would be few warps, then the block. `across`: 8 threads, whose block reads whole stretches of a row; one where
    // the axis is short; 32 where the results are too few for such stretches, or for the GPU when the axis stays whole.
    const int64_t items = plan.along ? results : ceil_div(results, plan.W), SMs = num_sms();
    const int64_t packs = n / plan.W;
    if (!plan.along) {
        plan.group = n <= 16 ? 1 : items < (in_pieces ? 32 : 32 * SMs) ? 32 : 8;
    } else if (packs > 1024 || (packs > 256 && results < 64 * SMs)) {
        plan.group = THREADS;
    } else {
        // Threads that end after one round of loads leave memory idle in between; four where there are results enough.
        const auto suffices = [&](int64_t group) {
            return packs <= IN_FLIGHT * group || (packs <= 4 * IN_FLIGHT * group && results * group >= 4096 * SMs);
        };
        plan.group = 4;
        while (plan.group < WARP && !suffices(plan.group)) plan.group *= 2;
    }
    // As many pieces as give each SM BLOCKS blocks, but none shorter than IN_FLIGHT packs for a thread.
    constexpr int64_t BLOCKS = 4;
    const int64_t blocks = ceil_div(items, THREADS / plan.group);
    const int64_t wanted = in_pieces ? std::max<int64_t>(1, BLOCKS * SMs / blocks) : 1;
    const int64_t least = IN_FLIGHT * plan.group * (plan.along ? plan.W : 1);
    const int64_t pieces = std::max<int64_t>(1, std::min(wanted, n / least));
    const int64_t unit = plan.along ? plan.group * plan.W : 1;
    plan.piece = std::max<int64_t>(1, ceil_div(ceil_div(n, pieces), unit) * unit);
    plan.pieces = std::max<int64_t>(1, ceil_div(n, plan.piece));
    return plan;
}

int64_t scratch_of(const Reduction& r) {
    const int64_t pieces = plan_reduction(r).pieces;
    return pieces > 1 ? pieces * r.loop.numel() * int64_t(sizeof(float)) : 0;
}

template <TensorFunction F>
void launch_reduce(const char* op, const Reduction& r, const ReducePlan& plan, float start, float* partial,
                   Stream stream) {
    const StridedLoop& loop = r.loop;
    const int last = loop.rank - 1;
    Reduce a{};
    a.rank = loop.rank, a.length = r.length, a.stride = r.stride, a.start = start;
    a.pieces = plan.pieces, a.piece = plan.piece, a.results = loop.numel();
    a.partial = plan.pieces > 1 ? partial : nullptr;
    const int W = plan.along ? 1 : plan.W;  // results of an item
    for (int d = 0; d < loop.rank; d++) a.size[d] = d == last ? loop.shape[d] / W : loop.shape[d];
    for (const auto& [to, from] :
         {std::pair<Operand*, const StridedLoop::Operand*>{&a.inp, &loop.operand[0]}, {&a.out, &loop.operand[1]}}) {
        to->data = from->data, to->dtype = from->dtype;
        for (int d = 0; d < loop.rank; d++) to->stride[d] = from->stride[d] * (d == last ? W : 1);
    }
    a.items = a.results / W, a.blocks = ceil_div(a.items, THREADS / plan.group), a.group = plan.group;
    const dim3 grid = grid_of(a.blocks * plan.pieces);
    const auto launch = [&](auto kernel) { launch_pdl(op, kernel, grid, THREADS, 0, stream, a); };
    const auto launch_width = [&](auto width) {
        if (plan.along && plan.group == THREADS)
            launch(along_kernel<F, width, true>);
        else if (plan.along)
            launch(along_kernel<F, width, false>);
        else if (plan.group == 1)
            launch(across_kernel<F, width, 1>);
        else if (plan.group == 8)
            launch(across_kernel<F, width, 8>);
        else
            launch(across_kernel<F, width, 32>);
    };
    if (plan.W == 8)
        launch_width(std::integral_constant<int, 8>{});
    else if (plan.W == 4)
        launch_width(std::integral_constant<int, 4>{});
    else
        launch_width(std::integral_constant<int, 1>{});
    if (!a.partial) return;
    // The partial results are an array [pieces, results], reduced over its first dimension by a kernel whose blocks
    // wait on the SMs before the first one's have ended.
    Reduction rest = r;
    rest.length = plan.pieces, rest.stride = a.results;
    rest.loop.operand[0].data = partial, rest.loop.operand[0].dtype = DType::F32;
    int64_t stride = 1;
    for (int d = last; d >= 0; d--) rest.loop.operand[0].stride[d] = stride, stride *= loop.shape[d];
    launch_reduce<F>(op, rest, plan_reduction(rest, false), start, nullptr, stream);
}

// --- matmul
//
// A block computes BM x BN outputs, BK columns of a and rows of b at a time, each thread T x T of them: with T = 8 an
// element that was read from shared memory is used eight times. The next step's elements are fetched into registers
// while this one's are multiplied, and written to the other of two buffers. In shared memory both operands lie with the
// inner dimension first, [BK][BM] and [BK][BN], whatever their strides in global memory, so that a thread reads its
// rows and columns four at a time.

enum class Layout : uint8_t { AlongK, AcrossK, Any };  // where an operand is contiguous: 16 bytes at a time, or none

template <int BM_, int BN_, int BK_, int T_>
struct Block {
    static constexpr int BM = BM_, BN = BN_, BK = BK_, T = T_, THREADS = BM / T * (BN / T);
};

struct Product {
    BatchedProduct p;
    float* out;
    const float *a, *b;
    int64_t tiles_m, tiles_n;
};

// One thread's part of the tiles [LANES][BK] of an operand, one after the other: lanes are rows of a, or columns of b.
// Threads stand side by side where memory is contiguous; a thread's packs are a fixed step apart, so that one pointer
// and one place serve for all.
template <typename S, int LANES, Layout L>
class Fetched {
  public:
    static constexpr int PITCH = LANES + 4;  // two-way bank conflicts instead of eight-way where k runs over the lanes

    // Elements outside of the operand are 0. Packs lie inside or outside as a whole.
    __device__ __forceinline__ Fetched(const float* data, int64_t lane_stride, int64_t k_stride, int64_t lanes,
                                       int64_t K)
        : along_k(L == Layout::AlongK || (L == Layout::Any && k_stride < lane_stride)), k_left(K) {
        const int i = int(threadIdx.x) * W, tile = along_k ? S::BK : LANES;
        lane = along_k ? i / tile : i % tile, k = along_k ? i % tile : i / tile;
        lanes_left = int(min(lanes, int64_t(LANES)));
        at = data + lane * lane_stride + k * k_stride;
        step = along_k ? LANE_STEP * lane_stride : K_STEP * k_stride;
        advance = S::BK * k_stride;
    }
    __device__ __forceinline__ void fetch() {
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            Floats<W> v{};
            if (lane + (along_k ? p * LANE_STEP : 0) < lanes_left && k + (along_k ? 0 : p * K_STEP) < k_left)
                v = load_floats<W>(at + p * step);
#pragma unroll
            for (int i = 0; i < W; i++) x[p * W + i] = v[i];
        }
        at += advance, k_left -= S::BK;
    }
    __device__ __forceinline__ void store(float (*tile)[PITCH]) const {
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            float* to = &tile[k + (along_k ? 0 : p * K_STEP)][lane + (along_k ? p * LANE_STEP : 0)];
            if constexpr (L == Layout::AcrossK)
                *reinterpret_cast<float4*>(to) = {x[p * 4], x[p * 4 + 1], x[p * 4 + 2], x[p * 4 + 3]};
            else
#pragma unroll
                for (int i = 0; i < W; i++) to[i * PITCH] = x[p * W + i];
        }
    }

  private:
    static constexpr int W = L == Layout::Any ? 1 : 4, PACKS = LANES * S::BK / S::THREADS / W;
    static constexpr int LANE_STEP = S::THREADS * W / S::BK, K_STEP = S::THREADS * W / LANES;
    const float* at;
    int64_t step, advance;
    bool along_k;
    int lane, k, lanes_left;
    int64_t k_left;
    float x[PACKS * W];
};

template <typename S, Layout A, Layout B>
__global__ void __launch_bounds__(S::THREADS, S::T == 8 ? 2 : 4) matmul_kernel(const __grid_constant__ Product q) {
    constexpr int BM = S::BM, BN = S::BN, BK = S::BK, T = S::T, H = 4;  // a thread's T x T outputs: blocks of 4 x 4
    using FetchedA = Fetched<S, BM, A>;
    using FetchedB = Fetched<S, BN, B>;
    __shared__ __align__(16) float tile_a[2][BK][FetchedA::PITCH], tile_b[2][BK][FetchedB::PITCH];
    const BatchedProduct& p = q.p;
    const RowItem of_batch = row_item(blockIdx.x, q.tiles_m * q.tiles_n), tile = row_item(of_batch.item, q.tiles_n);
    const int64_t m0 = tile.row * BM, n0 = tile.item * BN;
    const float *a = q.a, *b = q.b;
    float* out = q.out;
    int64_t matrix = of_batch.row;
    for (int d = p.batch.rank - 1; d >= 0; d--) {
        const RowItem at = d == 0 ? RowItem{0, matrix} : row_item(matrix, p.batch.shape[d]);
        matrix = at.row;
        out += at.item * p.batch.operand[0].stride[d];
        a += at.item * p.batch.operand[1].stride[d];
        b += at.item * p.batch.operand[2].stride[d];
    }
    FetchedA next_a(a + m0 * p.a_row, p.a_row, p.a_column, p.M - m0, p.K);
    FetchedB next_b(b + n0 * p.b_column, p.b_column, p.b_row, p.N - n0, p.K);
    // A warp reads 2 (T = 4: 4) addresses of a and a contiguous piece of b's row.
    constexpr int SIDE = BN / T;
    const int column = threadIdx.x % SIDE, row = threadIdx.x / SIDE;
    float sum[T][T] = {};
    next_a.fetch(), next_b.fetch();
    next_a.store(tile_a[0]), next_b.store(tile_b[0]);
    __syncthreads();
    int buffer = 0;
    for (int64_t k0 = 0; k0 < p.K; k0 += BK, buffer ^= 1) {
        const bool more = k0 + BK < p.K;
        if (more) next_a.fetch(), next_b.fetch();
#pragma unroll
        for (int k = 0; k < BK; k++) {
            float x[T], y[T];
#pragma unroll
            for (int h = 0; h < T / H; h++) {
                reinterpret_cast<float4*>(x)[h] =
                    *reinterpret_cast<const float4*>(&tile_a[buffer][k][h * (BM * H / T) + row * H]);
                reinterpret_cast<float4*>(y)[h] =
                    *reinterpret_cast<const float4*>(&tile_b[buffer][k][h * (BN * H / T) + column * H]);
            }
#pragma unroll
            for (int i = 0; i < T; i++)
#pragma unroll
                for (int j = 0; j < T; j++) sum[i][j] = fmaf(x[i], y[j], sum[i][j]);
        }
        if (more) next_a.store(tile_a[buffer ^ 1]), next_b.store(tile_b[buffer ^ 1]);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < T; i++) {
        const int64_t m = m0 + i / H * (BM * H / T) + row * H + i % H;
        if (m >= p.M) continue;
#pragma unroll
        for (int j = 0; j < T; j++) {
            const int64_t n = n0 + j / H * (BN * H / T) + column * H + j % H;
            if (n < p.N) out[m * p.out_row + n * p.out_column] = sum[i][j];
        }
    }
}

// Whether matrices of this operand can be read 16 bytes at a time, and in which direction.
Layout layout_of(const BatchedProduct& p, int operand, int64_t lane_stride, int64_t k_stride, int64_t lanes) {
    const auto aligned = [](int64_t stride) { return stride % 4 == 0; };
    bool rows = reinterpret_cast<uintptr_t>(p.batch.operand[operand].data) % 16 == 0;
    for (int d = 0; d < p.batch.rank; d++) rows = rows && aligned(p.batch.operand[operand].stride[d]);
    if (rows && k_stride == 1 && p.K % 4 == 0 && aligned(lane_stride)) return Layout::AlongK;
    if (rows && lane_stride == 1 && lanes % 4 == 0 && aligned(k_stride)) return Layout::AcrossK;
    return Layout::Any;
}

template <typename F>
void with_layout(Layout layout, F f) {
    switch (layout) {
        case Layout::AlongK:
            return f(std::integral_constant<Layout, Layout::AlongK>{});
        case Layout::AcrossK:
            return f(std::integral_constant<Layout, Layout::AcrossK>{});
        case Layout::Any:
            return f(std::integral_constant<Layout, Layout::Any>{});
    }
}

template <typename S>
void launch_matmul(const char* op, const BatchedProduct& p, Stream stream) {
    Product q{};
    q.p = p;
    q.out = static_cast<float*>(p.batch.operand[0].data);
    q.a = static_cast<const float*>(p.batch.operand[1].data);
    q.b = static_cast<const float*>(p.batch.operand[2].data);
    q.tiles_m = ceil_div(p.M, S::BM), q.tiles_n = ceil_div(p.N, S::BN);
    const int64_t blocks = q.tiles_m * q.tiles_n * p.batch.numel();
    require(blocks <= 0x7fffffff, op, ": ", p.batch.numel(), " products of [", p.M, ", ", p.K, "] and [", p.K, ", ",
            p.N, "] take more blocks than a grid holds; multiply the batch in parts");
    with_layout(layout_of(p, 1, p.a_row, p.a_column, p.M), [&](auto a) {
        with_layout(layout_of(p, 2, p.b_column, p.b_row, p.N), [&](auto b) {
            matmul_kernel<S, decltype(a)::value, decltype(b)::value>
                <<<unsigned(blocks), S::THREADS, 0, cuda_stream(stream)>>>(q);
        });
    });
    check_launch(op, stream);
}

}  // namespace

void tensor_map(Tensor out, TensorFunction f, Tensor inp, Stream stream) {
    const char* op = "tensor_map";
    const StridedLoop loop = map_loop(op, out, f, inp);
    if (out.numel() > 0) launch_elementwise<1>(op, loop, f, stream);
}

void tensor_zip(Tensor out, TensorFunction f, Tensor x, Tensor y, Stream stream) {
    const char* op = "tensor_zip";
    const StridedLoop loop = zip_loop(op, out, f, x, y);
    if (out.numel() > 0) launch_elementwise<2>(op, loop, f, stream);
}

void tensor_bin_bcast(Tensor out, TensorFunction f, Tensor x, Tensor y, Stream stream) {
    const char* op = "tensor_bin_bcast";
    const BinBcast b = bin_bcast_loop(op, out, f, x, y);
    if (out.numel() == 0) return;
    if (x)
        launch_elementwise<2>(op, b.loop, b.f, stream);
    else
        launch_elementwise<1>(op, b.loop, b.f, stream);
}

int64_t tensor_reduce_scratch(Tensor out, Tensor inp, int axis) {
    return scratch_of(check_reduction("tensor_reduce_scratch", out, TensorFunction::Add, inp, axis));
}

void tensor_reduce(Tensor out, TensorFunction f, Tensor inp, int axis, float start, Tensor scratch, Stream stream) {
    const char* op = "tensor_reduce";
    const Reduction r = check_reduction(op, out, f, inp, axis);
    check_scratch(op, scratch, scratch_of(r));
    if (out.numel() == 0) return;
    const ReducePlan plan = plan_reduction(r);
    float* partial = static_cast<float*>(scratch.data);
    if (f == TensorFunction::Add)
        launch_reduce<TensorFunction::Add>(op, r, plan, start, partial, stream);
    else if (f == TensorFunction::Mul)
        launch_reduce<TensorFunction::Mul>(op, r, plan, start, partial, stream);
    else
        launch_reduce<TensorFunction::Max>(op, r, plan, start, partial, stream);
}

void tensor_matmul(Tensor out, Tensor a, Tensor b, Stream stream) {
    const char* op = "tensor_matmul";
    const BatchedProduct p = check_product(op, out, a, b);
    if (out.numel() == 0) return;
    // The large block unless a matrix is small, or there would be fewer blocks than SMs.
    using Large = Block<128, 128, 8, 8>;
    using Small = Block<32, 32, 16, 4>;
    const int64_t large_blocks = ceil_div(p.M, Large::BM) * ceil_div(p.N, Large::BN) * p.batch.numel();
    if (std::min(p.M, p.N) > 64 && large_blocks >= num_sms())
        launch_matmul<Large>(op, p, stream);
    else
        launch_matmul<Small>(op, p, stream);
}

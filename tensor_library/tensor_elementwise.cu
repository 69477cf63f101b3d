// map, zip and bin_bcast of tensor_ops.h: one elementwise kernel over a strided loop, and one for long rows that cannot
// be read in packs.
//
//                              elementwise_kernel                       row_segments_kernel
//   W elements in a pack       8 (16-bit)    4          1               -
//   elements a thread          8             4          4               8
//   registers, 1 and 2 inputs  40, 42        40, 40     54, 62          34, 40
//   blocks per SM              6, 5          6, 6       4, 4            6, 6
//
// (sm_90a, CUDA 13.0; blocks of 256 threads, no shared memory.)
//
// Adding a bias [3072] to bf16 [1024, 3072] (the MLP of GPT-2 124M, one sequence): 1024·3072 / 8 = 393,216 packs in
// 1,536 blocks. An H100 holds 132·5 = 660 of them at once.
#include "kernels/cuda/cuda_common.cuh"
#include "tensor_library/tensor_ops.cuh"
#include "tensor_library/tensor_ops_check.h"

namespace {

using namespace tensor_detail;

// Calls body with f as a compile-time constant, if f has ARGUMENTS arguments.
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

// Sizes and strides of the loop; the innermost dimension counts packs of W elements.
template <int INPUTS>
struct Elementwise {
    int rank;
    int64_t size[MAX_DIMS];
    int64_t packs, row_segments;  // all packs (row_segments_kernel: all segments); segments of a row
    Operand out, inp[INPUTS];
    TensorFunction f;
    bool bf16;  // all operands are bf16
};

// A thread computes PACKS packs that are THREADS apart: one if a pack has 16 bytes, four if it is a single element, so
// that several loads are in flight.
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

// For long rows that cannot be read in packs. A warp computes a segment of a row, each thread RUN elements that are a
// warp's width apart: the row index is divided out once for all of them, and their loads are in flight together.
constexpr int RUN = 8, SEGMENT = RUN * WARP;

struct Run {
    uint32_t word[RUN];  // an element each
};

// Elements at, at + step, …. `left` is the number of elements from this thread's first one to the end of the segment.
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
__global__ void __launch_bounds__(THREADS) row_segments_kernel(const __grid_constant__ Elementwise<INPUTS> a) {
    const int last = a.rank - 1;
    const int64_t segment = blockIdx.x * int64_t(THREADS / WARP) + threadIdx.x / WARP;
    if (segment >= a.packs) return;
    const RowItem at = row_item(segment, a.row_segments);
    const int64_t column = at.item * SEGMENT + threadIdx.x % WARP;
    const int left = int(min(a.size[last] - column, int64_t(SEGMENT)));
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

// The widest pack that every operand allows: 8 elements if all are 16-bit, 4, or 1.
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
    // One long row whose length is not a multiple of the pack width: launch its whole packs and its end separately.
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
    a.rank = loop.rank;
    a.f = f;
    a.packs = loop.numel() / W;
    a.bf16 = std::all_of(loop.operand, loop.operand + loop.operands,
                         [](const StridedLoop::Operand& operand) { return operand.dtype == DType::BF16; });
    for (int d = 0; d < loop.rank; d++) a.size[d] = d == last ? loop.shape[d] / W : loop.shape[d];
    for (int k = 0; k <= INPUTS; k++) {
        Operand& operand = k == 0 ? a.out : a.inp[k - 1];
        operand.data = loop.operand[k].data;
        operand.dtype = loop.operand[k].dtype;
        for (int d = 0; d < loop.rank; d++) operand.stride[d] = loop.operand[k].stride[d] * (d == last ? W : 1);
    }
    if (W == 1 && loop.inner() >= 2 * WARP) {
        a.row_segments = ceil_div(loop.inner(), SEGMENT);
        a.packs = loop.numel() / loop.inner() * a.row_segments;
        row_segments_kernel<INPUTS><<<grid_of(ceil_div(a.packs, THREADS / WARP)), THREADS, 0, cuda_stream(stream)>>>(a);
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

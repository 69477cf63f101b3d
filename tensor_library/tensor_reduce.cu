// reduce of tensor_ops.h.
//
// Two kernels. `along` is for an axis that is contiguous: neighbouring threads along the axis share a result. `across`
// is for an axis that is not: each thread has results of its own (W neighbours) and walks the axis. Where there are too
// few results to fill the GPU, the axis is split: each split writes partial results to the scratch, [splits, results]
// fp32, which `across` then reduces. A thread sums FLUSH packs before it adds them to its total, which keeps running
// sums short and rounding errors small.
//
//   W elements in a pack        8 (16-bit)    4             1
//   along, registers            62 to 64      51 to 62      40
//     shared memory             -; 32 B where the block shares a result
//   across, registers           64            48 to 58      40
//     shared memory             8,192 B       4,096 B       1,024 B; none where a thread walks the axis alone
//   blocks per SM               4             4 or 5        6
//
// (sm_90a, CUDA 13.0; blocks of 256 threads; 8 bytes of stack for `across` with W = 4.)
//
// GPT-2 124M, one sequence, fp32 [1024, 768] on an H100 (132 SMs). Over the channels: a row is 192 packs, so a warp for
// each of 1,024 results and 128 blocks. Over the tokens: 768 results are 192 packs of 4, with 8 threads for each 6
// blocks of 256 threads; 32 splits of 32 tokens make 192 blocks. Their 32·768 partial results take 96 KiB of scratch,
// and 24 blocks reduce them.
#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/pdl.cuh"
#include "tensor_library/tensor_ops.cuh"
#include "tensor_library/tensor_ops_check.h"

namespace {

using namespace tensor_detail;

constexpr int FLUSH = 64, IN_FLIGHT = 4;

struct Reduce {
    int rank;
    int64_t size[MAX_DIMS];  // of the results; `across`: the innermost dimension in packs
    Operand inp, out;
    int64_t items;                 // results, or packs of them
    int64_t blocks;                // for all items of a split
    int group;                     // along_kernel: threads that share a result, a power of two
    int64_t length, stride;        // of the axis
    int64_t splits, split_length;  // the axis is split into ranges of split_length elements
    float start;
    float* partial;  // [splits, results]; null: results go to out
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

// Reduces packs first, first + step, … below `end`, which are pack_stride elements apart, lane by lane.
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
        for (int i = 0; i < W; i++) {
            total[i] = apply<F>(total[i], sum[i]);
            sum[i] = neutral<F>();
        }
    }
    return total;
}

template <TensorFunction F>
__device__ __forceinline__ void store_result(const Reduce& a, int64_t split, int64_t result, int64_t at_out, float x) {
    if (a.partial)
        a.partial[split * a.results + result] = x;
    else
        store_as<1>(a.out.data, a.out.dtype, at_out, Floats<1>{{apply<F>(a.start, x)}});
}

// A group of threads for each result: the whole block, or a.group threads of a warp.
template <TensorFunction F, int W, bool BLOCK>
__global__ void __launch_bounds__(THREADS) along_kernel(const __grid_constant__ Reduce a) {
    pdl_launch_dependents();
    pdl_wait();
    const int group = BLOCK ? THREADS : a.group, lane = int(threadIdx.x) & (group - 1);
    const RowItem block = row_item(blockIdx.x, a.blocks);
    const int64_t result = (block.item * THREADS + threadIdx.x) >> (31 - __clz(group));
    const bool mine = result < a.items;
    const Offsets at = offsets_of(a, mine ? result : 0);
    const int64_t begin = block.row * a.split_length, end = min(begin + a.split_length, a.length);
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

// ROWS threads share the axis of a pack of results. A block has THREADS / ROWS neighbouring packs.
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
    const int64_t begin = block.row * a.split_length, end = min(begin + a.split_length, a.length);
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

// How a reduction runs. The size of the scratch and the launch both follow from it.
struct ReducePlan {
    bool along;
    int W, group;  // group: threads that share a result (`along`), or a pack of them (`across`)
    int64_t splits, split_length;
};

ReducePlan plan_reduction(const Reduction& r, bool may_split = true) {
    const StridedLoop& loop = r.loop;  // of (inp, out)
    const StridedLoop::Operand& inp = loop.operand[0];
    const int last = loop.rank - 1;
    const int64_t size = dtype_size(inp.dtype), results = std::max<int64_t>(loop.numel(), 1), n = r.length;
    ReducePlan plan{};
    // Neighbouring threads take the contiguous dimension, or without one the dimension of the smaller stride.
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
    // `along`: as many threads of a warp as get IN_FLIGHT packs each; a whole warp up to 1,024 packs, or 256 if there
    // would be few warps; beyond that the block. `across`: 8 threads, so that a block reads contiguous ranges of a row;
    // 1 if the axis is short; 32 if there are too few results for such ranges, or to fill the GPU when the axis is not
    // split.
    const int64_t items = plan.along ? results : ceil_div(results, plan.W), SMs = num_sms();
    const int64_t packs = n / plan.W;
    if (!plan.along) {
        plan.group = n <= 16 ? 1 : items < (may_split ? 32 : 32 * SMs) ? 32 : 8;
    } else if (packs > 1024 || (packs > 256 && results < 64 * SMs)) {
        plan.group = THREADS;
    } else {
        // A thread that ends after one round of loads leaves the memory idle: with enough results take four rounds.
        const auto suffices = [&](int64_t group) {
            return packs <= IN_FLIGHT * group || (packs <= 4 * IN_FLIGHT * group && results * group >= 4096 * SMs);
        };
        plan.group = 4;
        while (plan.group < WARP && !suffices(plan.group)) plan.group *= 2;
    }
    // As many splits as give each SM BLOCKS blocks, but at least IN_FLIGHT packs for each thread.
    constexpr int64_t BLOCKS = 4;
    const int64_t blocks = ceil_div(items, THREADS / plan.group);
    const int64_t wanted = may_split ? std::max<int64_t>(1, BLOCKS * SMs / blocks) : 1;
    const int64_t least = IN_FLIGHT * plan.group * (plan.along ? plan.W : 1);
    const int64_t splits = std::max<int64_t>(1, std::min(wanted, n / least));
    const int64_t granularity = plan.along ? plan.group * plan.W : 1;
    plan.split_length = std::max<int64_t>(1, ceil_div(ceil_div(n, splits), granularity) * granularity);
    plan.splits = std::max<int64_t>(1, ceil_div(n, plan.split_length));
    return plan;
}

int64_t scratch_of(const Reduction& r) {
    const int64_t splits = plan_reduction(r).splits;
    return splits > 1 ? splits * r.loop.numel() * int64_t(sizeof(float)) : 0;
}

template <TensorFunction F>
void launch_reduce(const char* op, const Reduction& r, const ReducePlan& plan, float start, float* partial,
                   Stream stream) {
    const StridedLoop& loop = r.loop;
    const int last = loop.rank - 1;
    Reduce a{};
    a.rank = loop.rank;
    a.length = r.length;
    a.stride = r.stride;
    a.start = start;
    a.splits = plan.splits;
    a.split_length = plan.split_length;
    a.results = loop.numel();
    a.partial = plan.splits > 1 ? partial : nullptr;
    const int W = plan.along ? 1 : plan.W;  // results of an item
    for (int d = 0; d < loop.rank; d++) a.size[d] = d == last ? loop.shape[d] / W : loop.shape[d];
    for (const auto& [to, from] :
         {std::pair<Operand*, const StridedLoop::Operand*>{&a.inp, &loop.operand[0]}, {&a.out, &loop.operand[1]}}) {
        to->data = from->data;
        to->dtype = from->dtype;
        for (int d = 0; d < loop.rank; d++) to->stride[d] = from->stride[d] * (d == last ? W : 1);
    }
    a.items = a.results / W;
    a.blocks = ceil_div(a.items, THREADS / plan.group);
    a.group = plan.group;
    const dim3 grid = grid_of(a.blocks * plan.splits);
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
    // The partial results are an array [splits, results]. A second launch reduces its first dimension; its blocks are
    // resident before the first kernel ends (programmatic dependent launch).
    Reduction rest = r;
    rest.length = plan.splits;
    rest.stride = a.results;
    rest.loop.operand[0].data = partial;
    rest.loop.operand[0].dtype = DType::F32;
    int64_t stride = 1;
    for (int d = last; d >= 0; d--) {
        rest.loop.operand[0].stride[d] = stride;
        stride *= loop.shape[d];
    }
    launch_reduce<F>(op, rest, plan_reduction(rest, false), start, nullptr, stream);
}

}  // namespace

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

// One adapter for all rows: y += h·Bᵀ of each part, in one launch. It reads and writes y and does little else; B is
// read by 4 warps at a time and h by all blocks of an SM, both from L1.
//
// A warp computes 32 rows and 32 outputs of one part by mma.sync, in two steps that fit its operands to wide accesses:
//   - Outputs are permuted among the four 8-column tiles of the accumulators: column c of tile j is output
//     8·(c / 2) + 2j + c % 2 of the 32. Lane 4g + t, which holds columns 2t and 2t + 1 of each tile, then holds outputs
//     8t … 8t + 7: 16 bytes of y in rows g, g + 8, …
//   - So is the rank within 16: lane 4g + t takes elements 4t … 4t + 3 of a row of h and of B as its k = 2t, 2t + 1,
//     2t + 8 and 2t + 9, by one access of 8 bytes. Both operands agree, so the sum is the same.
//
// LLaMA 8B, bf16, 256 rows, R = 16, blocks of 128 rows and 32 outputs: qkv (6,144 outputs) has 2 · 192 = 384
// blocks, 2.9 for each of an H200's 132 SMs, proj and fcproj (4,096) 256, 1.9 an SM, and fc (28,672) 1,792, 13.6 an SM,
// of which 5 are resident. fc reads 14.7 MB of y and writes as much, all four layers 44 MB: 8 µs at 5.5 TB/s of L2
// (estimated).
// A lane loads its 64 bytes of y before all else: 8 KiB a block.
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/pdl.cuh"
#include "kernels/generation/lora_rows.h"
#include "kernels/generation/lora_rows_check.h"

namespace {

constexpr int WARPS = 4, WARP_ROWS = 32, WARP_OUTPUTS = 32, BLOCKS_PER_SM = 5;  // 5: 102 registers a thread
constexpr int FP32_ROWS = 8, FP32_THREADS = 256;

template <typename T>
struct Expansion {
    T* y;
    const T *h, *b;
    int64_t N, y_stride, h_stride;
    int R;
    int part_ends[LORA_MAX_PARTS];
    int unit_ends[LORA_MAX_PARTS];  // of the parts, in units of WARP_OUTPUTS outputs; a unit is in one part
};

// Elements 0 … count − 1 of COUNT; the others are 0. With W > 1 they are all there or none is.
template <int W, int COUNT, typename T>
__device__ __forceinline__ Pack<T, COUNT> load_first(const T* p, int count) {
    Pack<T, COUNT> x{};
    if constexpr (W > 1) {
        if (count > 0) x = load_pack<COUNT>(p);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (i < count) x.word[i / 2] |= uint32_t(p[i].bits) << (i % 2 * 16);
    }
    return x;
}

template <int W, int COUNT, typename T>
__device__ __forceinline__ void store_first(T* p, const Floats<COUNT>& x, int count) {
    if constexpr (W > 1) {
        if (count > 0) store_floats(p, x);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (i < count) p[i] = from_float<T>(x[i]);
    }
}

// blockIdx: unit of outputs, WARPS · WARP_ROWS rows.
template <int W, typename T>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM) expand_all_kernel(const __grid_constant__ Expansion<T> p) {
    constexpr int TILES = WARP_OUTPUTS / 8, LANE_ROWS = WARP_ROWS / 8;
    pdl_launch_dependents();
    pdl_wait();
    const int lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4, unit = int(blockIdx.x);
    const int64_t first_row = (blockIdx.y * int64_t(WARPS) + threadIdx.x / 32) * WARP_ROWS;
    if (first_row >= p.N) return;
    int part = 0;
    while (unit >= p.unit_ends[part]) part++;
    const int begin =
        part ? p.part_ends[part - 1] + (unit - p.unit_ends[part - 1]) * WARP_OUTPUTS : unit * WARP_OUTPUTS;
    const int end = p.part_ends[part];

    // Row i of the lane is g + 8i of the warp's: in tile i / 2 of the accumulators the first or second of its two.
    const int64_t row = first_row + g;
    T* const y = p.y + row * p.y_stride + begin + 8 * t;
    const T* const h = p.h + row * p.h_stride + part * p.R;
    int outputs[LANE_ROWS];
    Pack<T, 8> sums[LANE_ROWS];
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
        outputs[i] = row + 8 * i < p.N ? end - (begin + 8 * t) : 0;
        sums[i] = load_first<W, 8>(y + 8 * i * p.y_stride, outputs[i]);
    }
    float c[LANE_ROWS / 2][TILES][4] = {};
#pragma unroll 1
    for (int k = 0; k < p.R; k += 16) {
        const int r = k + 4 * t;
        uint32_t a[LANE_ROWS / 2][4];
#pragma unroll
        for (int i = 0; i < LANE_ROWS; i++) {
            const Pack<T, 4> four = load_first<W, 4>(h + 8 * i * p.h_stride + r, row + 8 * i < p.N && r < p.R ? 4 : 0);
            a[i / 2][i % 2] = four.word[0];
            a[i / 2][i % 2 + 2] = four.word[1];
        }
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            const int o = begin + 8 * (g / 2) + 2 * j + g % 2;
            const Pack<T, 4> b = load_first<W, 4>(p.b + int64_t(o) * p.R + r, o < end && r < p.R ? 4 : 0);
#pragma unroll
            for (int m = 0; m < LANE_ROWS / 2; m++) mma_m16n8k16<T>(c[m][j], a[m], b.word[0], b.word[1]);
        }
    }
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
        Floats<8> sum = as_floats(sums[i]);
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            sum[2 * j] += c[i / 2][j][i % 2 * 2];
            sum[2 * j + 1] += c[i / 2][j][i % 2 * 2 + 1];
        }
        store_first<W>(y + 8 * i * p.y_stride, sum, outputs[i]);
    }
}

// A thread takes one output of FP32_ROWS rows. blockIdx: these rows, FP32_THREADS outputs.
template <int W>
__global__ void __launch_bounds__(FP32_THREADS)
    expand_all_fp32_kernel(const __grid_constant__ Expansion<float> p, int OC) {
    pdl_launch_dependents();
    pdl_wait();
    const int64_t first_row = blockIdx.x * int64_t(FP32_ROWS);
    const int o = int(blockIdx.y * FP32_THREADS + threadIdx.x);
    if (o >= OC) return;
    int part = 0;
    while (o >= p.part_ends[part]) part++;
    const int rows = int(min(int64_t(FP32_ROWS), p.N - first_row));
    const float* const h = p.h + first_row * p.h_stride + part * p.R;
    float sum[FP32_ROWS] = {};
    for (int r = 0; r < p.R; r += W) {
        const Floats<W> weight = load_floats<W>(p.b + int64_t(o) * p.R + r);
#pragma unroll
        for (int i = 0; i < FP32_ROWS; i++) {
            if (i >= rows) continue;
            const Floats<W> of_row = load_floats<W>(h + i * p.h_stride + r);
#pragma unroll
            for (int k = 0; k < W; k++) sum[i] += weight[k] * of_row[k];
        }
    }
#pragma unroll
    for (int i = 0; i < FP32_ROWS; i++)
        if (i < rows) p.y[(first_row + i) * p.y_stride + o] += sum[i];
}

template <typename T>
Expansion<T> make_expansion(const AdapterSizes& z, const Tensor& y, const Tensor& h, const AdapterWeights& w) {
    Expansion<T> p{};
    p.y = y.as<T>();
    p.h = h.as<T>();
    p.b = w.b.as<T>();
    p.N = z.N;
    p.y_stride = row_stride(y);
    p.h_stride = row_stride(h);
    p.R = int(z.R);
    for (size_t i = 0; i < size_t(z.parts); i++) {
        const int64_t begin = i ? w.part_ends[i - 1] : 0, units = ceil_div(w.part_ends[i] - begin, WARP_OUTPUTS);
        p.part_ends[i] = int(w.part_ends[i]);
        p.unit_ends[i] = int((i ? p.unit_ends[i - 1] : 0) + units);
    }
    return p;
}

bool parts_aligned(const AdapterWeights& w) {
    for (const int64_t end : w.part_ends)
        if (end % 8) return false;
    return true;
}

}  // namespace

void adapter_expand_all(Tensor y, Tensor h, const AdapterWeights& w, Stream stream) {
    const char* op = "adapter_expand_all";
    const DType dtype = check_activation_dtype(op, "y", y);
    const AdapterSizes z = check_only_adapter(op, dtype, y, h, w);
    if (z.N == 0) return;
    const bool weights_aligned = rows_aligned({h}) && start_aligned(w.b);
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        const Expansion<T> p = make_expansion<T>(z, y, h, w);
        if constexpr (std::is_same_v<T, float>) {
            const dim3 grid(unsigned(ceil_div(z.N, FP32_ROWS)), unsigned(ceil_div(z.columns, FP32_THREADS)));
            dispatch_width<T>(weights_aligned, [&](auto width) {
                launch_pdl(op, expand_all_fp32_kernel<decltype(width)::value>, grid, FP32_THREADS, 0, stream, p,
                           int(z.columns));
            });
        } else {
            const dim3 grid(unsigned(p.unit_ends[z.parts - 1]), unsigned(ceil_div(z.N, WARPS * WARP_ROWS)));
            dispatch_width<T>(weights_aligned && rows_aligned({y}) && parts_aligned(w), [&](auto width) {
                launch_pdl(op, expand_all_kernel<decltype(width)::value, T>, grid, WARPS * 32, 0, stream, p);
            });
        }
    });
}

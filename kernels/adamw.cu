// AdamW over an arena: blocks loop over tiles of 2048 elements.
//
//   tile             2048 elements: 2 vectors of 4 for each of 256 threads
//   shared memory    56 B (the factors of the update)
//   registers        48
//   blocks per SM    5
//
// GPT-2 124M: 124.5 million elements (vocabulary padded to 50304) are about 60800 tiles. An H100 has 132·5 = 660
// resident blocks, so each block does 92 or 93 tiles. The 148 tensors are 148 segments, which fit in one launch.
#include "kernels/adamw.h"

#include "kernels/adamw_check.h"
#include "kernels/cuda/cuda_common.cuh"
#include "runtime/rng.h"

namespace {

constexpr int THREADS = 256;
constexpr int64_t TILE = int64_t(THREADS) * 4 * 2;  // elements: two vectors a thread

// A segment as the kernel reads it, 40 bytes.
struct DeviceSegment {
    int64_t begin, end;
    int64_t to_fp32;     // index in params − index in the arena; NO_FP32: not in params
    int64_t to_element;  // index within the tensor − index in the arena
    uint64_t key;
};
constexpr int64_t NO_FP32 = INT64_MIN;

// Passed by value, which needs no copy to the device. A block finds the segment of its tile by bisection over
// first_tile. Segments beyond those that fit in a kernel's 32764 bytes of parameters take another launch (GPT-2 1558M
// has 580).
constexpr int MAX_SEGMENTS = 672;
struct SegmentTable {
    int32_t count;
    int32_t first_tile[MAX_SEGMENTS + 1];  // number of tiles of the previous segments
    float weight_decay[MAX_SEGMENTS];
    DeviceSegment segment[MAX_SEGMENTS];
};

// The factors of an update. A block computes them once, in double: the powers of β and 1 − β would lose digits in fp32.
struct Factors {
    float beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
    float grad_scale;
    float step_size;   // lr / (1 − β1^t)
    float root_scale;  // 1 / √(1 − β2^t)
    float lr;
    uint64_t seed, step;  // of the rounding noise
};

template <typename T>
struct Arenas {
    float* params;
    T* params_T;  // null if T = float
    float *m, *v;
    const float* grads;
};
static_assert(sizeof(SegmentTable) + sizeof(Arenas<float>) + sizeof(void*) + sizeof(AdamWOptions) <= 32764);

// bf16 drops the low 16 bits of an fp32 number. Adding 16 random bits there carries into the last kept bit with a
// probability equal to the dropped fraction, which is exactly unbiased. Sign and magnitude are separate bits, so this
// also holds for negative numbers. A carry into the exponent gives the next bf16 number. Where the dropped bits are 0,
// as in infinities, nothing carries.
__device__ __forceinline__ bf16 round_stochastically(float x, uint32_t random) {
    if (x != x) return from_float<bf16>(x);  // the payload of a NaN could carry into the sign
    return {uint16_t((__float_as_uint(x) + (random >> 16)) >> 16)};
}

// Four elements of a tensor share one Philox block with counter (t, element/4) and the key of the tensor. The element
// takes 36 bits of the low half and t the other 28: the noise repeats after 268 million steps.
__device__ __forceinline__ Philox4 noise_block(const Factors& f, uint64_t key, int64_t element) {
    return philox(f.seed, f.step << 36 | uint64_t(element) / 4, key);
}

template <int W, typename T>
__device__ __forceinline__ void update(const Arenas<T>& a, int64_t i, const Factors& f, const DeviceSegment& segment,
                                       float decay) {
    static_assert(W == 1 || W == 4, "a whole Philox block or one element of it");
    constexpr bool HAS_T = !std::is_same_v<T, float>;
    const bool in_fp32 = !HAS_T || segment.to_fp32 != NO_FP32;
    const Floats<W> g = load_floats<W>(a.grads + i);
    Floats<W> m = load_floats<W>(a.m + i), v = load_floats<W>(a.v + i), p;
    if (in_fp32)
        p = load_floats<W>(a.params + i + segment.to_fp32);
    else
        p = load_floats<W>(a.params_T + i);
#pragma unroll
    for (int k = 0; k < W; k++) {
        // fmaf explicitly, so that every instance of this kernel computes the same bits.
        const float gk = g[k] * f.grad_scale;
        m[k] = fmaf(f.beta1, m[k], f.one_minus_beta1 * gk);
        v[k] = fmaf(f.beta2, v[k], f.one_minus_beta2 * (gk * gk));
        const float adam = f.step_size * m[k] / fmaf(sqrtf(v[k]), f.root_scale, f.eps);
        p[k] -= fmaf(decay, p[k], adam);
    }
    store_floats<W>(a.m + i, m);
    store_floats<W>(a.v + i, v);
    if (in_fp32) {
        store_floats<W>(a.params + i + segment.to_fp32, p);
        if constexpr (HAS_T) store_floats<W>(a.params_T + i, p);
    } else if constexpr (std::is_same_v<T, bf16>) {
        const int64_t element = i + segment.to_element;
        const Philox4 noise = noise_block(f, segment.key, element);
        Floats<W> rounded;  // exact in bf16
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (W == 4)
                rounded[k % W] = as_float(round_stochastically(p[k % W], noise.v[k]));
            else if (k == element % 4)  // a run-time index would put the block into local memory
                rounded[0] = as_float(round_stochastically(p[0], noise.v[k]));
        }
        store_floats<W>(a.params_T + i, rounded);
    }
}

template <int W, typename T>
__global__ void __launch_bounds__(THREADS) adamw_kernel(Arenas<T> a, const StepScalars* scalars, AdamWOptions options,
                                                        const __grid_constant__ SegmentTable segments) {
    if (scalars->skip) return;
    __shared__ Factors shared;
    if (threadIdx.x == 0) {
        const double beta1 = options.beta1, beta2 = options.beta2, t = double(scalars->t);
        shared.beta1 = options.beta1;
        shared.one_minus_beta1 = float(1 - beta1);
        shared.beta2 = options.beta2;
        shared.one_minus_beta2 = float(1 - beta2);
        shared.eps = options.eps;
        shared.grad_scale = scalars->grad_scale;
        shared.step_size = float(scalars->lr / (1 - pow(beta1, t)));
        shared.root_scale = float(1 / sqrt(1 - pow(beta2, t)));
        shared.lr = scalars->lr;
        shared.seed = options.seed;
        shared.step = uint64_t(scalars->t);
    }
    __syncthreads();
    const Factors f = shared;
    const int32_t tiles = segments.first_tile[segments.count];
    for (int32_t tile = int32_t(blockIdx.x); tile < tiles; tile += int32_t(gridDim.x)) {
        int low = 0, high = segments.count - 1;  // the last segment that starts at or before the tile
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (segments.first_tile[middle] <= tile)
                low = middle;
            else
                high = middle - 1;
        }
        const DeviceSegment& segment = segments.segment[low];
        const int64_t begin = segment.begin, end = segment.end;
        const float decay = f.lr * segments.weight_decay[low];
        // A vector must be aligned in params and be one Philox block. Both hold for tensors that start at multiples of
        // four.
        const bool vectors = W == 1 || (segment.to_fp32 % W == 0 && segment.to_element % W == 0);
        // Tiles start at multiples of TILE in the arena, so that vectors are aligned wherever segments end.
        const int64_t base = (begin / TILE + tile - segments.first_tile[low]) * TILE;
#pragma unroll
        for (int64_t part = 0; part < TILE; part += int64_t(THREADS) * W) {
            const int64_t i = base + part + int64_t(threadIdx.x) * W;
            if (vectors && i >= begin && i + W <= end) {
                update<W>(a, i, f, segment, decay);
            } else {
                for (int64_t j = max(i, begin); j < min(i + W, end); j++) update<1>(a, j, f, segment, decay);
            }
        }
    }
}

int64_t resident_blocks(const char* op, const void* kernel) {
    int blocks = 0;
    cuda_check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, THREADS, 0), op);
    return blocks * num_sms();
}

template <typename T>
void launch(const char* op, const Arenas<T>& arenas, const AdamWSegment* segments, int64_t num_segments,
            const AdamWOptions& options, const StepScalars* scalars, bool aligned, Stream stream) {
    SegmentTable table;
    table.count = 0;
    table.first_tile[0] = 0;
    for (int64_t i = 0; i < num_segments; i++) {
        const AdamWSegment& s = segments[i];
        if (s.begin < s.end) {
            const int at = table.count++;
            table.segment[at] = {s.begin, s.end, s.fp32_begin < 0 ? NO_FP32 : s.fp32_begin - s.begin,
                                 s.first_element - s.begin, s.key};
            table.weight_decay[at] = s.weight_decay;
            const int64_t tiles = table.first_tile[at] + ceil_div(s.end, TILE) - s.begin / TILE;
            require(tiles <= INT32_MAX / 2, op, ": ", s.end, " elements are more than one GPU can hold");
            table.first_tile[at + 1] = int32_t(tiles);
        }
        if (table.count == 0 || (table.count < MAX_SEGMENTS && i + 1 < num_segments)) continue;
        // As many blocks as are resident at once: each computes its factors once and loops over tiles.
        dispatch_width<float>(aligned, [&](auto width) {
            const auto kernel = adamw_kernel<decltype(width)::value, T>;
            static const int64_t resident = resident_blocks(op, reinterpret_cast<const void*>(kernel));
            const int64_t blocks = std::min<int64_t>(table.first_tile[table.count], resident);
            kernel<<<grid_of(blocks), THREADS, 0, cuda_stream(stream)>>>(arenas, scalars, options, table);
        });
        check_launch(op, stream);
        table.count = 0;
    }
}

}  // namespace

void adamw_update(Tensor params, Tensor params_T, Tensor m, Tensor v, Tensor grads, const AdamWSegment* segments,
                  int64_t num_segments, const AdamWOptions& options, Tensor scalars, Stream stream) {
    const char* op = "adamw_update";
    check_adamw(op, params, params_T, m, v, grads, segments, num_segments, scalars);
    dispatch_dtype(op, params_T ? params_T.dtype : DType::F32, [&](auto zero) {
        using T = decltype(zero);
        const Arenas<T> arenas{params.as<float>(), params_T ? params_T.as<T>() : nullptr, m.as<float>(), v.as<float>(),
                               grads.as<float>()};
        launch<T>(op, arenas, segments, num_segments, options,
                  reinterpret_cast<const StepScalars*>(scalars.as<uint8_t>()),
                  rows_aligned({params, params_T, m, v, grads}), stream);
    });
}

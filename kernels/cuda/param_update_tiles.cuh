// Common code of the optimizers' kernels: the segments of a launch, the loop over their elements, and how parameters
// are loaded and stored (kernels/param_update.h).
//
// A launch covers tiles of 2048 elements: 2 vectors of 4 for each of 256 threads. Blocks loop over tiles. A block finds
// the segment of its tile by bisection.
//
// GPT-2 124M: 124.5 million elements (vocabulary padded to 50304) are about 60800 tiles. With 5 blocks on each of 132
// SMs, each block does 92 or 93 tiles. The 148 tensors are 148 segments, which fit in one launch.
#pragma once

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/param_update.h"
#include "kernels/stochastic_rounding.h"

constexpr int UPDATE_THREADS = 256;
constexpr int64_t UPDATE_TILE = int64_t(UPDATE_THREADS) * 4 * 2;  // elements: two vectors a thread

// A segment as kernels read it. An optimizer that needs more derives from it.
struct DeviceSegment {
    int64_t begin, end;
    int64_t to_fp32;     // index in params − index in the arena; NO_FP32: not in params
    int64_t to_element;  // index within the tensor − index in the arena
    uint64_t key;
    float weight_decay, lr_scale;

    DeviceSegment() = default;
    explicit DeviceSegment(const ParamSegment& s)
        : begin(s.begin),
          end(s.end),
          to_fp32(s.fp32_begin < 0 ? NO_FP32 : s.fp32_begin - s.begin),
          to_element(s.first_element - s.begin),
          key(s.key),
          weight_decay(s.weight_decay),
          lr_scale(s.lr_scale) {}
    static constexpr int64_t NO_FP32 = INT64_MIN;
};

// Passed by value, which needs no copy to the device. Kernels have 32764 bytes of parameters, of which 512 are left for
// the other arguments. Segments beyond those that fit take another launch (GPT-2 1558M has 580).
template <typename Segment>
struct SegmentTable {
    static constexpr int MAX = int((32764 - 512 - 2 * sizeof(int64_t)) / (sizeof(Segment) + sizeof(int32_t)));
    int32_t count;
    int32_t first_tile[MAX + 1];  // number of tiles of the previous segments
    Segment segment[MAX];
};

// Launches kernel(arguments..., table) for the segments that are not empty, as often as the tables need. As many blocks
// as are resident at once, so that each computes what is common to all elements only once.
template <auto kernel, typename Segment, typename HostSegment, typename... Arguments>
void launch_segments(const char* op, const HostSegment* segments, int64_t num_segments, Stream stream,
                     const Arguments&... arguments) {
    static const int64_t resident = [&] {
        int blocks = 0;
        cuda_check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, UPDATE_THREADS, 0), op);
        return blocks * num_sms();
    }();
    SegmentTable<Segment> table;
    table.count = 0;
    table.first_tile[0] = 0;
    for (int64_t i = 0; i < num_segments; i++) {
        const HostSegment& s = segments[i];
        if (s.begin < s.end) {
            const int at = table.count++;
            table.segment[at] = Segment(s);
            const int64_t tiles = table.first_tile[at] + ceil_div(s.end, UPDATE_TILE) - s.begin / UPDATE_TILE;
            require(tiles <= INT32_MAX / 2, op, ": ", s.end, " elements are more than one GPU can hold");
            table.first_tile[at + 1] = int32_t(tiles);
        }
        if (table.count == 0 || (table.count < table.MAX && i + 1 < num_segments)) continue;
        const int64_t blocks = std::min<int64_t>(table.first_tile[table.count], resident);
        kernel<<<grid_of(blocks), UPDATE_THREADS, 0, cuda_stream(stream)>>>(arguments..., table);
        check_launch(op, stream);
        table.count = 0;
    }
}

// Calls update(width, i, segment) for all elements of all segments, in vectors of W at index i of the arenas where
// vectors(segment) allows it, else one by one: `width` is an integral_constant. W is 4 or 1. The arenas must be aligned
// for W.
template <int W, typename Segment, typename Vectors, typename Update>
__device__ __forceinline__ void for_each_element(const SegmentTable<Segment>& segments, Vectors vectors,
                                                 Update update) {
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
        const Segment& segment = segments.segment[low];
        const int64_t begin = segment.begin, end = segment.end;
        const bool in_vectors = W == 1 || vectors(segment);
        // Tiles start at multiples of UPDATE_TILE in the arena, so that vectors are aligned wherever segments end.
        const int64_t base = (begin / UPDATE_TILE + tile - segments.first_tile[low]) * UPDATE_TILE;
#pragma unroll
        for (int64_t part = 0; part < UPDATE_TILE; part += int64_t(UPDATE_THREADS) * W) {
            const int64_t i = base + part + int64_t(threadIdx.x) * W;
            if (in_vectors && i >= begin && i + W <= end) {
                update(std::integral_constant<int, W>{}, i, segment);
            } else {
                for (int64_t j = max(i, begin); j < min(i + W, end); j++)
                    update(std::integral_constant<int, 1>{}, j, segment);
            }
        }
    }
}

__device__ __forceinline__ bf16 round_stochastically(float x, uint32_t noise) {
    if (x != x) return from_float<bf16>(x);  // the payload of a NaN could carry into the sign
    return {rounded_bits(__float_as_uint(x), noise)};
}

// Stores elements `element` and on of a tensor. noise: of the Philox block that has them.
template <int W>
__device__ __forceinline__ void store_stochastically(bf16* p, const Floats<W>& x, const Philox4& noise,
                                                     int64_t element) {
    static_assert(W == 1 || W == 4, "a whole Philox block or one element of it");
    Floats<W> rounded;  // exact in bf16
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (W == 4)
            rounded[k % W] = as_float(round_stochastically(x[k % W], noise.v[k]));
        else if (k == element % 4)  // a run-time index would put the block into local memory
            rounded[0] = as_float(round_stochastically(x[0], noise.v[k]));
    }
    store_floats<W>(p, rounded);
}

// Seed and step of the noise.
struct NoiseKeys {
    uint64_t seed = 0, t = 0;
};

// Stores the elements of a segment from index i of the arena on: fp32 as they are, bf16 rounded stochastically.
template <int W>
__device__ __forceinline__ void store_rounded(float* p, const Floats<W>& x, const NoiseKeys&, const DeviceSegment&,
                                              int64_t, Rounded) {
    store_floats<W>(p, x);
}
template <int W>
__device__ __forceinline__ void store_rounded(bf16* p, const Floats<W>& x, const NoiseKeys& keys,
                                              const DeviceSegment& segment, int64_t i, Rounded what) {
    const int64_t element = i + segment.to_element;
    store_stochastically<W>(p, x, rounding_noise(keys.seed, keys.t, segment.key, element, what), element);
}

// Parameters in fp32, in 16 bits, or both.
template <typename T>
struct ParamArenas {
    float* params;
    T* params_T;  // null if T = float
    NoiseKeys noise = {};

    // Vectors must be aligned in params and be one Philox block. Both hold for tensors that start at multiples of four.
    static __device__ __forceinline__ bool vectors(const DeviceSegment& segment) {
        return segment.to_fp32 % 4 == 0 && segment.to_element % 4 == 0;
    }

    static __device__ __forceinline__ bool in_fp32(const DeviceSegment& segment) {
        return std::is_same_v<T, float> || segment.to_fp32 != DeviceSegment::NO_FP32;
    }

    template <int W>
    __device__ __forceinline__ Floats<W> load(int64_t i, const DeviceSegment& segment) const {
        return in_fp32(segment) ? load_floats<W>(params + i + segment.to_fp32) : load_floats<W>(params_T + i);
    }

    template <int W>
    __device__ __forceinline__ void store(int64_t i, const DeviceSegment& segment, const Floats<W>& p) const {
        if (in_fp32(segment)) {
            store_floats<W>(params + i + segment.to_fp32, p);
            if constexpr (!std::is_same_v<T, float>) store_floats<W>(params_T + i, p);
        } else if constexpr (std::is_same_v<T, bf16>) {
            store_rounded<W>(params_T + i, p, noise, segment, i, Rounded::Param);
        }
    }
};

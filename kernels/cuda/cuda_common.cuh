// What the CUDA kernels share: numbers of T as floats, vectors of them, reductions, and the choice of T and of the
// vector's width at launch.
//
// T is the dtype of activations: float, bf16 or fp16. Kernels compute in fp32: they load T as floats and round once,
// when they store. Memory is read and written in vectors of W elements, 16 bytes or a multiple; a kernel is compiled
// for the full width and for W = 1, which takes what is not aligned or does not divide (dispatch_width).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/check.h"
#include "runtime/device/cuda_check.h"
#include "runtime/device/tensor.h"

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

// --- numbers

__device__ __forceinline__ float as_float(float x) {
    return x;
}
__device__ __forceinline__ float as_float(bf16 x) {
    return __uint_as_float(uint32_t(x.bits) << 16);
}
__device__ __forceinline__ float as_float(fp16 x) {
    return __half2float(__ushort_as_half(x.bits));
}

// Round to nearest even.
template <typename T>
__device__ __forceinline__ T from_float(float x) {
    if constexpr (std::is_same_v<T, float>)
        return x;
    else if constexpr (std::is_same_v<T, bf16>)
        return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
    else
        return {__half_as_ushort(__float2half_rn(x))};
}

// x as it will be read again once stored as T.
template <typename T>
__device__ __forceinline__ float rounded_to(float x) {
    return as_float(from_float<T>(x));
}

// exp and 1/x: to about one unit in the last place for fp32 results, by the special function unit for 16-bit results,
// which don't see its two units more.
template <typename T>
__device__ __forceinline__ float exp_for(float x) {
    return std::is_same_v<T, float> ? expf(x) : __expf(x);
}
template <typename T>
__device__ __forceinline__ float reciprocal_for(float x) {
    return std::is_same_v<T, float> ? 1 / x : __fdividef(1, x);
}

// --- vectors

// Elements of T in 16 bytes: the widest access of one thread.
template <typename T>
constexpr int FULL_WIDTH = 16 / int(sizeof(T));

// W elements as they lie in memory, 16-bit ones in pairs: an array of single ones takes a register for each, which
// doubles what loads in flight cost.
template <typename T, int W>
struct alignas(sizeof(T) * W < 16 ? sizeof(T) * W : 16) Pack {
    static constexpr bool PAIRS = sizeof(T) == 2 && W % 2 == 0;
    std::conditional_t<PAIRS, uint32_t, T> word[PAIRS ? W / 2 : W];
};

template <int W>
struct Floats {
    float v[W];
    __device__ __forceinline__ float& operator[](int i) { return v[i]; }
    __device__ __forceinline__ float operator[](int i) const { return v[i]; }
};

// As stored: for what is loaded early and used late, because 16-bit elements take half the registers of floats. p must
// be aligned to the smaller of 16 bytes and W elements.
template <int W, typename T>
__device__ __forceinline__ Pack<T, W> load_pack(const T* p) {
    return *reinterpret_cast<const Pack<T, W>*>(p);
}

// Vectors of 16 bytes or more: to global memory only, and in assembly, because the compiler stores the words one by one
// where they come from conversions.
template <int W, typename T>
__device__ __forceinline__ void store_pack(T* p, const Pack<T, W>& x) {
    if constexpr (sizeof(x) % sizeof(uint4) == 0) {
#pragma unroll
        for (size_t i = 0; i < sizeof(x) / sizeof(uint4); i++) {
            const uint4 v = reinterpret_cast<const uint4*>(&x)[i];
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(
                             __cvta_generic_to_global(reinterpret_cast<uint4*>(p) + i)),
                         "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                         : "memory");
        }
    } else {
        *reinterpret_cast<Pack<T, W>*>(p) = x;
    }
}

template <typename T, int W>
__device__ __forceinline__ Floats<W> as_floats(const Pack<T, W>& pack) {
    Floats<W> x;
    if constexpr (Pack<T, W>::PAIRS) {
#pragma unroll
        for (int i = 0; i < W / 2; i++) {
            const uint32_t word = pack.word[i];
            if constexpr (std::is_same_v<T, bf16>) {
                x[2 * i] = __uint_as_float(word << 16);
                x[2 * i + 1] = __uint_as_float(word & 0xffff0000u);
            } else {
                x[2 * i] = as_float(fp16{uint16_t(word)});
                x[2 * i + 1] = as_float(fp16{uint16_t(word >> 16)});
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < W; i++) x[i] = as_float(pack.word[i]);
    }
    return x;
}

// Round to nearest even.
template <typename T, int W>
__device__ __forceinline__ Pack<T, W> as_pack(const Floats<W>& x) {
    Pack<T, W> pack;
    if constexpr (Pack<T, W>::PAIRS) {
#pragma unroll
        for (int i = 0; i < W / 2; i++) {
            if constexpr (std::is_same_v<T, bf16>) {
                const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
                pack.word[i] = reinterpret_cast<const uint32_t&>(pair);
            } else {
                const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
                pack.word[i] = reinterpret_cast<const uint32_t&>(pair);
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < W; i++) pack.word[i] = from_float<T>(x[i]);
    }
    return pack;
}

template <int W, typename T>
__device__ __forceinline__ Floats<W> load_floats(const T* p) {
    return as_floats(load_pack<W>(p));
}

template <int W, typename T>
__device__ __forceinline__ void store_floats(T* p, const Floats<W>& x) {
    store_pack(p, as_pack<T>(x));
}

// The line of global memory around p is on its way to L2.
__device__ __forceinline__ void prefetch_line(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p)));
}

// --- sums and maxima of a warp and of a block, the same bits in every thread. The order is a tree of fixed shape.

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

// A NaN in any lane gives NaN, which fmaxf would drop.
__device__ __forceinline__ float nan_max(float a, float b) {
    return a > b || a != a ? a : b;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x = nan_max(x, __shfl_xor_sync(ALL_LANES, x, offset));
    return x;
}

// Every thread of the block calls it; THREADS is the block's size, a multiple of 32.
template <int THREADS>
__device__ __forceinline__ float block_sum(float x) {
    static_assert(THREADS % WARP == 0 && THREADS <= 1024);
    x = warp_sum(x);
    if constexpr (THREADS == WARP) return x;
    __shared__ float partial[THREADS / WARP];
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = x;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int w = 0; w < THREADS / WARP; w++) sum += partial[w];
    __syncthreads();  // partial may be written again
    return sum;
}

// Two sums for the waiting of one.
template <int THREADS>
__device__ __forceinline__ void block_sum(float& x, float& y) {
    static_assert(THREADS % WARP == 0 && THREADS <= 1024);
    x = warp_sum(x), y = warp_sum(y);
    if constexpr (THREADS == WARP) return;
    __shared__ float2 partial[THREADS / WARP];
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = {x, y};
    __syncthreads();
    x = y = 0;
#pragma unroll
    for (int w = 0; w < THREADS / WARP; w++) x += partial[w].x, y += partial[w].y;
    __syncthreads();
}

template <int THREADS>
__device__ __forceinline__ float block_max(float x) {
    static_assert(THREADS % WARP == 0 && THREADS <= 1024);
    x = warp_max(x);
    if constexpr (THREADS == WARP) return x;
    __shared__ float partial[THREADS / WARP];
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = x;
    __syncthreads();
    float max = partial[0];
#pragma unroll
    for (int w = 1; w < THREADS / WARP; w++) max = nan_max(max, partial[w]);
    __syncthreads();
    return max;
}

// Item i of rows of per_row items each: its row and its place there. 64-bit divisions take several times as long.
struct RowItem {
    int64_t row, item;
};
__device__ __forceinline__ RowItem row_item(int64_t i, int64_t per_row) {
    if ((uint64_t(i) | uint64_t(per_row)) >> 32 == 0) {
        const uint32_t row = uint32_t(i) / uint32_t(per_row);
        return {row, uint32_t(i) - row * uint32_t(per_row)};
    }
    return {i / per_row, i % per_row};
}

// --- at launch

// f(T{}) with the T of the dtype: dispatch_dtype(op, inp.dtype, [&](auto zero) { using T = decltype(zero); … }).
template <typename F>
void dispatch_dtype(const char* op, DType dtype, F f) {
    switch (dtype) {
        case DType::F32:
            return f(float{});
        case DType::BF16:
            return f(bf16{});
        case DType::F16:
            return f(fp16{});
        default:
            throw Error(str(op, ": activations are ", dtype_name(dtype), ", expected fp32, bf16 or fp16"));
    }
}

// f(std::integral_constant<int, W>) with the full width of T, or with 1 where the operands don't allow it.
template <typename T, typename F>
void dispatch_width(bool full, F f) {
    if (full)
        f(std::integral_constant<int, FULL_WIDTH<T>>{});
    else
        f(std::integral_constant<int, 1>{});
}

// Row stride in elements of a matrix [N, C]; a single row may carry any.
inline int64_t row_stride(const Tensor& t) {
    return t.shape[0] > 1 ? t.stride[0] : std::max<int64_t>(1, t.shape[1]);
}

// Whether every row of these matrices and vectors begins at a multiple of 16 bytes; null tensors don't matter. What is
// left to ask for is that the width divides the columns.
inline bool rows_aligned(std::initializer_list<Tensor> tensors) {
    for (const Tensor& t : tensors) {
        if (!t) continue;
        if (reinterpret_cast<uintptr_t>(t.data) % 16) return false;
        for (int i = 0; i + 1 < t.rank; i++)
            if (t.shape[i] > 1 && t.stride[i] * dtype_size(t.dtype) % 16) return false;
    }
    return true;
}

inline int device_attribute(cudaDeviceAttr attribute) {
    int device = 0, value = 0;
    cuda_check(cudaGetDevice(&device), "device_attribute");
    cuda_check(cudaDeviceGetAttribute(&value, attribute, device), "device_attribute");
    return value;
}

// Multiprocessors of the current device, asked for once.
inline int64_t num_sms() {
    static const int count = device_attribute(cudaDevAttrMultiProcessorCount);
    return count;
}

// Bytes of shared memory that a block may ask for.
inline int64_t max_shared_bytes() {
    static const int bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return bytes;
}

// Of which as many blocks run side by side as fit, each with 1 KiB for the system.
inline int64_t shared_bytes_per_sm() {
    static const int bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    return bytes;
}

__host__ __device__ inline int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// One-dimensional grids reach 2³¹ − 1 blocks; kernels that might need more take a stride loop.
inline dim3 grid_of(int64_t blocks) {
    return dim3(static_cast<unsigned>(std::min<int64_t>(blocks, 0x7fffffff)));
}

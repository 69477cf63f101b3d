// Vectors of W elements: as they are stored (Pack), as floats (Floats), and how they are loaded and stored.
#pragma once

#include "kernels/cuda/number.cuh"

// Elements of T in 16 bytes, the widest access of one thread.
template <typename T>
constexpr int FULL_WIDTH = 16 / int(sizeof(T));

// W elements as they are stored. 16-bit elements are held in pairs: an array of single elements would take a register
// each, which doubles the registers of loads in flight.
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

// Loads W elements and keeps them as they are stored, for values that are loaded early and used late: 16-bit elements
// take half the registers of floats. p must be aligned to the smaller of 16 bytes and W elements.
template <int W, typename T>
__device__ __forceinline__ Pack<T, W> load_pack(const T* p) {
    return *reinterpret_cast<const Pack<T, W>*>(p);
}

// p must point to global memory. Vectors of 16 bytes or more are stored in assembly, because the compiler stores word
// by word where the words come from conversions.
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

// Prefetches the cache line of p, in global memory, into L2.
__device__ __forceinline__ void prefetch_line(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p)));
}

// The rows of inp of a GEMV block: up to 8, in shared memory, normalised. For linear_gemv.cu and linear_packed_gemv.cu.
#pragma once

#include "kernels/cuda/row_statistics.cuh"
#include "kernels/generation/linear.cuh"

namespace gemv_rows {

constexpr int WARPS = 8, THREADS = WARPS * WARP;
constexpr int64_t SHARED_BYTES = 64 << 10;  // for the rows: two blocks fit on every SM

// Copies the rows of inp to shared memory and normalises them if there is a norm: NB teams of warps, a row each. A lane
// reads back only what it has written itself.
//
// A row's sums are those of 256 lanes, eight warps, added in order: a team of fewer warps does the work of all eight,
// so that the bits do not depend on the number of rows.
template <int W, int NB, typename T>
__device__ __forceinline__ void load_rows(T* rows, const LinearParams<T>& p) {
    constexpr int TEAM = WARPS / NB;
    __shared__ float partial[NB][WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n = warp / TEAM;
    const T* const inp = p.inp + n * p.inp_stride;
    T* const x = rows + n * p.C;
    const int64_t end = n < p.N ? p.C : 0;
    // f(c, i) for this lane's vectors, in the role of a lane of each of the NB warps.
    const auto for_each_vector = [&](auto f) {
        for (int64_t base = 0; base < end; base += THREADS * W) {
#pragma unroll
            for (int i = 0; i < NB; i++) {
                const int64_t c = base + ((warp % TEAM + i * TEAM) * WARP + lane) * W;
                if (c < end) f(c, i);
            }
        }
    };
    const auto row_total = [&](const float(&sums)[NB]) {
#pragma unroll
        for (int i = 0; i < NB; i++) {
            const float sum = warp_sum(sums[i]);
            if (lane == 0) partial[n][warp % TEAM + i * TEAM] = sum;
        }
        __syncthreads();
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += partial[n][w];
        __syncthreads();
        return sum;
    };
    const auto loaded = [&](int64_t c) { return as_floats(*reinterpret_cast<const Pack<T, W>*>(x + c)); };

    float sums[NB] = {};
    for_each_vector([&](int64_t c, int i) {
        const Pack<T, W> pack = load_pack<W>(inp + c);
        *reinterpret_cast<Pack<T, W>*>(x + c) = pack;
        sums[i] = add_elements(sums[i], as_floats(pack));
    });
    if (!p.norm_weight) return;
    const float mean = p.centred ? row_total(sums) / float(p.C) : 0;
    float m2[NB] = {};
    // Written out: with add_squared_deviations nvcc unrolls the loop over C, for 8% more instructions.
    for_each_vector([&](int64_t c, int i) {
        const Floats<W> v = loaded(c);
#pragma unroll
        for (int k = 0; k < W; k++) m2[i] += (v[k] - mean) * (v[k] - mean);
    });
    const float rstd = row_rstd(row_total(m2), float(p.C), p.eps);
    for_each_vector([&](int64_t c, int) {
        const Floats<W> v = loaded(c), weight = load_floats<W>(p.norm_weight + c);
        Floats<W> bias = {};
        if (p.norm_bias) bias = load_floats<W>(p.norm_bias + c);
        *reinterpret_cast<Pack<T, W>*>(x + c) = as_pack<T>(normalize(v, mean, rstd, weight, bias));
    });
}

// How many rows of inp a launch can take; 0 if not even one fits into shared memory.
inline int64_t rows_per_launch(int64_t C, DType dtype) {
    const int64_t bytes = C * dtype_size(dtype);
    if (bytes <= SHARED_BYTES) return std::min(SHARED_BYTES / bytes, LINEAR_SMALL_N);
    return bytes + 4096 <= max_shared_bytes() ? 1 : 0;  // beside the kernel's own arrays
}

// Beyond 48 KiB, of which the kernel's own arrays take some, shared memory must be requested.
template <typename Kernel>
void request_shared_bytes(const char* op, Kernel kernel, size_t bytes) {
    if (bytes > (40 << 10))
        cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)), op);
}

}  // namespace gemv_rows

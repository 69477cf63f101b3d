#include "kernels/nf4.h"

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/nf4_check.h"
#include "kernels/nf4_values.h"

namespace {

// A thread makes 16 weights from one load of 8 bytes; 4 threads share a block. In bf16 a block is 128 bytes written and
// 33 read: the 218 million weights of a layer of LLaMA 8B take 0.55 GB, 0.18 ms at 3 TB/s.
constexpr int THREADS = 256, W = 16, WORDS = 4;  // words of 4 weights, each stored as a vector

struct Tables {
    float codes[16], absmax[256];
};

template <typename T>
__global__ void __launch_bounds__(THREADS)
    dequantise_kernel(T* out, const uint2* codes, const uint8_t* absmax_codes, const float* group_absmax,
                      const float* mean, int64_t n, const __grid_constant__ Tables tables) {
    __shared__ float values[16];  // lanes read different ones: shared memory serves 16 banks at once
    if (threadIdx.x < 16) values[threadIdx.x] = tables.codes[threadIdx.x];
    __syncthreads();
    const int64_t thread = blockIdx.x * int64_t(THREADS) + threadIdx.x, block = thread * W / NF4_BLOCK;
    if (thread * W >= n) return;
    const float absmax = fmaf(tables.absmax[absmax_codes[block]], group_absmax[block / NF4_GROUP], *mean);
    const uint2 pairs = codes[thread];
#pragma unroll
    for (int word = 0; word < WORDS; word++) {
        const uint32_t two_bytes = (word < 2 ? pairs.x : pairs.y) >> (word % 2 * 16);
        Floats<4> w;
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = values[two_bytes >> (i / 2 * 8 + (i % 2 ? 0 : 4)) & 15] * absmax;
        store_floats<4>(out + thread * W + word * 4, w);
    }
}

}  // namespace

void nf4_dequantise(Tensor out, const Nf4Weights& weights, Stream stream) {
    const char* op = "nf4_dequantise";
    check_tensor(op, "out", out, check_activation_dtype(op, "out", out), {out.numel()});
    check_nf4(op, weights, out.numel());
    require(start_aligned(out) && start_aligned(weights.codes), op, ": out or codes is not aligned to 16 bytes");
    const int64_t n = out.numel();
    if (n == 0) return;
    static const Tables tables = [] {
        Tables t;
        std::copy(std::begin(NF4_VALUES), std::end(NF4_VALUES), t.codes);
        const std::array<float, 256> absmax = nf4_absmax_values();
        std::copy(absmax.begin(), absmax.end(), t.absmax);
        return t;
    }();
    const auto launch = [&](auto zero) {
        using T = decltype(zero);
        dequantise_kernel<T><<<grid_of(ceil_div(n / W, THREADS)), THREADS, 0, cuda_stream(stream)>>>(
            out.as<T>(), static_cast<const uint2*>(weights.codes.data), weights.absmax_codes.as<uint8_t>(),
            weights.group_absmax.as<float>(), weights.mean.as<float>(), n, tables);
    };
    if (out.dtype == DType::F32)
        launch(float{});
    else
        out.dtype == DType::F16 ? launch(fp16{}) : launch(bf16{});
    check_launch(op, stream);
}

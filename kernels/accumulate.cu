// A thread adds 4 elements, or one where n or an address is not a multiple of 4 elements. The gradients of a layer of
// GPT-2 124M, n = 7,087,872: 7,087,872 / 4 / 256 = 6,922 blocks. Adding fp32 to bf16 moves 8 bytes an element, 57 MB.
#include "kernels/accumulate.h"

#include "kernels/accumulate_check.h"
#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/param_update_tiles.cuh"

namespace {

constexpr int THREADS = 256, WIDTH = 4;  // WIDTH elements are 16 bytes of fp32, 8 of bf16

// inp, or out + inp.
template <int W, typename Out, typename Inp>
__device__ __forceinline__ Floats<W> sum_of(const Out* out, const Inp* inp, bool add, int64_t i) {
    Floats<W> x = load_floats<W>(inp + i);
    if (add) {
        const Floats<W> before = load_floats<W>(out + i);
#pragma unroll
        for (int k = 0; k < W; k++) x[k] += before[k];
    }
    return x;
}

template <int W, typename Out, typename Inp>
__global__ void __launch_bounds__(THREADS) accumulate_kernel(Out* out, const Inp* inp, bool add, int64_t n) {
    const int64_t i = (blockIdx.x * int64_t(THREADS) + threadIdx.x) * W;
    if (i + W > n) return;
    store_floats<W>(out + i, sum_of<W>(out, inp, add, i));
}

struct DeviceNoise {
    uint64_t seed, key;
    int64_t first_element;
    const int64_t* t;
};

template <int W, typename Inp>
__global__ void __launch_bounds__(THREADS)
    accumulate_stochastic_kernel(bf16* out, const Inp* inp, bool add, int64_t n, DeviceNoise noise) {
    const int64_t i = (blockIdx.x * int64_t(THREADS) + threadIdx.x) * W, element = noise.first_element + i;
    if (i + W > n) return;
    store_stochastically<W>(out + i, sum_of<W>(out, inp, add, i),
                            rounding_noise(noise.seed, uint64_t(*noise.t), noise.key, element, Rounded::Param),
                            element);
}

template <typename Out, typename Inp>
void launch(const Tensor& out, const Tensor& inp, bool add, int64_t n, Stream stream) {
    const bool vectors = n % WIDTH == 0 && rows_aligned({out, inp});
    const auto run = [&](auto width) {
        constexpr int W = decltype(width)::value;
        accumulate_kernel<W><<<grid_of(ceil_div(n / W, THREADS)), THREADS, 0, cuda_stream(stream)>>>(
            out.as<Out>(), inp.as<Inp>(), add, n);
    };
    if (vectors)
        run(std::integral_constant<int, WIDTH>());
    else
        run(std::integral_constant<int, 1>());
    check_launch("accumulate", stream);
}

template <typename Inp>
void launch_stochastic(const Tensor& out, const Tensor& inp, bool add, int64_t n, const RoundingNoise& noise,
                       Stream stream) {
    // A vector is one Philox block.
    const bool vectors = n % WIDTH == 0 && rows_aligned({out, inp}) && noise.first_element % WIDTH == 0;
    const DeviceNoise device{noise.seed, noise.key, noise.first_element, noise.t.as<int64_t>()};
    const auto run = [&](auto width) {
        constexpr int W = decltype(width)::value;
        accumulate_stochastic_kernel<W><<<grid_of(ceil_div(n / W, THREADS)), THREADS, 0, cuda_stream(stream)>>>(
            out.as<bf16>(), inp.as<Inp>(), add, n, device);
    };
    if (vectors)
        run(std::integral_constant<int, WIDTH>());
    else
        run(std::integral_constant<int, 1>());
    check_launch("accumulate_stochastic", stream);
}

}  // namespace

void accumulate(Tensor out, Tensor inp, bool add, Stream stream) {
    const int64_t n = check_accumulate("accumulate", out, inp);
    if (n == 0) return;
    const bool from_fp32 = inp.dtype == DType::F32;
    if (out.dtype == DType::F32)
        from_fp32 ? launch<float, float>(out, inp, add, n, stream) : launch<float, bf16>(out, inp, add, n, stream);
    else
        from_fp32 ? launch<bf16, float>(out, inp, add, n, stream) : launch<bf16, bf16>(out, inp, add, n, stream);
}

void accumulate_stochastic(Tensor out, Tensor inp, bool add, const RoundingNoise& noise, Stream stream) {
    const int64_t n = check_accumulate_stochastic(out, inp, noise);
    if (n == 0) return;
    if (inp.dtype == DType::F32)
        launch_stochastic<float>(out, inp, add, n, noise, stream);
    else
        launch_stochastic<bf16>(out, inp, add, n, noise, stream);
}

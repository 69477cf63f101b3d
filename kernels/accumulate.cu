#include "kernels/accumulate.h"

#include "kernels/accumulate_check.h"
#include "kernels/cuda/cuda_common.cuh"

namespace {

constexpr int THREADS = 256, WIDTH = 4;  // elements a thread: 16 bytes of fp32, 8 of bf16

template <int W, typename Out, typename Inp>
__global__ void __launch_bounds__(THREADS) accumulate_kernel(Out* out, const Inp* inp, bool add, int64_t n) {
    const int64_t i = (blockIdx.x * int64_t(THREADS) + threadIdx.x) * W;
    if (i + W > n) return;
    Floats<W> x = load_floats<W>(inp + i);
    if (add) {
        const Floats<W> before = load_floats<W>(out + i);
#pragma unroll
        for (int k = 0; k < W; k++) x[k] += before[k];
    }
    store_floats<W>(out + i, x);
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

}  // namespace

void accumulate(Tensor out, Tensor inp, bool add, Stream stream) {
    const int64_t n = check_accumulate(out, inp);
    if (n == 0) return;
    const bool from_fp32 = inp.dtype == DType::F32;
    if (out.dtype == DType::F32)
        from_fp32 ? launch<float, float>(out, inp, add, n, stream) : launch<float, bf16>(out, inp, add, n, stream);
    else
        from_fp32 ? launch<bf16, float>(out, inp, add, n, stream) : launch<bf16, bf16>(out, inp, add, n, stream);
}

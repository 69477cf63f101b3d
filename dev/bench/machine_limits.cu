#include "dev/bench/machine_limits.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/matmul.h"
#include "runtime/device/blas_stream.h"
#include "runtime/device/cuda_check.h"

namespace {

constexpr int64_t BYTES = int64_t(1) << 30;  // per array
constexpr int THREADS = 256;

__global__ void __launch_bounds__(THREADS) triad_kernel(float4* a, const float4* b, const float4* c) {
    const int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x;
    const float4 x = b[i], y = c[i];
    a[i] = {x.x + 3 * y.x, x.y + 3 * y.y, x.z + 3 * y.z, x.w + 3 * y.w};
}

// The median, because other kernels cannot reach the rate of a single fast run.
template <typename F>
double median_seconds(F f) {
    constexpr size_t REPEATS = 9;
    std::vector<double> ms;
    Event start, end;
    f();
    while (ms.size() < REPEATS) {
        start.record(Stream{});
        f();
        end.record(Stream{});
        end.wait();
        ms.push_back(elapsed_ms(start, end));
    }
    std::nth_element(ms.begin(), ms.begin() + REPEATS / 2, ms.end());
    return ms[REPEATS / 2] * 1e-3;
}

MachineLimits measure() {
    const char* op = "machine_limits";
    std::vector<std::shared_ptr<void>> arrays;
    for (int i = 0; i < 3; i++) {
        arrays.emplace_back(device_alloc(size_t(BYTES)), device_free);
        device_fill(arrays.back().get(), i + 1, size_t(BYTES), Stream{});
    }
    void *a = arrays[0].get(), *b = arrays[1].get(), *c = arrays[2].get();
    MachineLimits limits{};
    limits.copy = 2 * double(BYTES) / median_seconds([&] {
                      cuda_check(cudaMemcpyAsync(a, b, size_t(BYTES), cudaMemcpyDeviceToDevice), op);
                  });
    limits.triad = 3 * double(BYTES) / median_seconds([&] {
                       triad_kernel<<<unsigned(BYTES / int64_t(sizeof(float4)) / THREADS), THREADS>>>(
                           static_cast<float4*>(a), static_cast<const float4*>(b), static_cast<const float4*>(c));
                       check_launch(op, Stream{});
                   });
    arrays.clear();
    const Stream stream = create_blas_stream();
    limits.flops = measured_peak_flops(stream, DType::F32);
    limits.flops_bf16 = measured_peak_flops(stream, DType::BF16);
    destroy_stream(stream);
    return limits;
}

}  // namespace

const MachineLimits& machine_limits() {
    static const MachineLimits limits = measure();
    return limits;
}

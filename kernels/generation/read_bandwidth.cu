#include "kernels/generation/read_bandwidth.h"

#include <algorithm>
#include <memory>

#include "kernels/cuda/cuda_common.cuh"
#include "runtime/timing.h"

namespace {

// 4 blocks on an SM have 2,048 threads with 8 loads of 16 bytes each: 256 KiB in flight. On the 132 SMs of an H100, 1
// GiB is 31 rounds of loads.
constexpr int THREADS = 512, LOADS = 8;

// The store that keeps the compiler from dropping the loads never happens: all bits of the memory are 0.
__global__ void __launch_bounds__(THREADS) read_kernel(uint4* data, int64_t n) {
    uint32_t bits = 0;
    const int64_t step = int64_t(gridDim.x) * THREADS;
    for (int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x; i < n; i += LOADS * step) {
        uint4 x[LOADS] = {};
#pragma unroll
        for (int k = 0; k < LOADS; k++)
            if (i + k * step < n) x[k] = data[i + k * step];
#pragma unroll
        for (int k = 0; k < LOADS; k++) bits |= x[k].x | x[k].y | x[k].z | x[k].w;
    }
    if (bits) data[0].x = bits;
}

}  // namespace

double measured_read_bandwidth(Stream stream) {
    const char* op = "measured_read_bandwidth";
    constexpr int64_t bytes = int64_t(1) << 30;
    const std::unique_ptr<void, void (*)(void*)> memory(device_alloc(bytes), device_free);
    device_fill(memory.get(), 0, bytes, stream);
    double best = 1e30;
    for (int i = 0; i < 6; i++) {  // the first warms up
        best = std::min(best, timed_ms(
                                  [&] {
                                      read_kernel<<<unsigned(num_sms() * 4), THREADS, 0, cuda_stream(stream)>>>(
                                          static_cast<uint4*>(memory.get()), bytes / int64_t(sizeof(uint4)));
                                      check_launch(op, stream);
                                  },
                                  1, stream));
    }
    return double(bytes) / (best * 1e-3);
}

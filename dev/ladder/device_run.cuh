// For the CUDA ladders: device memory that detects writes out of bounds, and times with a cold L2.
#pragma once

#include <algorithm>
#include <memory>
#include <type_traits>
#include <vector>

#include "dev/bench/cache_flush.h"
#include "runtime/device/convert_dtype.h"
#include "runtime/device/device.h"
#include "runtime/device/tensor.h"
#include "runtime/rng.h"

// n elements of T on the device, followed by a guard zone. Initially, and after poison(), all bytes are 0xff, which is
// NaN in fp32 and in bf16.
template <typename T>
class DeviceArray {
  public:
    explicit DeviceArray(int64_t n_, Stream stream)
        : n(n_), memory(device_alloc(size_t(bytes() + GUARD_BYTES)), device_free) {
        poison(stream);
    }
    // Normal random numbers · scale + shift, rounded to T; values() is what the device holds.
    static DeviceArray random(int64_t n, uint64_t seed, double scale, double shift, Stream stream) {
        DeviceArray a(n, stream);
        std::vector<T> rounded(static_cast<size_t>(n));
        a.host.resize(static_cast<size_t>(n));
#pragma omp parallel for
        for (int64_t i = 0; i < n; i++) {
            rounded[size_t(i)] = round(float(normal01(seed, 0, uint64_t(i)) * scale + shift));
            a.host[size_t(i)] = widen(rounded[size_t(i)]);
        }
        copy_to_device(a.data(), rounded.data(), size_t(a.bytes()), stream);
        synchronize(stream);  // the host's copy is freed
        return a;
    }

    T* data() const {
        return static_cast<T*>(memory.get());
    }
    const std::vector<double>& values() const {
        return host;
    }
    int64_t bytes() const {
        return n * int64_t(sizeof(T));
    }
    Tensor tensor(std::initializer_list<int64_t> shape) const {
        return make_tensor(memory.get(), dtype_of<T>(), Device::CUDA, shape);
    }

    void poison(Stream stream) {
        device_fill(memory.get(), 0xff, size_t(bytes() + GUARD_BYTES), stream);
    }
    std::vector<T> fetch(Stream stream) const {
        std::vector<T> to(static_cast<size_t>(n));
        copy_to_host(to.data(), data(), size_t(bytes()), stream);
        return to;
    }
    // Whether the guard zone is unchanged.
    bool guard_intact(Stream stream) const {
        std::vector<unsigned char> guard(GUARD_BYTES);
        copy_to_host(guard.data(), data() + n, GUARD_BYTES, stream);
        return std::all_of(guard.begin(), guard.end(), [](unsigned char byte) { return byte == 0xff; });
    }

    static double widen(T x) {
        if constexpr (std::is_same_v<T, bf16>)
            return to_float(x);
        else
            return x;
    }

  private:
    static T round(float x) {
        if constexpr (std::is_same_v<T, bf16>)
            return to_bf16(x);
        else
            return x;
    }
    static constexpr int64_t GUARD_BYTES = 4096;
    int64_t n;
    std::shared_ptr<void> memory;
    std::vector<double> host;
};

// Device time of a launch after a flush of the L2: the median of as many launches as fit into a third of a second, at
// least 3 and at most 50, after one warm-up.
class ColdTimer {
  public:
    explicit ColdTimer(Stream stream_) : stream(stream_) {}

    template <typename Launch>
    double median_ms(Launch launch) {
        std::vector<double> times;
        double total = 0;
        for (int i = 0; i <= 50 && (i <= 3 || total < 333); i++) {
            flush(stream);
            begin.record(stream);
            launch();
            end.record(stream);
            end.wait();
            if (i > 0) {
                times.push_back(elapsed_ms(begin, end));
                total += times.back();
            }
        }
        std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
        return times[times.size() / 2];
    }

  private:
    Stream stream;
    CacheFlush flush;
    Event begin, end;
};

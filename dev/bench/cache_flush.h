// Evicts the L2 cache before each timed run on a GPU by reading several times its size. Writing instead would leave
// some 50 MB of dirty lines in the cache, and the timed operation would wait for their write-back.
#pragma once

#include <memory>
#include <vector>

#include "runtime/device/device.h"
#include "tensor_library/tensor_ops.h"

class CacheFlush {
  public:
    CacheFlush() {
        const auto allocate = [&](DType dtype, std::initializer_list<int64_t> shape) {
            Tensor t = make_tensor(nullptr, dtype, backend_device(), shape);
            memory.emplace_back(device_alloc(size_t(t.bytes())), device_free);
            t.data = memory.back().get();
            return t;
        };
        rows = allocate(DType::F32, {int64_t(BYTES) >> 12, 1 << 10});
        maxima = allocate(DType::F32, {rows.shape[0], 1});
        scratch = allocate(DType::U8, {tensor_reduce_scratch(maxima, rows, 1)});
        device_fill(rows.data, 0, BYTES, Stream{});
        synchronize(Stream{});
    }
    void operator()(Stream stream) { tensor_reduce(maxima, TensorFunction::Max, rows, 1, 0, scratch, stream); }

  private:
    static constexpr size_t BYTES = size_t(256) << 20;
    std::vector<std::unique_ptr<void, void (*)(void*)>> memory;
    Tensor rows, maxima, scratch;
};

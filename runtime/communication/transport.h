// What moves the bytes behind Comm (runtime/communication/comm.h): one of comm_nccl.cu, comm_mpi.cpp and comm_none.cpp,
// as the build has it. Arguments come checked by Comm: contiguous memory of the backend's device, sizes that fit, more
// than one rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "runtime/communication/launch.h"
#include "runtime/device/device.h"

struct Transport {
    virtual ~Transport() = default;  // parts, unless that was done or it was finished
    virtual void finish() = 0;       // all ranks together, before the destructor: a good end
    virtual void part() {}           // at once, so that the other ranks notice

    // n: elements of x; of out; of inp.
    virtual void all_reduce(void* x, int64_t n, DType dtype, Stream stream) = 0;
    virtual void reduce_scatter(void* out, const void* inp, int64_t n, DType dtype, Stream stream) = 0;
    virtual void all_gather(void* out, const void* inp, int64_t n, DType dtype, Stream stream) = 0;
    virtual void broadcast(void* x, int64_t n, DType dtype, int64_t root, Stream stream) = 0;
    virtual void group_start() = 0;
    virtual void group_end() = 0;

    virtual void barrier() = 0;
    virtual void broadcast_host(void* bytes, size_t n, int64_t root) = 0;
    virtual void all_gather_host(void* all, const void* own, size_t n) = 0;

    virtual void check() = 0;
    virtual void watch(const std::string& what, Stream stream) = 0;
};

// Meets the other ranks. world.size > 1. Throws Error.
std::unique_ptr<Transport> connect(const World& world);

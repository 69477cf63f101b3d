// The interface behind Comm (runtime/communication/comm.h). The build links one of comm_nccl.cu, comm_mpi.cpp and
// comm_none.cpp. Comm has checked the arguments: contiguous device memory, matching sizes, more than one rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "runtime/communication/launcher.h"
#include "runtime/device/device.h"

struct Transport {
    virtual ~Transport() = default;  // aborts, unless finish() or abort() was called
    virtual void finish() = 0;       // collective, before the destructor: a regular end
    virtual void abort() {}          // immediate, so that the other ranks notice

    // n: elements of x (all_reduce, broadcast), of out (reduce_scatter), of inp (all_gather).
    virtual void all_reduce(void* x, int64_t n, DType dtype, Stream stream) = 0;
    virtual void reduce_scatter(void* out, const void* inp, int64_t n, DType dtype, Stream stream) = 0;
    virtual void all_gather(void* out, const void* inp, int64_t n, DType dtype, Stream stream) = 0;
    // send, receive: elements for and from each rank. The blocks of inp and out lie in rank order without gaps.
    virtual void all_to_all(void* out, const void* inp, const int64_t* receive, const int64_t* send, DType dtype,
                            Stream stream) = 0;
    virtual void broadcast(void* x, int64_t n, DType dtype, int64_t root, Stream stream) = 0;
    virtual void group_start() = 0;
    virtual void group_end() = 0;

    virtual void barrier() = 0;
    virtual void broadcast_host(void* bytes, size_t n, int64_t root) = 0;
    virtual void all_gather_host(void* all, const void* own, size_t n) = 0;

    virtual void check() = 0;
    virtual void watch(const std::string& what, Stream stream) = 0;
};

// Connects to the other ranks. world.size > 1. Throws Error.
std::unique_ptr<Transport> connect(const World& world);

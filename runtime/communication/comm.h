// Collectives among the ranks of a run. Three definitions behind it: NCCL in the CUDA build (comm_nccl.cu), MPI in the
// CPU build (comm_mpi.cpp), neither (comm_none.cpp); comm.cpp checks arguments for all of them.
//
// Every rank calls the same operations in the same order, with the same sizes and dtypes. A world of one calls no
// library: each operation is at most a copy from inp to out.
//
// Tensors are contiguous, on the backend's device, F32, F64, BF16, F16, I32, I64 (broadcast and all_gather: any dtype).
// Work is queued on the stream, like a kernel; on the CPU it is done when the call returns. NCCL's may be recorded in a
// Graph. Sums: MPI adds in rank order, 16-bit floats in fp32 and rounded once, so that all_reduce and reduce_scatter
// give the same bits, whatever the sizes; NCCL's order depends on its algorithm, the same for the same machine, sizes
// and version. Sums wrap in integers.
//
// Throws Error with one line that names rank and operation: sizes that don't fit, a peer that has ended, no answer
// within the world's timeout_s, what the library reports. After such an Error the communicator is of no more use: end.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "runtime/communication/launch.h"
#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

struct Transport;  // runtime/communication/transport.h

class Comm {
  public:
    // Connects: every rank must come within timeout_s. After join_world(). With MPI one Comm of more than one rank
    // in a process's life.
    explicit Comm(const World& world = {});
    // All ranks together, after what is queued is done and Graphs that hold its operations are gone; while an exception
    // flies it parts instead.
    ~Comm();
    // What a rank that fails does first: work that waits for others ends, so that nothing waits for it any more. Graphs
    // that hold operations go next, and last the Comm, for which nothing else may be called meanwhile.
    void part();
    Comm(const Comm&) = delete;
    Comm& operator=(const Comm&) = delete;

    int64_t rank() const { return own_rank; }
    int64_t size() const { return world_size; }

    // x: the sum over ranks, in place.
    void all_reduce(Tensor x, Stream stream);
    // out [n]: this rank's n elements, from rank()·n on, of the sum of inp [size()·n] over ranks. out may be that part
    // of inp; no other overlap. inp is otherwise unchanged.
    void reduce_scatter(Tensor out, Tensor inp, Stream stream);
    // out [size()·n]: every rank's inp [n] in rank order. inp may be this rank's part of out; no other overlap.
    void all_gather(Tensor out, Tensor inp, Stream stream);
    void broadcast(Tensor x, int64_t root, Stream stream);
    // Operations between the two may be launched as one (NCCL fuses them); none is done before group_end.
    void group_start();
    void group_end();

    // Returns when every rank has called it: hosts wait, devices don't.
    void barrier();
    // Small things in the hosts' memory: choices, flags, partial sums. They wait for each other.
    void broadcast_host(void* bytes, size_t n, int64_t root);
    void all_gather_host(void* all, const void* own, size_t n);  // all: size()·n bytes in rank order
    void broadcast_host(std::string& text, int64_t root);
    template <typename T>
    void broadcast_host(T& value, int64_t root) {
        static_assert(std::is_trivially_copyable_v<T>);
        broadcast_host(&value, sizeof value, root);
    }
    template <typename T>
    std::vector<T> all_gather_host(const T& own) {
        static_assert(std::is_trivially_copyable_v<T>);
        std::vector<T> all(static_cast<size_t>(size()));
        all_gather_host(all.data(), &own, sizeof own);
        return all;
    }

    // Throws what a rank that ended, the library or a time-out left behind, without waiting. Every operation does too.
    void check();
    // What is queued on the stream by now must be done within timeout_s, else the run ends with an Error that names
    // `what`. For work that the library can't watch by itself: a Graph that holds collectives. NCCL only.
    void watch(const std::string& what, Stream stream);

  private:
    std::string named(const char* op) const;
    void check_tensor(const char* op, const char* argument, const Tensor& t, bool sums) const;
    void check_part(const char* op, const char* part_name, const Tensor& part, const char* whole_name,
                    const Tensor& whole) const;
    void check_root(const char* op, int64_t root) const;
    int64_t own_rank, world_size;
    int exceptions;                        // in flight when it was made
    std::unique_ptr<Transport> transport;  // null in a world of one
};

// "NCCL 2.28.3", "MPI (Open MPI v4.1.4)", "none": for `info`.
std::string comm_library();
// What it takes of the device's memory for itself in a world of more than one rank, measured (docs/performance.md).
int64_t comm_overhead_bytes();

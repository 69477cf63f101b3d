// Collectives among the ranks of a run. The build links one transport: NCCL (comm_nccl.cu, CUDA build), MPI
// (comm_mpi.cpp, CPU build) or none (comm_none.cpp). comm.cpp checks the arguments for all of them.
//
// Every rank must call the same operations in the same order, with the same sizes and dtypes. With one rank no library
// is called; an operation is at most a copy from inp to out.
//
// Tensors are contiguous, on the backend's device, F32, F64, BF16, F16, I32, I64; any dtype where nothing is summed.
// Work is queued on the stream, like a kernel; on the CPU it is done when the call returns. NCCL operations may be
// recorded in a Graph. Order of sums: MPI adds in rank order, 16-bit floats in fp32 with one rounding, so all_reduce
// and reduce_scatter give the same bits for any size. NCCL's order depends on its algorithm and is fixed for given
// hosts, size and version. Integer sums wrap around.
//
// Throws Error naming the rank and the operation: sizes that do not match, a peer that ended, no answer within
// World::timeout_s, or an error of the library. The communicator is unusable after an Error: end the process.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "runtime/communication/launcher.h"
#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

struct Transport;  // runtime/communication/transport.h

class Comm {
  public:
    // Connects to the other ranks, which must arrive within timeout_s. Call join_world() first. With MPI a process can
    // create only one Comm of more than one rank.
    explicit Comm(const World& world = {});
    // Collective. Queued work must be done and Graphs that hold its operations must be destroyed. During stack
    // unwinding it calls abort() instead.
    ~Comm();
    // The first thing that a failing rank calls: pending operations end, so nothing waits for the other ranks. After it
    // destroy the Graphs that hold operations, then the Comm; call nothing else.
    void abort();
    Comm(const Comm&) = delete;
    Comm& operator=(const Comm&) = delete;

    int64_t rank() const { return own_rank; }
    int64_t size() const { return world_size; }

    // x: the sum over ranks, in place.
    void all_reduce(Tensor x, Stream stream);
    // out [n] = elements [rank()·n, (rank() + 1)·n) of the sum of inp [size()·n] over ranks. out may be that part of
    // inp; no other overlap is allowed. The rest of inp is unchanged.
    void reduce_scatter(Tensor out, Tensor inp, Stream stream);
    // out [size()·n] = every rank's inp [n] in rank order. inp may be this rank's part of out; no other overlap.
    void all_gather(Tensor out, Tensor inp, Stream stream);
    // inp: this rank's blocks for ranks 0, 1, …, one after the other; out: the blocks that they send to this one.
    // receive, send [size()]: elements of each block, which may be 0. out and inp do not overlap.
    void all_to_all(Tensor out, Tensor inp, const std::vector<int64_t>& receive, const std::vector<int64_t>& send,
                    Stream stream);
    void broadcast(Tensor x, int64_t root, Stream stream);
    // NCCL may fuse the operations between these calls; none is done before group_end.
    void group_start();
    void group_end();

    // Blocks the host until every rank has called it. Does not wait for devices.
    void barrier();
    // For small data in host memory: GEMM choices, flags, partial sums. Blocking.
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

    // Throws Error if a rank ended, the library failed or a time-out passed. Does not wait. Every operation checks too.
    void check();
    // Work queued on the stream so far must finish within timeout_s; otherwise the run ends with an Error that names
    // `what`. Needed for Graphs that hold collectives, which NCCL cannot watch itself. NCCL only.
    void watch(const std::string& what, Stream stream);

  private:
    std::string named(const char* op) const;
    void check_tensor(const char* op, const char* argument, const Tensor& t, bool sums) const;
    void check_part(const char* op, const char* part_name, const Tensor& part, const char* whole_name,
                    const Tensor& whole) const;
    void check_blocks(const char* op, const char* argument, const Tensor& t, const std::vector<int64_t>& blocks) const;
    void check_root(const char* op, int64_t root) const;
    int64_t own_rank, world_size;
    int exceptions;                        // in flight at construction
    std::unique_ptr<Transport> transport;  // null in a world of one
};

// "NCCL 2.28.3", "MPI (Open MPI v4.1.4)", "none": for `info`.
std::string comm_library();

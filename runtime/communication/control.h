// The control channel between hosts, separate from NCCL's connections between GPUs. Every rank keeps one TCP connection
// to rank 0. The ranks use it to connect at start, to check that they are compatible, and to exchange NCCL's id and
// small host data. When a process dies the system closes its connection, so the others notice at once.
//
// The protocol is plain TCP: during start-up anyone who reaches the port may join. Use it in a trusted network, like
// NCCL itself.
//
// Throws Error naming the rank: a busy port, an unknown host name, incompatible ranks, a peer that ended, no message
// within timeout_s.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/communication/descriptor.h"
#include "runtime/communication/launcher.h"

// A rank's description of itself; rank 0 compares them.
struct Member {
    std::string device;     // must be the same on all ranks: "NVIDIA H100 80GB HBM3"
    std::string device_id;  // must differ between ranks, unless empty
    std::string library;    // must be the same: "NCCL 2.28.3"
};

class ControlChannel {
  public:
    // Rank 0 listens at world.rendezvous and the others connect to it. Returns when all ranks have connected.
    ControlChannel(const World& world, const Member& self);
    ControlChannel(const ControlChannel&) = delete;
    ControlChannel& operator=(const ControlChannel&) = delete;

    // Collective, in the same order on all ranks. One thread only.
    void barrier();
    void broadcast(void* bytes, size_t n, int64_t root);
    void all_gather(void* all, const void* own, size_t n);  // all: size·n bytes in rank order

    // The failure of another rank, seen here or reported by rank 0: "rank 2 has ended". Empty if there is none. Does
    // not wait. May be called from any thread, concurrently with the operations.
    std::string trouble();
    // Rank 0 reports a failure to the others, so that all ranks name the same one. May be called from any thread.
    void report(const std::string& what);

  private:
    using Clock = std::chrono::steady_clock;
    enum class Kind : uint32_t { Hello, Verdict, Data, Trouble };
    struct Header {
        uint32_t magic;
        Kind kind;
        uint64_t number;  // of the operation: a mismatch means that ranks call different operations
        uint64_t length;
    };
    struct Hello;

    [[noreturn]] void fail(const std::string& what) const;
    Clock::time_point deadline() const;
    template <typename Body>
    void operate(const char* name, Body body);
    void gather(void* all, const void* own, size_t n, Clock::time_point until);
    void accept_ranks(const World& world, const Member& self);
    void connect_to_rank_0(const World& world, const Member& self);
    std::string incompatibility(const std::vector<Hello>& hellos, const Hello& hello) const;
    bool wait(int fd, short events, Clock::time_point until);  // false: timed out
    // peer: the rank at the other end, for errors.
    void send(int to, int64_t peer, Kind kind, const void* bytes, size_t n, Clock::time_point until);
    void receive(int from, int64_t peer, Kind kind, void* bytes, size_t n, Clock::time_point until);
    void receive_bytes(int from, int64_t peer, void* bytes, size_t n, Clock::time_point until);
    [[noreturn]] void fail_as_reported(int from, int64_t peer, uint64_t length, Clock::time_point until);

    const int64_t rank, size;
    const double timeout_s;
    std::vector<Descriptor> peers;  // rank 0: the other ranks, by rank; other ranks: [0] is rank 0
    uint64_t operation = 0;
    std::string operation_name;  // for errors
    std::string silence;         // the peer that sent nothing in time in this operation; empty: none
    std::mutex sending;          // frames are not interleaved
};

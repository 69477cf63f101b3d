// The hosts' own connection, beside NCCL's between the GPUs: every rank keeps a TCP connection to rank 0. Over it the
// ranks meet and check that they fit together, NCCL's id and small things of the hosts travel, and a rank that dies is
// noticed at once, because the system closes its connection.
//
// Plain TCP: whoever reaches the port while ranks are awaited may join, so it belongs into a network that is trusted,
// as NCCL's own connections do.
//
// Throws Error with one line that names the rank: a busy port, a name that is no machine's, ranks that don't fit
// together, a peer that has ended, nothing heard within timeout_s.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/communication/descriptor.h"
#include "runtime/communication/launch.h"

// What a rank says of itself; rank 0 compares.
struct Member {
    std::string device;     // must be the same on all ranks: "NVIDIA H100 80GB HBM3"
    std::string device_id;  // must be another on each, unless empty
    std::string library;    // must be the same: "NCCL 2.28.3"
};

class ControlChannel {
  public:
    // Rank 0 listens at world.rendezvous, the others come there; returns when all have.
    ControlChannel(const World& world, const Member& self);
    ControlChannel(const ControlChannel&) = delete;
    ControlChannel& operator=(const ControlChannel&) = delete;

    // Collective, in the same order on all ranks. One thread only.
    void barrier();
    void broadcast(void* bytes, size_t n, int64_t root);
    void all_gather(void* all, const void* own, size_t n);  // all: size·n bytes in rank order

    // Who has ended, or what rank 0 has told of another's end: "rank 2 has ended"; empty while all is well. Doesn't
    // wait. From any thread, beside the operations.
    std::string trouble();
    // Rank 0 tells the others what it found, so that they name the same rank. From any thread.
    void tell(const std::string& what);

  private:
    using Clock = std::chrono::steady_clock;
    enum class Kind : uint32_t { Hello, Verdict, Data, Trouble };
    struct Header {
        uint32_t magic;
        Kind kind;
        uint64_t number;  // of the operation: ranks that are at different ones are told so
        uint64_t length;
    };
    struct Hello;

    [[noreturn]] void fail(const std::string& what) const;
    Clock::time_point deadline() const;
    template <typename Body>
    void operate(const char* name, Body body);
    void gather(void* all, const void* own, size_t n, Clock::time_point until);
    void wait_for_others(const World& world, const Member& self);
    void go_to_rank_0(const World& world, const Member& self);
    std::string misfit(const std::vector<Hello>& hellos, const Hello& hello) const;
    bool wait(int fd, short events, Clock::time_point until);  // false: the time is over
    // who: the rank at the other end, for errors.
    void send(int to, int64_t who, Kind kind, const void* bytes, size_t n, Clock::time_point until);
    void receive(int from, int64_t who, Kind kind, void* bytes, size_t n, Clock::time_point until);
    void receive_bytes(int from, int64_t who, void* bytes, size_t n, Clock::time_point until);
    [[noreturn]] void fail_as_told(int from, int64_t who, uint64_t length, Clock::time_point until);

    const int64_t rank, size;
    const double timeout_s;
    std::vector<Descriptor> peers;  // rank 0: of the others by rank; else the one to rank 0 at 0
    uint64_t operation = 0;
    std::string doing;   // its name, for errors
    std::mutex sending;  // a frame goes out whole
};

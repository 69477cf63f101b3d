// What every part of a run needs to know of its surroundings; passed, never global. Everything runs on its stream, and
// beside it what the ranks of a run send each other.
#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <thread>

#include "runtime/communication/comm.h"
#include "runtime/device/device.h"
#include "runtime/device/profile.h"

struct Context {
    int64_t in_use_before = device_bytes_in_use();
    Stream stream = create_stream(), side;
    int64_t rank = 0, world = 1;
    const std::unique_ptr<Comm> comm;
    mutable Profiler profiler;  // watches, and changes nothing that is computed

    // Throws Error where the ranks don't meet (runtime/communication/comm.h).
    explicit Context(const World& w = {}) : rank(w.rank), world(w.size), comm(std::make_unique<Comm>(w)) {
        if (world > 1) side = create_side_stream();
    }
    ~Context() {
        if (world > 1) destroy_stream(side);
        destroy_stream(stream);
    }
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;

    // Waits for a moment in the stream's work, but not for a rank that has ended: that is an Error.
    void wait(const Event& moment) const {
        while (world > 1 && !moment.reached()) {
            comm->check();
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
        moment.wait();
    }
    // For all that is queued on the stream. what: it is called that in the Error.
    void wait_for_all(const std::string& what) const {
        Event moment;
        moment.record(stream);
        comm->watch(what, stream);
        wait(moment);
    }
};

// The first that is destroyed of what uses the context: a rank that fails parts from the others before it waits for
// work that they are part of.
struct AbortOnFailure {
    const Context& ctx;
    int exceptions = std::uncaught_exceptions();
    bool failed() const { return std::uncaught_exceptions() > exceptions; }
    ~AbortOnFailure() {
        if (failed()) ctx.comm->part();
    }
};

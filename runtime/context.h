// The environment of a run: streams, rank, communicator, profiler. It is passed as an argument and never global.
// Computation runs on `stream`; collectives that overlap it run on `side`.
#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <thread>

#include "runtime/communication/comm.h"
#include "runtime/device/blas_stream.h"
#include "runtime/device/device.h"
#include "runtime/device/profile.h"

struct Context {
    int64_t in_use_before = device_bytes_in_use();  // GPU memory that was in use when the run began
    Stream stream = create_blas_stream(), side;     // side: null with one rank
    int64_t rank = 0, world = 1;
    const std::unique_ptr<Comm> comm;
    mutable Profiler profiler;  // mutable: timing changes no result

    // Throws Error if the ranks fail to connect (runtime/communication/comm.h).
    explicit Context(const World& w = {}) : rank(w.rank), world(w.size), comm(std::make_unique<Comm>(w)) {
        if (world > 1) side = create_stream();
    }
    ~Context() {
        if (world > 1) destroy_stream(side);
        destroy_stream(stream);
    }
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;

    // Blocks the host until the event is reached. Throws Error if another rank ends meanwhile.
    void wait(const Event& event) const {
        while (world > 1 && !event.reached()) {
            comm->check();
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
        event.wait();
    }
    // Blocks the host until all work queued on `stream` is done. `what` names that work in an Error.
    void wait_for_stream(const std::string& what) const {
        Event queued;
        queued.record(stream);
        comm->watch(what, stream);
        wait(queued);
    }
};

// Declare this after everything else that uses the context, so that it is destroyed first. When an exception unwinds
// the stack it aborts the communicator, so that this rank does not wait for collectives that will never finish.
struct AbortOnFailure {
    const Context& ctx;
    int exceptions = std::uncaught_exceptions();
    bool failed() const { return std::uncaught_exceptions() > exceptions; }
    ~AbortOnFailure() {
        if (failed()) ctx.comm->abort();
    }
};

// Ends the process if it makes no progress: a GPU, a driver or a file system that hangs blocks the thread that waits
// for it, so that no exception can end the run. (Of several ranks each has its own; the time-outs of collectives are
// those of runtime/communication/comm.h.)
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

class Watchdog {
  public:
    // If no state begins within timeout_s, writes "<prefix>no progress for 60 s in step 12 (waiting for the device)
    // <remedy>" to stderr and ends the process with status 1. timeout_s 0: does nothing. Watches from the first state
    // on. The time in which the process is stopped (Ctrl-Z, a job that Slurm suspends) does not count.
    Watchdog(double timeout_s, std::string prefix, std::string remedy);
    ~Watchdog();
    Watchdog(const Watchdog&) = delete;
    Watchdog& operator=(const Watchdog&) = delete;

    // The process made progress, and does `name` from now on, for this step. Allocates nothing: name must stay valid.
    void state(const char* name, int64_t step);

  private:
    void run();
    const double timeout_s;
    const std::string prefix, remedy;
    std::mutex mutex;
    std::condition_variable changed;
    bool stop = false;
    const char* name = nullptr;  // null: no state yet
    int64_t step = 0;
    int ticks = 0;  // of the state: how often the worker woke up
    std::thread worker;
};

#include "runtime/watchdog.h"

#include <unistd.h>

#include <chrono>
#include <utility>

#include "runtime/console.h"
#include "runtime/error.h"

constexpr int TICKS = 20;  // in a time-out

Watchdog::Watchdog(double seconds, std::string line_prefix, std::string line_remedy)
    : timeout_s(seconds), prefix(std::move(line_prefix)), remedy(std::move(line_remedy)) {
    if (timeout_s > 0) worker = std::thread([this] { run(); });
}

Watchdog::~Watchdog() {
    if (!worker.joinable()) return;
    {
        const std::lock_guard<std::mutex> lock(mutex);
        stop = true;
    }
    changed.notify_all();
    worker.join();
}

void Watchdog::state(const char* state_name, int64_t state_step) {
    if (!worker.joinable()) return;
    const std::lock_guard<std::mutex> lock(mutex);
    name = state_name;
    step = state_step;
    ticks = 0;
}

// Counts ticks, not time: of the time in which the process is stopped at most one tick counts.
void Watchdog::run() {
    const std::chrono::duration<double> tick(timeout_s / TICKS);
    std::unique_lock<std::mutex> lock(mutex);
    while (!changed.wait_for(lock, tick, [this] { return stop; })) {
        if (!name || ++ticks <= TICKS) continue;
        const std::string line =
            str(prefix, "no progress for ", timeout_s, " s in step ", step, " (", name, ")", remedy);
        const std::string text = str(isatty(STDERR_FILENO) ? "\r\033[K" : "", for_stderr(line), "\n");
        (void)!::write(STDERR_FILENO, text.data(), text.size());  // std::cerr may be what hangs
        ::_exit(1);                                               // destructors would wait for the device, too
    }
}

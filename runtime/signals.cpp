#include "runtime/signals.h"

#include <signal.h>
#include <unistd.h>

#include <csignal>
#include <thread>

namespace {
// A signal handler can reach nothing but a global.
volatile std::sig_atomic_t stop_signal = 0;

void on_signal(int number) {
    stop_signal = number;
    std::signal(number, SIG_DFL);
}
}  // namespace

void take_signals_in_a_thread() {
    sigset_t stopping;
    sigemptyset(&stopping);
    sigaddset(&stopping, SIGINT);
    sigaddset(&stopping, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &stopping, nullptr);
    std::thread([stopping] {
        pthread_sigmask(SIG_UNBLOCK, &stopping, nullptr);
        for (;;) pause();
    }).detach();
}

void catch_stop_signals() {
    stop_signal = 0;
    std::signal(SIGINT, on_signal);
    std::signal(SIGTERM, on_signal);
}

bool stop_requested() {
    return stop_signal != 0;
}

void catch_interrupt() {
    stop_signal = 0;
    std::signal(SIGINT, on_signal);
}

void release_interrupt() {
    std::signal(SIGINT, SIG_DFL);
}

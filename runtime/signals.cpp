#include "runtime/signals.h"

#include <signal.h>
#include <unistd.h>

#include <csignal>
#include <thread>

namespace {
constexpr int STOP_SIGNALS[] = {SIGINT, SIGTERM, SIGHUP};

// A signal handler can reach nothing but a global.
volatile std::sig_atomic_t stop_signal = 0;

void on_signal(int number) {
    stop_signal = number;
    if (number != SIGHUP) std::signal(number, SIG_DFL);
}
}  // namespace

void take_signals_in_a_thread() {
    sigset_t stopping;
    sigemptyset(&stopping);
    for (const int number : STOP_SIGNALS) sigaddset(&stopping, number);
    pthread_sigmask(SIG_BLOCK, &stopping, nullptr);
    std::thread([stopping] {
        pthread_sigmask(SIG_UNBLOCK, &stopping, nullptr);
        for (;;) pause();
    }).detach();
}

void catch_stop_signals() {
    stop_signal = 0;
    for (const int number : STOP_SIGNALS)
        if (number != SIGHUP || !signal_ignored(number)) std::signal(number, on_signal);
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

bool signal_ignored(int number) {
    struct sigaction action {};
    return sigaction(number, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

void ignore_closed_pipes() {
    std::signal(SIGPIPE, SIG_IGN);
}

void ignore_file_size_limit() {
    std::signal(SIGXFSZ, SIG_IGN);
}

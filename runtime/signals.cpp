#include "runtime/signals.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <thread>

namespace {
constexpr int STOP_SIGNALS[] = {SIGINT, SIGTERM, SIGHUP};

// A signal handler can reach nothing but globals.
volatile std::sig_atomic_t stop_signal = 0;
volatile std::sig_atomic_t received[NSIG] = {};  // since the signal is caught
std::atomic<int> holds = 0, waiting_signal = 0;
static_assert(std::atomic<int>::is_always_lock_free);
bool started_with_hangup_ignored = false;

// Ends the process as the signal does by default.
void end_by(int number) {
    std::signal(number, SIG_DFL);
    kill(getpid(), number);
}

void on_signal(int number) {
    stop_signal = number;
    received[number] = received[number] + 1;
    if (number == SIGHUP || received[number] == 1) return;
    if (received[number] > 2 || holds == 0) return end_by(number);
    constexpr char TEXT[] =
        "\nwaiting for the checkpoint that is being written; another signal ends the process at once\n";
    (void)!write(STDERR_FILENO, TEXT, sizeof TEXT - 1);
    waiting_signal = number;
    if (holds == 0) end_by(number);  // the last hold ended meanwhile
}

void catch_signal(int number) {
    received[number] = 0;
    std::signal(number, on_signal);
}
}  // namespace

HoldExit::HoldExit() {
    holds++;
}

HoldExit::~HoldExit() {
    if (--holds > 0 || !waiting_signal) return;
    end_by(waiting_signal);
    for (;;) pause();
}

void note_hangup(int, char**, char**) {
    struct sigaction action {};
    started_with_hangup_ignored = sigaction(SIGHUP, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

void restore_hangup() {
    std::signal(SIGHUP, hangup_ignored() ? SIG_IGN : SIG_DFL);
}

bool hangup_ignored() {
    return started_with_hangup_ignored;
}

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
        if (number != SIGHUP || !hangup_ignored()) catch_signal(number);
}

bool stop_requested() {
    return stop_signal != 0;
}

void catch_interrupt() {
    stop_signal = 0;
    catch_signal(SIGINT);
}

void release_interrupt() {
    std::signal(SIGINT, SIG_DFL);
}

void ignore_closed_pipes() {
    std::signal(SIGPIPE, SIG_IGN);
}

void ignore_file_size_limit() {
    std::signal(SIGXFSZ, SIG_IGN);
}

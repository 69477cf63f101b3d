// SIGINT, SIGTERM and SIGHUP stop a run after its last complete step. A second SIGINT, or a second SIGTERM, ends the
// process at once; if a checkpoint is being written, it ends when that is complete, and a third one ends it at once. A
// second SIGHUP has no effect, because a terminal that closes may send several.
#pragma once

// Notes whether the process was started with SIGHUP ignored (nohup). Libraries may catch SIGHUP while they are loaded,
// as UCX does, which comes with the Open MPI of Debian 13; so this has to run before their constructors, from the
// program's .preinit_array. restore_hangup() then gives SIGHUP back its effect; call it before any other function here.
void note_hangup(int argc, char** argv, char** environment);
void restore_hangup();

// Starts a thread that receives these signals; the caller and all threads it creates later block them. Call this before
// any other thread exists. The reason: a signal handler's frame is written at the thread's stack pointer, and oneDNN's
// sgemm (AVX2, AVX-512) points that at its packing buffer on the heap, so a handler would overwrite other data.
// Throws std::system_error if the thread cannot be started.
void take_signals_in_a_thread();

// From now on these signals request a stop. SIGHUP stays ignored where the process was started so (nohup).
void catch_stop_signals();
bool stop_requested();

// While one exists, a second signal waits. When the last one ends, the process ends if a second signal came.
class HoldExit {
  public:
    HoldExit();
    ~HoldExit();
    HoldExit(const HoldExit&) = delete;
    HoldExit& operator=(const HoldExit&) = delete;
};

// Between these two calls SIGINT interrupts the current activity instead of ending the program; stop_requested()
// returns true after it.
void catch_interrupt();
void release_interrupt();

// Whether the process was started with SIGHUP ignored.
bool hangup_ignored();

// A write to a pipe or socket whose reader has gone fails with EPIPE instead of ending the process.
void ignore_closed_pipes();

// A write beyond the limit on file sizes (ulimit -f) fails with EFBIG instead of ending the process.
void ignore_file_size_limit();

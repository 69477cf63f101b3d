// SIGINT and SIGTERM stop a run at the end of its step; a second signal ends the process at once.
#pragma once

// Starts a thread that receives both signals; the caller and all threads it creates later block them. Call this before
// any other thread exists. The reason: a signal handler's frame is written at the thread's stack pointer, and oneDNN's
// sgemm (AVX2, AVX-512) points that at its packing buffer on the heap, so a handler would overwrite other data.
// Throws std::system_error if the thread cannot be started.
void take_signals_in_a_thread();

void catch_stop_signals();
bool stop_requested();

// Between these two calls SIGINT interrupts the current activity instead of ending the program; stop_requested()
// returns true after it.
void catch_interrupt();
void release_interrupt();

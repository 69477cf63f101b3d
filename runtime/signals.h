// SIGINT and SIGTERM ask a run to stop at the end of its step; a second one ends the process at once.
#pragma once

// From now on a thread of its own takes both signals: the caller and every thread that it makes block them. A handler's
// frame goes where the stack pointer of its thread points, and during a matrix product that may be a buffer of oneDNN
// on the heap (its sgemm for AVX2 and AVX-512 keeps the packed matrix there), beside memory of others. To be called
// before there are other threads. Throws std::system_error where no thread can be made.
void take_signals_in_a_thread();

void catch_stop_signals();
bool stop_requested();

// SIGINT alone, for as long as something is done that it should stop and not the program; stop_requested() tells.
void catch_interrupt();
void release_interrupt();

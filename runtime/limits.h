// Limits of the environment: threads, stacks, host memory, priorities.
#pragma once

#include <cstdint>
#include <functional>

// Bounds the number of OpenMP threads to 64, or to 4 per processor if that is more. libgomp crashes when its table of
// new threads exceeds the stack. Call this in the thread that computes, before its first parallel region.
void bound_threads();

// Throws Error if the threads of OpenMP cannot be started. Otherwise libgomp would end the process, without a remedy.
void check_threads();

// Returns work(), which runs with a stack of at least 8 MiB, Linux's usual default; so do the threads that it starts.
// Kernels keep tiles on the stack. If `ulimit -s` is smaller the limit is raised, or where that is not permitted, work
// runs in a thread of its own. Throws std::system_error if that cannot be started.
int with_enough_stack(const std::function<int()>& work);

// Host memory that can still be allocated: the least of free memory, the control group's limit and the address-space
// limit.
int64_t host_memory_available();

// Gives the calling thread the lowest CPU priority (nice 19), and with it the lowest disk priority. Its OpenMP regions
// then run on one thread.
void lower_thread_priority();

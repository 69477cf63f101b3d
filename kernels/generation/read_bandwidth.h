// How fast this device reads memory. Generation reads all weights in every step, so this is its speed limit.
#pragma once

#include "runtime/device/device.h"

// Measures the bytes per second that all threads (on a GPU all SMs) read, from 256 MiB (on a GPU 1 GiB) that it
// allocates; takes about 0.2 s. Throws Error if the allocation fails.
double measured_read_bandwidth(Stream stream);

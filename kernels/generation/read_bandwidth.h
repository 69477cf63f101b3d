// How fast this device reads memory: what generation, which reads all weights for every step, is measured by.
#pragma once

#include "runtime/device/device.h"

// Bytes per second that all threads (on a GPU all SMs) read, measured now on 256 MiB (a GPU: 1 GiB) of
// memory of its own; takes about 0.2 s. Throws Error where that memory can't be had.
double measured_read_bandwidth(Stream stream);

// The device that memory is planned for: the one that this program runs on, or for `plan --gpu` a GPU that is not here.
#pragma once

#include <cstdint>

#include "runtime/device/tensor.h"

struct Target {
    Device device = Device::CPU;
    int64_t sms = 0;      // SMs of a GPU
    int sm = 0;           // its compute capability times ten
    bool hopper = false;  // it runs the kernels for sm_90a

    // Memory that the program takes beside the arenas: code, libraries and their buffers. Measured constants.
    int64_t overhead_bytes() const;
    // Size for temporary buffers that keep the device busy and are small beside its memory.
    int64_t chunk_bytes() const { return device == Device::CUDA ? int64_t(1) << 30 : int64_t(64) << 20; }
    // Memory that the library of collectives takes in a run of several ranks. Measured constants.
    int64_t comm_overhead_bytes() const;
    // The memory that it takes in addition once the ranks of a world use all_to_all.
    int64_t all_to_all_bytes(int64_t world) const;
};

// The device of this program. On a GPU it is queried once.
Target this_target();

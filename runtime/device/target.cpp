#include "runtime/device/target.h"

#include <algorithm>

// On a GPU the context is not counted: it is in use before the arenas are allocated. What comes later is code that is
// loaded at its first launch: a few MiB of kernels, more of libraries.
int64_t Target::overhead_bytes() const {
    return int64_t(device == Device::CUDA ? 64 : 32) << 20;
}

// NCCL 2.28.9 between two H200 of one host: memory in use beyond the rest of the memory plan.
int64_t Target::comm_overhead_bytes() const {
    return int64_t(device == Device::CUDA ? 840 : 16) << 20;
}

// NCCL 2.28.3 among eight H200 of one host: 2,742 MiB beyond the rest of the memory plan, 392 MiB for each other rank,
// for the buffers of its point-to-point channels. Ranks of other hosts have not been measured and are not counted.
int64_t Target::all_to_all_bytes(int64_t world) const {
    constexpr int64_t RANKS_OF_A_HOST = 8;
    return device == Device::CUDA ? (std::min(world, RANKS_OF_A_HOST) - 1) * (int64_t(392) << 20) : 0;
}

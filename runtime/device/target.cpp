#include "runtime/device/target.h"

// On a GPU the context is not counted: it is in use before the arenas are allocated. What comes later is code that is
// loaded at its first launch: a few MiB of kernels, more of libraries.
int64_t Target::overhead_bytes() const {
    return int64_t(device == Device::CUDA ? 64 : 32) << 20;
}

// NCCL 2.28.9 between two H200 of one host: memory in use beyond the rest of the memory plan.
int64_t Target::comm_overhead_bytes() const {
    return int64_t(device == Device::CUDA ? 840 : 16) << 20;
}

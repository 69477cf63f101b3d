// The limits of this machine, measured at the first call. Benchmarks and ladders are compared with them.
// machine_limits.cpp measures the CPU, machine_limits.cu the GPU.
#pragma once

struct MachineLimits {
    // bytes/s, read + written, of memcpy on all threads or of a device copy, over arrays far larger than the caches
    double copy;
    // bytes/s of a[i] = b[i] + s·c[i] with plain stores. 3 arrays are counted (a CPU also reads a before it writes it)
    double triad;
    double flops;       // fp32 FLOP/s: on a CPU independent FMAs on all threads, on a GPU a large matmul
    double flops_bf16;  // FLOP/s of a large bf16 matmul on a GPU; 0 on a CPU, whose kernels compute in fp32
};

// Takes about half a second the first time; the same values afterwards.
const MachineLimits& machine_limits();

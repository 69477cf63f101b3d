// What this machine can do at most, measured when asked: what benchmarks and ladders are compared with.
// machine_limits.cpp is the CPU's definition, machine_limits.cu CUDA's.
#pragma once

struct MachineLimits {
    double
        copy;  // bytes/s, read + written: memcpy on all threads, a GPU's own copy, over arrays far larger than caches
    double triad;  // bytes/s of a[i] = b[i] + s·c[i] likewise, with plain stores: 3 streams counted (a CPU moves a 4th)
    double flops;  // fp32 FLOP/s: on a CPU independent fused multiply-adds on all threads, on a GPU a large product
    double flops_bf16;  // FLOP/s of a large bf16 product on a GPU; 0 on a CPU, whose kernels compute in fp32
};

// Takes about half a second the first time; the same values afterwards.
const MachineLimits& machine_limits();

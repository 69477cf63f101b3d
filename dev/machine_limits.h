// What this machine can do at most, measured when asked: what benchmarks and ladders are compared with.
#pragma once

struct MachineLimits {
    double copy;   // bytes/s, read + written, of memcpy on all threads over arrays far larger than the caches
    double triad;  // bytes/s of a[i] = b[i] + s·c[i] likewise, with plain stores: 3 streams counted, a 4th is moved
    double flops;  // fp32 FLOP/s of independent fused multiply-adds on all threads
};

// Takes about half a second the first time; the same values afterwards.
const MachineLimits& machine_limits();

// CUDA errors that mean a broken GPU, not a wrong program. It is no CUDA code, so that tests inject errors anywhere.
#pragma once

#include <string>

// The rest of an Error's line for the error with this number (cudaError_t), as in "GPU 3 (...): uncorrectable ECC error
// in its memory; ..."; empty for errors that a program can cause.
std::string gpu_fault(int error);

// How gpu_fault() names the GPU of this process: "GPU 3 (NVIDIA H100 80GB HBM3, 0000:3b:00.0) of host node7". A broken
// GPU cannot be asked, so device.cu notes it when the process creates its first stream.
void note_gpu(const std::string& name);

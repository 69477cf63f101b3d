// The user's file of GEMM algorithms that were chosen by timing (kernels/matmul.h), for this GPU and this library
// version. It saves the time to choose them again, and keeps runs on one machine bitwise equal. On the CPU, where there
// is nothing to choose, nothing is read or written.
#pragma once

#include <string>

#include "runtime/device/device.h"

// $XDG_CACHE_HOME/train_gpt/gemm/<GPU>-<library>.txt, where $XDG_CACHE_HOME is ~/.cache by default. Empty on the CPU
// and without a home directory.
std::string matmul_cache_path();

// Adopts the file's algorithms for the stream. A missing, unreadable or damaged file is ignored.
void load_matmul_cache(Stream stream);

// Adds the algorithms that the stream has used to the file. A file that cannot be written is ignored.
void store_matmul_cache(Stream stream);

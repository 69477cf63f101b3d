// How a checkpoint's config asks RoPE's frequencies to be scaled (kernels/rope.h has the formulas): plain data that the
// config reads and the kernel takes.
#pragma once

#include <cstdint>

struct RopeScaling {
    enum class Kind : uint8_t { None, Linear, Llama3, Dynamic };
    Kind kind = Kind::None;
    double factor = 1;
    double low_freq_factor = 1, high_freq_factor = 4;  // llama3 only
    int64_t original_max_position = 0;                 // llama3 and dynamic: the length L0 trained for
};

// How a config asks for RoPE's frequencies (kernels/rope.h has the formulas): plain data that the config reads and the
// kernel takes.
#pragma once

#include <cstdint>

struct RopeScaling {
    enum class Kind : uint8_t { None, Linear, Llama3, Dynamic, Truncated };
    Kind kind = Kind::None;
    double factor = 1;                                 // linear, llama3 and dynamic
    double low_freq_factor = 1, high_freq_factor = 4;  // llama3 only
    int64_t original_max_position = 0;                 // llama3 and dynamic: the length L0 trained for
    double fraction = 1;  // of the channels of a head that rotate: the first ones; truncated: of the pairs
};

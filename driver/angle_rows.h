// Host memory of Activations::angle_rows(), kept so that a step allocates nothing.
#pragma once

#include <cstdint>
#include <vector>

struct AngleRows {
    std::vector<int32_t> rows;
    std::vector<int64_t> lengths;  // of each token's sequence
    std::vector<float> values;
};

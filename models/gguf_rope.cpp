#include "models/gguf_rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

std::vector<double> llama3_rope_factors(const RopeScaling& s, double theta, int64_t head_size) {
    std::vector<double> factors;
    for (int64_t i = 0; i < head_size; i += 2) {
        const double wavelength = 2 * std::numbers::pi * std::pow(theta, double(i) / double(head_size));
        const double smooth = std::clamp((double(s.original_max_position) / wavelength - s.low_freq_factor) /
                                             (s.high_freq_factor - s.low_freq_factor),
                                         0.0, 1.0);
        factors.push_back(1 / ((1 - smooth) / s.factor + smooth));
    }
    return factors;
}

bool llama3_scaling(const std::vector<float>& factors, double theta, int64_t head_size, RopeScaling& scaling) {
    scaling = {RopeScaling::Kind::Llama3, double(*std::max_element(factors.begin(), factors.end())), 1, 4, 8192};
    const std::vector<double> expected = llama3_rope_factors(scaling, theta, head_size);
    for (size_t i = 0; i < expected.size(); i++)
        if (!(std::fabs(factors[i] / expected[i] - 1) <= 1e-4)) return false;
    return true;
}

// Sizes and differences of vectors in float64, for comparisons with a reference.
#pragma once

#include <cmath>
#include <vector>

#include "runtime/error.h"

inline double rms(const std::vector<double>& x) {
    double sum = 0;
    for (const double v : x) sum += v * v;
    return std::sqrt(sum / double(x.size()));
}

inline std::vector<double> difference(const std::vector<double>& a, const std::vector<double>& b) {
    require(a.size() == b.size(), a.size(), " values are compared with ", b.size());
    std::vector<double> d(a.size());
    for (size_t i = 0; i < d.size(); i++) d[i] = a[i] - b[i];
    return d;
}

inline double max_abs(const std::vector<double>& x) {
    double m = 0;
    for (const double v : x) {
        if (!(std::fabs(v) <= m)) m = std::fabs(v);  // NaN stays
    }
    return m;
}

// Random targets, and gradients of their losses, for the tests of cross-entropy.
#pragma once

#include <limits>
#include <vector>

#include "kernels/cross_entropy.h"
#include "runtime/rng.h"

// N targets below V; some_ignored: about a third is IGNORE_TARGET.
inline std::vector<int32_t> random_targets(int64_t N, int64_t V, bool some_ignored) {
    std::vector<int32_t> targets;
    for (int64_t n = 0; n < N; n++) {
        const Philox4 r = philox(9, uint64_t(n), 0);
        targets.push_back(some_ignored && r.v[0] % 3 == 0 ? IGNORE_TARGET : int32_t(r.v[1] % uint64_t(V)));
    }
    return targets;
}

// Of both signs, and some of them 0; NaN where the target is ignored.
inline std::vector<double> random_dlosses(const std::vector<int32_t>& targets) {
    std::vector<double> dlosses;
    for (size_t n = 0; n < targets.size(); n++) {
        const bool ignored = targets[n] == IGNORE_TARGET;
        dlosses.push_back(ignored      ? std::numeric_limits<double>::quiet_NaN()
                          : n % 5 == 4 ? 0
                                       : double(float(0.37 * normal01(10, 0, n))));
    }
    return dlosses;
}

// A matrix [N, columns] with row n times factors[n], which is 0 where that is NaN.
inline std::vector<double> scaled_rows(std::vector<double> matrix, const std::vector<double>& factors) {
    const size_t columns = matrix.size() / factors.size();
    for (size_t i = 0; i < matrix.size(); i++) {
        const double factor = factors[i / columns];
        matrix[i] *= factor == factor ? factor : 0;
    }
    return matrix;
}

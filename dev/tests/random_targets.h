// Random targets for the tests of cross-entropy.
#pragma once

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

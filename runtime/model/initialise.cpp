#include "runtime/model/initialise.h"

#include <algorithm>

#include "runtime/rng.h"

// In blocks, because a host copy of the whole model would need too much memory.
void initialise_weights(const ParamTable& table, const WeightArenas& w, uint64_t seed, Stream stream) {
    for (const Tensor& arena : {w.weights.data, w.master.data, w.fp32.data}) {
        if (arena) device_fill(arena.data, 0, static_cast<size_t>(arena.bytes()), stream);
    }
    std::vector<float> block(1 << 20);
    for (const Param& p : table.params) {
        const uint64_t key = name_hash(p.name);
        for (int64_t begin = 0; begin < p.numel(); begin += int64_t(block.size())) {
            const int64_t n = std::min(int64_t(block.size()), p.numel() - begin);
            if (!w.needed(p, begin, n).second) continue;
#pragma omp parallel for
            for (int64_t i = 0; i < n; i++) {
                block[static_cast<size_t>(i)] =
                    p.init_std > 0
                        ? p.init_std * static_cast<float>(normal01(seed, key, static_cast<uint64_t>(begin + i)))
                        : p.init_value + p.init_step * static_cast<float>(begin + i);
            }
            w.store(p, block.data(), begin, n);
        }
    }
}

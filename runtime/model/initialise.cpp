#include "runtime/model/initialise.h"

#include <algorithm>

#include "runtime/normal.h"
#include "runtime/rng.h"

namespace {

constexpr int64_t BLOCK = 1 << 22;  // elements of a copy to a device: 16 MiB

}  // namespace

void initial_values(float* out, const Param& p, uint64_t seed, int64_t begin, int64_t n) {
    if (p.init_bound > 0) {
        const uint64_t key = name_hash(p.name);
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < n; i++) {
            const Philox4 r = philox(seed, uint64_t(begin + i), key);
            out[i] = float((2 * uniform01(r.v[0], r.v[1]) - 1) * double(p.init_bound));
        }
        return;
    }
    if (p.init_std <= 0) {
        for (int64_t i = 0; i < n; i++) out[i] = p.init_value + p.init_step * static_cast<float>(begin + i);
        return;
    }
    constexpr int64_t CHUNK = 1 << 13;  // stays in a first-level cache
    const uint64_t key = name_hash(p.name);
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < n; at += CHUNK) {
        const int64_t count = std::min(CHUNK, n - at);
        normal_numbers(out + at, seed, key, static_cast<uint64_t>(begin + at), count);
        for (int64_t i = at; i < at + count; i++) out[i] *= p.init_std;
    }
}

// In blocks of pinned memory, because a host copy of the whole model would need too much. While the device copies one,
// the other is filled.
void initialise_weights(const ParamTable& table, const WeightArenas& w, uint64_t seed, Stream stream) {
    for (const Tensor& arena : {w.weights.data, w.master.data, w.fp32.data}) {
        if (arena) device_fill(arena.data, 0, static_cast<size_t>(arena.bytes()), stream);
    }
    const HostMemory memory(host_alloc(2 * BLOCK * sizeof(float)), host_free),
        rounded(host_alloc(2 * BLOCK * sizeof(uint16_t)), host_free);
    Event copied[2];
    size_t next = 0;
    for (const Param& p : table.params) {
        for (int64_t at = 0; at < p.numel(); at += BLOCK) {
            const auto [begin, count] = w.needed(p, at, std::min(BLOCK, p.numel() - at));
            if (!count) continue;
            copied[next].wait();
            float* const block = static_cast<float*>(memory.get()) + int64_t(next) * BLOCK;
            initial_values(block, p, seed, begin, count);
            w.store(p, block, begin, count, static_cast<uint16_t*>(rounded.get()) + int64_t(next) * BLOCK);
            copied[next].record(Stream{});
            next ^= 1;
        }
    }
    for (const Event& event : copied) event.wait();
}

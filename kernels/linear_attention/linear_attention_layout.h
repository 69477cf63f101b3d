// The scratch of linear attention on CUDA (kernels/scratch.h). Host code only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/linear_attention/linear_attention_types.h"

namespace linear_attention {

constexpr int64_t MIN_SPLIT = 256;  // tokens: 4 chunks

// Blocks that fill the GPU: 3 per SM, or 1 where heads are larger than 64.
inline int64_t wanted_blocks(const LinearAttentionSizes& z, int64_t sms) {
    return sms * (std::max(z.E, z.M) <= 64 ? 3 : 1);
}

// An upper bound of the states of a pass whose sequences are split: one for each split and one for each sequence's end.
// It is reached where as many sequences as possible have 1.5 times the wanted tokens, so that each has two splits.
inline int64_t max_states(const LinearAttentionSizes& z, int64_t blocks) {
    const int64_t heads = std::max<int64_t>(1, z.NKV);
    return 2 * std::min((blocks + heads - 1) / heads, (z.N + MIN_SPLIT - 1) / MIN_SPLIT);
}

// The parts of the scratch in floats, in the order of memory.
struct Layout {
    int64_t states, decays, delta = 0, query_dots = 0, key_dots = 0;
    int directions = 1;  // forward: KeyState; backward: QueryState too

    Layout(const LinearAttentionSizes& z, bool backward, int64_t sms) {
        // With a single split, a sequence needs its two states only where states are given.
        const int64_t count = z.NKV * std::max(z.states ? 2 * z.S : 0,
                                               z.max_length > MIN_SPLIT ? max_states(z, wanted_blocks(z, sms)) : 0);
        const int64_t column_blocks = (z.E + 15) / 16 + 1;  // at most
        states = count * (z.E * z.M + z.E);
        decays = (count + 3) / 4 * 4;  // states stay aligned to 16 bytes
        if (!backward) return;
        directions = 2;
        delta = z.NH * z.N;
        query_dots = column_blocks * z.NH * z.N;
        key_dots = column_blocks * z.NKV * z.N;
    }
    int64_t bytes() const {
        return (directions * (states + decays) + delta + query_dots + key_dots) * int64_t(sizeof(float));
    }
};

}  // namespace linear_attention

// The states of linear attention during generation: a state has the same size however long its sequence is
// (kernels/linear_attention/linear_attention.h). One arena, in which each layer with linear or gated_linear attention
// has a state for each of `slots` sequences.
//
// A state holds all tokens of its sequence: it cannot be rewound to fewer tokens.
#pragma once

#include <vector>

#include "kernels/linear_attention/linear_attention.h"
#include "runtime/device/arena.h"
#include "runtime/model/model_config.h"

class StateCache {
  public:
    StateCache(const ModelConfig& config, int64_t slots);  // plans only
    void allocate(const Tensor& shared = {});              // shared: as KvCache::allocate() has it

    int64_t bytes() const { return total; }
    int64_t bytes_per_sequence() const { return slots ? total / slots : 0; }  // of all layers

    // Views of a layer: s [slots, NKV, HS, HS] and, with linear attention, z [slots, NKV, HS]; rows is passed on.
    LinearAttentionState layer(int64_t l, const Tensor& rows = {}) const;
    // Resets the slot's states to those of an empty sequence.
    void clear(int64_t slot, Stream stream) const;
    void copy(int64_t from, int64_t to, Stream stream) const;  // a slot's states

  private:
    template <typename F>
    void for_each_tensor(F f) const;

    struct Offsets {
        int64_t s = -1, z = -1;  // bytes from the arena's start; −1: none
    };
    const int64_t slots, heads, head_size;
    std::vector<Offsets> offsets;  // by layer
    int64_t total = 0;
    Arena memory;
};

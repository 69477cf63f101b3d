// What layers of linear attention keep of a text while it grows: a state of one size, however long the text is
// (kernels/linear_attention/linear_attention.h). One arena, in which each layer of kind L or G has a state for each of
// `slots` texts.
//
// A state holds all tokens of its text: none can be taken back.
#pragma once

#include <vector>

#include "kernels/linear_attention/linear_attention.h"
#include "runtime/device/arena.h"
#include "runtime/model/model_config.h"

class StateCache {
  public:
    StateCache(const ModelConfig& config, int64_t slots);  // plans only
    void allocate();

    int64_t bytes() const { return total; }
    int64_t bytes_per_text() const { return slots ? total / slots : 0; }  // of all layers

    // s [slots, NKV, HS, HS] and, of kind L, z [slots, NKV, HS] of a layer; rows: as given.
    LinearAttentionState layer(int64_t l, const Tensor& rows = {}) const;
    // The slot's states become those of an empty text.
    void clear(int64_t slot, Stream stream) const;

  private:
    struct Place {
        int64_t s = -1, z = -1;  // bytes from the arena's start; −1: none
    };
    const int64_t slots, heads, head_size;
    std::vector<Place> places;  // by layer
    int64_t total = 0;
    Arena memory;
};

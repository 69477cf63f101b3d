// The KV cache of generation: one arena in which each of `slots` sequences owns `capacity` rows of every layer with
// softmax attention. Its size is known before anything is allocated. Nothing moves and nothing is allocated while
// sequences grow.
#pragma once

#include <vector>

#include "runtime/device/arena.h"
#include "runtime/model/model_config.h"

class KvCache {
  public:
    // Plans only. Throws Error where a layer has more rows than the 2³⁰ that attention takes as one sequence: the
    // unused rows between two sequences are passed to it as a sequence.
    KvCache(const ModelConfig& config, int64_t slots, int64_t capacity, DType dtype);
    void allocate();

    int64_t bytes() const { return 2 * layers * layer_bytes(); }
    // Of one token, over all layers with softmax attention.
    int64_t bytes_per_token() const { return 2 * layers * kv_heads * head_size * dtype_size(dtype); }

    // [slots, capacity, NKV, HS]; the same memory as rows [slots·capacity, NKV, HS].
    Tensor k(int64_t layer) const { return view(2 * index[size_t(layer)], {slots, capacity, kv_heads, head_size}); }
    Tensor v(int64_t layer) const { return view(2 * index[size_t(layer)] + 1, {slots, capacity, kv_heads, head_size}); }
    Tensor k_rows(int64_t layer) const {
        return view(2 * index[size_t(layer)], {slots * capacity, kv_heads, head_size});
    }
    Tensor v_rows(int64_t layer) const {
        return view(2 * index[size_t(layer)] + 1, {slots * capacity, kv_heads, head_size});
    }

    const int64_t slots, capacity;

  private:
    int64_t layer_bytes() const;
    Tensor view(int64_t part, std::initializer_list<int64_t> shape) const {
        return memory.at(part * layer_bytes(), dtype, shape);
    }

    const int64_t layers, kv_heads, head_size;
    std::vector<int64_t> index;  // by the model's layer: how many softmax layers precede it
    const DType dtype;
    Arena memory;
};

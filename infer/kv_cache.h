// The KV cache of generation: one arena in which each of `slots` sequences owns rows of every layer with softmax
// attention. Its size is known before anything is allocated. Nothing moves and nothing is allocated while sequences
// grow.
//
// A layer that sees all tokens has a row for each of `capacity` tokens. A layer with a sliding window w < capacity has
// a ring of w − 1 + STEPS_BACK rows (at most `capacity`): position p is in row p mod rows. A decode step appends to the
// ring and reads the last w positions (kernels/generation/decode_attention.h). Prompts are different, because a chunk
// of them may be longer than the ring and attention reads keys in order: the engine copies the up to w − 1 earlier keys
// that the chunk sees in front of the chunk's own, runs attention over that, and copies the chunk's last keys to the
// ring (Engine::prefill_pass).
#pragma once

#include <algorithm>
#include <vector>

#include "runtime/device/arena.h"
#include "runtime/model/model_config.h"

// A sequence's part of a pass over prompts: `tokens` new tokens, which follow its `past` tokens in the cache.
struct PassChunk {
    int64_t slot, past, tokens;
};

// The key rows of a pass in the layers with a ring. The keys that each chunk sees are packed without gaps, in the order
// of the chunks: those of earlier passes, then its own.
struct RingPass {
    std::vector<int32_t> cum_k;               // [chunks + 1] ends of the packed sequences
    std::vector<int32_t> new_keys;            // [tokens of the pass] packed rows of the chunks' own keys
    std::vector<int32_t> past_from, past_to;  // rows of the ring, and the packed rows that they are copied to
    std::vector<int32_t> kept_from, kept_to;  // packed rows of the last own keys, and the rows of the ring for them
    int64_t longest = 0;                      // packed keys of a sequence
};
RingPass ring_pass(const std::vector<PassChunk>& chunks, int64_t window, int64_t rows);

class KvCache {
  public:
    // How far a sequence that has wrapped its rings can be cut back: when the host has read the token that ends a
    // response, up to this many tokens after it are in the cache (Engine::steps_ahead).
    static constexpr int64_t STEPS_BACK = 2;

    // Plans only. Throws Error where a layer has more rows than the 2³⁰ that attention takes as one sequence: the
    // unused rows between two sequences are passed to it as a sequence.
    KvCache(const ModelConfig& config, int64_t slots, int64_t capacity, DType dtype);
    void allocate();

    int64_t bytes() const { return total; }
    // The bytes that a decode step reads for a sequence of this many tokens, over all layers with softmax attention.
    int64_t bytes_read(int64_t length) const;

    // Rows of a sequence in a layer, and the layer's window; 0 where it has none or the capacity does not exceed it.
    int64_t rows(int64_t layer) const { return layers[size_t(layer)].rows; }
    int64_t window(int64_t layer) const { return layers[size_t(layer)].window; }
    // The windows that occur, without repetition.
    std::vector<int64_t> windows() const;
    int64_t ring_rows(int64_t window) const { return std::min(window - 1 + STEPS_BACK, capacity); }
    // Whether the keys that a token at position `length` sees are all there, in a slot that has held up to `longest`
    // tokens of the sequence.
    bool holds(int64_t length, int64_t longest) const;

    // [slots, rows, NKV, HS]; the same memory as rows [slots·rows, NKV, HS].
    Tensor k(int64_t l) const { return view(l, 0, {slots, rows(l), kv_heads, head_size}); }
    Tensor v(int64_t l) const { return view(l, 1, {slots, rows(l), kv_heads, head_size}); }
    Tensor k_rows(int64_t l) const { return view(l, 0, {slots * rows(l), kv_heads, head_size}); }
    Tensor v_rows(int64_t l) const { return view(l, 1, {slots * rows(l), kv_heads, head_size}); }

    const int64_t slots, capacity;

  private:
    struct Layer {
        int64_t rows = 0, window = 0;
        int64_t at = 0;  // bytes from the arena's start to k; v follows
    };
    int64_t row_bytes() const { return kv_heads * head_size * dtype_size(dtype); }  // of k or v
    int64_t layer_bytes(const Layer& layer) const;                                  // of k or v
    Tensor view(int64_t l, int64_t part, std::initializer_list<int64_t> shape) const;

    const int64_t kv_heads, head_size;
    const DType dtype;
    std::vector<Layer> layers;  // of the model; those of linear attention have no rows
    int64_t total = 0;
    Arena memory;
};

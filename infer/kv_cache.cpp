#include "infer/kv_cache.h"

RingPass ring_pass(const std::vector<PassChunk>& chunks, int64_t window, int64_t rows) {
    RingPass pass;
    pass.cum_k.push_back(0);
    for (const PassChunk& c : chunks) {
        const int64_t past = std::min(c.past, window - 1), kept = std::min(c.tokens, rows);
        const auto row_of = [&](int64_t position) { return static_cast<int32_t>(c.slot * rows + position % rows); };
        const int32_t first = pass.cum_k.back(), first_new = first + static_cast<int32_t>(past);
        for (int64_t i = 0; i < past; i++) {
            pass.past_from.push_back(row_of(c.past - past + i));
            pass.past_to.push_back(first + static_cast<int32_t>(i));
        }
        for (int64_t i = 0; i < c.tokens; i++) {
            const int32_t packed = first_new + static_cast<int32_t>(i);
            pass.new_keys.push_back(packed);
            if (i < c.tokens - kept) continue;
            pass.kept_from.push_back(packed);
            pass.kept_to.push_back(row_of(c.past + i));
        }
        pass.cum_k.push_back(first_new + static_cast<int32_t>(c.tokens));
        pass.longest = std::max(pass.longest, past + c.tokens);
    }
    return pass;
}

KvCache::KvCache(const ModelConfig& c, int64_t num_slots, int64_t tokens, DType type)
    : slots(num_slots), capacity(tokens), kv_heads(c.kv_heads), head_size(c.head_size), dtype(type) {
    int64_t all_rows;
    constexpr int64_t MAX_ROWS = int64_t(1) << 30;  // without windows
    const bool fits = !__builtin_mul_overflow(slots, capacity, &all_rows) && all_rows <= MAX_ROWS;
    for (int64_t l = 0; l < c.layers; l++) {
        Layer layer;
        if (c.attention_type(l) == AttentionType::Softmax) {
            require(fits, "a KV cache for ", slots, " sequences of ", capacity,
                    " tokens has more than 2^30 rows; use fewer sequences (--batch-size) or a shorter context");
            const int64_t window = c.window(l);
            layer.window = window < capacity ? window : 0;
            layer.rows = layer.window ? ring_rows(layer.window) : capacity;
            layer.at = total;
            total += 2 * layer_bytes(layer);
        }
        layers.push_back(layer);
    }
}

int64_t KvCache::layer_bytes(const Layer& layer) const {
    const int64_t bytes = slots * layer.rows * row_bytes();
    return (bytes + ArenaPlan::ALIGNMENT - 1) / ArenaPlan::ALIGNMENT * ArenaPlan::ALIGNMENT;
}

int64_t KvCache::bytes_read(int64_t length) const {
    int64_t rows = 0;
    for (const Layer& layer : layers)
        if (layer.rows) rows += layer.window ? std::min(layer.window, length) : length;
    return 2 * rows * row_bytes();
}

std::vector<int64_t> KvCache::windows() const {
    std::vector<int64_t> found;
    for (const Layer& layer : layers)
        if (layer.window && std::find(found.begin(), found.end(), layer.window) == found.end())
            found.push_back(layer.window);
    return found;
}

bool KvCache::holds(int64_t length, int64_t longest) const {
    return std::all_of(layers.begin(), layers.end(), [&](const Layer& layer) {
        const int64_t oldest = std::max<int64_t>(longest - layer.rows, 0);  // position that has a row
        return !layer.window || length == 0 || oldest <= std::max<int64_t>(length + 1 - layer.window, 0);
    });
}

Tensor KvCache::view(int64_t l, int64_t part, std::initializer_list<int64_t> shape) const {
    const Layer& layer = layers[size_t(l)];
    return memory.at(layer.at + part * layer_bytes(layer), dtype, shape);
}

void KvCache::allocate() {
    memory = Arena(total, "KV cache");
}

#include "infer/kv_cache.h"

KvCache::KvCache(const ModelConfig& c, int64_t num_slots, int64_t tokens, DType type)
    : slots(num_slots),
      capacity(tokens),
      layers(c.layers_of(AttentionType::Softmax)),
      kv_heads(c.kv_heads),
      head_size(c.head_size),
      dtype(type) {
    for (int64_t l = 0, before = 0; l < c.layers; l++) {
        index.push_back(before);
        before += c.attention_type(l) == AttentionType::Softmax;
    }
    int64_t rows;
    require(layers == 0 || (!__builtin_mul_overflow(slots, capacity, &rows) && rows <= int64_t(1) << 30),
            "a KV cache for ", slots, " sequences of ", capacity,
            " tokens has more than 2^30 rows; lower --batch-size or --context");
}

int64_t KvCache::layer_bytes() const {
    const int64_t bytes = slots * capacity * kv_heads * head_size * dtype_size(dtype);
    return (bytes + ArenaPlan::ALIGNMENT - 1) / ArenaPlan::ALIGNMENT * ArenaPlan::ALIGNMENT;
}

void KvCache::allocate() {
    memory = Arena(bytes(), "KV cache");
}

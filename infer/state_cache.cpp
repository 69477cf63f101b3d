#include "infer/state_cache.h"

StateCache::StateCache(const ModelConfig& c, int64_t num_slots)
    : slots(num_slots), heads(c.kv_heads), head_size(c.head_size), offsets(size_t(c.layers)) {
    const auto take = [&](int64_t elements) {
        const int64_t at = total, bytes = elements * int64_t(sizeof(float));
        total += (bytes + ArenaPlan::ALIGNMENT - 1) / ArenaPlan::ALIGNMENT * ArenaPlan::ALIGNMENT;
        return at;
    };
    for (int64_t l = 0; l < c.layers; l++) {
        if (c.attention_type(l) == AttentionType::Softmax) continue;
        offsets[size_t(l)].s = take(slots * heads * head_size * head_size);
        if (c.attention_type(l) == AttentionType::Linear) offsets[size_t(l)].z = take(slots * heads * head_size);
    }
}

void StateCache::allocate(const Tensor& shared) {
    memory = shared ? Arena(shared) : Arena(total, "states of linear attention");
}

LinearAttentionState StateCache::layer(int64_t l, const Tensor& rows) const {
    const Offsets& p = offsets[size_t(l)];
    LinearAttentionState state;
    state.s = memory.at(p.s, DType::F32, {slots, heads, head_size, head_size});
    if (p.z >= 0) state.z = memory.at(p.z, DType::F32, {slots, heads, head_size});
    state.rows = rows;
    return state;
}

// f(states of a layer, [slots, …])
template <typename F>
void StateCache::for_each_tensor(F f) const {
    for (size_t l = 0; l < offsets.size(); l++) {
        if (offsets[l].s < 0) continue;
        const LinearAttentionState state = layer(int64_t(l));
        f(state.s);
        if (state.z) f(state.z);
    }
}

void StateCache::clear(int64_t slot, Stream stream) const {
    for_each_tensor([&](const Tensor& t) {
        const Tensor row = t.rows(slot, slot + 1);
        device_fill(row.data, 0, size_t(row.bytes()), stream);
    });
}

void StateCache::copy(int64_t from, int64_t to, Stream stream) const {
    for_each_tensor([&](const Tensor& t) {
        const Tensor row = t.rows(from, from + 1);
        device_copy(t.rows(to, to + 1).data, row.data, size_t(row.bytes()), stream);
    });
}

#include "driver/frozen_memory.h"

#include <algorithm>

#include "runtime/files/log.h"

namespace {

char* bytes_of(const Tensor& t) {
    return static_cast<char*>(t.data);
}

}  // namespace

void FrozenMemory::add(Tensor& t, int64_t layer, DType dtype, const std::vector<int64_t>& shape) {
    layers.resize(std::max(layers.size(), size_t(layer) + 1));
    bindings.push_back({&t, layer, layers[size_t(layer)].add("", dtype, shape, 0, 0)});
}

void FrozenMemory::assign_offsets() {
    for (ArenaPlan& layer : layers) layer.assign_offsets();
}

int64_t FrozenMemory::layer_bytes(int64_t layer) const {
    const int64_t unit = ArenaPlan::ALIGNMENT * kept.parts;
    return (layers[size_t(layer)].bytes() + unit - 1) / unit * unit;
}

int64_t FrozenMemory::bytes() const {
    int64_t all = 0;
    for (size_t l = 0; l < layers.size(); l++) all += layer_bytes(int64_t(l)) / kept.parts;
    return all;
}

int64_t FrozenMemory::buffer_bytes() const {
    int64_t largest = 0;
    for (size_t l = 0; l < layers.size(); l++) largest = std::max(largest, layer_bytes(int64_t(l)));
    return in_place() ? 0 : WeightGatherer::LAYER_BUFFERS * largest;
}

Tensor FrozenMemory::kept_of(int64_t layer) const {
    int64_t begin = 0;
    for (int64_t l = 0; l < layer; l++) begin += layer_bytes(l) / kept.parts;
    return memory.at(begin, DType::U8, {layer_bytes(layer) / kept.parts});
}

Tensor FrozenMemory::whole_of(int64_t layer) const {
    if (in_place()) return kept_of(layer);
    const int64_t buffer = layer % WeightGatherer::LAYER_BUFFERS;
    return buffers.at(buffer * (buffers.bytes() / WeightGatherer::LAYER_BUFFERS), DType::U8, {layer_bytes(layer)});
}

void FrozenMemory::allocate(const char* what) {
    memory = Arena(bytes(), what, kept.place);
    buffers = Arena(buffer_bytes(), "gathered weights");
    for (const Binding& b : bindings) {
        const ArenaPlan::Entry& e = layers[size_t(b.layer)].entries()[size_t(b.entry)];
        *b.tensor = Arena(whole_of(b.layer)).at(e.offset, e.dtype, e.shape);
    }
}

// Where a tensor of a layer begins in the part that this rank keeps; negative: in an earlier part.
int64_t FrozenMemory::offset(int64_t layer, const Tensor& t) const {
    return bytes_of(t) - bytes_of(whole_of(layer)) - kept.part * kept_of(layer).bytes();
}

std::pair<int64_t, int64_t> FrozenMemory::own(int64_t layer, const Tensor& t) const {
    const int64_t at = offset(layer, t);
    return {std::clamp<int64_t>(-at, 0, t.bytes()), std::clamp<int64_t>(kept_of(layer).bytes() - at, 0, t.bytes())};
}

void FrozenMemory::store(int64_t layer, const Tensor& t, const void* values) const {
    const auto [begin, end] = own(layer, t);
    if (begin < end)
        copy_to_device(bytes_of(kept_of(layer)) + offset(layer, t) + begin, static_cast<const char*>(values) + begin,
                       size_t(end - begin), Stream{});
}

std::vector<KeptGroup> FrozenMemory::groups(int num_groups) const {
    std::vector<KeptGroup> all(static_cast<size_t>(num_groups));
    for (size_t l = 0; l < layers.size(); l++)
        if (layer_bytes(int64_t(l)))
            all[1 + l] = {str("layer ", l, ", ", human_bytes(layer_bytes(int64_t(l)))),
                          int(l) % WeightGatherer::LAYER_BUFFERS, kept_of(int64_t(l)), whole_of(int64_t(l))};
    return all;
}

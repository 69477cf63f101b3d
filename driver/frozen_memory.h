// The memory of a base's quantised weights (driver/nf4_base.h, driver/fp8_base.h), layer by layer. It lies on the
// device; or in pinned memory of the host; or each rank keeps a part of every layer (ZeRO stage 3). In the last two
// cases two buffers hold the layers in use, and parallel/weight_gatherer.h fills them. A part ends at a multiple of 256
// bytes: between blocks of NF4, which is all the same to the kernels, because they read whole layers.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "parallel/weight_gatherer.h"
#include "runtime/device/arena.h"

class FrozenMemory {
  public:
    // This rank keeps part `part` of `parts`.
    struct Kept {
        MemoryPlace place = MemoryPlace::Device;
        int64_t part = 0, parts = 1;
    };
    explicit FrozenMemory(const Kept& where) : kept(where) {}
    FrozenMemory(const FrozenMemory&) = delete;
    FrozenMemory& operator=(const FrozenMemory&) = delete;

    // Plans a tensor of a layer. It must outlive this; allocate() makes it a view of the memory that kernels read.
    void add(Tensor& t, int64_t layer, DType dtype, const std::vector<int64_t>& shape);
    void assign_offsets();  // after the last one

    MemoryPlace place() const { return kept.place; }
    bool in_place() const { return kept.place == MemoryPlace::Device && kept.parts == 1; }
    int64_t bytes() const;         // that this rank keeps
    int64_t buffer_bytes() const;  // 0: the weights are in place
    void allocate(const char* what);
    // The bytes of t, which is in a layer, that this rank keeps: from the first to before the second.
    std::pair<int64_t, int64_t> own(int64_t layer, const Tensor& t) const;
    // Writes those of them that this rank keeps from values of the host to where it keeps them.
    void store(int64_t layer, const Tensor& t, const void* values) const;
    // For the gatherer, by the groups of the parameter table: layer l is group 1 + l.
    std::vector<KeptGroup> groups(int num_groups) const;

  private:
    int64_t layer_bytes(int64_t layer) const;
    int64_t offset(int64_t layer, const Tensor& t) const;
    Tensor kept_of(int64_t layer) const;   // bytes
    Tensor whole_of(int64_t layer) const;  // in its buffer, or in place

    struct Binding {
        Tensor* tensor;
        int64_t layer, entry;
    };
    const Kept kept;
    std::vector<ArenaPlan> layers;
    std::vector<Binding> bindings;
    Arena memory, buffers;
};

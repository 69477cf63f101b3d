// LoRA adapters that the engine applies at run time (kernels/generation/lora_rows.h): device memory for those of all
// linear layers, filled up with zeros to one rank, so that any row of a batch may use any adapter.
#pragma once

#include <utility>
#include <vector>

#include "kernels/generation/lora_rows.h"
#include "model.h"
#include "models/lora_adapter.h"
#include "runtime/device/arena.h"

// Throws Error for a rank above LORA_MAX_RANK.
int64_t round_up_rank(int64_t rank);

class AdapterBank {
  public:
    // Plans the memory for adapters of a base with this table; allocate() gets it, filled with zeros. rank: as
    // round_up_rank() gives it, of the largest.
    AdapterBank(const ParamTable& table, int64_t adapters, int64_t rank, DType dtype);
    int64_t rank() const { return R; }
    int64_t bytes() const { return plan.bytes(); }
    // shared: U8 [bytes()], memory that the bank uses and does not own; null: it gets its own.
    void allocate(Stream stream, const Tensor& shared = {});
    // All adapters are zeros.
    void clear(Stream stream) const;

    // The i-th adapter. Throws Error where it changes another matrix than those of the blocks' linear layers.
    void store(int64_t i, const LoraAdapter& adapter, Stream stream) const;
    // Those that the model trains, as the i-th.
    void store(int64_t i, const Context& ctx, const Model& model) const;
    // By layer.
    const std::vector<BlockAdapters>& blocks() const { return layers; }

  private:
    // B: with the adapter's scale.
    struct Update {
        int64_t row, rows, rank;  // of the parameter that it changes
        const std::vector<float>&a, &b;
    };
    void store(int64_t i, const Param& p, const Update& u, Stream stream) const;
    std::pair<Tensor, Tensor> places(int64_t i, const Param& p, int64_t row, int64_t rows) const;

    const ParamTable& table;
    const int64_t adapters, R;
    const DType dtype;
    ArenaPlan plan;
    Arena memory;
    std::vector<BlockAdapters> layers;
};

// The one list of a model's tensors. parameter_table() in train_gpt.cu fills it in from the config; allocation,
// initialisation, the optimizer, checkpoints, import, export, the memory plan and the tests walk it.
//
// Layout of the parameter, gradient and optimizer arenas (all three the same): groups in the order embedding,
// layer 0 … L−1, final norm and head. A group is contiguous and padded so that it splits evenly over the ranks.
#pragma once

#include <string>
#include <vector>

#include "runtime/tensor.h"

// Which tensor of a checkpoint holds rows [row, row + rows) of a parameter. transposed: the file stores [cols, rows]
// (GPT-2's Conv1D). A vector is a parameter of one column. optional_prefix: see checkpoint.h.
struct Piece {
    std::string name;
    int64_t row, rows;
    bool transposed;
};

struct Param {
    int slot;             // which role (the driver's enum): same slot in every layer
    int layer;            // -1: not of a layer
    int group;            // 0 embedding, 1 + l layer l, layers + 1 final norm and head
    std::string name;     // our name, "layers.3.qkv.weight": random streams, dumps and tables use it
    int64_t rows, cols;   // as in files. A vector has cols = 0 (rank 1)
    int64_t padded_rows;  // as in memory; rows beyond `rows` are zero and stay zero
    float init_std;       // normal(0, init_std); 0: constant
    float init_value;     // the constant
    float init_step = 0;  // what the constant grows by from one row to the next
    bool decay;           // weight decay applies (matrices only)
    bool fp32;            // stays fp32 in a 16-bit model (weights and biases of norms, biases of gates)
    std::vector<Piece> pieces;
    int64_t offset = 0;       // elements from the start of the arena, set by layout()
    int64_t fp32_offset = 0;  // where `fp32`: from the start of an arena that holds those parameters only

    int64_t row_size() const { return cols ? cols : 1; }
    int64_t numel() const { return rows * row_size(); }                // as in files
    int64_t padded_numel() const { return padded_rows * row_size(); }  // as in memory
};

struct ParamTable {
    std::vector<Param> params;         // in arena order
    std::vector<int64_t> group_begin;  // elements; group g is [group_begin[g], group_begin[g + 1])
    int64_t total = 0;                 // elements of an arena, padding included
    int64_t fp32_total = 0;            // elements of an arena of the parameters that stay fp32

    int64_t num_weights() const;  // elements as in files
    // The parameter in that role, or nullptr where this model has none (no bias, tied head). After layout().
    const Param* find(int slot, int layer = -1) const;
    const Param& by_name(const std::string& name) const;  // throws Error

    // Sets offsets and groups. Each tensor starts at a multiple of 128 elements; each group's size is a multiple of
    // 128·world elements. Throws Error where sizes overflow, groups go backwards, two parameters have one role or
    // pieces don't cover their parameter's rows in order.
    void layout(int64_t world);

  private:
    std::vector<int> index;  // [slot, layer + 1] → position in params, -1: none
    int columns = 0;         // of index
};

// The parameter's part of an arena (weights, grads, m or v) on host or device: [padded_rows, cols], or [padded_rows]
// for a vector.
Tensor param_tensor(const Param& p, Tensor arena);

// The memory behind a model's parameters.
struct WeightArenas {
    Tensor weights;  // [total] fp32, bf16 or fp16: what the kernels read
    Tensor master;   // [total] fp32 beside 16-bit weights that are trained, else null
    Tensor fp32;     // [fp32_total] beside 16-bit weights without master weights, else null

    WeightArenas() = default;
    WeightArenas(Tensor arena) : weights(arena) {}  // NOLINT: an fp32 arena is all that many callers have

    Tensor tensor(const Param& p) const;       // what kernels read: fp32 for what stays fp32
    Tensor exact(const Param& p) const;        // the most exact copy: master weights where there are some
    bool fits(const ParamTable& table) const;  // large enough, dtypes as above

    // values: fp32 on the host, padded_numel() of them, or n from element `begin` of the parameter. 16-bit weights are
    // rounded to nearest. Copies go through the device's default queue.
    void store(const Param& p, const float* values, int64_t begin, int64_t n) const;
    // The exact values on the host: where they lie there as fp32, else a copy in buffer.
    const float* fetch(const Param& p, std::vector<float>& buffer) const;
};

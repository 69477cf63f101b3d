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
    bool decay;           // weight decay applies (matrices only)
    std::vector<Piece> pieces;
    int64_t offset = 0;  // elements from the start of the arena, set by layout()

    int64_t row_size() const { return cols ? cols : 1; }
    int64_t numel() const { return rows * row_size(); }                // as in files
    int64_t padded_numel() const { return padded_rows * row_size(); }  // as in memory
};

struct ParamTable {
    std::vector<Param> params;         // in arena order
    std::vector<int64_t> group_begin;  // elements; group g is [group_begin[g], group_begin[g + 1])
    int64_t total = 0;                 // elements of an arena, padding included

    int64_t num_weights() const;  // elements as in files
    // The parameter in that role, or nullptr where this model has none (no bias, tied head). After layout().
    const Param* find(int slot, int layer = -1) const;
    const Param& by_name(const std::string& name) const;  // throws Error

    // Sets offsets and groups. Each tensor starts at a multiple of 64 bytes; each group's size is a multiple of
    // 16·world elements. Throws Error where sizes overflow, groups go backwards, two parameters have one role or pieces
    // don't cover their parameter's rows in order.
    void layout(int64_t world);

  private:
    std::vector<int> index;  // [slot, layer + 1] → position in params, -1: none
    int columns = 0;         // of index
};

// The parameter's part of an arena (params, grads, m or v) of fp32 on host or device: [padded_rows, cols], or
// [padded_rows] for a vector.
Tensor param_tensor(const Param& p, Tensor arena);

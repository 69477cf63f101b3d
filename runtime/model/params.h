// The one list of a model's tensors. parameter_table() in train_gpt.cu fills it in from the config; allocation,
// initialisation, the optimizer, checkpoints, import, export, the memory plan and the tests walk it.
//
// Layout of the parameter, gradient and optimizer arenas (all three the same): groups in the order embedding,
// layer 0 … L−1, head, and last the norms, which stay fp32 in a 16-bit model. A group is contiguous and padded so that
// it splits evenly over the ranks: an arena holds every group whole, or of each the part that one rank owns.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "runtime/device/tensor.h"

// Which tensor of a checkpoint holds rows [row, row + rows) of a parameter. transposed: the file stores [cols, rows]
// (GPT-2's Conv1D). A vector is a parameter of one column. optional_prefix: see checkpoint.h.
struct SourceTensor {
    std::string name;
    int64_t row, rows;
    bool transposed;
};

struct Param {
    int slot;             // which role (the driver's enum): same slot in every layer
    int layer;            // -1: not of a layer
    int group;            // 0 embedding, 1 + l layer l, layers + 1 head, layers + 2 what stays fp32
    std::string name;     // our name, "layers.3.qkv.weight": random streams, dumps and tables use it
    int64_t rows, cols;   // as in files. A vector has cols = 0 (rank 1)
    int64_t padded_rows;  // as in memory; rows beyond `rows` are zero and stay zero
    float init_std;       // normal(0, init_std); 0: constant
    float init_value;     // the constant
    bool decay;           // weight decay applies (matrices only)
    bool fp32;            // stays fp32 in a 16-bit model (weights and biases of norms, biases of gates)
    std::vector<SourceTensor> sources;
    float init_step = 0;  // what the constant grows by from one row to the next
    // Set by layout():
    int64_t offset = 0;                       // elements from the start of a whole arena
    int64_t group_begin = 0, group_size = 0;  // its group, likewise

    int64_t row_size() const { return cols ? cols : 1; }
    int64_t numel() const { return rows * row_size(); }                // as in files
    int64_t padded_numel() const { return padded_rows * row_size(); }  // as in memory
};

struct ParamTable {
    std::vector<Param> params;         // in arena order
    std::vector<int64_t> group_begin;  // elements; group g is [group_begin[g], group_begin[g + 1])
    int64_t total = 0;                 // elements of a whole arena, padding included
    int64_t fp32_total = 0;            // elements of the last group if its parameters stay fp32, else 0

    int num_groups() const { return int(group_begin.size()) - 1; }
    int64_t group_size(int g) const { return group_begin[size_t(g) + 1] - group_begin[size_t(g)]; }

    int64_t num_weights() const;  // elements as in files
    // Groups [first, last) of that dtype for a person: "layer 10 to layer 11, 54.07 MiB".
    std::string describe_groups(int first, int last, DType dtype) const;
    // The parameter in that role, or nullptr where this model has none (no bias, tied head). After layout().
    const Param* find(int slot, int layer = -1) const;
    const Param& by_name(const std::string& name) const;  // throws Error

    // Sets offsets and groups. Each tensor starts at a multiple of 128 elements; each group's size is a multiple of
    // 128·world elements. Throws Error where sizes overflow, groups go backwards, two parameters have one role,
    // sources don't cover their parameter's rows in order, or what stays fp32 shares a group with what doesn't or is in
    // another than the last.
    void layout(int64_t world);

  private:
    std::vector<int> index;  // [slot, layer + 1] → position in params, -1: none
    int columns = 0;         // of index
};

// The parameter's part of a whole arena (weights, grads, m or v) on host or device: [padded_rows, cols], or
// [padded_rows] for a vector.
Tensor param_tensor(const Param& p, Tensor arena);

// Memory laid out by a table: every group whole, or of each group the part that one of `parts` ranks owns, in the order
// of the groups. A group of n elements that begins at b takes n/parts elements from b/parts on.
struct ParamArena {
    Tensor data;                  // [total / parts], less origin
    int64_t part = 0, parts = 1;  // the owner's rank, and of how many
    int64_t origin = 0;           // elements of the layout before data: an arena of the last group alone
    std::vector<Tensor> views;    // where parts > 1: each group whole, for the time that kernels read or write it

    ParamArena() = default;
    ParamArena(Tensor whole) : data(whole) {}  // NOLINT: a whole arena is all that many callers have

    explicit operator bool() const { return bool(data); }
    // What it holds of groups [first, last): [n].
    Tensor groups(const ParamTable& table, int first, int last) const;
    // The whole parameter as kernels see it: [padded_rows, cols] or [padded_rows].
    Tensor tensor(const Param& p) const;
    // What it holds of the parameter's elements [begin, begin + n): the first and the number of them, and where.
    struct Span {
        int64_t begin = 0, count = 0;
        int64_t at = 0;  // in data
    };
    Span span(const Param& p, int64_t begin, int64_t n) const;
    Tensor elements(const Span& span) const { return data.rows(span.at, span.at + span.count); }
};

// The memory behind a model's parameters.
struct WeightArenas {
    ParamArena weights;  // [total] fp32, bf16 or fp16: what the kernels read
    ParamArena master;   // [total] fp32 beside 16-bit weights that are trained, else null
    ParamArena fp32;     // the last group, always whole, beside 16-bit weights and beside parts of weights, else null

    WeightArenas() = default;
    WeightArenas(Tensor arena) : weights(arena) {}             // NOLINT: an fp32 arena is all that many callers have
    WeightArenas(const ParamArena& arena) : weights(arena) {}  // NOLINT: likewise

    Tensor tensor(const Param& p) const;            // what kernels read: fp32 for what stays fp32
    const ParamArena& exact(const Param& p) const;  // the most exact copy: master weights where there are some
    bool fits(const ParamTable& table) const;       // large enough, dtypes as above

    // The elements among [begin, begin + n) of the parameter that the arenas hold, from the first to the last: where
    // they begin and how many they are.
    std::pair<int64_t, int64_t> needed(const Param& p, int64_t begin, int64_t n) const;
    // values: fp32 on the host, padded_numel() of them, or n from element `begin` of the parameter; of those what the
    // arenas hold is stored. 16-bit weights are rounded to nearest. Copies go through the device's default queue.
    void store(const Param& p, const float* values, int64_t begin, int64_t n) const;
    // The exact values on the host, of a parameter that is there whole: where they lie there as fp32, else a copy in
    // buffer.
    const float* fetch(const Param& p, std::vector<float>& buffer) const;
};

// n values of an arena as fp32 on the host: where they lie there as fp32, else a copy in buffer.
const float* fetch_values(const Tensor& values, std::vector<float>& buffer);

// The parameter table: the only list of a model's tensors. parameter_table() in train_gpt.cu builds it from the config.
// Allocation, initialisation, the optimizer, checkpoints, import, export, the memory plan and the tests iterate over
// it.
//
// The parameter, gradient and optimizer arenas share one layout: the groups embedding, layer 0 ... L−1, head, and last
// the parameters that stay fp32 in a 16-bit model (norms, biases of gates). A group is contiguous and padded so that it
// splits evenly over the ranks. An arena holds either whole groups or one rank's part of every group.
#pragma once

#include <functional>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "runtime/device/tensor.h"

// The tensor of a Hugging Face checkpoint that holds rows [row, row + rows) of a parameter. transposed: the file stores
// [cols, rows] (GPT-2's Conv1D). A vector has one column.
struct SourceTensor {
    std::string name;
    int64_t row, rows;
    bool transposed;
};

// The optimizer of a parameter, and what the rest of the program asks about one (CONTRIBUTING.md has the recipe for a
// new one).
enum class OptimizerType : uint8_t { AdamW, Muon };
struct OptimizerFacts {
    const char* name;     // on the command line and in files
    bool second_moment;   // its state has v beside m
    bool whole_matrices;  // it updates matrices (parallel/distributed_muon.h), not elements (parallel/update.h)
};
constexpr OptimizerFacts OPTIMIZERS[] = {{"adamw", true, false}, {"muon", false, true}};  // in the enum's order
constexpr size_t NUM_OPTIMIZERS = std::size(OPTIMIZERS);
constexpr const OptimizerFacts& facts_of(OptimizerType optimizer) {
    return OPTIMIZERS[size_t(optimizer)];
}

// Parameters that share a learning rate. Hidden matrices: the matrices of the blocks, except a decay gate's, which are
// few and count as vectors. A tied head is an embedding.
enum class RateGroup : uint8_t { HiddenMatrices, Embeddings, Head, Vectors };
constexpr size_t NUM_RATE_GROUPS = 4;
constexpr const char* RATE_GROUP_NAMES[NUM_RATE_GROUPS] = {"hidden_matrices", "embeddings", "head", "vectors"};

struct Param {
    int role;             // enum Role (roles.h), the same in every layer
    int layer;            // -1: outside the layers
    int group;            // 0 embedding, 1 + l layer l, layers + 1 head, layers + 2 fp32 parameters
    std::string name;     // "layers.3.qkv.weight": keys random streams, dumps and tables
    int64_t rows, cols;   // as in files. A vector has cols = 0 (rank 1)
    int64_t padded_rows;  // as in memory; rows beyond `rows` are zero and stay zero
    float init_std;       // normal(0, init_std); 0: constant
    float init_value;     // the constant
    bool decay;           // weight decay applies (matrices only)
    bool fp32;            // stays fp32 in a 16-bit model (weights and biases of norms, biases of gates)
    std::vector<SourceTensor> sources;
    float init_step = 0;   // the constant's increment from row to row
    float init_bound = 0;  // uniform in ±init_bound instead of init_std and init_value; 0: not
    RateGroup rate_group = RateGroup::Vectors;
    OptimizerType optimizer = OptimizerType::AdamW;
    std::vector<int64_t> part_rows = {};  // hidden matrices: rows of each matrix of a fused tensor (q, k, v; gate, up)
    // Set by layout():
    size_t index = 0;                         // in the table
    int64_t offset = 0;                       // elements from the start of a whole arena
    int64_t group_begin = 0, group_size = 0;  // of its group, in elements

    int64_t row_size() const { return cols ? cols : 1; }
    int64_t numel() const { return rows * row_size(); }                // as in files
    int64_t padded_numel() const { return padded_rows * row_size(); }  // as in memory
};

struct ParamTable {
    bool frozen = false;                     // its parameters are not trained: no gradients, moments or master weights
    std::string file = "model.safetensors";  // that holds them in a model directory
    std::vector<Param> params;               // in arena order
    std::vector<int64_t> group_begin;        // elements; group g is [group_begin[g], group_begin[g + 1])
    int64_t total = 0;                       // elements of a whole arena, padding included
    int64_t fp32_total = 0;                  // elements of the last group if its parameters stay fp32, else 0

    int num_groups() const { return int(group_begin.size()) - 1; }
    int64_t group_size(int g) const { return group_begin[size_t(g) + 1] - group_begin[size_t(g)]; }

    int64_t num_weights() const;    // elements as in files
    bool updates_matrices() const;  // whether an optimizer of its parameters does (OptimizerFacts)
    // Describes groups [first, last) of a dtype for people: "layer 10 to layer 11, 54.07 MiB".
    std::string describe_groups(int first, int last, DType dtype) const;
    // The parameter of a role, or nullptr if this model has none (no bias, tied head). Valid after layout().
    const Param* find(int role, int layer = -1) const;
    const Param& by_name(const std::string& name) const;  // throws Error

    // Sets offsets and groups. Each tensor starts at a multiple of 128 elements; each group's size is a multiple of
    // 128·world elements. Throws Error if sizes overflow, groups are out of order, two parameters share a role, sources
    // or parts do not cover their parameter's rows in order, or fp32 parameters are not exactly the last group.
    void layout(int64_t world);

  private:
    std::vector<int> index;  // [role, layer + 1] → position in params, -1: none
    int columns = 0;         // of index
};

// A parameter's tensor in a whole arena (weights, gradients, m or v) on host or device: [padded_rows, cols], or
// [padded_rows] for a vector.
Tensor param_tensor(const Param& p, Tensor arena);

// Memory laid out by a table: whole groups, or the part of every group that one of `parts` ranks owns, in the order of
// the groups. The part of a group with n elements at offset b is n/parts elements at offset b/parts.
struct ParamArena {
    Tensor data;                  // [total / parts], less origin
    int64_t part = 0, parts = 1;  // the owner's rank, the number of owners
    int64_t origin = 0;           // the offset of data in the layout, > 0 for an arena of the last group alone
    // Whole groups while kernels use them, where they are not data itself: if parts > 1, or in another dtype.
    std::vector<Tensor> views;
    // A packed arena holds only some parameters: by Param::index, the offset in data of the held part, -1: not in this
    // arena; then the size of the arena. Empty: data has the table's layout.
    std::vector<int64_t> starts;

    ParamArena() = default;
    ParamArena(Tensor whole) : data(whole) {}  // NOLINT: implicit on purpose

    explicit operator bool() const { return bool(data); }
    // The held elements of groups [first, last): [n].
    Tensor groups(const ParamTable& table, int first, int last) const;
    bool holds(const Param& p) const { return starts.empty() || starts[p.index] >= 0; }
    // The whole parameter as kernels use it: [padded_rows, cols] or [padded_rows].
    Tensor tensor(const Param& p) const;
    // The held part of a parameter's elements [begin, begin + n).
    struct Span {
        int64_t begin = 0, count = 0;
        int64_t at = 0;  // offset in data
    };
    Span span(const Param& p, int64_t begin, int64_t n) const;
    // Whether data is fp32, bf16 or fp16 and has room for this part of an arena of n elements.
    bool holds(int64_t n) const;
    Tensor elements(const Span& span) const { return data.rows(span.at, span.at + span.count); }
};

// The elements of a parameter, without padding, that one of `parts` ranks owns.
ParamArena::Span owned_span(const Param& p, int64_t part, int64_t parts);

// ParamArena::starts of an arena of the parameters that `held` accepts. Each held part begins at a multiple of 128
// elements.
std::vector<int64_t> packed_starts(const ParamTable& table, int64_t part, int64_t parts,
                                   const std::function<bool(const Param&)>& held);
// Of the second moment v, which only some optimizers have. Empty if all parameters have one.
std::vector<int64_t> second_moment_starts(const ParamTable& table, int64_t part, int64_t parts);
// Elements of v, the largest over the parts.
int64_t second_moment_size(const ParamTable& table, int64_t parts);

// The memory behind a model's parameters.
struct WeightArenas {
    ParamArena weights;  // [total] fp32, bf16 or fp16: read by kernels
    ParamArena master;   // [total] fp32 master copy of trained 16-bit weights, else null
    ParamArena fp32;     // the last group, always whole, if weights are 16-bit or sharded; else null: it is in weights
    ParamArena replicated;  // packed: others that are whole on every rank, where weights are sharded; or null

    WeightArenas() = default;
    WeightArenas(Tensor arena) : weights(arena) {}             // NOLINT: implicit on purpose
    WeightArenas(const ParamArena& arena) : weights(arena) {}  // NOLINT: implicit on purpose

    Tensor tensor(const Param& p) const;            // what kernels read; fp32 for the last group
    const ParamArena& exact(const Param& p) const;  // the most exact copy: master weights if present
    bool fits(const ParamTable& table) const;       // checks sizes and dtypes

    // (begin, count) of the smallest range that covers the held elements of [begin, begin + n) of a parameter.
    std::pair<int64_t, int64_t> needed(const Param& p, int64_t begin, int64_t n) const;
    // Stores elements [begin, begin + n) from fp32 values on the host; elements that the arenas do not hold are
    // skipped. 16-bit weights are rounded to nearest. values may be what find() returned. Copies use the device's
    // default stream. They are asynchronous if values and rounded are pinned memory; rounded has room for n numbers of
    // 16 bits, or is null: then the call waits.
    void store(const Param& p, const float* values, int64_t begin, int64_t n, uint16_t* rounded = nullptr) const;
    // The only place of elements [begin, begin + n), if they all are in one fp32 arena on the host; else null.
    float* find(const Param& p, int64_t begin, int64_t n) const;
    // The exact fp32 values of a whole parameter on the host: a pointer into the arena if possible, otherwise a copy in
    // buffer.
    const float* fetch(const Param& p, std::vector<float>& buffer) const;
};

// Elements of a parameter as fp32 values on the host: a pointer into the arena if possible, otherwise a copy in buffer.
// Throws Error if the arena does not hold all of them.
const float* fetch_span(const ParamArena& arena, const Param& p, int64_t begin, int64_t n, std::vector<float>& buffer);
// The same for the bytes in the arena's dtype.
const void* fetch_bytes(const ParamArena& arena, const Param& p, int64_t begin, int64_t n, std::vector<char>& buffer);
// The same for values of an arena.
const float* fetch_values(const Tensor& values, std::vector<float>& buffer);

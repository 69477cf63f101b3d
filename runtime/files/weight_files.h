// The weights of a model: of a model directory in Hugging Face layout, which has one safetensors file or shards with an
// index, or of a file in another format.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/files/read_params.h"
#include "runtime/files/safetensors.h"
#include "runtime/model/packed_weight.h"
#include "runtime/model/params.h"

// Returns a parameter's padded_numel() values on the host in memory layout, padding rows zero: a pointer to existing
// memory, or to buffer.
using FetchParam = std::function<const float*(const Param& p, std::vector<float>& buffer)>;

// The dtype in which a file holds, or is to hold, one of the tensors that a parameter is made of.
using StoredDType = std::function<DType(const Param& p, const SourceTensor& tensor)>;

// Returns rows [row, row + rows) of a parameter's matrix, or elements of a vector, without padding rows.
using FetchRows = std::function<const float*(const Param& p, int64_t row, int64_t rows, std::vector<float>& buffer)>;

// Weights in files, read one parameter at a time.
struct WeightSource {
    FetchParam fetch;
    StoredDType dtype;
    FetchRows fetch_rows = {};  // null: fetch() only
};

// A model's weights. Those of a directory (ParamTable::file) are checked against a table: every source tensor is
// present with its shape. Other tensors are an Error, except known buffers (GPT-2's attn.bias, attn.masked_bias, rotary
// inv_freq) and a tied model's lm_head.weight that equals the token embedding, the table's first parameter. (If they
// differ it is an Error, because transformers 4 uses the embedding and transformers 5 the head.) Names may lack the
// family's prefix
// ("transformer." / "model."); dtypes are fp32, bf16, fp16 and fp64.
//
// packing: of a directory with packed weights (`convert --weights`). Tensors of the parameters that packs()
// (runtime/model/packed_params.h) are U8 [rows, packed_row_bytes], in memory order also where the family transposes.
class StoredWeights {
  public:
    StoredWeights(const std::string& directory, const ParamTable& table, std::optional<Packing> packing = {});
    // The tensors that a parameter is made of, in the order of its sources.
    struct Tensor {
        std::string name;
        StoredPart part;
    };
    using Tensors = std::vector<std::vector<Tensor>>;  // by Param::index
    // Of another format: `owner` keeps the files open, `model` names them in errors.
    StoredWeights(std::string model, std::shared_ptr<const void> owner, Tensors all);

    const std::vector<Tensor>& tensors(const Param& p) const { return by_param[p.index]; }
    const std::string& path() const { return where; }

  private:
    std::string where;
    std::shared_ptr<const void> files;
    Tensors by_param;
};

// Changes elements [begin, begin + count) of a parameter, in memory order, when they have been read. Called from
// several threads.
using AdjustValues = std::function<void(const Param& p, int64_t begin, int64_t count, float* values)>;

// Opens a model's weights. std::string: a directory.
WeightSource open_weight_source(const StoredWeights& weights, const AdjustValues& adjust = {});
WeightSource open_weight_source(const std::string& directory, const ParamTable& table, const AdjustValues& adjust = {});

// Fills the arenas, on host or device, from a model's weights, with the checks of StoredWeights. Padding rows are
// set to zero. After an Error of these checks the arenas are unchanged. A finite value that 16-bit arenas would make
// infinite is an Error that names the tensor. Parameters that a packed arena does not hold are not read. Returns a
// warning that names the tensors with values that are not finite, for stderr; empty if there are none.
std::string load_weights(const StoredWeights& weights, const ParamTable& table, const WeightArenas& arenas,
                         const AdjustValues& adjust = {});
std::string load_weights(const std::string& directory, const ParamTable& table, const WeightArenas& arenas);

// Whether a directory has a file of weights, or an index of shards.
bool holds_weights(const std::string& directory);

// The files of a LoRA adapter (models/lora_adapter.h).
constexpr const char* ADAPTER_CONFIG = "adapter_config.json";
constexpr const char* ADAPTER_WEIGHTS = "adapter_model.safetensors";

// Throws Error naming the tensor for a finite value that dtype would make infinite.
void check_range(const float* values, int64_t n, DType dtype, const std::string& path, const std::string& tensor);

// Writes model.safetensors at path, tensor by tensor. dtype: F32, BF16 or F16, of each tensor. Throws Error naming the
// tensor for a finite value that the dtype would make infinite. Not atomic: callers write into an AtomicDirectory.
// packed: how parameters that packs() are written instead, as StoredWeights reads them; null: they are not.
struct PackedRows {
    Packing packing;
    // Fills packed rows from the values of rows [row, row + rows.rows.shape[0]) of a parameter.
    std::function<void(const PackedWeight& rows, const Param& p, int64_t row, const float* values)> quantise;
};
void save_weights(const std::string& path, const ParamTable& table, const FetchParam& fetch, const StoredDType& dtype,
                  const PackedRows* packed = nullptr);

// The same with one dtype, from the most exact weights in the arenas. Several ranks write one file together: each
// declares all tensors and writes the elements that it owns, 1/ranks.count of every group. The arenas must hold at
// least these. The caller calls end_part() and finish().
void write_weights(SafetensorsWriter& writer, FileWriter::Open how, const ParamTable& table, const WeightArenas& arenas,
                   DType dtype, const Ranks& ranks = {});

// Throws Error, "<where>: the arena is bf16 [7], expected ...", unless the arenas fit the table.
void check_arenas(const ParamTable& table, const WeightArenas& arenas, const std::string& where);
// A tensor's name without its optional prefix, "transformer." or "model.".
std::string bare_name(const std::string& name);
std::string shape_string(const std::vector<int64_t>& shape);  // "[3, 4]"

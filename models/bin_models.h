// Model files of llm.c and llama2.c (.bin): a header, then the weights one after the other.
//
// llm.c, version 3 (fp32) and 5 (bf16): int32[256] header: 20240326, version, positions, vocabulary, layers, heads,
//   channels, padded vocabulary. GPT-2 with a tied head. Tensors of the same role follow each other, layer by layer.
//   Matrices are [outputs, inputs] (the transpose of Hugging Face's GPT-2), q, k and v fused.
// llama2.c, version 0: seven int32: channels, ffn, layers, heads, KV heads, vocabulary (negative: the head is a tensor
//   of its own), positions; fp32 weights, RoPE's tables before the head. Version 1: uint32 0x616b3432, int32 1, the
//   seven numbers, a byte that says whether the head is tied, zeros to byte 256; fp32 weights, norms first.
//   llama2.c rotates adjacent channels, kernels/rope.h rotates halves, so the rows of q and k are permuted.
// In both programs the norms' epsilon is 1e-5, in llama2.c RoPE's base is 10000.
//
// Errors name the file: an unknown magic number or version, sizes that are inconsistent or do not match the file's
// length.
#pragma once

#include <memory>
#include <string>

#include "runtime/files/checkpoint_directory.h"
#include "runtime/files/files.h"
#include "runtime/files/weight_files.h"
#include "runtime/model/model_config.h"

// Detects the format of a .bin file from its first bytes and its length.
enum class BinKind : uint8_t { Llmc, Llama2c, Other };
BinKind bin_model_kind(const std::string& path);

class BinModel {
  public:
    explicit BinModel(const std::string& path);  // checks everything except the weights' values
    const ModelConfig& config() const { return model; }
    std::string format() const;  // "llm.c v3"
    DType dtype() const { return stored; }
    // The weights in the layout of table, which must be config()'s table.
    WeightSource weights(const ParamTable& table) const;

  private:
    ModelConfig model;
    BinKind kind;
    int32_t version = 0;
    DType stored = DType::F32;
    int64_t data_start = 0, padded_vocab = 0;
    std::shared_ptr<const FileReader> file;
};

// Writes llm.c's format: version 3 for F32, version 5 for BF16. path must not exist; the file is written atomically.
// Throws Error for models that the format cannot express: it holds only GPT-2 with ffn = 4·channels, epsilon 1e-5 and a
// tied head.
void write_llmc_model(const std::string& path, const ModelConfig& config, const ParamTable& table,
                      const FetchParam& fetch, DType dtype);

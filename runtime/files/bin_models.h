// Model files of llm.c and llama2.c (.bin): a header, then the weights one after the other.
//
// llm.c, version 3 (fp32) and 5 (bf16): int32[256] header: 20240326, version, positions, vocabulary, layers, heads,
//   channels, padded vocabulary. GPT-2 with a tied head; each kind of tensor for all layers before the next kind.
//   Matrices are [outputs, inputs] (the transpose of Hugging Face's GPT-2), q, k and v fused.
// llama2.c, version 0: seven int32: channels, ffn, layers, heads, KV heads, vocabulary (negative: the head is a tensor
//   of its own), positions; fp32 weights, RoPE's tables before the head. Version 1: uint32 0x616b3432, int32 1, the
//   seven numbers, a byte that says whether the head is tied, zeros to byte 256; fp32 weights, norms first.
//   RoPE turns neighbouring channels there and halves here (kernels/rope.h), so the rows of q and k change places.
// In both programs the norms' epsilon is 1e-5, in llama2.c RoPE's base is 10000.
//
// Errors name the file: a magic number or version that is none of these, sizes that contradict themselves or the
// file's length.
#pragma once

#include <memory>
#include <string>

#include "runtime/files/checkpoint.h"
#include "runtime/files/files.h"

// What a .bin file is, by its first bytes and its length.
enum class BinKind : uint8_t { Llmc, Llama2c, Other };
BinKind bin_model_kind(const std::string& path);

class BinModel {
  public:
    explicit BinModel(const std::string& path);  // checks all but the weights' values
    const ModelConfig& config() const { return model; }
    std::string format() const;  // "llm.c v3"
    DType dtype() const { return stored; }
    // The weights as table has them, which is config()'s.
    WeightSource weights(const ParamTable& table) const;

  private:
    ModelConfig model;
    BinKind kind;
    int32_t version = 0;
    DType stored = DType::F32;
    int64_t data_start = 0, padded_vocab = 0;
    std::shared_ptr<const MappedFile> file;
};

// Writes llm.c's file: version 3 for F32, version 5 for BF16. path must not exist; it appears whole or not at all.
// Throws Error for models that the format can't say: others than GPT-2 with its own inner width, epsilon and tied head.
void write_llmc_model(const std::string& path, const ModelConfig& config, const ParamTable& table,
                      const FetchParam& fetch, DType dtype);

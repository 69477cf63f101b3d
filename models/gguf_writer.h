// Writes a model as a GGUF file for llama.cpp.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "models/model_source.h"

// llama.cpp's architecture of a model, and what it lacks of it, for an error: "linear attention"; empty: nothing.
struct GgufFit {
    std::string architecture, lacks;
};
GgufFit gguf_fit(const ModelConfig& config);

// The types of matrices. Norms, biases and position embeddings are always fp32.
struct GgufWeights {
    bool quantised = false;
    GgufType type = GgufType::F32;  // of all matrices, if `as_stored` is false
    bool as_stored = false;         // fp16, bf16 or fp32, whichever the source has
};

// The model must fit (gguf_fit). path must not exist and appears whole or not at all. weights: of source, as in its
// files. Rows that no whole number of blocks makes up stay in 16 bits. Returns lines for stderr that name their
// tensors. Throws Error for a tokenizer that llama.cpp cannot express, and, naming the tensor, for a value that is not
// finite in a quantised tensor or that the type cannot hold.
std::string write_gguf(const std::string& path, const ModelSource& source, const ModelFiles& tokenizer,
                       const ParamTable& table, const WeightSource& weights, const GgufWeights& types);

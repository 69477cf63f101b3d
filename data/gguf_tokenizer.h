// The tokenizer and the chat template of a GGUF file (llama.cpp's src/llama-vocab.cpp reads them) as the files of a
// model directory, and the other way round.
//
// Byte-level BPE: tokenizer.ggml.model is "gpt2", tokenizer.ggml.pre names the words, tokens and merges are those of
// tokenizer.json. SentencePiece BPE: "llama"; tokens have scores instead of merges. token_type: 1 normal, 2 unknown,
// 3 control (a special token), 4 user-defined (an added token), 5 unused (padding of the vocabulary), 6 byte.
#pragma once

#include "runtime/files/gguf_file.h"
#include "runtime/files/model_files.h"

// tokenizer.json, tokenizer_config.json and chat_template.jinja, made when they are read: what the file has of them.
// The types of the file's keys were checked (models/gguf_keys.h). Reading throws Error, naming the key, for a tokenizer
// that is not supported, and for lists that do not fit together.
ModelFiles::Contents gguf_tokenizer_files(const std::shared_ptr<const GgufFile>& file);

// The tokens that end a text, as llama.cpp has it.
std::vector<int64_t> gguf_end_tokens(const GgufFile& file);

// Sets the keys of a model's tokenizer and chat template. vocab_size: the model's, of which the tokenizer may have
// fewer; end_tokens: the ids that end a text; bos: the id in front of a text, where the tokenizer puts one there; -1:
// none. Throws Error with the remedy for a tokenizer that llama.cpp cannot express.
struct GgufTokenIds {
    int64_t vocab_size;
    int32_t bos;
    std::vector<int32_t> end_tokens;
};
void set_gguf_tokenizer(GgufWriter& writer, const ModelFiles& model, const GgufTokenIds& ids);

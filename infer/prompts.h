// Prompts: reading them from a file, their tokens, and the tokens that start and end a text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "models/model_source.h"

// The token that generation starts from when there is no prompt: beginning-of-text, or end-of-text as in GPT-2; token 0
// where neither is known. tokenizer may be null.
int32_t start_token(const ModelConfig& config, const Tokenizer* tokenizer);

// The ids below this one can be sampled: the tokenizer's. Further rows of the model's vocabulary are padding (Qwen),
// which no text of the training contained. tokenizer may be null.
int64_t sampled_vocab(const ModelConfig& config, const Tokenizer* tokenizer);

// The tokens that end a completion: end-of-text of the tokenizer, and those of config.json and generation_config.json.
std::vector<int32_t> end_tokens(const ModelSource& source, const Tokenizer* tokenizer);

// Splits a file into prompts at lines of ---. The newline before such a line and the one at the end of the file are not
// part of a prompt, nor is a byte order mark. A newline may be CR LF.
std::vector<std::string> split_prompts(const std::string& text);
std::vector<std::string> read_prompts(const std::string& path);

// A note for the user on bytes of the text that the vocabulary lacks ("3 bytes ... the model does not see them"); "" if
// it lacks none.
std::string lost_bytes_note(const std::string& text, const Tokenizer& tokenizer);

// The tokens of a prompt, at least one: those that the tokenizer prepends to a text, then the prompt's own; the
// start token if there are none. Throws Error for a prompt without a tokenizer and for a token beyond the model's
// vocabulary.
std::vector<int32_t> prompt_tokens(const std::string& prompt, const ModelSource& source, const Tokenizer* tokenizer);

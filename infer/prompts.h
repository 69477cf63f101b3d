// What a model reads before it writes: the prompts of a file, their tokens, and the tokens that begin and end texts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "runtime/files/checkpoint.h"

// The token that a text starts from when there is no prompt: the beginning of text, or GPT-2's end of the one before.
// Where neither is known, any token will do. tokenizer may be null.
int32_t start_token(const ModelConfig& config, const Tokenizer* tokenizer);

// The tokens that end a text: the tokenizer's end of text, the config's, and those of generation_config.json.
std::vector<int32_t> end_tokens(const ModelSource& source, const Tokenizer* tokenizer);

// The prompts of a file: what lies between lines that are ---. The newline before such a line belongs to it, and so
// does one at the end of the file if there are several prompts.
std::vector<std::string> split_prompts(const std::string& text);

// The tokens of a prompt, never none: what the tokenizer puts in front of a text, then the prompt's own; without either
// the start token. Throws Error for a prompt that no tokenizer is there to read, and for a token beyond the model's
// vocabulary.
std::vector<int32_t> prompt_tokens(const std::string& prompt, const ModelSource& source, const Tokenizer* tokenizer);

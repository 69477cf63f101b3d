// The settings of a tokenizer_config.json with which transformers gives other tokens than tokenizer.json says.
#pragma once

#include "runtime/files/model_files.h"

// What tokenizer.json does in front of a text.
struct TextStart {
    bool tokens;              // puts tokens in front, such as <s>
    bool space, space_known;  // puts a space in front; only where it has add_prefix_space, which transformers overrides
};

// Throws Error naming the key for a setting in a model's tokenizer_config.json that would change the tokens.
// Does nothing if there is no such file.
void check_tokenizer_settings(const ModelFiles& model, const TextStart& start);

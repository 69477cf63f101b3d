// The tokens that the files beside a tokenizer.json declare, as transformers 5 reads them.
//
// tokenizer_config.json: bos_token and the other names of roles, further keys that end in _token, extra_special_tokens
// (a list, or an object of names), else additional_special_tokens, and added_tokens_decoder. Without
// added_tokens_decoder also special_tokens_map.json, whose keys win, and added_tokens.json. Tokens that tokenizer.json
// lacks get the ids behind it, in this order: those with ids by their ids, those with names, the rest.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/files/model_files.h"

struct DeclaredTokens {
    struct Token {
        nlohmann::json fields;       // as in added_tokens of tokenizer.json, without an id
        std::string from;            // for errors: the file
        int64_t id = -1;             // as declared; −1: none is
        bool replaces = false;       // its fields replace those of a token that tokenizer.json has
        bool makes_special = false;  // such a token becomes special
        bool plain = false;          // given as text, without fields
    };
    std::vector<Token> tokens;                               // in the order in which they are added
    std::vector<std::pair<std::string, std::string>> named;  // ("eos_token", "</s>"): variables of chat templates

    // The token of a name such as eos_token; "" if none is declared.
    std::string find(const std::string& name) const;

    // added_tokens of a tokenizer.json (an array), completed. vocab: the ids of model.vocab. Throws Error, with the
    // token's name, where a declared id is not the one that the token has or gets.
    nlohmann::json complete(nlohmann::json added, const std::unordered_map<std::string, int32_t>& vocab,
                            const std::string& tokenizer_json) const;
};

// Empty if the model has none of the files. Throws Error if one is damaged.
DeclaredTokens read_declared_tokens(const ModelFiles& model);

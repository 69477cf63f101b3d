// tokenizer.json from the vocabularies that other formats carry.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

// The tokens in the vocabulary's notation, by id; no text: no token has the id.
using TokenTexts = std::vector<std::optional<std::string>>;

nlohmann::json added_token(int64_t id, const std::string& content, bool special = true, bool rstrip = false);

// The words that byte-level BPE cuts text into, by a name: gpt2; smollm (digits one by one, then as gpt2); llama3;
// olmo2 (as llama3, but the merges decide, not the vocabulary); qwen2 (with NFC); tekken; llamacpp-default. The result
// has the keys normalizer, pre_tokenizer and ignore_merges. Throws Error for another name.
nlohmann::json words_of(const std::string& name);

struct StartToken {
    int64_t id = -1;  // -1: no token goes in front of a text
    std::string content;
};

// merges: pairs [left, right] in the order of their ranks.
nlohmann::json byte_level_tokenizer(const TokenTexts& tokens, nlohmann::json merges, const nlohmann::json& added,
                                    const std::string& words, const StartToken& start);

// A pair merges where its text is a token, the best score first; of one token's pairs the one with the longer left part
// first. unknown: "" if there is no unknown token. space_in_front: of a text, and of text behind a special token.
nlohmann::json sentencepiece_tokenizer(const TokenTexts& tokens, const std::vector<float>& scores,
                                       const nlohmann::json& added, const std::string& unknown, bool space_in_front,
                                       const StartToken& start);

// The merges of such a tokenizer. added: tokens that no merge makes.
nlohmann::json merges_by_score(const TokenTexts& tokens, const std::vector<float>& scores, const nlohmann::json& added);

// Byte-level BPE: text <-> tokens, read from a Hugging Face tokenizer.json.
//
// Sennrich et al. 2016 (BPE); Radford et al. 2019, section 2.2 (bytes as the base alphabet). A byte-level tokenizer is
// the same thing without merges. Ids equal those of the `tokenizers` package (add_special_tokens=False) for valid
// UTF-8; bytes that are not UTF-8 are words of their own. Supported: model BPE; no normalizer; pre-tokenizers
// ByteLevel, and Sequence of Split (isolated) and Digits, then ByteLevel (GPT-2, LLaMA-3). Errors: a file that is
// missing, broken or of a kind not supported (named), an id outside the vocabulary.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

class Tokenizer {
  public:
    explicit Tokenizer(const std::string& tokenizer_json);
    ~Tokenizer();
    Tokenizer(Tokenizer&&) noexcept;

    // Special tokens written out in the text ("<|endoftext|>") become their ids only if allow_special.
    // May be called from several threads at once.
    std::vector<int32_t> encode(std::string_view text, bool allow_special = false) const;
    // Exact inverse of encode for any bytes (but for the space that a tokenizer with add_prefix_space puts in front).
    // Special tokens are written out.
    std::string decode(const std::vector<int32_t>& tokens) const;
    std::string decode(int32_t token) const;  // the token's own bytes (may be part of a UTF-8 character)
    bool contains(int32_t token) const;       // a model's vocabulary may be larger, and ids may have gaps

    int64_t vocab_size() const;   // largest id + 1
    int32_t end_of_text() const;  // id of <|endoftext|>, else of </s> or <|end_of_text|>; -1 if there is none

  private:
    struct Impl;
    std::unique_ptr<Impl> impl;
};

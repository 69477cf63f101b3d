// BPE tokenizers: text <-> tokens, read from a Hugging Face tokenizer.json.
//
// Two kinds. Byte-level (GPT-2, LLaMA-3, SmolLM): regular expressions cut the text into words, whose bytes are merged
// (Sennrich et al. 2016; Radford et al. 2019, section 2.2); a tokenizer of bytes is the same thing without merges.
// SentencePiece's BPE (LLaMA-2, Mistral; Kudo, Richardson 2018): spaces become U+2581, one more comes in front, and
// characters are merged; a character outside of the vocabulary becomes one token a byte (byte fallback).
//
// Ids equal those of the `tokenizers` package (add_special_tokens=False) for valid UTF-8; bytes that are not UTF-8 are
// words of their own, or fallback bytes. Supported: model BPE; normalizers Prepend and Replace with U+2581;
// pre-tokenizers ByteLevel, Sequence of Split (isolated) and Digits then ByteLevel, Metaspace. Errors: a file that is
// missing, broken or of a kind not supported (named), an id outside the vocabulary.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/utf8.h"

class Tokenizer {
  public:
    explicit Tokenizer(const std::string& tokenizer_json);
    ~Tokenizer();
    Tokenizer(Tokenizer&&) noexcept;

    // Special tokens written out in the text ("<|endoftext|>") become their ids only if allow_special.
    // May be called from several threads at once.
    std::vector<int32_t> encode(std::string_view text, bool allow_special = false) const;
    // Exact inverse of encode for any bytes, but for what the file itself demands: add_prefix_space and Metaspace put a
    // space in front only where there is none, and SentencePiece doesn't tell U+2581 from a space. Special tokens are
    // written out.
    std::string decode(const std::vector<int32_t>& tokens) const;
    std::string decode(int32_t token) const;  // the token's own bytes (may be part of a UTF-8 character)
    bool contains(int32_t token) const;       // a model's vocabulary may be larger, and ids may have gaps
    // Whether the first token's leading space is the tokenizer's and no part of the text (SentencePiece).
    bool strips_first_space() const;

    int64_t vocab_size() const;   // largest id + 1
    int32_t end_of_text() const;  // id of <|endoftext|>, else of </s> or <|end_of_text|>; -1 if there is none
    // What a model expects in front of a text, by the file's post_processor: LLaMA's <s>, nothing for GPT-2.
    const std::vector<int32_t>& start_of_text() const;

  private:
    struct Impl;
    std::unique_ptr<Impl> impl;
};

// Decodes tokens as they come, each character whole. All that it returns is, joined, what decode gives for all tokens.
class TextStream {
  public:
    // at_start: the first token begins a text (and does not go on from a prompt). The tokenizer must outlive this.
    explicit TextStream(const Tokenizer& t, bool at_start = false)
        : tokenizer(t), strip(at_start && t.strips_first_space()) {}
    std::string put(int32_t token);  // "" for ids beyond the tokenizer's: a model's vocabulary may be padded
    std::string finish();            // what is left of a text that ends inside a character

  private:
    const Tokenizer& tokenizer;
    bool strip;
    Utf8Stream characters;
};

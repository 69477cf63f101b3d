// BPE tokenizers: text <-> tokens, read from a Hugging Face tokenizer.json.
//
// Two algorithms. Byte-level BPE (GPT-2, LLaMA-3, Qwen, Mistral's Tekken): regular expressions split the text into
// words, whose bytes are merged (Sennrich et al. 2016; Radford et al. 2019, section 2.2); a byte tokenizer has no
// merges. SentencePiece BPE (LLaMA-2, Mistral; Kudo, Richardson 2018): spaces become U+2581, a U+2581 is prepended to
// the text, and characters are merged; a character outside the vocabulary becomes one token per byte (byte fallback).
//
// Ids equal those of the `tokenizers` package (add_special_tokens=False) for valid UTF-8; invalid bytes become
// separate words, or fallback bytes. As in that package, bytes that the vocabulary lacks are left out, or characters
// become the unknown token; lost_bytes() counts them. Supported: model BPE; normalizers NFC (byte-level), Prepend and
// Replace with U+2581 (SentencePiece); pre-tokenizers ByteLevel, Sequence of Split (Isolated, or Removed and inverted
// with an expression that matches all text) and Digits then ByteLevel, Metaspace; added tokens with all their rules
// (data/added_tokens.h); post-processors TemplateProcessing and ByteLevel. Errors: a file that is missing or damaged, a
// feature that is not supported (the message names it), an id outside the vocabulary, text that a Split removes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/utf8.h"
#include "runtime/files/model_files.h"

class Tokenizer {
  public:
    // Of a file named tokenizer.json the tokens that files beside it declare (data/declared_tokens.h) are added.
    // shown_as: the name in errors if the file is temporary.
    explicit Tokenizer(const std::string& tokenizer_json, const std::string& shown_as = "");
    // The tokenizer of a model, with the tokens that its other files declare.
    explicit Tokenizer(const ModelFiles& model);
    static bool exists(const ModelFiles& model);
    ~Tokenizer();
    // Whether a model's tokenizer and another tokenizer.json, with what is declared beside them, are the same.
    static bool same(const ModelFiles& model, const std::string& other);
    // Whether each id stands for the same bytes and is as special as in another tokenizer.
    bool has_tokens_of(const Tokenizer& other) const;
    Tokenizer(Tokenizer&&) noexcept;

    // Special tokens written out in the text ("<|endoftext|>") become their ids only if allow_special.
    // May be called from several threads at once.
    std::vector<int32_t> encode(std::string_view text, bool allow_special = false) const;
    // The same, for text of different origins: a special token becomes its id only where all of its bytes are marked.
    // Apart from special tokens the marks have no effect. Throws Error unless there is one mark for each byte.
    std::vector<int32_t> encode_marked(std::string_view text, std::vector<bool> may_be_special) const;
    // The tokens of several texts, one after the other, special tokens as text. It is faster than encode() for each of
    // many short texts: they share what one call remembers of words.
    struct Batch {
        std::vector<int32_t> tokens;
        std::vector<size_t> ends;   // text i has the tokens up to ends[i]
        std::vector<int64_t> lost;  // lost_bytes() of each text
    };
    Batch encode_batch(const std::vector<std::string_view>& texts) const;
    // Whether the token is one of tokenizer.json's special tokens.
    bool is_special(int32_t token) const;
    // The first special token that is written out in the text; "" if there is none.
    std::string find_special(std::string_view text) const;
    // The bytes of text that encode() leaves out or replaces by the unknown token, because the vocabulary lacks them.
    int64_t lost_bytes(std::string_view text) const;
    // The exact inverse of encode for any bytes that are not lost, with exceptions that the file prescribes:
    // add_prefix_space and Metaspace prepend a space only if there is none, SentencePiece reads U+2581 as a space, NFC
    // changes text, added tokens take white space (lstrip, rstrip), and byte-level decoding reads an added token of the
    // byte alphabet as its bytes (DeepSeek's "\u00f5" is byte F5).
    // Special tokens are written out.
    std::string decode(const std::vector<int32_t>& tokens) const;
    std::string decode(int32_t token) const;  // the token's own bytes, which may be part of a UTF-8 character
    bool contains(int32_t token) const;       // ids may have gaps; false for the padding of a model's vocabulary
    // Whether the tokenizer added the first token's leading space, so that it is not part of the text (SentencePiece).
    bool strips_first_space() const;

    int64_t vocab_size() const;  // largest id + 1
    // The declared eos_token. If none is declared, <|endoftext|>, else </s> or <|end_of_text|>; -1 if there is none.
    int32_t end_of_text() const;
    // The tokens that start every text, from the file's post_processor: <s> for LLaMA, none for GPT-2.
    const std::vector<int32_t>& start_of_text() const;

  private:
    struct Impl;
    std::unique_ptr<Impl> impl;
};

// Decodes tokens one at a time and returns whole characters. The joined results equal decode() of all tokens.
class TextStream {
  public:
    // at_start: the first token starts a text, that is, it does not continue a prompt. The tokenizer must outlive this.
    explicit TextStream(const Tokenizer& t, bool at_start = false)
        : tokenizer(t), strip(at_start && t.strips_first_space()) {}
    std::string put(int32_t token);  // "" for ids outside the vocabulary: a model may have more
    std::string finish();            // the bytes of an incomplete last character

  private:
    const Tokenizer& tokenizer;
    bool strip;
    Utf8Stream characters;
};

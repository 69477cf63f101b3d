// Token files: llm.c's format. int32[256] header, then uint16 or uint32 tokens, all little-endian.
//   header[0], [1] = 20240520, 1 (uint16 tokens) or 20240801, 7 (uint32 tokens); header[2] = low 32 bits of the number
//   of tokens, header[3] = its high 32 bits (0 in llm.c's own files).
// Shards matched by a glob are one sequence of tokens in the order of their names. They stay open and are read in
// parts. A file x.mask may accompany x.bin: int32[256] header (20261121, version, low and high 32 bits of the number of
// tokens), then one byte of flags per token: 1 if it is a loss token (else it is only an input, as a prompt is), 2 if
// it is the first token of an example, 4 too if that is the rejected response of a preference pair with its prompt,
// which follows the chosen one with the prompt. Only files of version 3 have flag 4, and they hold nothing but pairs;
// files of version 1 have no flag 2 either. Without a mask all are loss tokens. Errors, each with the name of the file:
// no match, wrong magic or version, a length that differs from the header, an empty shard, shards of different formats,
// examples or pairs in some shards only, a shard that is not a regular file or is truncated meanwhile.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "runtime/files/files.h"

class TokenFiles {
  public:
    explicit TokenFiles(const std::string& pattern);
    int64_t size() const { return total; }
    // dst[i] = token begin + i for i < count. Throws Error with file and offset for a token ≥ vocab_size (if > 0).
    void read(int64_t begin, int64_t count, int32_t* dst, int64_t vocab_size) const;
    bool masked() const { return any_mask; }
    // dst[i] = 1 if token begin + i is a loss token, else 0.
    void read_mask(int64_t begin, int64_t count, uint8_t* dst) const;
    // Whether the masks say where examples start.
    bool has_examples() const { return mask_version >= 2; }
    // Whether the examples are preference pairs. data/packing.h checks their order.
    bool has_pairs() const { return mask_version >= 3; }
    // dst[i] = the flags of token begin + i.
    static constexpr uint8_t LOSS = 1, EXAMPLE_START = 2, REJECTED = 4;
    void read_flags(int64_t begin, int64_t count, uint8_t* dst) const;
    const std::string& pattern() const { return name; }
    // The file with the flags of a token; for masked files.
    const std::string& mask_path(int64_t token) const { return shard_of(token)->mask->path(); }
    std::vector<std::string> paths() const;

  private:
    struct Shard {
        FileReader file;
        int64_t begin, count;  // tokens
        int width;             // bytes per token
        std::optional<FileReader> mask;
    };
    const Shard* shard_of(int64_t token) const;
    void check_range(int64_t begin, int64_t count) const;

    std::string name;
    std::vector<Shard> shards;
    int64_t total = 0;
    bool any_mask = false;
    uint32_t mask_version = 1;  // of all shards; 1 also if one has no mask
};

// A data directory as `make data` writes it: train_*.bin, val_*.bin, tokenizer.json and meta.json (docs/use/data.md).
struct DataDirectory {
    std::string path;
    int64_t vocab_size = 0;                          // of tokenizer.json, else of meta.json; 0: neither is there
    int32_t end_of_text = -1;                        // -1: unknown
    int32_t end_of_turn = -1;                        // the special token after an assistant turn; -1: none, or unknown
    bool chat_template = false;                      // whether the tokenizer's chat template wrote the conversations
    int64_t train_bytes = 0, val_bytes = 0;          // bytes of text of each split; 0: unknown
    int64_t train_documents = 0, val_documents = 0;  // 0: unknown
    int64_t train_tokens = -1, val_tokens = -1;      // of meta.json; -1: unknown
    std::string tokenizer_path() const;              // "" if there is none
    std::string train_pattern() const;               // globs for TokenFiles
    std::string val_pattern() const;
};
// Whether a directory holds train_*.bin or val_*.bin.
bool holds_tokens(const std::string& directory);
// Throws Error if path is not a data directory. meta.json is optional: llm.c's data sets have none.
DataDirectory open_data(const std::string& path);

// A split's token files. Throws Error if their number of tokens is not that of meta.json.
TokenFiles open_split(const DataDirectory& data, bool train_split);

// Bytes of text of a split: from meta.json, else by decoding the tokens. 0 if unknown.
int64_t text_bytes(const DataDirectory& data, const TokenFiles& files, bool train_split);

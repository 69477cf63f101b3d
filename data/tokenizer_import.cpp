#include "data/tokenizer_import.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <vector>

#include "data/bpe.h"
#include "data/token_text.h"
#include "data/tokenizer_json.h"
#include "data/utf8.h"
#include "runtime/error.h"
#include "runtime/files/files.h"

using nlohmann::json;

namespace {

constexpr int32_t LLMC_MAGIC = 20240328;
constexpr const char* END_OF_TEXT = "<|endoftext|>";

// A file read front to back.
class Reader {
  public:
    explicit Reader(const std::string& file) : path(file), content(read_file(file, int64_t(1) << 28)) {}

    template <typename T>
    T read(const char* what) {
        T value;
        std::memcpy(&value, bytes(sizeof(T), what).data(), sizeof(T));
        return value;
    }
    std::string_view bytes(size_t n, const char* what) {
        require(n <= content.size() - at, path, ": ends inside ", what, " (", n, " bytes at offset ", at,
                "); the file is truncated or not a tokenizer");
        at += n;
        return std::string_view(content).substr(at - n, n);
    }
    bool done() const { return at == content.size(); }

    const std::string path;
    const std::string content;

  private:
    size_t at = 0;
};

// The tokens in the vocabulary's notation, by id, and their ids.
struct Vocabulary {
    std::vector<std::string> tokens;
    std::unordered_map<std::string, int32_t> ids;

    void add(const Reader& file, const std::string& token) {
        const auto [entry, is_new] = ids.try_emplace(token, int32_t(tokens.size()));
        require(is_new, file.path, ": token ", tokens.size(), " is the same as token ", entry->second,
                "; the file is damaged");
        tokens.push_back(token);
    }
    TokenTexts texts() const { return {tokens.begin(), tokens.end()}; }
};

// llm.c's gpt2_tokenizer.bin.
json import_llmc(Reader& file) {
    int32_t header[256];
    std::memcpy(header, file.bytes(sizeof header, "the header").data(), sizeof header);
    const int32_t version = header[1], count = header[2], end_of_text = version == 1 ? 50256 : header[3];
    require(version == 1 || version == 2, file.path, ": tokenizer version ", version,
            " is not supported; use version 1 or 2");
    require(count > 256 && count < (1 << 22), file.path, ": ", count, " tokens; the file is damaged");
    require(0 <= end_of_text && end_of_text < count, file.path, ": end-of-text is token ", end_of_text, " of ", count,
            "; the file is damaged");

    const ByteAlphabet alphabet;
    Vocabulary vocabulary;
    int32_t byte_id[256];
    std::fill(std::begin(byte_id), std::end(byte_id), -1);
    std::vector<std::string> texts;
    for (int32_t id = 0; id < count; id++) {
        texts.emplace_back(file.bytes(file.read<uint8_t>("a token's length"), "a token"));
        require(!texts.back().empty(), file.path, ": token ", id, " is empty; the file is damaged");
        vocabulary.add(file, id == end_of_text ? END_OF_TEXT : alphabet.token(texts.back()));
        if (texts.back().size() == 1) byte_id[uint8_t(texts.back()[0])] = id;
    }
    require(file.done(), file.path, ": has data after its ", count, " tokens; the file is damaged");

    json merges = json::array();
    MergeTable table;
    std::vector<int32_t> parts;
    std::vector<Merge> scratch;
    for (int32_t id = 0; id < count; id++) {
        const std::string& text = texts[size_t(id)];
        if (id == end_of_text || text.size() == 1) continue;
        parts.clear();
        for (const char c : text) {
            parts.push_back(byte_id[uint8_t(c)]);
            require(parts.back() >= 0, file.path, ": there is no token for byte ", int(uint8_t(c)), " of token ", id,
                    "; the file is damaged");
        }
        merge_word(parts, scratch, table);
        require(parts.size() == 2, file.path, ": token ", id,
                " is not a merge of two earlier tokens; ids must be in the order of merges");
        table.add({parts[0], parts[1]}, {uint32_t(id), id});
        merges.push_back({vocabulary.tokens[size_t(parts[0])], vocabulary.tokens[size_t(parts[1])]});
    }
    return byte_level_tokenizer(vocabulary.texts(), std::move(merges),
                                json::array({added_token(end_of_text, END_OF_TEXT)}), "gpt2", {});
}

// Converts a token from llama2.c's notation to SentencePiece's.
std::string piece_of(std::string_view text) {
    if (text == "\n<s>\n" || text == "\n</s>\n") return std::string(text.substr(1, text.size() - 2));
    return replace_all(text, " ", SPACE_MARK);
}

// llama2.c's tokenizer.bin.
json import_llama2c(Reader& file) {
    constexpr int32_t LONGEST = 512;  // bytes; LLaMA's longest token has 27
    const int32_t longest = file.read<int32_t>("the longest token's length");
    require(longest > 0 && longest <= LONGEST, file.path,
            ": neither a tokenizer.json nor a tokenizer.bin of llama2.c or llm.c");
    Vocabulary vocabulary;
    std::vector<float> scores;
    while (!file.done()) {
        scores.push_back(file.read<float>("a token's score"));
        const int32_t length = file.read<int32_t>("a token's length");
        require(std::isfinite(scores.back()) && length > 0 && length <= longest, file.path, ": token ",
                vocabulary.tokens.size(), " has ", length, " bytes (at most ", longest, ") and a score of ",
                scores.back(), "; the file is damaged");
        const std::string piece = piece_of(file.bytes(size_t(length), "a token"));
        for (size_t i = 0, n; i < piece.size(); i += n) {
            n = utf8_length(piece, i);
            require(n > 0, file.path, ": token ", vocabulary.tokens.size(), " is not UTF-8; the file is damaged");
        }
        vocabulary.add(file, piece);
    }
    require(!vocabulary.tokens.empty(), file.path, ": holds no tokens");

    json added = json::array();
    const auto id_of = [&](const std::string& token) {
        const auto found = vocabulary.ids.find(token);
        return found == vocabulary.ids.end() ? -1 : found->second;
    };
    for (const char* token : {"<unk>", "<s>", "</s>"})
        if (id_of(token) >= 0) added.push_back(added_token(id_of(token), token));
    const std::string unknown = id_of("<unk>") >= 0 ? "<unk>" : "";
    return sentencepiece_tokenizer(vocabulary.texts(), scores, added, unknown, true, {id_of("<s>"), "<s>"});
}

bool has_llmc_magic(std::string_view content) {
    int32_t magic = 0;
    if (content.size() >= sizeof magic) std::memcpy(&magic, content.data(), sizeof magic);
    return magic == LLMC_MAGIC;
}

}  // namespace

std::string import_tokenizer(const std::string& path) {
    Reader file(path);
    const size_t first = file.content.find_first_not_of(" \t\r\n");
    if (first != std::string::npos && file.content[first] == '{') return file.content;
    return (has_llmc_magic(file.content) ? import_llmc(file) : import_llama2c(file)).dump(1) + "\n";
}

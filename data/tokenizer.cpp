#include "data/tokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <deque>
#include <limits>
#include <nlohmann/json.hpp>
#include <queue>
#include <unordered_map>
#include <utility>

#include "runtime/error.h"
#include "runtime/files.h"

namespace {

using nlohmann::json;

// Ids index tables in memory; no vocabulary in use is near this.
constexpr int64_t MAX_VOCAB = 1 << 22;

// How GPT-2 cuts text into words before merging (Radford et al. 2019; the published regular expression).
constexpr const char* GPT2_WORDS = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// ---------------------------------------------------------------------------------------------------------------------
// UTF-8 and GPT-2's byte alphabet

// Bytes of the well-formed UTF-8 character at text[i], 0 if there is none (Unicode 15, table 3-7: no overlong forms, no
// surrogates, nothing above U+10FFFF).
size_t utf8_length(std::string_view text, size_t i) {
    const auto at = [&](size_t k) -> unsigned { return i + k < text.size() ? uint8_t(text[i + k]) : 0; };
    const auto tail = [&](size_t k) { return (at(k) & 0xC0) == 0x80; };
    const unsigned a = at(0), b = at(1);
    if (a < 0x80) return 1;
    if (a >= 0xC2 && a <= 0xDF) return tail(1) ? 2 : 0;
    if (a >= 0xE0 && a <= 0xEF) {
        const bool second = tail(1) && (a != 0xE0 || b >= 0xA0) && (a != 0xED || b < 0xA0);
        return second && tail(2) ? 3 : 0;
    }
    if (a >= 0xF0 && a <= 0xF4) {
        const bool second = tail(1) && (a != 0xF0 || b >= 0x90) && (a != 0xF4 || b < 0x90);
        return second && tail(2) && tail(3) ? 4 : 0;
    }
    return 0;
}

// tokenizer.json writes bytes as printable characters: those that are printable in Latin-1 as themselves, the others in
// ascending order as U+0100, U+0101 …
class ByteAlphabet {
  public:
    ByteAlphabet() {
        byte_of.fill(-1);
        int other = 256;
        for (int byte = 0; byte < 256; byte++) {
            const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
            byte_of[size_t(printable ? byte : other++)] = int16_t(byte);
        }
    }

    // The bytes that a token stands for; false if it has a character outside of the alphabet.
    bool bytes(const std::string& token, std::string& out) const {
        out.clear();
        for (size_t i = 0; i < token.size();) {
            const size_t n = utf8_length(token, i);
            const unsigned a = uint8_t(token[i]);
            // The alphabet ends at U+0143: one or two bytes of UTF-8.
            const unsigned code = n == 1 ? a : n == 2 ? (a & 0x1F) << 6 | (uint8_t(token[i + 1]) & 0x3F) : 0xFFFF;
            if (code >= byte_of.size() || byte_of[code] < 0) return false;
            out += char(byte_of[code]);
            i += n;
        }
        return true;
    }

  private:
    std::array<int16_t, 256 + 68> byte_of;  // by code point; 68 bytes are not printable
};

// ---------------------------------------------------------------------------------------------------------------------
// Cutting text into words

// tokenizer.json's regular expressions are Oniguruma's. PCRE2's \s differs from Unicode's White_Space (and Oniguruma's)
// in one character, U+180E: spell the class out. Everything else in the expressions in use means the same to both.
std::string spell_out_white_space(const std::string& pattern) {
    const std::string white = R"(\t-\r\x{85}\p{Z})";
    std::string out;
    bool in_class = false;
    for (size_t i = 0; i < pattern.size(); i++) {
        if (pattern[i] != '\\' || i + 1 == pattern.size()) {
            if (pattern[i] == '[') in_class = true;
            if (pattern[i] == ']') in_class = false;
            out += pattern[i];
            continue;
        }
        const char escaped = pattern[++i];
        if (escaped == 's')
            out += in_class ? white : "[" + white + "]";
        else if (escaped == 'S' && !in_class)
            out += "[^" + white + "]";
        else
            (out += '\\') += escaped;
    }
    return out;
}

struct CodeFree {
    void operator()(pcre2_code* code) const { pcre2_code_free(code); }
};
struct MatchDataFree {
    void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};
using MatchData = std::unique_ptr<pcre2_match_data, MatchDataFree>;

std::string pcre2_message(int code) {
    PCRE2_UCHAR text[256] = {};
    pcre2_get_error_message(code, text, sizeof text);
    return reinterpret_cast<const char*>(text);
}

// A compiled regular expression that cuts text into its matches and what lies between them.
class Splitter {
  public:
    Splitter(const std::string& pattern, bool literal, const std::string& file) {
        const std::string source = literal ? pattern : spell_out_white_space(pattern);
        int error = 0;
        PCRE2_SIZE offset = 0;
        const uint32_t options = PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP);
        code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(source.data()), source.size(), options, &error, &offset,
                                 nullptr));
        require(code != nullptr, file, ": pre_tokenizer: the regular expression '", pattern, "' is not supported (",
                error ? pcre2_message(error) : "out of memory", ")");
        pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);  // where that can't be had, matching is only slower
    }

    // text is valid UTF-8. Calls piece(string_view) for consecutive parts that make up the text; none is empty.
    template <typename Piece>
    void split(std::string_view text, pcre2_match_data* match, const Piece& piece) const {
        const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
        size_t done = 0, from = 0;
        while (from < text.size()) {
            int found = pcre2_match(code.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK, match, nullptr);
            if (found == PCRE2_ERROR_JIT_STACKLIMIT)  // the interpreter has more room
                found = pcre2_match(code.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, match,
                                    nullptr);
            if (found == PCRE2_ERROR_NOMATCH) break;
            require(found >= 0, "tokenizer: cutting text into words failed: ", pcre2_message(found));
            const PCRE2_SIZE* const range = pcre2_get_ovector_pointer(match);
            if (range[0] >= range[1]) {  // an empty match cuts nothing; go on behind the next character
                from = std::max<size_t>(from, range[0]);
                from += from < text.size() ? utf8_length(text, from) : 1;
                continue;
            }
            if (range[0] > done) piece(text.substr(done, range[0] - done));
            piece(text.substr(range[0], range[1] - range[0]));
            done = from = range[1];
        }
        if (done < text.size()) piece(text.substr(done));
    }

    MatchData match_data() const {
        MatchData data(pcre2_match_data_create_from_pattern(code.get(), nullptr));
        require(data != nullptr, "tokenizer: out of memory");
        return data;
    }

  private:
    std::unique_ptr<pcre2_code, CodeFree> code;
};

// ---------------------------------------------------------------------------------------------------------------------
// Merging

// The merge of a pair of tokens: which comes first (the lower rank) and the token it makes.
struct Merge {
    uint32_t rank;
    int32_t token;
};

// Pairs of ids -> Merge. A hash table with open addressing: the look-up is the inner loop of encode.
class MergeTable {
  public:
    void build(const std::vector<std::pair<std::pair<int32_t, int32_t>, Merge>>& merges) {
        size_t size = 16;
        while (size < 2 * merges.size()) size *= 2;
        slots.assign(size, {EMPTY, {}});
        for (const auto& [ids, merge] : merges) {
            Slot& slot = slots[find_slot(key(ids.first, ids.second))];
            slot = {key(ids.first, ids.second), merge};  // a pair that is listed twice has its later rank
        }
        count = merges.size();
    }

    bool empty() const { return count == 0; }

    const Merge* find(int32_t left, int32_t right) const {
        const Slot& slot = slots[find_slot(key(left, right))];
        return slot.key == EMPTY ? nullptr : &slot.merge;
    }

  private:
    static constexpr uint64_t EMPTY = ~uint64_t(0);  // ids are not negative, so no pair has this key
    struct Slot {
        uint64_t key;
        Merge merge;
    };

    static uint64_t key(int32_t left, int32_t right) { return uint64_t(uint32_t(left)) << 32 | uint32_t(right); }

    size_t find_slot(uint64_t k) const {
        const size_t mask = slots.size() - 1;
        uint64_t h = k * 0x9E3779B97F4A7C15ull;  // 2^64/φ spreads neighbouring keys
        h ^= h >> 32;
        size_t i = size_t(h) & mask;
        while (slots[i].key != EMPTY && slots[i].key != k) i = (i + 1) & mask;
        return i;
    }

    std::vector<Slot> slots;
    size_t count = 0;
};

// Merges the word ids in place: again and again the pair of the lowest rank, the leftmost of equals. For short words,
// which are nearly all, a scan for the lowest rank is faster than any queue.
void merge_short(std::vector<int32_t>& ids, std::vector<Merge>& merges, const MergeTable& table) {
    constexpr Merge NONE = {std::numeric_limits<uint32_t>::max(), -1};
    const auto look_up = [&](size_t i) {
        const Merge* merge = i + 1 < ids.size() ? table.find(ids[i], ids[i + 1]) : nullptr;
        return merge ? *merge : NONE;
    };
    merges.resize(ids.size());  // merges[i]: that of ids[i] and ids[i + 1]
    for (size_t i = 0; i < ids.size(); i++) merges[i] = look_up(i);
    for (;;) {
        size_t best = 0;
        for (size_t i = 1; i < ids.size(); i++)
            if (merges[i].rank < merges[best].rank) best = i;
        if (merges[best].rank == NONE.rank) return;
        ids[best] = merges[best].token;
        ids.erase(ids.begin() + int64_t(best) + 1);
        merges.erase(merges.begin() + int64_t(best) + 1);
        merges[best] = look_up(best);
        if (best > 0) merges[best - 1] = look_up(best - 1);
    }
}

// The same in O(n log n): a queue of candidate merges over a doubly linked list of symbols.
void merge_long(std::vector<int32_t>& ids, const MergeTable& table) {
    struct Symbol {
        int32_t id;  // −1 once it has been merged into its left neighbour
        int64_t previous, next;
    };
    const int64_t n = int64_t(ids.size());
    std::vector<Symbol> symbols(ids.size());
    for (int64_t i = 0; i < n; i++) symbols[size_t(i)] = {ids[size_t(i)], i - 1, i + 1};
    const auto candidate = [&](int64_t i) -> const Merge* {
        if (i < 0 || symbols[size_t(i)].id < 0 || symbols[size_t(i)].next >= n) return nullptr;
        return table.find(symbols[size_t(i)].id, symbols[size_t(symbols[size_t(i)].next)].id);
    };

    using Candidate = std::pair<uint32_t, int64_t>;  // rank, position of the left symbol
    std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
    const auto push = [&](int64_t i) {
        if (const Merge* merge = candidate(i)) queue.push({merge->rank, i});
    };
    for (int64_t i = 0; i < n; i++) push(i);
    while (!queue.empty()) {
        const auto [rank, i] = queue.top();
        queue.pop();
        const Merge* merge = candidate(i);
        if (!merge || merge->rank != rank) continue;  // a neighbour has been merged since it was queued
        Symbol& left = symbols[size_t(i)];
        Symbol& right = symbols[size_t(left.next)];
        left.id = merge->token;
        left.next = right.next;
        right.id = -1;
        if (left.next < n) symbols[size_t(left.next)].previous = i;
        push(i);
        push(left.previous);
    }
    ids.clear();
    for (int64_t i = 0; i < n; i = symbols[size_t(i)].next) ids.push_back(symbols[size_t(i)].id);
}

// ---------------------------------------------------------------------------------------------------------------------
// Tokens that are found in the text as they are written, before it is cut into words

class AddedTokens {
  public:
    void add(std::string content, int32_t id) {
        by_first_byte[uint8_t(content[0])].push_back({std::move(content), id});
    }

    void finish() {  // longest first
        for (auto& tokens : by_first_byte)
            std::stable_sort(tokens.begin(), tokens.end(),
                             [](const Token& a, const Token& b) { return a.content.size() > b.content.size(); });
    }

    // Calls plain(string_view) and token(id) for the parts of the text, in order: leftmost, then longest.
    template <typename Plain, typename Found>
    void split(std::string_view text, const Plain& plain, const Found& found) const {
        size_t done = 0;
        for (size_t i = 0; i < text.size();) {
            const auto& tokens = by_first_byte[uint8_t(text[i])];
            const auto token = std::find_if(tokens.begin(), tokens.end(), [&](const Token& t) {
                return text.compare(i, t.content.size(), t.content) == 0;
            });
            if (token == tokens.end()) {
                i++;
                continue;
            }
            if (i > done) plain(text.substr(done, i - done));
            found(token->id);
            done = i += token->content.size();
        }
        if (done < text.size()) plain(text.substr(done));
    }

  private:
    struct Token {
        std::string content;
        int32_t id;
    };
    std::array<std::vector<Token>, 256> by_first_byte;
};

// ---------------------------------------------------------------------------------------------------------------------
// Reading tokenizer.json

const char* type_of(const json& object) {
    const auto type = object.find("type");
    return type != object.end() && type->is_string() ? type->get_ref<const std::string&>().c_str() : "?";
}

bool given(const json& object, const char* key) {
    return object.contains(key) && !object[key].is_null();
}

bool flag(const json& object, const char* key, bool otherwise) {
    return given(object, key) ? object[key].get<bool>() : otherwise;
}

}  // namespace

struct Tokenizer::Impl {
    class Encoder;

    std::string file;
    std::vector<std::string> bytes;                        // by id
    std::vector<bool> known;                               // by id
    std::array<int32_t, 256> byte_id;                      // −1: not in the vocabulary
    std::unordered_map<std::string, int32_t> whole_words;  // filled if ignore_merges
    bool ignore_merges = false;
    MergeTable merges;
    std::vector<Splitter> splitters;  // applied one after the other
    bool add_prefix_space = false;
    // As the tokenizers package does it: first the tokens marked "normalized": false, then, in the rest, the others.
    // [0]: with special tokens, [1]: without.
    AddedTokens verbatim[2], normalized[2];
    int32_t end_of_text = -1;

    explicit Impl(const std::string& path) : file(path) {
        byte_id.fill(-1);
        const std::string text = read_file(path, int64_t(1) << 30);
        try {
            read(json::parse(text));
        } catch (const json::exception& e) {
            throw Error(str(path, ": not a valid tokenizer.json (", e.what(), ")"));
        }
    }

    template <typename... Parts>
    [[noreturn]] void unsupported(const Parts&... parts) const {
        throw Error(str(file, ": ", parts..., " is not supported; byte-level BPE as GPT-2's and LLaMA-3's is"));
    }

    void read(const json& root) {
        require(root.is_object() && given(root, "model") && root["model"].is_object(), file,
                ": not a tokenizer.json: it has no object 'model'");
        read_pre_tokenizer(root);
        const std::unordered_map<std::string, int32_t> ids = read_vocab(root["model"]);
        read_merges(root["model"], ids);
        read_added_tokens(root, ids);
    }

    void read_pre_tokenizer(const json& root) {
        if (given(root, "normalizer")) {
            const json& normalizer = root["normalizer"];
            if (type_of(normalizer) != std::string("Sequence") || !normalizer.at("normalizers").empty())
                unsupported("normalizer ", type_of(normalizer));
        }
        if (given(root, "decoder") && type_of(root["decoder"]) != std::string("ByteLevel"))
            unsupported("decoder ", type_of(root["decoder"]));
        if (!given(root, "pre_tokenizer")) unsupported("a tokenizer without a ByteLevel pre_tokenizer");

        const json& pre = root["pre_tokenizer"];
        const json steps = type_of(pre) == std::string("Sequence") ? pre.at("pretokenizers") : json::array({pre});
        bool byte_level = false;
        for (const json& step : steps) {
            const std::string type = type_of(step);
            if (byte_level) unsupported("pre_tokenizer ", type, " after ByteLevel");
            if (type == "ByteLevel") {
                byte_level = true;
                add_prefix_space = flag(step, "add_prefix_space", true);
                if (add_prefix_space && !splitters.empty()) unsupported("add_prefix_space after ", type_of(steps[0]));
                if (flag(step, "use_regex", true)) splitters.emplace_back(GPT2_WORDS, false, file);
            } else if (type == "Digits") {
                splitters.emplace_back(flag(step, "individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)", false, file);
            } else if (type == "Split") {
                const std::string behavior = step.at("behavior").get<std::string>();
                if (behavior != "Isolated" || flag(step, "invert", false))
                    unsupported("pre_tokenizer Split with behavior ", behavior,
                                flag(step, "invert", false) ? ", inverted" : "");
                const json& pattern = step.at("pattern");
                const bool literal = pattern.contains("String");
                splitters.emplace_back(pattern.at(literal ? "String" : "Regex").get<std::string>(), literal, file);
            } else {
                unsupported("pre_tokenizer ", type);
            }
        }
        if (!byte_level) unsupported("pre_tokenizer ", type_of(pre), " without ByteLevel");
    }

    void add_token(const std::string& token_bytes, int64_t id) {
        require(0 <= id && id < MAX_VOCAB, file, ": token id ", id, " is outside [0, ", MAX_VOCAB, ")");
        if (size_t(id) >= bytes.size()) {
            bytes.resize(size_t(id) + 1);
            known.resize(size_t(id) + 1);
        }
        require(!known[size_t(id)], file, ": two tokens have the id ", id);
        bytes[size_t(id)] = token_bytes;
        known[size_t(id)] = true;
    }

    std::unordered_map<std::string, int32_t> read_vocab(const json& model) {
        const std::string type = given(model, "type") ? type_of(model) : "BPE";  // the key came after the format
        if (type != "BPE") unsupported("model ", type);
        if (flag(model, "byte_fallback", false)) unsupported("model BPE with byte_fallback (SentencePiece)");
        for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
            if (given(model, key) && !model[key].get<std::string>().empty()) unsupported("model BPE with ", key);
        if (given(model, "dropout") && model["dropout"].get<double>() > 0) unsupported("model BPE with dropout");
        ignore_merges = flag(model, "ignore_merges", false);

        const json& vocab = model.at("vocab");
        require(vocab.is_object() && !vocab.empty(), file, ": model.vocab must be an object of tokens and ids");
        const ByteAlphabet alphabet;
        std::unordered_map<std::string, int32_t> ids;  // by the token as it is written
        ids.reserve(vocab.size());
        for (const auto& [token, id] : vocab.items()) {
            require(id.is_number_integer(), file, ": the id of token '", token, "' is not a whole number");
            std::string token_bytes;
            const bool is_bytes = alphabet.bytes(token, token_bytes);
            add_token(is_bytes ? token_bytes : token, id.get<int64_t>());
            const int32_t checked_id = ids[token] = id.get<int32_t>();
            if (!is_bytes) continue;  // no text is ever cut into it
            if (token_bytes.size() == 1) byte_id[uint8_t(token_bytes[0])] = checked_id;
            if (ignore_merges) whole_words[token_bytes] = checked_id;
        }
        return ids;
    }

    void read_merges(const json& model, const std::unordered_map<std::string, int32_t>& ids) {
        const json& list = model.at("merges");
        require(list.is_array(), file, ": model.merges must be a list");
        const auto id_of = [&](const std::string& token) {
            const auto found = ids.find(token);
            require(found != ids.end(), file, ": model.merges makes or uses '", token,
                    "', which is not in model.vocab");
            return found->second;
        };
        std::vector<std::pair<std::pair<int32_t, int32_t>, Merge>> all;
        all.reserve(list.size());
        for (const json& entry : list) {
            std::string left, right;
            if (entry.is_string()) {  // "a b", the older form
                const std::string& both = entry.get_ref<const std::string&>();
                const size_t space = both.find(' ');
                require(space != std::string::npos && both.find(' ', space + 1) == std::string::npos, file,
                        ": model.merges: '", both, "' is not a pair of tokens");
                left = both.substr(0, space), right = both.substr(space + 1);
            } else {  // ["a", "b"], which allows spaces in tokens
                require(entry.is_array() && entry.size() == 2, file, ": model.merges: entry ", all.size(),
                        " is not a pair of tokens");
                left = entry[0].get<std::string>(), right = entry[1].get<std::string>();
            }
            all.push_back({{id_of(left), id_of(right)}, {uint32_t(all.size()), id_of(left + right)}});
        }
        merges.build(all);
    }

    void read_added_tokens(const json& root, const std::unordered_map<std::string, int32_t>& ids) {
        std::unordered_map<std::string, int32_t> all_ids = ids;
        if (given(root, "added_tokens")) {
            for (const json& token : root["added_tokens"]) {
                const std::string content = token.at("content").get<std::string>();
                const int64_t id = token.at("id").get<int64_t>();
                require(!content.empty(), file, ": added_tokens: token ", id, " is empty");
                for (const char* key : {"single_word", "lstrip", "rstrip"})
                    if (flag(token, key, false)) unsupported("added token '", content, "' with ", key);
                const auto in_vocab = ids.find(content);
                require(in_vocab == ids.end() || in_vocab->second == id, file, ": token '", content, "' has the id ",
                        in_vocab == ids.end() ? -1 : in_vocab->second, " in model.vocab, ", id, " in added_tokens");
                if (in_vocab == ids.end())
                    add_token(content, id);
                else
                    bytes[size_t(id)] = content;  // written as it is, not in the byte alphabet
                all_ids[content] = int32_t(id);
                const bool special = flag(token, "special", false);
                AddedTokens* const sets = flag(token, "normalized", !special) ? normalized : verbatim;
                sets[0].add(content, int32_t(id));
                if (!special) sets[1].add(content, int32_t(id));
            }
        }
        for (AddedTokens* set : {&verbatim[0], &verbatim[1], &normalized[0], &normalized[1]}) set->finish();
        for (const char* name : {"<|endoftext|>", "</s>", "<|end_of_text|>"}) {
            const auto found = all_ids.find(name);
            if (end_of_text < 0 && found != all_ids.end()) end_of_text = found->second;
        }
    }
};

// One call of encode: the output, and what the words share.
class Tokenizer::Impl::Encoder {
  public:
    explicit Encoder(const Impl& owner) : tokenizer(owner) {
        for (const Splitter& splitter : tokenizer.splitters) match_data.push_back(splitter.match_data());
    }

    std::vector<int32_t> out;

    // A stretch of text without added tokens.
    void plain(std::string_view text) {
        if (tokenizer.add_prefix_space && text[0] != ' ') {
            prefixed.push_back(" " + std::string(text));
            text = prefixed.back();
        }
        if (tokenizer.splitters.empty()) return word(text);
        // The regular expressions see valid UTF-8 only. Bytes that aren't are words of their own, so that what decode
        // gives back is the text, whatever it holds.
        for (size_t i = 0; i < text.size();) {
            const size_t begin = i;
            for (size_t n; i < text.size() && (n = utf8_length(text, i)) > 0;) i += n;
            if (i > begin) words(text.substr(begin, i - begin), 0);
            const size_t invalid = i;
            while (i < text.size() && utf8_length(text, i) == 0) i++;
            if (i > invalid) word(text.substr(invalid, i - invalid));
        }
    }

  private:
    void words(std::string_view text, size_t step) {
        if (step == tokenizer.splitters.size()) return word(text);
        tokenizer.splitters[step].split(text, match_data[step].get(),
                                        [&](std::string_view piece) { words(piece, step + 1); });
    }

    void word(std::string_view text) {
        if (tokenizer.merges.empty() && !tokenizer.ignore_merges) {
            for (const char c : text) out.push_back(id_of(c));
            return;
        }
        const bool cached = text.size() <= 32;  // long words hardly come twice
        if (cached) {
            const auto [entry, is_new] = cache.try_emplace(text, out.size(), 0);
            auto& [begin, count] = entry->second;
            if (!is_new) {
                const size_t end = out.size();
                out.resize(end + count);
                std::copy_n(out.begin() + int64_t(begin), count, out.begin() + int64_t(end));
                return;
            }
            merge(text);
            count = out.size() - begin;
            if (cache.size() >= MAX_CACHE) cache.clear();
        } else {
            merge(text);
        }
    }

    void merge(std::string_view text) {
        if (tokenizer.ignore_merges) {
            const auto whole = tokenizer.whole_words.find(std::string(text));
            if (whole != tokenizer.whole_words.end()) return out.push_back(whole->second);
        }
        ids.clear();
        for (const char c : text) ids.push_back(id_of(c));
        if (ids.size() <= 64)
            merge_short(ids, merges, tokenizer.merges);
        else
            merge_long(ids, tokenizer.merges);
        out.insert(out.end(), ids.begin(), ids.end());
    }

    int32_t id_of(char c) const {
        const int32_t id = tokenizer.byte_id[uint8_t(c)];
        require(id >= 0, tokenizer.file, ": the vocabulary lacks byte ", int(uint8_t(c)),
                " of the text; a byte-level vocabulary must hold all 256");
        return id;
    }

    static constexpr size_t MAX_CACHE = 1 << 20;

    const Impl& tokenizer;
    std::vector<MatchData> match_data;
    std::deque<std::string> prefixed;  // texts with a space in front; the cache's keys may point into them
    // Word -> where its ids stand in out (begin, count). Keys are views of the text.
    std::unordered_map<std::string_view, std::pair<size_t, size_t>> cache;
    std::vector<int32_t> ids;
    std::vector<Merge> merges;
};

Tokenizer::Tokenizer(const std::string& tokenizer_json) : impl(std::make_unique<Impl>(tokenizer_json)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool allow_special) const {
    Impl::Encoder encoder(*impl);
    const auto found = [&](int32_t id) { encoder.out.push_back(id); };
    const int set = allow_special ? 0 : 1;
    impl->verbatim[set].split(
        text,
        [&](std::string_view rest) {
            impl->normalized[set].split(
                rest, [&](std::string_view plain) { encoder.plain(plain); }, found);
        },
        found);
    return std::move(encoder.out);
}

std::string Tokenizer::decode(const std::vector<int32_t>& tokens) const {
    std::string text;
    for (const int32_t token : tokens) text += decode(token);
    return text;
}

std::string Tokenizer::decode(int32_t token) const {
    require(contains(token), impl->file, ": token ", token, " is not in the vocabulary of ", vocab_size());
    return impl->bytes[size_t(token)];
}

bool Tokenizer::contains(int32_t token) const {
    return token >= 0 && size_t(token) < impl->known.size() && impl->known[size_t(token)];
}

int64_t Tokenizer::vocab_size() const {
    return int64_t(impl->bytes.size());
}
int32_t Tokenizer::end_of_text() const {
    return impl->end_of_text;
}

#include "data/tokenizer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_map>
#include <utility>

#include "data/added_tokens.h"
#include "data/bpe.h"
#include "data/declared_tokens.h"
#include "data/splitter.h"
#include "data/token_text.h"
#include "data/tokenizer_settings.h"
#include "data/unicode.h"
#include "runtime/error.h"
#include "runtime/files/files.h"
#include "runtime/files/json_keys.h"
#include "runtime/names.h"

namespace {

using nlohmann::json;

// The largest number of unused ids below the largest id: ids index tables in memory. Real vocabularies have few gaps.
constexpr int64_t MAX_GAPS = 100000;

constexpr const char* FILE_NAME = "tokenizer.json";  // of a model

// GPT-2's regular expression for splitting text into words before merging (Radford et al. 2019, as published).
constexpr const char* GPT2_WORDS = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

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

// The pairs of characters that some merge joins. SentencePiece text has no word boundaries, but it can be split between
// two characters that no merge joins: the parts merge separately, with the same result.
class Joints {
  public:
    void build(const std::vector<uint64_t>& keys) {
        size_t size = 16;
        while (size < 2 * keys.size()) size *= 2;
        buckets.assign(size, {});
        for (const uint64_t key : keys) buckets[find_bucket(buckets, key)].key = key;
    }
    bool has(int32_t left, int32_t right) const {
        if (left < 0 || right < 0) return false;
        const uint64_t key = pair_key(left, right);
        return buckets[find_bucket(buckets, key)].key == key;
    }

  private:
    struct Bucket {
        static constexpr uint64_t EMPTY = ~uint64_t(0);
        uint64_t key = EMPTY;
    };
    std::vector<Bucket> buckets;
};

}  // namespace

struct Tokenizer::Impl {
    class Encoder;
    class SpecialBytes;
    using Ids = std::unordered_map<std::string, int32_t>;  // by the token in the file's notation
    enum class InFront { Never, First, Always };           // Metaspace: where a space is prepended

    std::string file;
    const ByteAlphabet alphabet;
    std::vector<std::string> bytes;                        // by id
    std::vector<bool> known;                               // by id
    std::vector<bool> special_ids;                         // by id; false beyond the end
    int64_t id_end = 0;                                    // all ids are smaller
    std::array<int32_t, 256> byte_id;                      // −1: not in the vocabulary
    std::unordered_map<std::string, int32_t> whole_words;  // filled if ignore_merges
    bool ignore_merges = false;
    MergeTable merges;
    // As in the tokenizers package, the tokens with "normalized": false (verbatim) are matched first, in the original
    // text. The others (normalized) are matched in the rest, after normalization.
    AddedTokens verbatim, normalized;
    json added = json::array();  // added_tokens, with those that the files beside the tokenizer.json declare
    int32_t end_of_text = -1;
    std::vector<int32_t> start_of_text;

    int32_t unknown = -1;  // id of unk_token
    bool fuse_unknown = false;

    // Byte-level
    bool composes = false;            // normalizer: NFC
    std::vector<Splitter> splitters;  // applied in this order
    bool add_prefix_space = false;

    // SentencePiece
    bool sentencepiece = false;
    bool prepends = false, marks_spaces = false;  // normalizer: Prepend, Replace
    bool metaspace = false, metaspace_split = false;
    InFront in_front = InFront::Never;  // Metaspace
    bool strips_first_space = false;
    std::vector<int32_t> character_id;  // by code point; −1, or beyond the end: not in the vocabulary
    bool cuts = false;                  // split text between characters that are not in joints
    Joints joints;

    // beside: the model whose tokenizer.json the text is.
    Impl(const std::string& text, std::string shown_as, const ModelFiles& beside) : file(std::move(shown_as)) {
        byte_id.fill(-1);
        std::string fault;
        const json value = parse_json(text, fault);
        require(fault.empty(), file, ": not a valid tokenizer.json: ", fault, "; the file is damaged");
        try {
            read(value, read_declared_tokens(beside));
        } catch (const json::exception& e) {
            const std::string text_of_library = e.what(), what = text_of_library.substr(text_of_library.find("] ") + 2);
            throw Error(str(file, ": not a valid tokenizer.json: ", what));  // without its "[json.exception.…] "
        }
        check_tokenizer_settings(beside, {!start_of_text.empty(), add_prefix_space, !sentencepiece});
    }

    // The model that a tokenizer.json belongs to. A file of another name has nothing to do with the files beside it.
    static ModelFiles model_of(const std::string& path) {
        const size_t slash = path.rfind('/');
        if (path.substr(slash + 1) != FILE_NAME) return {};
        return slash == std::string::npos ? "." : path.substr(0, slash + 1);
    }

    template <typename... Parts>
    [[noreturn]] void unsupported(const Parts&... parts) const {
        throw Error(str(file, ": ", printable(str(parts...)),
                        " is not supported; use a tokenizer with byte-level BPE, as GPT-2, LLaMA-3 and Qwen have, or "
                        "with SentencePiece BPE, as LLaMA-2 has"));
    }

    void read(const json& root, const DeclaredTokens& declared) {
        require(root.is_object() && given(root, "model") && root["model"].is_object(), file,
                ": not a tokenizer.json: it has no object 'model'");
        read_normalizer(root);
        read_pre_tokenizer(root);
        const Ids ids = read_vocab(root["model"]);
        read_merges(root["model"], ids);
        read_added_tokens(root, declared, ids);
        read_post_processor(root);
    }

    // The steps of a normalizer, a pre-tokenizer, a post-processor or a decoder: a single one, or those that a Sequence
    // has under `list`, which may be Sequences too.
    static json steps_of(const json& root, const char* part, const char* list) {
        json steps = json::array();
        if (given(root, part)) add_steps(root[part], list, steps);
        return steps;
    }
    static void add_steps(const json& step, const char* list, json& steps) {
        if (type_of(step) != std::string("Sequence")) return steps.push_back(step);
        for (const json& one : step.at(list)) add_steps(one, list, steps);
    }

    static bool is_replace(const json& step, const std::string& from, const std::string& to) {
        return type_of(step) == std::string("Replace") && step.at("pattern").contains("String") &&
               step["pattern"]["String"] == from && step.at("content") == to;
    }

    void read_normalizer(const json& root) {
        for (const json& step : steps_of(root, "normalizer", "normalizers")) {
            if (type_of(step) == std::string("Prepend") && step.at("prepend") == SPACE_MARK && !prepends)
                prepends = true;
            else if (is_replace(step, " ", SPACE_MARK))
                marks_spaces = true;
            else if (type_of(step) == std::string("NFC"))
                composes = true;
            else
                unsupported("normalizer ", type_of(step));
        }
        const bool fallback = given(root["model"], "byte_fallback") && flag(root["model"], "byte_fallback", false);
        metaspace = given(root, "pre_tokenizer") && type_of(root["pre_tokenizer"]) == std::string("Metaspace");
        sentencepiece = prepends || marks_spaces || metaspace || fallback;
        if (sentencepiece && given(root, "pre_tokenizer") && !metaspace)
            unsupported("pre_tokenizer ", type_of(root["pre_tokenizer"]), " in a SentencePiece tokenizer");
        if (!sentencepiece) return;
        if (composes) unsupported("normalizer NFC in a SentencePiece tokenizer");

        const json decoder = steps_of(root, "decoder", "decoders");
        size_t i = 0;
        const auto next_is = [&](const char* type) {
            return i < decoder.size() && type_of(decoder[i]) == std::string(type);
        };
        const bool spaces = i < decoder.size() && is_replace(decoder[i], SPACE_MARK, " ");
        i += spaces;
        const bool bytes_fall_back = next_is("ByteFallback");
        i += bytes_fall_back;
        const bool fuses = next_is("Fuse");
        i += fuses;
        if (next_is("Strip") && decoder[i].at("content") == " " && decoder[i].at("start") == 1 &&
            decoder[i].at("stop") == 0) {
            strips_first_space = true;
            i++;
        }
        const std::string type = i < decoder.size() ? type_of(decoder[i]) : "";
        if (!spaces || !fuses || i < decoder.size() || bytes_fall_back != fallback)
            unsupported("SentencePiece with a decoder other than Replace, ByteFallback, Fuse, Strip",
                        type.empty() ? "" : " (" + type + ")");
    }

    void read_pre_tokenizer(const json& root) {
        if (sentencepiece) {
            if (metaspace) read_metaspace(root["pre_tokenizer"]);
            return;
        }
        if (given(root, "decoder") && type_of(root["decoder"]) != std::string("ByteLevel"))
            unsupported("decoder ", type_of(root["decoder"]));
        if (!given(root, "pre_tokenizer")) unsupported("a tokenizer without a ByteLevel pre_tokenizer");

        const json steps = steps_of(root, "pre_tokenizer", "pretokenizers");
        bool byte_level = false;
        for (const json& step : steps) {
            const std::string type = type_of(step);
            if (byte_level) unsupported("pre_tokenizer ", type, " after ByteLevel");
            if (type == "ByteLevel") {
                byte_level = true;
                add_prefix_space = flag(step, "add_prefix_space", true);
                if (add_prefix_space && !splitters.empty()) unsupported("add_prefix_space after ", type_of(steps[0]));
                if (flag(step, "use_regex", true))
                    splitters.emplace_back(GPT2_WORDS, false, Splitter::Between::Kept, file);
            } else if (type == "Digits") {
                splitters.emplace_back(flag(step, "individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)", false,
                                       Splitter::Between::Kept, file);
            } else if (type == "Split") {
                add_split(step);
            } else {
                unsupported("pre_tokenizer ", type);
            }
        }
        if (!byte_level) unsupported("pre_tokenizer ", type_of(root["pre_tokenizer"]), " without ByteLevel");
    }

    void add_split(const json& step) {
        const std::string behavior = step.at("behavior").get<std::string>();
        const bool invert = flag(step, "invert", false), refuses = behavior == "Removed" && invert;
        if (behavior != "Isolated" && !refuses)
            unsupported("pre_tokenizer Split with behavior ", behavior, invert ? ", inverted" : "");
        const json& pattern = step.at("pattern");
        const bool literal = pattern.contains("String");
        const std::string text = pattern.at(literal ? "String" : "Regex").get<std::string>();
        splitters.emplace_back(text, literal, refuses ? Splitter::Between::Refused : Splitter::Between::Kept, file);
        // A file that leaves out common text is refused at once, and not with the first text that has it.
        std::string ascii;
        for (char c = 1; c < 127; c++) ascii += c;
        const Splitter& splitter = splitters.back();
        SplitTime time(ascii.size());
        splitter.split(ascii, splitter.matcher(), time, [](std::string_view) {});
    }

    void read_metaspace(const json& step) {
        if (step.at("replacement") != SPACE_MARK) unsupported("Metaspace with another replacement than U+2581");
        if (prepends || marks_spaces) unsupported("Metaspace beside a normalizer");
        metaspace_split = flag(step, "split", true);
        const std::string otherwise = flag(step, "add_prefix_space", true) ? "always" : "never";  // the older key
        const std::string scheme =
            given(step, "prepend_scheme") ? step["prepend_scheme"].get<std::string>() : otherwise;
        const std::optional<InFront> found = find_enum<InFront>(Names<3>{"never", "first", "always"}, scheme);
        if (!found) unsupported("Metaspace with prepend_scheme ", scheme);
        in_front = *found;
    }

    void add_token(const std::string& token_bytes, int64_t id) {
        require(0 <= id && id < id_end, file, ": token id ", id, " is outside [0, ", id_end, "); at most ", MAX_GAPS,
                " ids may be unused");
        if (size_t(id) >= bytes.size()) {
            bytes.resize(size_t(id) + 1);
            known.resize(size_t(id) + 1);
        }
        require(!known[size_t(id)], file, ": two tokens have the id ", id);
        bytes[size_t(id)] = token_bytes;
        known[size_t(id)] = true;
    }

    Ids read_vocab(const json& model) {
        const std::string type = given(model, "type") ? type_of(model) : "BPE";  // older files lack the key
        if (type != "BPE") unsupported("model ", type);
        for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
            if (given(model, key) && !model[key].get<std::string>().empty()) unsupported("model BPE with ", key);
        if (given(model, "dropout") && model["dropout"].get<double>() > 0) unsupported("model BPE with dropout");
        ignore_merges = flag(model, "ignore_merges", false);

        const json& vocab = model.at("vocab");
        require(vocab.is_object() && !vocab.empty(), file, ": model.vocab must be an object that maps tokens to ids");
        id_end = int64_t(vocab.size()) + MAX_GAPS;
        Ids ids;
        ids.reserve(vocab.size());
        for (const auto& [token, id] : vocab.items()) {
            require(id.is_number_integer(), file, ": the id of token '", printable(token), "' is not a whole number");
            std::string token_bytes;
            const bool is_text = sentencepiece ? sentencepiece_bytes(model, token, id.get<int32_t>(), token_bytes)
                                               : alphabet.bytes(token, token_bytes);
            add_token(is_text ? token_bytes : token, id.get<int64_t>());
            const int32_t checked_id = ids[token] = id.get<int32_t>();
            if (!is_text) continue;  // no text is encoded as it
            if (!sentencepiece && token_bytes.size() == 1) byte_id[uint8_t(token_bytes[0])] = checked_id;
            if (ignore_merges) whole_words[sentencepiece ? token : token_bytes] = checked_id;
        }
        // Byte-level BPE has no use for the unknown token if there is a token for each byte.
        const bool needs_unknown = sentencepiece || std::count(byte_id.begin(), byte_id.end(), -1) > 0;
        if (needs_unknown && given(model, "unk_token")) {
            const auto found = ids.find(model["unk_token"].get<std::string>());
            require(found != ids.end(), file, ": model.unk_token is not in model.vocab");
            unknown = found->second;
            fuse_unknown = flag(model, "fuse_unk", false);
        }
        return ids;
    }

    // The bytes of a SentencePiece token. Records the ids of characters and fallback bytes.
    bool sentencepiece_bytes(const json& model, const std::string& token, int32_t id, std::string& out) {
        const int byte = flag(model, "byte_fallback", false) ? fallback_byte(token) : -1;
        if (byte >= 0) {
            byte_id[size_t(byte)] = id;
            out = char(byte);
            return true;
        }
        out = replace_all(token, SPACE_MARK, " ");
        if (token.empty() || utf8_length(token, 0) != token.size()) return !token.empty();
        const size_t code = utf8_code_point(token, 0, token.size());
        if (code >= character_id.size()) character_id.resize(code + 1, -1);
        character_id[code] = id;
        return true;
    }

    void read_merges(const json& model, const Ids& ids) {
        const json& list = model.at("merges");
        require(list.is_array(), file, ": model.merges must be a list");
        const auto id_of = [&](const std::string& token) {
            const auto found = ids.find(token);
            require(found != ids.end(), file, ": model.merges needs the token '", printable(token),
                    "', which is not in model.vocab");
            return found->second;
        };
        std::vector<std::pair<std::pair<int32_t, int32_t>, Merge>> all;
        all.reserve(list.size());
        std::vector<uint64_t> joined;
        cuts = sentencepiece && !ignore_merges && std::count(byte_id.begin(), byte_id.end(), -1) == 0;
        for (const json& entry : list) {
            std::string left, right;
            if (entry.is_string()) {  // "a b", the older form
                const std::string& both = entry.get_ref<const std::string&>();
                const size_t space = both.find(' ');
                require(space != std::string::npos && both.find(' ', space + 1) == std::string::npos, file,
                        ": model.merges: '", printable(both), "' is not a pair of tokens");
                left = both.substr(0, space);
                right = both.substr(space + 1);
            } else {  // ["a", "b"], which allows spaces in tokens
                require(entry.is_array() && entry.size() == 2, file, ": model.merges: entry ", all.size(),
                        " is not a pair of tokens");
                left = entry[0].get<std::string>();
                right = entry[1].get<std::string>();
            }
            all.push_back({{id_of(left), id_of(right)}, {uint32_t(all.size()), id_of(left + right)}});
            // A fallback byte such as <0x0A> is one symbol: its merges are not merges of the characters in its name.
            cuts = cuts && !left.empty() && !right.empty() && fallback_byte(left) < 0 && fallback_byte(right) < 0;
            if (!cuts) continue;
            size_t last = left.size() - 1;
            while (last > 0 && (uint8_t(left[last]) & 0xC0) == 0x80) last--;
            const int32_t l = find_character(left, last), r = find_character(right, 0);
            if (l >= 0 && r >= 0) joined.push_back(pair_key(l, r));
        }
        merges.build(all);
        joints.build(joined);
    }

    // The id of the character at text[i]; −1 if there is no valid character or the vocabulary lacks it.
    int32_t find_character(std::string_view text, size_t i) const {
        const size_t n = utf8_length(text, i);
        const size_t code = n ? utf8_code_point(text, i, n) : character_id.size();
        return code < character_id.size() ? character_id[code] : -1;
    }

    bool normalizes(std::string_view text) const {
        return prepends || marks_spaces || (composes && may_need_nfc(text));
    }

    std::string normalize(std::string_view text) const {
        if (composes) return nfc(text);
        std::string out = prepends && !text.empty() ? SPACE_MARK : "";
        return out += marks_spaces ? replace_all(text, " ", SPACE_MARK) : std::string(text);
    }

    void read_added_tokens(const json& root, const DeclaredTokens& declared, const Ids& ids) {
        if (given(root, "added_tokens")) added = root["added_tokens"];
        require(added.is_array(), file, ": added_tokens must be a list");
        added = declared.complete(std::move(added), ids, file);
        id_end += int64_t(added.size());
        Ids all_ids = ids;
        for (const json& token : added) add_added_token(token, ids, all_ids);
        const std::string end = declared.find("eos_token");
        const std::vector<std::string> names =
            end.empty() ? std::vector<std::string>{"<|endoftext|>", "</s>", "<|end_of_text|>"} : std::vector{end};
        for (const std::string& name : names) {
            const auto found = all_ids.find(name);
            if (end_of_text < 0 && found != all_ids.end()) end_of_text = found->second;
        }
    }

    void add_added_token(const json& token, const Ids& ids, Ids& all_ids) {
        const std::string content = token.at("content").get<std::string>();
        const int64_t id = token.at("id").get<int64_t>();
        require(!content.empty(), file, ": added_tokens: token ", id, " is empty");
        const auto in_vocab = ids.find(content);
        require(in_vocab == ids.end() || in_vocab->second == id, file, ": token '", printable(content), "' has the id ",
                in_vocab == ids.end() ? -1 : in_vocab->second, " in model.vocab but ", id, " in added_tokens");
        const bool special = flag(token, "special", false), in_normalized = flag(token, "normalized", !special);
        // A token that is matched in normalized text is normalized too, which may prepend a space.
        const std::string written = in_normalized ? normalize(content) : content;
        std::string text = sentencepiece ? replace_all(written, SPACE_MARK, " ") : written;
        // As in the tokenizers package, decoding reads characters of the byte alphabet as bytes.
        std::string token_bytes;
        if (!sentencepiece && alphabet.bytes(written, token_bytes)) text = token_bytes;
        if (in_vocab == ids.end())
            add_token(text, id);
        else
            bytes[size_t(id)] = text;
        all_ids[content] = int32_t(id);
        special_ids.resize(std::max(special_ids.size(), size_t(id) + 1));
        special_ids[size_t(id)] = special;
        (in_normalized ? normalized : verbatim)
            .add({written, int32_t(id), special, flag(token, "single_word", false), flag(token, "lstrip", false),
                  flag(token, "rstrip", false)});
    }

    // Reads the special tokens that templates put before the text ("$A" in the template). A prompt with one behind it
    // could not be continued.
    void read_post_processor(const json& root) {
        for (const json& step : steps_of(root, "post_processor", "processors")) {
            const std::string type = type_of(step);
            if (type != "TemplateProcessing" && type != "ByteLevel") unsupported("post_processor ", type);
            if (type == "ByteLevel") continue;  // adds no tokens
            std::vector<int32_t> start;
            bool behind = false;
            for (const json& part : step.at("single")) {
                behind |= !part.contains("SpecialToken");
                if (!part.contains("SpecialToken")) continue;
                const std::string name = part["SpecialToken"].at("id").get<std::string>();
                require(!behind, file, ": post_processor: puts the token '", printable(name),
                        "' behind a text, which is not supported; take it out of 'single'");
                for (const json& id : step.at("special_tokens").at(name).at("ids")) {
                    const int64_t number = id.get<int64_t>();
                    require(0 <= number && number < int64_t(known.size()) && known[size_t(number)], file,
                            ": post_processor: token ", number, " of '", printable(name), "' is not in the vocabulary");
                    start.push_back(int32_t(number));
                }
            }
            start_of_text.insert(start_of_text.begin(), start.begin(), start.end());  // around what is there
        }
    }
};

// Which bytes of a text may be part of a special token: all, none, or those that are marked.
class Tokenizer::Impl::SpecialBytes {
  public:
    explicit SpecialBytes(bool every) : all(every) {}
    explicit SpecialBytes(std::vector<bool> marks) : all(false), marked(std::move(marks)) {}

    bool operator()(size_t begin, size_t size) const {
        if (marked.empty()) return all;
        const auto first = marked.begin() + int64_t(begin);
        return std::find(first, first + int64_t(size), false) == first + int64_t(size);
    }
    SpecialBytes part(size_t begin, size_t size) const {
        if (marked.empty()) return *this;
        const auto first = marked.begin() + int64_t(begin);
        return SpecialBytes(std::vector<bool>(first, first + int64_t(size)));
    }
    // Those of the text after normalization: what it puts in front may be special, as what follows may. NFC can join
    // any bytes, so that all or none may be.
    SpecialBytes normalized(std::string_view text, const Impl& tokenizer) const {
        if (marked.empty()) return *this;
        if (tokenizer.composes) return SpecialBytes((*this)(0, text.size()));
        std::vector<bool> out(tokenizer.prepends ? SPACE_MARK.size() : 0, marked[0]);
        for (size_t i = 0; i < text.size(); i++)
            out.insert(out.end(), tokenizer.marks_spaces && text[i] == ' ' ? SPACE_MARK.size() : 1, marked[i]);
        return SpecialBytes(std::move(out));
    }

  private:
    bool all;
    std::vector<bool> marked;  // empty: all
};

// One call of encode(): its output, and the state that its words share.
class Tokenizer::Impl::Encoder {
  public:
    explicit Encoder(const Impl& owner) : tokenizer(owner) {
        for (const Splitter& splitter : tokenizer.splitters) matchers.push_back(splitter.matcher());
    }

    std::vector<int32_t> out;
    int64_t lost = 0;  // bytes that the vocabulary lacks

    void text(std::string_view all, const SpecialBytes& special) {
        time = SplitTime(all.size());
        const auto found = [&](int32_t id) { out.push_back(id); };
        tokenizer.verbatim.split(
            all, special,
            [&](std::string_view rest) {
                const bool first = rest.data() == all.data();
                SpecialBytes rest_special = special.part(size_t(rest.data() - all.data()), rest.size());
                if (tokenizer.normalizes(rest)) {
                    rest_special = rest_special.normalized(rest, tokenizer);
                    rest = keep(tokenizer.normalize(rest));
                }
                tokenizer.normalized.split(
                    rest, rest_special,
                    [&](std::string_view part) { plain(part, first && part.data() == rest.data()); }, found);
            },
            found);
    }

  private:
    // Keeps text alive as long as the encoder: the cache's keys may point into it.
    std::string_view keep(std::string kept_text) {
        kept.push_back(std::move(kept_text));
        return kept.back();
    }

    // Encodes normalized text without added tokens. first: it is the start of the whole text.
    void plain(std::string_view text, bool first) {
        if (tokenizer.sentencepiece) return tokenizer.metaspace ? metaspace(text, first) : characters(text);
        if (tokenizer.add_prefix_space && text[0] != ' ') text = keep(" " + std::string(text));
        if (tokenizer.splitters.empty()) return word(text);
        // The regular expressions take only valid UTF-8. A run of invalid bytes becomes a separate word, so that
        // decode() restores any text.
        for (size_t i = 0; i < text.size();) {
            const size_t begin = i;
            for (size_t n; i < text.size() && (n = utf8_length(text, i)) > 0;) i += n;
            if (i > begin) words(text.substr(begin, i - begin), 0);
            const size_t invalid = i;
            while (i < text.size() && utf8_length(text, i) == 0) i++;
            if (i > invalid) word(text.substr(invalid, i - invalid));
        }
    }

    void words(std::string_view text, size_t step) {
        if (step == tokenizer.splitters.size()) return word(text);
        tokenizer.splitters[step].split(text, matchers[step], time,
                                        [&](std::string_view piece) { words(piece, step + 1); });
    }

    void metaspace(std::string_view text, bool first) {
        std::string marked = replace_all(text, " ", SPACE_MARK);
        const bool wanted = tokenizer.in_front == InFront::Always || (tokenizer.in_front == InFront::First && first);
        if (wanted && marked.compare(0, SPACE_MARK.size(), SPACE_MARK) != 0) marked.insert(0, SPACE_MARK);
        text = keep(std::move(marked));
        while (tokenizer.metaspace_split && !text.empty()) {
            const size_t end = std::min(text.find(SPACE_MARK, SPACE_MARK.size()), text.size());
            const bool marked_in_front = text.compare(0, SPACE_MARK.size(), SPACE_MARK) == 0;
            const size_t cut = marked_in_front ? end : std::min(text.find(SPACE_MARK), text.size());
            characters(text.substr(0, cut));
            text.remove_prefix(cut);
        }
        if (!text.empty()) characters(text);
    }

    // Splits SentencePiece text between characters that no merge joins.
    void characters(std::string_view text) {
        size_t begin = 0;
        int32_t before = -1;
        for (size_t i = 0; tokenizer.cuts && i < text.size();) {
            const int32_t id = tokenizer.find_character(text, i);
            if (i > begin && !tokenizer.joints.has(before, id)) {
                word(text.substr(begin, i - begin));
                begin = i;
            }
            before = id;
            i += std::max<size_t>(utf8_length(text, i), 1);
        }
        word(text.substr(begin));
    }

    void word(std::string_view text) {
        if (tokenizer.merges.empty() && !tokenizer.ignore_merges) return symbols(text, out);
        const bool cached = text.size() <= 32;  // long words rarely repeat
        if (cached) {
            const auto [entry, is_new] = cache.try_emplace(text, out.size(), 0);
            auto& [begin, count] = entry->second;
            if (!is_new) {
                const size_t end = out.size();
                out.resize(end + count);
                std::copy_n(out.begin() + int64_t(begin), count, out.begin() + int64_t(end));
                return;
            }
            const int64_t lost_before = lost;
            merge(text);
            count = out.size() - begin;
            if (lost > lost_before) cache.erase(text);  // each occurrence counts
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
        symbols(text, ids);
        merge_word(ids, merges, tokenizer.merges);
        out.insert(out.end(), ids.begin(), ids.end());
    }

    // Appends the ids that merging starts from: bytes, or characters (the fallback bytes of one that the vocabulary
    // lacks). What has no id is lost: left out, or the unknown token.
    void symbols(std::string_view text, std::vector<int32_t>& to) {
        int64_t pending = 0;  // unknown tokens that are not written yet
        const auto flush = [&] {
            for (; pending > 0; pending = tokenizer.fuse_unknown ? 0 : pending - 1) to.push_back(tokenizer.unknown);
        };
        const auto lose = [&](size_t n) {
            lost += int64_t(n);
            pending += tokenizer.unknown >= 0;
        };
        const auto add = [&](int32_t id) {
            if (pending > 0) flush();
            to.push_back(id);
        };
        for (size_t i = 0; i < text.size() && !tokenizer.sentencepiece; i++) {
            const int32_t id = tokenizer.byte_id[uint8_t(text[i])];
            if (id >= 0)
                add(id);
            else
                lose(1);
        }
        for (size_t i = 0, n; i < text.size() && tokenizer.sentencepiece; i += n) {
            const int32_t id = tokenizer.find_character(text, i);
            n = std::max<size_t>(utf8_length(text, i), 1);
            if (id >= 0) {
                add(id);
                continue;
            }
            const std::string_view character = text.substr(i, n);
            const auto has_byte = [&](char c) { return tokenizer.byte_id[uint8_t(c)] >= 0; };
            if (std::all_of(character.begin(), character.end(), has_byte))
                for (const char c : character) to.push_back(tokenizer.byte_id[uint8_t(c)]);
            else
                lose(n);
        }
        flush();
    }

    static constexpr size_t MAX_CACHE = 1 << 20;

    const Impl& tokenizer;
    std::vector<Splitter::Matcher> matchers;
    SplitTime time{0};
    std::deque<std::string> kept;
    // Word -> range of its ids in out (begin, count). Keys are views of the text.
    std::unordered_map<std::string_view, std::pair<size_t, size_t>> cache;
    std::vector<int32_t> ids;
    std::vector<Merge> merges;
};

Tokenizer::Tokenizer(const std::string& tokenizer_json, const std::string& shown_as)
    : impl(std::make_unique<Impl>(read_file(tokenizer_json, int64_t(1) << 30),
                                  shown_as.empty() ? tokenizer_json : shown_as, Impl::model_of(tokenizer_json))) {}
Tokenizer::Tokenizer(const ModelFiles& model)
    : impl(std::make_unique<Impl>(model.read(FILE_NAME), model.shown_as(FILE_NAME), model)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;

bool Tokenizer::exists(const ModelFiles& model) {
    return model.has(FILE_NAME);
}

bool Tokenizer::same(const ModelFiles& model, const std::string& other) {
    if (model.read(FILE_NAME) != read_file(other)) return false;
    const auto declares = [](const ModelFiles& files) { return !read_declared_tokens(files).tokens.empty(); };
    if (!declares(model) && !declares(Impl::model_of(other))) return true;
    return Tokenizer(model).impl->added == Tokenizer(other).impl->added;
}

bool Tokenizer::has_tokens_of(const Tokenizer& other) const {
    const Impl &a = *impl, &b = *other.impl;
    return a.bytes == b.bytes && a.known == b.known && a.special_ids == b.special_ids;
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool allow_special) const {
    Impl::Encoder encoder(*impl);
    encoder.text(text, Impl::SpecialBytes(allow_special));
    return std::move(encoder.out);
}

std::vector<int32_t> Tokenizer::encode_marked(std::string_view text, std::vector<bool> may_be_special) const {
    require(may_be_special.size() == text.size(), "encode_marked: ", may_be_special.size(), " marks for ", text.size(),
            " bytes");
    Impl::Encoder encoder(*impl);
    encoder.text(text, Impl::SpecialBytes(std::move(may_be_special)));
    return std::move(encoder.out);
}

Tokenizer::Batch Tokenizer::encode_batch(const std::vector<std::string_view>& texts) const {
    Impl::Encoder encoder(*impl);
    Batch batch;
    for (const std::string_view text : texts) {
        const int64_t lost_before = encoder.lost;
        encoder.text(text, Impl::SpecialBytes(false));
        batch.ends.push_back(encoder.out.size());
        batch.lost.push_back(encoder.lost - lost_before);
    }
    batch.tokens = std::move(encoder.out);
    return batch;
}

bool Tokenizer::is_special(int32_t token) const {
    return token >= 0 && size_t(token) < impl->special_ids.size() && impl->special_ids[size_t(token)];
}

std::string Tokenizer::find_special(std::string_view text) const {
    int32_t first = -1;
    const auto found = [&](int32_t id) {
        if (first < 0 && is_special(id)) first = id;
    };
    const auto always = [](size_t, size_t) { return true; };
    const auto plain = [&](std::string_view part) {
        impl->normalized.split(
            impl->normalize(part), always, [](std::string_view) {}, found);
    };
    impl->verbatim.split(text, always, plain, found);
    return first < 0 ? "" : decode(first);
}

int64_t Tokenizer::lost_bytes(std::string_view text) const {
    if (!impl->sentencepiece && std::count(impl->byte_id.begin(), impl->byte_id.end(), -1) == 0) return 0;
    Impl::Encoder encoder(*impl);
    encoder.text(text, Impl::SpecialBytes(false));
    return encoder.lost;
}

std::string Tokenizer::decode(const std::vector<int32_t>& tokens) const {
    std::string text;
    for (const int32_t token : tokens) text += decode(token);
    if (impl->strips_first_space && !text.empty() && text[0] == ' ') text.erase(0, 1);
    return text;
}

std::string Tokenizer::decode(int32_t token) const {
    require(contains(token), impl->file, ": token ", token, " is not in the vocabulary of ", vocab_size());
    return impl->bytes[size_t(token)];
}

bool Tokenizer::contains(int32_t token) const {
    return token >= 0 && size_t(token) < impl->known.size() && impl->known[size_t(token)];
}

bool Tokenizer::strips_first_space() const {
    return impl->strips_first_space;
}
int64_t Tokenizer::vocab_size() const {
    return int64_t(impl->bytes.size());
}
int32_t Tokenizer::end_of_text() const {
    return impl->end_of_text;
}
const std::vector<int32_t>& Tokenizer::start_of_text() const {
    return impl->start_of_text;
}

std::string TextStream::put(int32_t token) {
    if (!tokenizer.contains(token)) return "";
    std::string text = tokenizer.decode(token);
    if (text.empty()) return "";
    if (std::exchange(strip, false) && text[0] == ' ') text.erase(0, 1);
    return characters.put(text);
}

std::string TextStream::finish() {
    return characters.finish();
}

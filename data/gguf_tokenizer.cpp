#include "data/gguf_tokenizer.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <unordered_map>

#include "data/chat_template.h"
#include "data/declared_tokens.h"
#include "data/token_text.h"
#include "data/tokenizer.h"
#include "data/tokenizer_json.h"
#include "runtime/error.h"
#include "runtime/files/json_keys.h"

using nlohmann::json;

namespace {

enum TokenType : int32_t { NORMAL = 1, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE };

struct WordsName {
    const char* pre;    // tokenizer.ggml.pre
    const char* words;  // words_of()
    bool starts;        // <s> goes in front of a text if the file does not say
};
// The first of equal words is what is written. Of the architectures read here only OLMo2 has those of dbrx.
constexpr WordsName WORDS[] = {
    {"gpt-2", "gpt2", false},   {"smollm", "smollm", false},  {"qwen2", "qwen2", false},
    {"tekken", "tekken", true}, {"dbrx", "olmo2", false},     {"llama-bpe", "llama3", true},
    {"llama3", "llama3", true}, {"llama-v3", "llama3", true}, {"default", "llamacpp-default", false}};

constexpr struct {
    const char *role, *key;
} ROLES[] = {{"bos_token", "bos"}, {"eos_token", "eos"}, {"unk_token", "unknown"}, {"pad_token", "padding"}};

// The ids that llama.cpp ends a text at, those of filling in at a middle among them.
constexpr const char* END_TOKENS[] = {"eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"};

constexpr const char* CHAT_TEMPLATE = "tokenizer.chat_template";

std::string ggml(const std::string& name) {
    return "tokenizer.ggml." + name;
}

std::string id_key(const char* name) {
    return ggml(str(name, "_token_id"));
}

// The vocabulary of a GGUF file.
class GgufVocabulary {
  public:
    explicit GgufVocabulary(const GgufFile& from) : file(from), keys(from.keys()) {
        const std::vector<std::string> texts = get(ggml("tokens"));
        types = keys.value(ggml("token_type"), std::vector<int64_t>(texts.size(), NORMAL));
        scores = keys.value(ggml("scores"), std::vector<float>());
        check_size(ggml("token_type"), types.size(), texts.size());
        if (!scores.empty()) check_size(ggml("scores"), scores.size(), texts.size());
        for (size_t i = 0; i < scores.size(); i++)
            require(std::isfinite(scores[i]), file.path(), ": key ", ggml("scores"), ": the score of token ", i, " is ",
                    scores[i], "; the file is damaged");
        // The rows of a vocabulary that has more of them than the tokenizer has tokens.
        for (size_t i = 0; i < texts.size(); i++) {
            const bool row = types[i] == UNUSED && texts[i] == str("[PAD", i, "]");
            tokens.push_back(row ? std::nullopt : std::optional(texts[i]));
        }
    }

    // The token in a role, "" if there is none.
    std::string token_of(const char* name) const {
        const int64_t id = keys.value(id_key(name), int64_t(-1));
        return 0 <= id && id < int64_t(tokens.size()) ? tokens[size_t(id)].value_or("") : "";
    }

    json tokenizer() const {
        const std::string model = get(ggml("model"));
        if (model == "llama") {
            if (scores.empty()) (void)get(ggml("scores"));
            return sentencepiece_tokenizer(tokens, scores, added(), token_of("unknown"),
                                           keys.value(ggml("add_space_prefix"), true), start(true));
        }
        require(!is_phi3(), file.path(), ": the tokenizer is ", printable(model),
                "; supported for phi3: llama (SentencePiece)");
        const std::string pre = keys.value(ggml("pre"), "default");
        const auto* const words =
            std::find_if(std::begin(WORDS), std::end(WORDS), [&](const WordsName& w) { return pre == w.pre; });
        if (model != "gpt2" || words == std::end(WORDS)) {
            std::string names;
            for (const WordsName& w : WORDS) names += str(names.empty() ? "" : ", ", w.pre);
            throw Error(str(file.path(), ": the tokenizer is ", printable(model), " with words of kind ",
                            printable(pre), "; supported: llama, and gpt2 with ", names));
        }
        return byte_level_tokenizer(tokens, merges(), added(), words->words, start(words->starts));
    }

    json tokenizer_config() const {
        json config = {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"clean_up_tokenization_spaces", false}};
        for (const auto& [role, key] : ROLES)
            if (const std::string token = token_of(key); !token.empty()) config[role] = token;
        // transformers 5 reads chat_template.jinja, older versions the key.
        if (keys.contains(CHAT_TEMPLATE)) config["chat_template"] = keys[CHAT_TEMPLATE];
        return config;
    }

  private:
    json get(const std::string& key) const {
        require(keys.contains(key), file.path(), ": key ", key, " is missing");
        return keys[key];
    }
    void check_size(const std::string& key, size_t found, size_t expected) const {
        require(found == expected, file.path(), ": key ", key, " has ", found, " values for ", expected,
                " tokens; the file is damaged");
    }
    bool is_phi3() const { return keys.value("general.architecture", "") == "phi3"; }

    json added() const {
        // The file does not say which tokens take the white space behind them: of Phi-3 these, as llama.cpp has it.
        const std::set<std::string> plain = {"<unk>", "<s>", "<|endoftext|>"};
        json list = json::array();
        for (size_t i = 0; i < tokens.size(); i++) {
            const int64_t type = types[i];
            if (!tokens[i] || (type != CONTROL && type != UNKNOWN && type != USER_DEFINED)) continue;
            list.push_back(
                added_token(int64_t(i), *tokens[i], type != USER_DEFINED, is_phi3() && !plain.count(*tokens[i])));
        }
        return list;
    }

    StartToken start(bool by_default) const {
        const std::string bos = token_of("bos");
        if (bos.empty() || !keys.value(ggml("add_bos_token"), by_default)) return {};
        return {keys[id_key("bos")].get<int64_t>(), bos};
    }

    json merges() const {
        json list = json::array();
        for (const json& entry : get(ggml("merges"))) {
            const std::string& text = entry.get_ref<const std::string&>();
            const size_t space = text.find(' ');
            require(space != std::string::npos && text.find(' ', space + 1) == std::string::npos, file.path(), ": key ",
                    ggml("merges"), ": entry ", list.size(), " is ", shown(entry),
                    ", not two tokens with a space between them; the file is damaged");
            list.push_back({text.substr(0, space), text.substr(space + 1)});
        }
        return list;
    }

    const GgufFile& file;
    const json& keys;
    TokenTexts tokens;
    std::vector<int64_t> types;
    std::vector<float> scores;
};

}  // namespace

ModelFiles::Contents gguf_tokenizer_files(const std::shared_ptr<const GgufFile>& file) {
    ModelFiles::Contents files;
    if (file->keys().contains(ggml("tokens"))) {
        files["tokenizer.json"] = [file] { return GgufVocabulary(*file).tokenizer().dump() + "\n"; };
        files["tokenizer_config.json"] = [file] { return GgufVocabulary(*file).tokenizer_config().dump(2) + "\n"; };
    }
    const std::string chat_template = file->keys().value(CHAT_TEMPLATE, "");
    if (!chat_template.empty()) files["chat_template.jinja"] = [chat_template] { return chat_template; };
    return files;
}

std::vector<int64_t> gguf_end_tokens(const GgufFile& file) {
    std::vector<int64_t> ids;
    for (const char* name : END_TOKENS) {
        const int64_t id = file.keys().value(id_key(name), int64_t(-1));
        if (id >= 0 && std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
    }
    return ids;
}

namespace {

// What llama.cpp has no expression for.
[[noreturn]] void inexpressible(const std::string& tokenizer, const std::string& what) {
    throw Error(str(tokenizer, ": llama.cpp has no tokenizer ", what,
                    "; convert the model without its tokenizer.json, or give it another with --tokenizer"));
}

void set_start_and_end(GgufWriter& writer, int64_t bos, const std::vector<int32_t>& ends) {
    if (bos >= 0) writer.set(id_key("bos"), bos);
    constexpr size_t MOST = std::size(END_TOKENS);
    require(ends.size() <= MOST, "the model has ", ends.size(), " tokens that end a text, and llama.cpp ", MOST,
            "; remove some from eos_token_id in generation_config.json");
    for (size_t i = 0; i < ends.size(); i++) writer.set(id_key(END_TOKENS[i]), int64_t(ends[i]));
}

// A tokenizer.json as the keys of a GGUF file.
class TokenizerKeys {
  public:
    TokenizerKeys(const ModelFiles& model, const GgufTokenIds& given)
        : file(model.shown_as("tokenizer.json")),
          root(parse_json_object(model.read("tokenizer.json"), file)),
          declared(read_declared_tokens(model)),
          tokenizer(model),
          ids(given) {
        const json& vocab = root["model"]["vocab"];
        std::unordered_map<std::string, int32_t> by_text;
        for (const auto& [token, id] : vocab.items()) by_text[token] = id.get<int32_t>();
        added = declared.complete(root.value("added_tokens", json::array()), by_text, file);
        require(tokenizer.vocab_size() <= ids.vocab_size, file, " has ", tokenizer.vocab_size(),
                " tokens, but the model's vocabulary has ", ids.vocab_size, "; give the model's own tokenizer");
        tokens.resize(size_t(ids.vocab_size));
        types.assign(tokens.size(), UNUSED);
        for (const auto& [token, id] : by_text) put(id, token, NORMAL);
        for (const json& token : added)
            put(token["id"], token["content"], token.value("special", false) ? CONTROL : USER_DEFINED);
    }

    void set(GgufWriter& writer) {
        const bool sentencepiece = read_sentencepiece();
        writer.set(ggml("model"), sentencepiece ? "llama" : "gpt2");
        writer.set(ggml("pre"), sentencepiece ? std::string("default") : words());
        std::vector<std::string> texts;
        for (size_t i = 0; i < tokens.size(); i++) texts.push_back(tokens[i].value_or(str("[PAD", i, "]")));
        if (sentencepiece) {
            writer.set(ggml("scores"), scores());
            writer.set(ggml("add_space_prefix"), space_in_front);
        } else {
            writer.set(ggml("merges"), merges());
        }
        writer.set(ggml("tokens"), texts);
        writer.set(ggml("token_type"), types);
        set_ids(writer);
    }

  private:
    void put(int64_t id, const std::string& text, int32_t type) {
        tokens[size_t(id)] = text;
        types[size_t(id)] = type;
    }

    const json& part(const char* name) const {
        static const json NONE;
        const auto found = root.find(name);
        return found == root.end() ? NONE : *found;
    }

    // As data/tokenizer.cpp decides it. Sets space_in_front, and the types of byte tokens and the unknown one.
    bool read_sentencepiece() {
        const json& pre = part("pre_tokenizer");
        const bool metaspace = pre.is_object() && pre.value("type", "") == "Metaspace";
        const bool fallback = root["model"].value("byte_fallback", false);
        if (!fallback && !metaspace) return false;
        if (!fallback) inexpressible(file, "of SentencePiece without byte fallback");
        const std::string otherwise = metaspace && pre.value("add_prefix_space", true) ? "always" : "never";
        space_in_front = metaspace ? pre.value("prepend_scheme", otherwise) != "never"
                                   : part("normalizer").dump().find("Prepend") != std::string::npos;
        for (size_t i = 0; i < tokens.size(); i++)
            if (tokens[i] && fallback_byte(*tokens[i]) >= 0) types[i] = BYTE;
        const json unknown = root["model"].value("unk_token", json());
        for (size_t i = 0; i < tokens.size(); i++)
            if (tokens[i] && json(*tokens[i]) == unknown) types[i] = UNKNOWN;
        return true;
    }

    // tokenizer.ggml.pre of the expressions that cut text into words.
    std::string words() const {
        const bool none = root["model"].value("merges", json::array()).empty();
        if (none) return WORDS[0].pre;  // how bytes are grouped then does not matter
        const json found =
            words_in(part("normalizer"), part("pre_tokenizer"), root["model"].value("ignore_merges", false));
        for (const WordsName& w : WORDS) {
            const json known = words_of(w.words);
            if (found == words_in(known["normalizer"], known["pre_tokenizer"], known["ignore_merges"])) return w.pre;
        }
        inexpressible(file, "with these words (pre_tokenizer, normalizer, ignore_merges)");
    }
    // What decides the words, without what changes no ids.
    static json words_in(const json& normalizer, const json& pre_tokenizer, bool ignore_merges) {
        const bool sequence = pre_tokenizer.is_object() && pre_tokenizer.value("type", "") == "Sequence";
        json steps = sequence ? pre_tokenizer["pretokenizers"] : json::array({pre_tokenizer});
        for (json& step : steps) {
            if (!step.is_object()) continue;
            step.erase("trim_offsets");
            const bool matches_kept = step.value("behavior", "") == "Removed" && step.value("invert", false);
            if (matches_kept) step.update({{"behavior", "Isolated"}, {"invert", false}});  // its matches are all text
        }
        return {{"normalizer", normalizer}, {"steps", steps}, {"ignore_merges", ignore_merges}};
    }

    static std::pair<std::string, std::string> pair_of(const json& merge) {
        if (merge.is_array()) return {merge[0].get<std::string>(), merge[1].get<std::string>()};
        const std::string both = merge.get<std::string>();
        const size_t space = both.find(' ');
        return {both.substr(0, space), both.substr(space + 1)};
    }

    std::vector<std::string> merges() const {
        std::vector<std::string> list;
        for (const json& merge : root["model"]["merges"]) {
            const auto [left, right] = pair_of(merge);
            list.push_back(left + " " + right);
        }
        return list;
    }

    // Scores that order merges as tokenizer.json's list does. They exist if all merges that make one token are
    // neighbours in it, and all pairs of tokens that make a token are merges.
    std::vector<float> scores() const {
        std::vector<float> all(tokens.size(), 0.0f);
        std::map<std::string, size_t> id_of;
        for (size_t i = 0; i < tokens.size(); i++)
            if (tokens[i]) id_of[*tokens[i]] = i;
        std::set<std::pair<std::string, std::string>> pairs;
        float score = 0;
        std::string last;
        std::set<std::string> made;
        for (const json& merge : root["model"]["merges"]) {
            const auto pair = pair_of(merge);
            const std::string token = pair.first + pair.second;
            pairs.insert(pair);
            if (token == last) continue;
            if (!made.insert(token).second) inexpressible(file, "in which the merges of one token are apart");
            all[id_of.at(token)] = --score;
            last = token;
        }
        for (size_t i = 0; i < tokens.size(); i++)
            if (tokens[i] && !made.count(*tokens[i])) all[i] = --score;
        for (const json& merge : merges_by_score(tokens, all, added))
            if (!pairs.count(pair_of(merge)))
                inexpressible(file, str("of SentencePiece that does not merge ", shown(merge)));
        return all;
    }

    void set_ids(GgufWriter& writer) const {
        const auto id_of = [&](const std::string& text) -> int64_t {
            const auto found = std::find(tokens.begin(), tokens.end(), std::optional(text));
            return text.empty() || found == tokens.end() ? -1 : found - tokens.begin();
        };
        const std::vector<int32_t>& start = tokenizer.start_of_text();
        if (start.size() > 1) inexpressible(file, str("that puts ", start.size(), " tokens in front of a text"));
        set_start_and_end(writer, start.empty() ? ids.bos : start[0], ids.end_tokens);
        writer.set(ggml("add_bos_token"), !start.empty());
        const json unknown = root["model"].value("unk_token", json());
        const int64_t unk = id_of(unknown.is_string() ? unknown.get<std::string>() : declared.find("unk_token"));
        const int64_t pad = id_of(declared.find("pad_token"));
        if (unk >= 0) writer.set(id_key("unknown"), unk);
        if (pad >= 0) writer.set(id_key("padding"), pad);
    }

    const std::string file;
    const json root;
    const DeclaredTokens declared;
    const Tokenizer tokenizer;  // which checks the file
    const GgufTokenIds& ids;
    json added;
    TokenTexts tokens;
    std::vector<int32_t> types;
    bool space_in_front = false;
};

}  // namespace

void set_gguf_tokenizer(GgufWriter& writer, const ModelFiles& model, const GgufTokenIds& ids) {
    if (!Tokenizer::exists(model)) {
        writer.set(ggml("model"), "no_vocab");
        set_start_and_end(writer, ids.bos, ids.end_tokens);
        return;
    }
    TokenizerKeys(model, ids).set(writer);
    const std::string chat_template = ChatTemplate::program_of(model);
    if (!chat_template.empty()) writer.set(CHAT_TEMPLATE, chat_template);
}

#include "data/gguf_tokenizer.h"

#include <algorithm>
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
constexpr WordsName WORDS[] = {{"gpt-2", "gpt2", false},      {"smollm", "smollm", false}, {"qwen2", "qwen2", false},
                               {"tekken", "tekken", true},    {"dbrx", "olmo2", false},    {"llama-bpe", "llama3", true},
                               {"llama3", "llama3", true},    {"llama-v3", "llama3", true},
                               {"default", "llamacpp-default", false}};

constexpr struct {
    const char *role, *key;
} ROLES[] = {{"bos_token", "bos"}, {"eos_token", "eos"}, {"unk_token", "unknown"}, {"pad_token", "padding"}};

// In this order: the ids that llama.cpp ends a text at.
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
        const auto* const words = std::find_if(std::begin(WORDS), std::end(WORDS),
                                               [&](const WordsName& w) { return pre == w.pre; });
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
            list.push_back(added_token(int64_t(i), *tokens[i], type != USER_DEFINED, is_phi3() && !plain.count(*tokens[i])));
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

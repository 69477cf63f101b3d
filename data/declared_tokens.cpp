#include "data/declared_tokens.h"

#include <algorithm>
#include <map>
#include <set>

#include "data/token_text.h"
#include "runtime/error.h"
#include "runtime/files/json_keys.h"
#include "runtime/text.h"

using nlohmann::json;
using nlohmann::ordered_json;

namespace {

// transformers adds new tokens in this order.
constexpr const char* TOKEN_NAMES[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                       "pad_token", "cls_token", "mask_token"};

bool is_standard_name(const std::string& key) {
    return std::find(std::begin(TOKEN_NAMES), std::end(TOKEN_NAMES), key) != std::end(TOKEN_NAMES);
}

// One of the files; no keys if it does not exist. In the order of the file, which decides ids.
struct TokenFile {
    std::string path;
    ordered_json object = ordered_json::object();
    bool always_special = false;

    TokenFile() = default;
    TokenFile(const ModelFiles& model, const char* name, bool special = false)
        : path(model.shown_as(name)), always_special(special) {
        if (model.has(name)) object = parse_ordered_json_object(model.read(name), path);
    }

    bool has(const char* key) const { return object.contains(key) && !object[key].is_null(); }
    // Whether Python takes the value for true: something is listed.
    bool lists(const char* key) const { return has(key) && !object[key].empty(); }

    [[noreturn]] void wrong(const std::string& key, const ordered_json& value, const char* expected) const {
        throw Error(str(path, ": key '", printable(key), "' is ", shown(value), ", expected ", expected));
    }

    // A token as text, or as an object with its rules, whose defaults are those of the package tokenizers.
    json token(const std::string& key, const ordered_json& value) const {
        const bool text = value.is_string();
        if (!text && !(value.is_object() && value.contains("content") && value["content"].is_string()))
            wrong(key, value, "a token: text, or an object with the key content");
        const auto flag = [&](const char* name, bool otherwise) {
            if (text || !value.contains(name)) return otherwise;
            if (!value[name].is_boolean()) wrong(key + "." + name, value[name], "true or false");
            return value[name].get<bool>();
        };
        const bool special = text || always_special || flag("special", false);
        return {{"content", (text ? value : value["content"]).get<std::string>()},
                {"single_word", flag("single_word", false)},
                {"lstrip", flag("lstrip", false)},
                {"rstrip", flag("rstrip", false)},
                {"normalized", flag("normalized", !special)},
                {"special", special}};
    }
};

class DeclarationReader {
  public:
    explicit DeclarationReader(const ModelFiles& model) : config(model, "tokenizer_config.json") {
        const bool has_decoder = config.has("added_tokens_decoder");
        if (!has_decoder) map = TokenFile(model, "special_tokens_map.json", true);
        read_named();
        read_extra();
        if (has_decoder)
            read_decoder();
        else
            read_added_tokens(model);
        std::set<std::string> contents, plain;
        for (DeclaredTokens::Token& token : named) {
            token.makes_special = !has_decoder;
            contents.insert(token.fields["content"].get<std::string>());
        }
        for (auto* list : {&by_id, &named, &extra}) {
            for (DeclaredTokens::Token& token : *list) {
                const std::string content = token.fields["content"];
                if (contents.count(content)) token.fields["special"] = true;
                if (!token.plain || plain.insert(content).second) out.tokens.push_back(std::move(token));
            }
        }
    }

    DeclaredTokens out;

  private:
    // A name that is given again gets the later token, at the place of the first.
    void add_named(const TokenFile& file, const std::string& key, const ordered_json& value) {
        const json fields = file.token(key, value);
        const auto [place, is_new] = places.try_emplace(key, out.named.size());
        const size_t i = place->second;
        if (is_new) {
            out.named.emplace_back();
            named.emplace_back();
        }
        out.named[i] = {key, fields["content"]};
        named[i] = {fields, file.path};
        named[i].plain = value.is_string();
    }

    void read_named() {
        for (const char* name : TOKEN_NAMES) {
            const TokenFile& file = map.object.contains(name) ? map : config;
            if (file.has(name)) add_named(file, name, file.object[name]);
        }
        read_other_names(config, true);
        read_other_names(map, true);
        read_other_names(config, false);
        if (config.lists("extra_special_tokens") && config.object["extra_special_tokens"].is_object())
            read_names(config, config.object["extra_special_tokens"]);
        if (map.lists("extra_special_tokens") && map.object["extra_special_tokens"].is_object())
            read_names(map, map.object["extra_special_tokens"]);
    }
    void read_names(const TokenFile& file, const ordered_json& names) {
        for (const auto& [key, value] : names.items()) add_named(file, key, value);
    }
    // TokenFile such as image_token. transformers takes the plain texts of tokenizer_config.json later than all others.
    // An object in that file is a token only if it says so.
    void read_other_names(const TokenFile& file, bool early) {
        for (const auto& [key, value] : file.object.items()) {
            if (!ends_with(key, "_token") || is_standard_name(key)) continue;
            const bool object = value.is_object() && (file.always_special || value.contains("__type"));
            const bool is_early = file.always_special || object;
            if ((object || value.is_string()) && is_early == early) add_named(file, key, value);
        }
    }

    void read_extra() {
        const auto list = [&](const TokenFile& file, const char* key) {
            const ordered_json& values = file.object[key];
            if (!values.is_array()) file.wrong(key, values, "a list of tokens");
            for (const ordered_json& value : values) {
                extra.push_back({file.token(key, value), file.path});
                extra.back().plain = value.is_string();
            }
        };
        const char *const newer = "extra_special_tokens", *const older = "additional_special_tokens";
        const auto is_list = [&](const TokenFile& file) {
            return file.lists(newer) && !file.object[newer].is_object();
        };
        const bool moved = !config.lists(newer) && config.object.contains(older);  // read as the newer key
        bool is_given = moved || (config.object.contains(newer) && !config.object[newer].is_object());
        if (is_list(config) || (moved && config.lists(older))) list(config, moved ? older : newer);
        if (is_list(map)) {
            list(map, newer);
            is_given = true;
        } else if (map.lists(newer)) {  // names, in place of the list
            extra.clear();
            is_given = false;
        }
        if (is_given) return;
        if (map.object.contains(older)) {
            if (map.lists(older)) list(map, older);
        } else if (!moved && config.lists(older)) {
            list(config, older);
        }
    }

    void read_decoder() {
        const ordered_json& decoder = config.object["added_tokens_decoder"];
        if (!decoder.is_object()) config.wrong("added_tokens_decoder", decoder, "an object that maps ids to tokens");
        std::map<int64_t, DeclaredTokens::Token> sorted;
        for (const auto& [key, value] : decoder.items()) {
            const bool is_id =
                !key.empty() && key.size() <= 9 && key.find_first_not_of("0123456789") == std::string::npos;
            if (!is_id || !value.is_object())
                config.wrong("added_tokens_decoder." + key, value, "a token's object under its id");
            const int64_t id = std::stoll(key);
            sorted[id] = {config.token("added_tokens_decoder." + key, value), config.path, id, true};
        }
        for (auto& [id, token] : sorted) by_id.push_back(std::move(token));
    }

    // An older file: {"<pad>": 32000}.
    void read_added_tokens(const ModelFiles& model) {
        const TokenFile file(model, "added_tokens.json");
        std::set<std::string> special;
        for (size_t i = 0; i < named.size(); i++)
            if (is_standard_name(out.named[i].first)) special.insert(out.named[i].second);
        for (const DeclaredTokens::Token& token : extra) special.insert(token.fields["content"].get<std::string>());
        std::map<int64_t, DeclaredTokens::Token> sorted;
        for (const auto& [content, id] : file.object.items()) {
            if (!id.is_number_integer() || id < 0 || id > INT32_MAX) file.wrong(content, id, "a token id");
            json fields = file.token(content, content);
            fields["special"] = special.count(content) > 0;
            fields["normalized"] = !special.count(content);
            sorted[id.get<int64_t>()] = {std::move(fields), file.path, id.get<int64_t>()};
        }
        for (auto& [id, token] : sorted) by_id.push_back(std::move(token));
    }

    TokenFile config, map;
    std::map<std::string, size_t> places;  // of names in `named`
    std::vector<DeclaredTokens::Token> by_id, named, extra;
};

}  // namespace

std::string DeclaredTokens::find(const std::string& name) const {
    for (const auto& [key, content] : named)
        if (key == name) return content;
    return "";
}

json DeclaredTokens::complete(json added, const std::unordered_map<std::string, int32_t>& vocab,
                              const std::string& tokenizer_json) const {
    std::map<std::string, json*> listed;
    std::map<int64_t, std::string> owner;
    int64_t next = int64_t(vocab.size());
    const auto take = [&](json& token) {
        listed[token.at("content").get<std::string>()] = &token;
        owner[token.at("id").get<int64_t>()] = token["content"];
        next = std::max(next, token["id"].get<int64_t>() + 1);
    };
    for (const auto& [content, id] : vocab) owner[id] = content;
    json::array_t& list = added.get_ref<json::array_t&>();
    list.reserve(list.size() + tokens.size());  // pointers into it stay valid
    for (json& token : list) take(token);
    std::set<std::string> final_tokens;  // what is said later of such a token changes nothing
    for (const auto& [content, token] : listed) final_tokens.insert(content);
    for (const Token& token : tokens) {
        const std::string content = token.fields["content"];
        if (content.empty()) continue;
        const auto own = listed.find(content);
        const auto in_vocab = vocab.find(content);
        const bool known = own != listed.end() || in_vocab != vocab.end();
        const int64_t id = own != listed.end()       ? (*own->second)["id"].get<int64_t>()
                           : in_vocab != vocab.end() ? in_vocab->second
                                                     : next;
        require(token.id < 0 || token.id == id, token.from, ": token '", printable(content), "' has the id ", token.id,
                ", but ", tokenizer_json, known ? " gives it " : " lacks it, and the next id there is ", id,
                "; make the files agree, or take all of them from one model");
        const auto other = owner.find(id);
        if (!known && other != owner.end())
            throw Error(str(token.from, ": token '", printable(content), "' would get the id ", id, ", which ",
                            tokenizer_json, " gives '", printable(other->second),
                            "'; add the token to its added_tokens"));
        if (own == listed.end()) {
            list.push_back(token.fields);
            list.back()["id"] = id;
            take(list.back());
        } else if (token.replaces || !final_tokens.count(content)) {
            own->second->update(token.fields);
        } else if (token.makes_special) {
            (*own->second)["special"] = true;
        }
        if (token.id >= 0) final_tokens.insert(content);
    }
    return added;
}

DeclaredTokens read_declared_tokens(const ModelFiles& model) {
    return std::move(DeclarationReader(model).out);
}

// Tests data/declared_tokens.h against the ids of transformers (dev/peers/make_declared_tokens_fixture.py), and what is
// refused.
#include "data/declared_tokens.h"

#include <gtest/gtest.h>

#include <ctime>

#include "data/chat_template.h"
#include "data/tokenizer.h"
#include "dev/tests/tokenizer_fixture.h"

using nlohmann::json;

namespace {

using Files = std::map<std::string, std::string>;

class ModelDirectory : public TempDir {
  public:
    explicit ModelDirectory(const Files& files, const std::vector<std::string>& special = {}) {
        write_file(file("tokenizer.json"), tokenizer_description("gpt2", special).dump());
        for (const auto& [name, content] : files) write_file(file(name), content);
    }
    Tokenizer tokenizer() const { return Tokenizer(file("tokenizer.json")); }
};

std::string name_of(const Tokenizer& tokenizer, int32_t id) {
    return id < 0 ? "" : tokenizer.decode(id);
}

}  // namespace

TEST(DeclaredTokens, IdsMatchTransformers) {
    const char* const other = std::getenv("DECLARED_TOKENS_FIXTURE");
    const json fixture = json::parse(read_file(other ? other : "dev/fixtures/declared_tokens.json"));
    ASSERT_GE(fixture["cases"].size(), 100u);
    for (const json& one : fixture["cases"]) {
        const ModelDirectory model(one["files"].get<Files>());
        json description = fixture["tokenizers"][one["in_vocab"] ? 1 : 0];
        description["added_tokens"] = one["added_tokens"];
        write_file(model.file("tokenizer.json"), description.dump());
        SCOPED_TRACE(one.dump());
        const Tokenizer tokenizer = model.tokenizer();
        for (size_t i = 0; i < fixture["texts"].size(); i++) {
            EXPECT_EQ(tokenizer.encode(fixture["texts"][i].get<std::string>(), true),
                      one["ids"][i].get<std::vector<int32_t>>())
                << fixture["texts"][i];
        }
        EXPECT_EQ(tokenizer.vocab_size(), one["vocab_size"]);
        const int32_t eos = one["eos"];
        EXPECT_EQ(tokenizer.end_of_text(), eos >= 0 ? eos : tokenizer.end_of_text());
        json named = json::object();
        for (const auto& [name, content] : read_declared_tokens(model.path()).named) named[name] = content;
        EXPECT_EQ(named, one["named"]);
    }
}

TEST(DeclaredTokens, EndOfTextIsTheDeclaredToken) {
    const auto end = [](const std::string& config, const std::vector<std::string>& special) {
        const ModelDirectory model({{"tokenizer_config.json", config}}, special);
        const Tokenizer tokenizer = model.tokenizer();
        return name_of(tokenizer, tokenizer.end_of_text());
    };
    EXPECT_EQ(end("{}", {"</s>", "[EOS]"}), "<|endoftext|>");
    EXPECT_EQ(end(R"({"eos_token": "</s>"})", {"</s>"}), "</s>");  // <|endoftext|> is there, too
    EXPECT_EQ(end(R"({"eos_token": {"content": "[EOS]", "lstrip": false}})", {"[EOS]"}), "[EOS]");
    EXPECT_EQ(end(R"({"eos_token": "<eos>"})", {}), "<eos>");
    EXPECT_EQ(end(R"({"eos_token": null, "eos_token_id": 3})", {}), "<|endoftext|>");
    const ModelDirectory mapped({{"special_tokens_map.json", R"({"eos_token": {"content": "</s>"}})"},
                                 {"tokenizer_config.json", R"({"eos_token": "<|endoftext|>"})"}},
                                {"</s>"});
    EXPECT_EQ(name_of(mapped.tokenizer(), mapped.tokenizer().end_of_text()), "</s>");
    // A file of another name is not part of a model directory.
    write_file(mapped.file("other.json"), read_file(mapped.file("tokenizer.json")));
    const Tokenizer other(mapped.file("other.json"));
    EXPECT_EQ(name_of(other, other.end_of_text()), "<|endoftext|>");
}

TEST(DeclaredTokens, ContradictionsAndDamageAreErrors) {
    const auto error = [](const Files& files) {
        const ModelDirectory model(files, {"<x>"});
        try {
            model.tokenizer();
        } catch (const Error& e) {
            return std::string(e.what());
        }
        return std::string();
    };
    const ModelDirectory model({}, {"<x>"});
    const int64_t x = model.tokenizer().encode("<x>", true)[0], next = x + 1;
    const auto decoder = [](int64_t id, const char* token) {
        return Files{{"tokenizer_config.json",
                      json({{"added_tokens_decoder", {{std::to_string(id), {{"content", token}}}}}}).dump()}};
    };
    EXPECT_EQ(error(decoder(x, "<x>")), "");
    EXPECT_EQ(error(decoder(next, "<y>")), "");
    for (const auto& [files, words] : std::vector<std::pair<Files, std::vector<std::string>>>{
             {decoder(next, "<x>"),
              {"tokenizer_config.json: token '<x>' has the id " + str(next), "gives it " + str(x)}},
             {decoder(x, "<y>"), {"token '<y>' has the id " + str(x), "the next id there is " + str(next)}},
             {decoder(next + 9, "<y>"), {"token '<y>' has the id " + str(next + 9)}},
             {{{"added_tokens.json", str("{\"<x>\": ", next, "}")}}, {"added_tokens.json: token '<x>'"}},
             {{{"added_tokens.json", "{\"<x>\": \"1\"}"}}, {"key '<x>' is \"1\"", "a token id"}},
             {{{"tokenizer_config.json", "{\"eos_token\": 3}"}}, {"key 'eos_token' is 3, expected a token"}},
             {{{"tokenizer_config.json", "{\"additional_special_tokens\": \"<y>\"}"}}, {"expected a list of tokens"}},
             {{{"tokenizer_config.json", "{\"added_tokens_decoder\": {\"a\": {\"content\": \"<y>\"}}}"}},
              {"added_tokens_decoder.a"}},
             {{{"special_tokens_map.json", "[1]"}}, {"special_tokens_map.json: JSON, but not an object"}},
             {{{"special_tokens_map.json", "{"}}, {"special_tokens_map.json: broken JSON"}}}) {
        const std::string found = error(files);
        for (const std::string& word : words) EXPECT_NE(found.find(word), std::string::npos) << found << "\n" << word;
        EXPECT_EQ(found.find('\n'), std::string::npos);
    }
}

TEST(DeclaredTokens, ManyKeysTakeLinearTime) {
    std::string keys, names;
    for (int i = 0; i < 300000; i++) keys += str(i ? "," : "", "\"k", i, "\":0");
    for (int i = 0; i < 100000; i++) names += str(i ? "," : "", "\"n", i, "\":\"</s>\"");
    const ModelDirectory model({{"tokenizer_config.json", str("{\"extra_special_tokens\": {", names, "},", keys, "}")},
                                {"added_tokens.json", "{}"}});
    const std::clock_t begin = std::clock();  // of this process: other programs may run
    EXPECT_EQ(read_declared_tokens(model.path()).named.size(), 100000U);
    EXPECT_LT(double(std::clock() - begin) / CLOCKS_PER_SEC, 20);
}

TEST(DeclaredTokens, AreVariablesOfChatTemplates) {
    const ModelDirectory model(
        {{"tokenizer_config.json", R"({"extra_special_tokens": {"boi": "<i>"}, "image_token": "<img>"})"},
         {"special_tokens_map.json", R"({"eos_token": "</s>"})"},
         {"chat_template.jinja", "{{ eos_token + boi + image_token }}"}});
    const ChatTemplate chat(model.path());
    const Tokenizer tokenizer = model.tokenizer();
    EXPECT_EQ(chat.render({}, false, local_time_now()).chars, "</s><i><img>");
    EXPECT_EQ(chat.tokens({}, false, local_time_now(), tokenizer).size(), 3u);
}

TEST(DeclaredTokens, TheSameTokenizerHasTheSameDeclaredTokens) {
    const ModelDirectory plain({}, {"<x>"}), same({{"tokenizer_config.json", R"({"eos_token": "<x>"})"}}, {"<x>"}),
        other({{"tokenizer_config.json", R"({"eos_token": "<y>"})"}}, {"<x>"});
    EXPECT_TRUE(Tokenizer::same(plain.path(), same.file("tokenizer.json")));
    EXPECT_FALSE(Tokenizer::same(plain.path(), other.file("tokenizer.json")));
}

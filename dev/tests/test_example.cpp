// Training examples: the loss tokens of conversations by each family's chat template, as transformers' renderings
// define them (dev/fixtures/chat_templates.json), and of a prompt and its response without a template.
#include "data/example.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "dev/tests/tokenizer_fixture.h"

namespace {

using nlohmann::json;

std::tm fixture_date() {
    std::tm date = {};
    date.tm_year = 126;
    date.tm_mon = 6;
    date.tm_mday = 4;
    return date;
}

ChatTemplate chat_template(const std::string& source, json config = json::object()) {
    const TempDir dir;
    write_file(dir.file("chat_template.jinja"), source);
    write_file(dir.file("tokenizer_config.json"), config.dump());
    return ChatTemplate(dir.path());
}

std::string error_of(const std::function<void()>& work) {
    try {
        work();
        return "";
    } catch (const Error& e) {
        return e.what();
    }
}

// The loss tokens as text.
std::string learnt(const Example& example, const Tokenizer& tokenizer) {
    std::string text;
    for (size_t i = 0; i < example.tokens.size(); i++)
        if (example.loss[i]) text += tokenizer.decode(example.tokens[i]);
    return text;
}

constexpr const char* CHATML =
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

TEST(Examples, TokensAndLossOfEachFamily) {
    const json fixture = json::parse(read_file("dev/fixtures/chat_templates.json"));
    std::map<std::string, int64_t> equal;
    int64_t refused = 0, failed = 0;
    for (const json& family : fixture["families"]) {
        const std::string name = family["name"].get<std::string>();
        const ChatTemplate model = chat_template(family["template"].get<std::string>(), family["named"]);
        const Tokenizer tokenizer = tokenizer_fixture(family["tokenizer"].get<std::string>(),
                                                      family["special"].get<std::vector<std::string>>());
        for (const json& one : family["examples"]) {
            std::vector<Message> messages;
            for (const json& m : one["messages"])
                messages.push_back({m["role"].get<std::string>(), m["content"].get<std::string>()});
            const auto encode = [&] { return encode_conversation(messages, model, fixture_date(), tokenizer); };
            if (one.contains("ids")) {
                const Example example = encode();
                EXPECT_EQ(example.tokens, one["ids"].get<std::vector<int32_t>>()) << name << one["messages"];
                EXPECT_EQ(example.loss, one["mask"].get<std::vector<uint8_t>>()) << name << one["messages"];
                EXPECT_GT(std::accumulate(example.loss.begin(), example.loss.end(), 0), 0);
                equal[name]++;
            } else if (one.contains("refused")) {
                const std::string part = str("writes the assistant turn ", one["refused"].get<int64_t>(), " otherwise");
                EXPECT_NE(error_of(encode).find(part), std::string::npos) << name << error_of(encode);
                refused++;
            } else {
                EXPECT_NE(error_of(encode).find(one["fails"].get<std::string>()), std::string::npos) << name;
                failed++;
            }
        }
    }
    for (const char* name : {"smollm2", "llama3", "qwen2.5"}) EXPECT_EQ(equal[name], 6) << name;
    for (const char* name : {"mistral-v0.1", "mistral-v0.3", "mistral-nemo"}) EXPECT_GE(equal[name], 4) << name;
    EXPECT_GE(refused, 2);
    EXPECT_GE(failed, 2);
}

TEST(Examples, LossIsTheResponseThroughTheEndOfTheTurn) {
    const Tokenizer tokenizer = tokenizer_fixture("gpt2", {"<|im_start|>", "<|im_end|>"});
    const auto text = [&](const std::vector<Message>& messages, const std::string& source = CHATML) {
        return learnt(encode_conversation(messages, chat_template(source), fixture_date(), tokenizer), tokenizer);
    };
    EXPECT_EQ(text({{"user", "Hi"}, {"assistant", "Yes."}}), "Yes.<|im_end|>");
    EXPECT_EQ(text({{"system", "S"}, {"user", "Hi"}, {"assistant", "Yes."}, {"user", "So?"}, {"assistant", "No"}}),
              "Yes.<|im_end|>No<|im_end|>");
    // A template without a special token at the end of a turn: all that it writes there.
    EXPECT_EQ(text({{"user", "Hi"}, {"assistant", "Yes."}, {"user", "So?"}, {"assistant", "No"}},
                   "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
                   "{% if add_generation_prompt %}assistant:{% endif %}"),
              "Yes.;No;");
    // A template that ignores add_generation_prompt: the start of the turn is learnt with it.
    EXPECT_EQ(text({{"user", "Hi"}, {"assistant", "Yes."}},
                   "{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"),
              "<|im_start|>Yes.<|im_end|>");
    EXPECT_NE(error_of([&] { text({{"user", "Hi"}}); }).find("no assistant turn"), std::string::npos);
    EXPECT_NE(error_of([&] {
                  text({{"user", "a<|im_end|>"}, {"assistant", "b"}});
              }).find("a message holds the special token <|im_end|> as text"),
              std::string::npos);
}

TEST(Examples, PromptAndResponseWithoutATemplate) {
    const Tokenizer gpt2 = tokenizer_fixture("gpt2");
    const Example example = encode_prompt_response("it was", " the best", gpt2);
    std::vector<int32_t> expected = gpt2.encode("it was the best");
    expected.push_back(gpt2.end_of_text());
    EXPECT_EQ(example.tokens, expected);
    EXPECT_EQ(learnt(example, gpt2), " the best<|endoftext|>");
    EXPECT_NE(error_of([&] { encode_prompt_response("x", "<|endoftext|>", gpt2); }).find("special token"),
              std::string::npos);
    // A token that prompt and response share is a loss token.
    const Example joined = encode_prompt_response("it w", "as", gpt2);
    EXPECT_EQ(learnt(joined, gpt2), " was<|endoftext|>");
}

}  // namespace

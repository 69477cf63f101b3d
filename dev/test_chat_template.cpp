// The three chat formats: recognised by their special tokens, and written as the models' own templates write them.
#include "infer/chat_template.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "dev/tokenizer_fixture.h"

namespace {

using nlohmann::json;

constexpr const char* CHATML =
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou "
    "are "
    "a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}";
constexpr const char* LLAMA3 = "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}";
constexpr const char* LLAMA2 = "{{ '<<SYS>>\\n' + system_message }}{{ bos_token + '[INST] ' + content + ' [/INST]' }}";

TEST(ChatTemplates, RecognisedBySpecialTokens) {
    const ChatTemplate chatml = recognise_chat_template(CHATML, "x");
    EXPECT_EQ(chatml.format, ChatFormat::ChatML);
    EXPECT_EQ(chatml.default_system, "You are a helpful AI assistant named SmolLM, trained by Hugging Face");
    EXPECT_EQ(recognise_chat_template("{{'<|im_start|>system\\n' + system + '<|im_end|>'}}", "x").default_system, "");
    EXPECT_EQ(recognise_chat_template(LLAMA3, "x").format, ChatFormat::Llama3);
    EXPECT_EQ(recognise_chat_template(LLAMA2, "x").format, ChatFormat::Llama2);
    for (const char* other : {"", "{{ '[INST] ' + content }}", "### Human: {{ content }}"}) {
        try {
            recognise_chat_template(other, "dir/tokenizer_config.json");
            ADD_FAILURE() << other;
        } catch (const Error& e) {
            EXPECT_EQ(std::string(e.what()).rfind("dir/tokenizer_config.json: the chat template is not in ChatML", 0),
                      0u);
        }
    }
}

TEST(ChatTemplates, FoundInModelDirectory) {
    const TempDir dir;
    EXPECT_THROW(find_chat_template(dir.path()), Error);
    write_file(dir.file("tokenizer_config.json"), json{{"chat_template", LLAMA3}}.dump());
    EXPECT_EQ(find_chat_template(dir.path()).format, ChatFormat::Llama3);
    const json several =
        json::array({{{"name", "tool_use"}, {"template", LLAMA3}}, {{"name", "default"}, {"template", LLAMA2}}});
    write_file(dir.file("tokenizer_config.json"), json{{"chat_template", several}}.dump());
    EXPECT_EQ(find_chat_template(dir.path()).format, ChatFormat::Llama2);
    write_file(dir.file("tokenizer_config.json"), "{\"chat_template\": 5}");
    EXPECT_THROW(find_chat_template(dir.path()), Error);
    write_file(dir.file("chat_template.jinja"), CHATML);
    EXPECT_EQ(find_chat_template(dir.path()).format, ChatFormat::ChatML);
}

// Two user turns, as text: decode() writes special tokens out.
std::string conversation(ChatFormat format, const Tokenizer& tokenizer, const std::string& system) {
    ChatWriter writer(format, tokenizer);
    std::string text;
    const auto add = [&](const std::vector<int32_t>& tokens) { text += tokenizer.decode(tokens); };
    add(writer.begin(system)), add(writer.user_turn("Hi ")), add(tokenizer.encode("Yes."));
    add(writer.end_of_assistant_turn()), add(writer.user_turn("<|im_end|> or </s>?"));
    return text;
}

TEST(ChatWriter, MatchesTheTemplates) {
    const Tokenizer chatml = tokenizer_fixture("gpt2", {"<|im_start|>", "<|im_end|>"});
    EXPECT_EQ(
        conversation(ChatFormat::ChatML, chatml, "Be kind."),
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>"
        "\n<|im_start|>user\n<|im_end|> or </s>?<|im_end|>\n<|im_start|>assistant\n");
    EXPECT_EQ(conversation(ChatFormat::ChatML, chatml, "").rfind("<|im_start|>user\nHi", 0), 0u);
    const Tokenizer llama3 = tokenizer_fixture("llama3", {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"});
    EXPECT_EQ(conversation(ChatFormat::Llama3, llama3, "Be kind."),
              "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|><|start_header_id|>user"
              "<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|>"
              "<|start_header_id|>user<|end_header_id|>\n\n<|im_end|> or </s>?<|eot_id|><|start_header_id|>assistant"
              "<|end_header_id|>\n\n");
    const Tokenizer llama2 = tokenizer_fixture("bytes", {"<s>", "</s>"});
    EXPECT_EQ(conversation(ChatFormat::Llama2, llama2, "Be kind."),
              "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST]Yes.</s><s>[INST] <|im_end|> or </s>? [/INST]");
}

// User input never becomes a special token.
TEST(ChatWriter, SpecialTokensInContentAreEncodedAsText) {
    const Tokenizer tokenizer = tokenizer_fixture("gpt2", {"<|im_start|>", "<|im_end|>"});
    ChatWriter writer(ChatFormat::ChatML, tokenizer);
    const int32_t end = writer.end_tokens()[0];
    const std::vector<int32_t> plain = writer.user_turn("a"), tricky = writer.user_turn("a<|im_end|>");
    EXPECT_EQ(std::count(plain.begin(), plain.end(), end), std::count(tricky.begin(), tricky.end(), end));
    EXPECT_GT(tricky.size(), plain.size());
    EXPECT_THROW(ChatWriter(ChatFormat::Llama3, tokenizer), Error);
}

}  // namespace

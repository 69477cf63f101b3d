// Training examples: the loss tokens of conversations by each family's chat template, as transformers' renderings
// define them (dev/fixtures/chat_templates.json), and of a prompt and its response without a template.
#include "data/example.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <numeric>
#include <regex>

#include "data/conversation_json.h"
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
                const std::string part = str("writes message ", one["refused"].get<int64_t>(), ", an assistant turn");
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

// The definition, as it is: every turn rendered by itself. Returns the mask, or nothing where a turn is refused.
std::vector<uint8_t> loss_by_definition(const std::vector<Message>& messages, const ChatTemplate& model,
                                        const Tokenizer& tokenizer) {
    const auto render = [&](size_t n, bool prompt) {
        return model.render({messages.begin(), messages.begin() + int64_t(n)}, prompt, fixture_date());
    };
    const auto shared = [](const auto& a, const auto& b) {
        const size_t n = std::min(a.size(), b.size());
        return size_t(std::mismatch(a.begin(), a.begin() + int64_t(n), b.begin()).first - a.begin());
    };
    const jinja::Text whole = render(messages.size(), false);
    const std::vector<int32_t> ids = ChatTemplate::encode(whole, tokenizer);
    std::vector<uint8_t> loss(ids.size());
    for (size_t i = 0; i < messages.size(); i++) {
        if (messages[i].role != "assistant") continue;
        const jinja::Text prompt = render(i, true), turn = render(i + 1, false);
        const size_t same = shared(turn.chars, whole.chars);
        if (shared(prompt.chars, turn.chars) < prompt.size() || prompt.size() > same) return {};
        for (size_t k = same; k < turn.size(); k++)
            if (turn.marks[k] & jinja::CONTENT) return {};
        const size_t begin = shared(ChatTemplate::encode(prompt, tokenizer), ids);
        size_t end = std::max(begin, shared(ChatTemplate::encode(turn, tokenizer), ids)), k = begin;
        while (k < end && tokenizer.is_special(ids[k])) k++;
        while (k < end && !tokenizer.is_special(ids[k])) k++;
        std::fill(loss.begin() + int64_t(begin), loss.begin() + int64_t(k < end ? k + 1 : end), uint8_t(1));
    }
    return loss;
}

// Templates that write a turn by what follows, and some that only seem to: the loss is that of the definition.
TEST(Examples, LossFollowsTheDefinitionForTemplatesThatLookAhead) {
    const Tokenizer tokenizer = tokenizer_fixture("gpt2", {"<|im_start|>", "<|im_end|>"});
    const std::string turn = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}",
                      ending = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
                      loop = "{% for m in messages %}";
    const std::vector<std::string> sources = {
        loop + turn + ending,
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}" +
            loop + turn + ending,
        "{% for m in messages[1:] %}" + turn + "{% else %}none" + ending,
        loop + "{% if loop.last %}!{% endif %}" + turn + ending,
        loop + turn + "{% if not loop.last %}<|im_end|>{% endif %}" + ending,
        loop + "{{ loop.revindex }}" + turn + ending,
        loop + "{{ loop.nextitem.role }}" + turn + ending,
        loop + "{{ loop.previtem.role }}{{ loop.index }}" + turn + ending,
        loop + "{{ messages[loop.index0].role }}" + turn + ending,
        loop + "{{ messages[loop.index].role }}" + turn + ending,
        "{{ messages|length }}" + loop + turn + ending,
        "{{ messages[1].role }}" + loop + turn + ending,
        loop + turn + ending + "{{ messages[-1].role }}",
        loop + turn + ending + "{{ messages[0].role }}",
        loop + turn + ending + "{{ messages|length }}",
        "{% set n = namespace(k=0) %}" + loop + "{% set n.k = n.k + 1 %}" + turn + ending + "{{ n.k }}",
        "{% set n = namespace(k=0) %}" + loop + "{% set n.k = n.k + 1 %}{% endfor %}" + loop + "{{ n.k }}" + turn +
            ending,
        "{% set l = [] %}" + loop + "{% set _ = l.append(1) %}" + turn + ending + "{{ l|length }}",
        "{% set t %}" + loop + turn + "{% endfor %}{% endset %}{{ t[5:] }}{% if add_generation_prompt %}x{% endif %}",
        "{% for m in messages if m.role != 'system' %}" + turn + ending,
        loop + turn + "{% if loop.index == 3 %}{% break %}{% endif %}" + ending,
        "{% macro f() %}{{ messages|length }}{% endmacro %}" + loop + "{{ f() }}" + turn + ending,
        loop + turn + "{% endfor %}{% for m in messages %}{{ m.role }}" + ending,
        "{{ add_generation_prompt }}" + loop + turn + ending,
        loop + "{{ m.role }}: {{ m.content }}\n" + ending,
        loop + turn + "{% endfor %}",
    };
    const std::vector<std::vector<Message>> conversations = {
        {{"user", "Hi"}, {"assistant", "Yes."}},
        {{"system", "S"}, {"user", "Hi"}, {"assistant", "it was"}, {"user", "So?"}, {"assistant", "the best"}},
        {{"assistant", "First"}, {"user", "b"}, {"assistant", "d"}, {"user", "last"}},
        {{"user", "a"}, {"assistant", ""}, {"assistant", "c"}, {"user", "d"}, {"assistant", "e"}, {"user", "f"}},
    };
    int refused = 0, equal = 0;
    for (const std::string& source : sources) {
        const ChatTemplate model = chat_template(source);
        for (const auto& messages : conversations) {
            std::vector<uint8_t> expected, found;
            const auto by_definition = [&] { expected = loss_by_definition(messages, model, tokenizer); };
            const auto encode = [&] { found = encode_conversation(messages, model, fixture_date(), tokenizer).loss; };
            const std::string fails = error_of(by_definition), error = error_of(encode);
            EXPECT_EQ(expected, found) << source << "\n" << error;
            EXPECT_EQ(error.empty(), !expected.empty()) << source << "\n" << error << fails;
            (found.empty() ? refused : equal)++;
        }
    }
    EXPECT_GT(equal, 15);
    EXPECT_GT(refused, 20);
}

// The time of a conversation grows with its length.
TEST(Examples, LongConversationsTakeLittleTime) {
    const Tokenizer tokenizer = tokenizer_fixture("gpt2", {"<|im_start|>", "<|im_end|>"});
    std::vector<Message> messages;
    for (int i = 0; i < 3000; i++) messages.push_back({i % 2 ? "assistant" : "user", str("it was the best ", i)});
    const std::clock_t start = std::clock();
    const Example example = encode_conversation(messages, chat_template(CHATML), fixture_date(), tokenizer);
    EXPECT_LT(double(std::clock() - start) / CLOCKS_PER_SEC, 3);
    const int32_t end = tokenizer.encode("<|im_end|>", true)[0];
    int64_t ends = 0;
    for (size_t i = 0; i < example.tokens.size(); i++) ends += example.tokens[i] == end && example.loss[i];
    EXPECT_EQ(ends, 1500);
}

// DeepSeek-R1's template: the generation prompt opens the reasoning, which stored turns leave out.
TEST(Examples, GenerationPromptThatStoredTurnsLeaveOut) {
    const Tokenizer tokenizer = tokenizer_fixture("gpt2", {"<|User|>", "<|Assistant|>", "<|end|>"});
    const std::string r1 =
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}{% else %}"
        "{{ '<|Assistant|>' + m.content.split('</think>')[-1]|trim + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}";
    const auto encode = [&](const std::vector<Message>& messages) {
        return encode_conversation(messages, chat_template(r1), fixture_date(), tokenizer);
    };
    const Example example = encode({{"user", "Hi"}, {"assistant", "<think>\nWhy.\n</think>\n\nYes. \n"}});
    EXPECT_EQ(tokenizer.decode(example.tokens), "<|User|>Hi<|Assistant|><think>\nWhy.\n</think>\n\nYes.<|end|>");
    EXPECT_EQ(learnt(example, tokenizer), "Why.\n</think>\n\nYes.<|end|>");
    const std::string error = error_of([&] { encode({{"user", "Hi"}, {"assistant", "Yes."}}); });
    EXPECT_NE(
        error.find("the generation prompt is '<|Assistant|><think>\\n', but message 2, an assistant turn, does not "
                   "begin so"),
        std::string::npos)
        << error;
    const std::string many = error_of([&] {
        encode({{"user", "Hi"},
                {"assistant", "<think>\na</think>b"},
                {"user", "c"},
                {"assistant", "<think>\nd</think>e"}});
    });
    EXPECT_NE(many.find("but message 2, an assistant turn"), std::string::npos) << many;
    // A stored turn that begins as the generation prompt is trained as it is.
    const std::string kept =
        "{% for m in messages %}{{ '<|User|>' if m.role == 'user' else '<|Assistant|>' }}{{ m.content + '<|end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}";
    EXPECT_EQ(learnt(encode_conversation({{"user", "Hi"}, {"assistant", "<think>\nWhy.\n</think>Yes."}},
                                         chat_template(kept), fixture_date(), tokenizer),
                     tokenizer),
              "Why.\n</think>Yes.<|end|>");
}

// What came from messages decides where a turn ends: the special tokens around calls of tools are loss tokens, whether
// the template puts them before, between or after what it writes of the message.
TEST(Examples, CallsOfTools) {
    const std::string source =
        "{{ tools|tojson }}{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% for c in "
        "m.tool_calls or [] %}<|call|>{{ c.name }}<|sep|>{{ c.arguments|tojson }}<|end|>{% endfor %}</s>;"
        "{% else %}<|sep|>{{ m.role }}:{{ m.content }};{% endif %}{% endfor %}";
    const Tokenizer tokenizer = tokenizer_fixture("gpt2", {"<|call|>", "<|sep|>", "<|end|>", "</s>"});
    const ChatTemplate model = chat_template(source, {{"eos_token", "</s>"}});
    const auto example = [&](const std::string& record) {
        const ConversationInput input = read_conversation(record, model.reads_parts());
        return encode_conversation(input.messages, model, fixture_date(), tokenizer, input.variables);
    };
    const std::string
        calls = R"("tool_calls": [{"name": "f", "arguments": {"b": 1, "a": "x"}}, {"name": "g", "arguments": []}]})",
        user = R"({"role": "user", "content": "Hi"})", tool = R"({"role": "tool", "content": "3"})";
    const std::string whole = "[" + user + R"(, {"role": "assistant", "content": "", )" + calls + ", " + tool +
                              R"(, {"role": "assistant", "content": "It is", )" + calls + "]";
    const std::string written = R"(<|call|>f<|sep|>{"b": 1, "a": "x"}<|end|><|call|>g<|sep|>)";
    const std::string ends = written + "[]<|end|></s>";
    const Example both = example(R"({"tools": [{"n": null}], "messages": )" + whole + "}");
    EXPECT_EQ(tokenizer.decode(both.tokens),
              R"([{"n": null}]<|sep|>user:Hi;)" + ends + ";<|sep|>tool:3;It is" + ends + ";");
    EXPECT_EQ(learnt(both, tokenizer), ends + "It is" + ends);
    EXPECT_EQ(learnt(example("{\"inputs\": [0, 1], \"messages\": " + whole + "}"), tokenizer), "It is" + ends);
    // What came from a message stays text, and a turn whose calls the template does not write is refused.
    const std::string special = std::regex_replace(whole, std::regex(R"("x")"), R"("<|end|>")");
    EXPECT_NE(error_of([&] { example("{\"messages\": " + special + "}"); }).find("holds the special token <|end|>"),
              std::string::npos);
    const ConversationInput input = read_conversation("{\"messages\": " + whole + "}", false);
    EXPECT_NE(error_of([&] {
                  encode_conversation(input.messages,
                                      chat_template("{% for m in messages %}{{ m.content }};{% endfor %}"),
                                      fixture_date(), tokenizer);
              }).find("writes nothing of message 2"),
              std::string::npos);
    const std::vector<std::string> texts = {"Hi", "", "f", "x", "g", "3", "It is", "f", "x", "g"};
    EXPECT_EQ(input.texts, texts);
}

TEST(Examples, PartsOfText) {
    const Tokenizer tokenizer = tokenizer_fixture("gpt2");
    const std::string record = R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"},
        {"type": "text", "text": "b"}]}, {"role": "assistant", "content": "c"}]})";
    const auto text = [&](const std::string& content) {
        const ChatTemplate model = chat_template("{% for m in messages %}" + content + ";{% endfor %}");
        const ConversationInput input = read_conversation(record, model.reads_parts());
        return model.render(input.messages, false, fixture_date(), input.variables).chars;
    };
    EXPECT_EQ(text("{{ m.content }}"), "a\nb;c;");
    EXPECT_EQ(text("{{ m.content + '!' }}"), "a\nb!;c!;");
    EXPECT_EQ(text("{{ m.content if m.content is string }}"), "a\nb;c;");
    EXPECT_EQ(text("{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}({{ p.text }})"
                   "{% endfor %}{% endif %}"),
              "(a)(b);c;");
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

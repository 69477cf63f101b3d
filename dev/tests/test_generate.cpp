// The end of a completion and the part of its text that is shown; prompts in a file; the output of a batch.
#include "infer/generate.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <sstream>

#include "dev/tests/test_util.h"
#include "dev/tests/tokenizer_fixture.h"
#include "infer/declared_sampling.h"
#include "infer/prompts.h"
#include "infer/sample_output.h"

namespace {

const Tokenizer& bytes() {
    static const Tokenizer tokenizer = tokenizer_fixture("bytes");
    return tokenizer;
}

// Feeds a text byte by byte. Returns what was shown after each byte.
std::vector<std::string> shown(const std::string& text, const CompletionOptions& options, Completion** kept = nullptr) {
    static std::vector<std::unique_ptr<Completion>> completions;  // `kept` outlives the call
    std::vector<std::string> after;
    auto total = std::make_shared<std::string>();
    completions.push_back(
        std::make_unique<Completion>(&bytes(), options, [total](std::string_view part) { *total += part; }));
    for (const int32_t id : bytes().encode(text)) {
        const bool ended = completions.back()->add(id);
        after.push_back(*total);
        if (ended) break;
    }
    if (kept) *kept = completions.back().get();
    return after;
}

TEST(Completion, OnlyWholeCharactersAreShown) {
    const CompletionOptions options;
    EXPECT_EQ(shown("a\u00e9z", options), (std::vector<std::string>{"a", "a", "a\u00e9", "a\u00e9z"}));
    EXPECT_EQ(shown("\U0001F600", options).back(), "\U0001F600");
    EXPECT_EQ(shown("\U0001F600", options)[2], "");
    EXPECT_EQ(shown("x\xff y", options).back(), "x\xff y");  // invalid UTF-8 passes through
    Completion* completion;
    std::string end = "ab\xe2\x82";  // the text ends inside a character
    CompletionOptions four;
    four.max_tokens = 4;
    EXPECT_EQ(shown(end, four, &completion).back(), end);
    EXPECT_EQ(completion->text(), end);
}

TEST(Completion, StopStringsAreNeverShown) {
    CompletionOptions options;
    options.stop = {"END", "\n\n"};
    Completion* completion;
    EXPECT_EQ(shown("ab ENDxyz", options, &completion).back(), "ab ");
    EXPECT_STREQ(completion->finish(), "stop");
    EXPECT_EQ(completion->text(), "ab ");
    EXPECT_EQ(completion->tokens().size(), 6u);  // those of the stop string are among them
    EXPECT_EQ(shown("E EN ENE x", options).back(),
              "E EN ENE x");  // a start that does not become a stop string is shown later
    EXPECT_EQ(shown("x EN", options).back(), "x ");
    EXPECT_EQ(shown("a\nb\n\nc", options, &completion).back(), "a\nb");
    options.stop = {"aab"};
    EXPECT_EQ(shown("aaab", options, &completion).back(), "a");  // the stop string starts inside another start of it
}

TEST(Completion, EndsAtLimitsAndEndTokens) {
    CompletionOptions options;
    options.max_tokens = 3;
    Completion* completion;
    EXPECT_EQ(shown("abcdef", options, &completion).back(), "abc");
    EXPECT_STREQ(completion->finish(), "length");
    options.max_tokens = 10;
    options.eos = {int32_t('x'), bytes().encode("d")[0]};
    EXPECT_EQ(shown("abcdef", options, &completion).back(), "abc");
    EXPECT_STREQ(completion->finish(), "eos");
    EXPECT_EQ(completion->tokens(), bytes().encode("abc"));
    options.stop = {"x"};
    EXPECT_THROW(Completion(nullptr, options), Error);
    options.stop.clear();
    Completion without_text(nullptr, options);
    EXPECT_FALSE(without_text.add(1000));
    EXPECT_EQ(without_text.text(), "");
}

TEST(ContextPolicy, Check) {
    for (const int64_t keep : {0, 5, 6}) (ContextPolicy{true, keep, true}.check(8, 100));  // a longer prompt slides
    for (const int64_t keep : {int64_t(-1), int64_t(7), INT64_MAX})
        EXPECT_THROW((ContextPolicy{true, keep}.check(8, 1)), Error) << keep;
    (ContextPolicy{false, 7}.check(8, 8));
    expect_error(
        [] {
            ContextPolicy{false, 0}.check(8, 9);
        },
        "a prompt of 9 tokens exceeds the context of 8; shorten the prompt or raise --context");
    expect_error([] { ContextPolicy{}.check(8, 9); },
                 "a prompt of 9 tokens exceeds the context of 8; shorten the prompt or raise --context; --context-full "
                 "slide cuts it");
    EXPECT_EQ((ContextPolicy{true, 0, true}.cut_note(8, 8)), "");
    EXPECT_EQ((ContextPolicy{true, 0, true}.cut_note(64, 180)),
              "a prompt of 180 tokens exceeds the context of 64: the model reads the last 32 of them");
    EXPECT_EQ((ContextPolicy{true, 3, true}.cut_note(8, 9)),
              "a prompt of 9 tokens exceeds the context of 8: the model reads the first 3 and the last 2 of them");
}

TEST(Prompts, SeparatedByLinesOfDashes) {
    using Strings = std::vector<std::string>;
    EXPECT_EQ(split_prompts("one\ntwo\n"), (Strings{"one\ntwo"}));
    EXPECT_EQ(split_prompts("one\n\n"), (Strings{"one\n"}));
    EXPECT_EQ(split_prompts("\xEF\xBB\xBFone\n---\n\xEF\xBB\xBFtwo"), (Strings{"one", "\xEF\xBB\xBFtwo"}));
    EXPECT_EQ(split_prompts("\xEF\xBB\xBF"), (Strings{""}));
    EXPECT_EQ(split_prompts("\n"), (Strings{""}));
    EXPECT_EQ(split_prompts("one\n---\ntwo\n"), (Strings{"one", "two"}));
    EXPECT_EQ(split_prompts("one\n\n---\n--- no\n---\n"), (Strings{"one\n", "--- no", ""}));
    EXPECT_EQ(split_prompts("---\na"), (Strings{"", "a"}));
    EXPECT_EQ(split_prompts(""), (Strings{""}));
    EXPECT_EQ(split_prompts("one\r\n\r\n---\r\ntwo\r\n"), (Strings{"one\r\n", "two"}));
    EXPECT_EQ(split_prompts("one\r\n"), (Strings{"one"}));
    EXPECT_EQ(split_prompts("one\r\n---\ntwo\r"), (Strings{"one", "two\r"}));
}

TEST(Prompts, EndTokensComeFromTheModelAndItsGenerationConfig) {
    const TempDir dir;
    ModelSource source;
    source.files = dir.path();
    source.config.vocab_size = 100;
    source.config.eos = 7;
    const auto ends = [&](const std::string& file) {
        write_file(dir.file("generation_config.json"), file);
        return end_tokens(source, nullptr);
    };
    using Ids = std::vector<int32_t>;
    EXPECT_EQ(end_tokens(source, nullptr), (Ids{7}));
    EXPECT_EQ(ends("{\"eos_token_id\": 99}"), (Ids{7, 99}));
    EXPECT_EQ(ends("{\"eos_token_id\": [3, 4]}"), (Ids{7, 3, 4}));
    // Not ids of this vocabulary, 2^32 + 9 and 2^64 − 1 among them.
    EXPECT_EQ(ends("{\"eos_token_id\": [100, -1, 4294967305, 18446744073709551615, 1.5, \"9\", null]}"), (Ids{7}));
    EXPECT_EQ(ends("{}"), (Ids{7}));
    EXPECT_THROW(ends("[9]"), Error);
    write_file(dir.file("generation_config.json"), "{}");
    source.original_config = {{"eos_token_id", {7, 8, 100}}};
    EXPECT_EQ(end_tokens(source, nullptr), (Ids{7, 7, 8}));
}

TEST(Prompts, EndTokensAreAddedToTheGenerationConfig) {
    const TempDir base, out, adapter;
    ModelSource source;
    source.config.vocab_size = 100;
    source.config.eos = 7;
    source.config.bos = 1;
    const std::string path = out.file("generation_config.json");
    // A fresh model; a base without the file, whose config.json says what transformers takes.
    add_end_tokens(out.path(), source, {9});
    EXPECT_EQ(read_json(path), nlohmann::json({{"eos_token_id", {7, 9}}, {"bos_token_id", 1}}));
    source.files = base.path();
    source.original_config = {{"eos_token_id", {7, 8}}, {"pad_token_id", 0}};
    add_end_tokens(out.path(), source, {9, 8});
    EXPECT_EQ(read_json(path), nlohmann::json({{"eos_token_id", {7, 8, 9}}, {"bos_token_id", 1}, {"pad_token_id", 0}}));
    // A base with the file: what it says stays, and the file does where nothing is new.
    write_file(base.file("generation_config.json"), R"({"eos_token_id": 2, "temperature": 0.6})");
    add_end_tokens(out.path(), source, {9});
    EXPECT_EQ(read_json(path), nlohmann::json({{"eos_token_id", {2, 9}}, {"temperature", 0.6}}));
    write_file(path, "as it was");
    add_end_tokens(out.path(), source, {2});
    add_end_tokens(out.path(), source, {});
    EXPECT_EQ(read_file(path), "as it was");
    // An adapter's own file ends its completions and comes into the model that it is merged into.
    source.adapter = adapter.path();
    write_file(adapter.file("generation_config.json"), R"({"eos_token_id": [2, 9]})");
    EXPECT_EQ(end_tokens(source, nullptr), (std::vector<int32_t>{7, 7, 8, 2, 9}));
    add_end_tokens(out.path(), source, {});
    EXPECT_EQ(read_json(path)["eos_token_id"], nlohmann::json({2, 9}));
}

TEST(DeclaredSampling, SetsWhatTheUserDidNot) {
    const std::set<std::string> typed = {"--top-p"};
    SamplingOptions options;
    const auto take = [&](const std::string& file) {
        options = {};
        options.top_p = 0.25f;  // typed
        const auto is_given = [&](const std::string& option) { return typed.count(option) > 0; };
        return take_declared_sampling({"G", nlohmann::json::parse(file)}, is_given, options);
    };
    EXPECT_EQ(take(R"({"eos_token_id": 2, "max_length": 4096, "temperature": null})"), "");
    EXPECT_EQ(options.temperature, 1);
    EXPECT_EQ(
        take(R"({"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1,
                       "repetition_penalty": 1.05, "num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0})"),
        "G: sets --repeat-penalty 1.05 --temperature 0.6 --top-k 20 --min-p 0.1; options on the command line win");
    EXPECT_EQ(options.temperature, 0.6f);
    EXPECT_EQ(options.top_k, 20);
    EXPECT_EQ(options.top_p, 0.25f);
    EXPECT_EQ(options.min_p, 0.1f);
    EXPECT_EQ(options.repeat_penalty, 1.05f);
    EXPECT_EQ(take(R"({"do_sample": false, "temperature": 0.6})"),
              "G: sets --temperature 0 (do_sample is false); options on the command line win");
    EXPECT_EQ(options.temperature, 0);
    EXPECT_EQ(
        take(R"({"num_beams": 4, "stop_strings": [], "suppress_tokens": [5], "top_k": 7})"),
        "G: sets --top-k 7; options on the command line win; not supported and ignored: suppress_tokens, num_beams");
    EXPECT_EQ(take(R"({"no_repeat_ngram_size": 1})"), "G: not supported and ignored: no_repeat_ngram_size");
    // A wrong value matters only where it would be used.
    EXPECT_EQ(take(R"({"top_p": 7})"), "");
    for (const char* file : {R"({"temperature": -1})", R"({"temperature": "hot"})", R"({"top_k": 2.5})",
                             R"({"top_k": -1})", R"({"min_p": 1.5})", R"({"repetition_penalty": 0})"})
        EXPECT_THROW(take(file), Error) << file;
}

TEST(SampleOutput, PrintsInOrder) {
    std::ostringstream out;
    SampleOutput output(out, {"A", "B", "C"});
    output.add(1, "b");
    output.add(0, "a");
    EXPECT_EQ(out.str(), "Aa");
    output.finish(1);
    output.add(2, "c");
    EXPECT_EQ(out.str(), "Aa");
    output.add(0, "aa");
    output.finish(0, "0.5\n");
    EXPECT_EQ(out.str(), "Aaaa\n0.5\n---\nBb\n---\nCc");
    output.add(2, "c");
    output.finish(2);
    EXPECT_EQ(out.str(), "Aaaa\n0.5\n---\nBb\n---\nCcc\n");
}

TEST(SampleOutput, StatisticsAddUp) {
    GenerateStatistics s;
    s.prompt_tokens = 100;
    s.prefill_seconds = 0.5;
    EXPECT_EQ(statistics_text(s, 0), "prompt: 100 tokens in 0.500 s, 200 tokens/s\n");
    s.completion_tokens = 63;
    s.decode_tokens = 60;
    s.steps = 20;
    s.step_sequences = 60;
    s.step_bytes = 4000000000;
    s.decode_seconds = 2;
    EXPECT_EQ(statistics_text(s, 8e9),
              "prompt: 100 tokens in 0.500 s, 200 tokens/s\ncompletion: 63 tokens, 60 of them by decode steps in "
              "2.000 s, 30.0 tokens/s, 10.0 for each sequence, weights and cache read at 2.0 GB/s, 25% of the 8.0 GB/s "
              "measured\n");
}

}  // namespace

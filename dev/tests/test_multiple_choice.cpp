// Questions with endings: the file, and which tokens of a text are scored.
#include "data/multiple_choice.h"

#include <gtest/gtest.h>

#include "dev/tests/tokenizer_fixture.h"

namespace {

TEST(Questions, ReadLineByLine) {
    const TempDir dir;
    const std::string path = dir.file("q.jsonl");
    write_file(path,
               "{\"ctx\": \"A\", \"endings\": [\"b\", \"c\"], \"label\": 1, \"more\": 3}\n\n"
               "{\"ctx\": \"\", \"endings\": [\"x\", \"y\", \"z\"], \"label\": 0}");
    const std::vector<Question> q = read_questions(path);
    ASSERT_EQ(q.size(), 2u);
    EXPECT_EQ(q[0].context, "A");
    EXPECT_EQ(q[0].label, 1u);
    EXPECT_EQ(q[1].endings, (std::vector<std::string>{"x", "y", "z"}));
}

TEST(Questions, DamageIsAOneLineError) {
    const TempDir dir;
    const std::string path = dir.file("q.jsonl"),
                      good = "{\"ctx\": \"A\", \"endings\": [\"b\", \"c\"], \"label\": 0}\n";
    for (const auto& [line, message] : std::vector<std::pair<std::string, std::string>>{
             {"{\"ctx\": \"A\"", "expected {\"ctx\": text, \"endings\": [text, ...], \"label\": number}"},
             {"{\"ctx\": " + std::string(200000, '[') + std::string(200000, ']') + "}",
              "expected {\"ctx\": text, \"endings\": [text, ...], \"label\": number}"},
             {"[]", "expected {\"ctx\": text, \"endings\": [text, ...], \"label\": number}"},
             {"{\"ctx\": 1, \"endings\": [\"b\", \"c\"], \"label\": 0}",
              "expected {\"ctx\": text, \"endings\": [text, ...], \"label\": number}"},
             {"{\"ctx\": \"A\", \"endings\": [\"b\"], \"label\": 0}",
              "1 endings, in the first line 2; put questions and texts with a last word into files of their own"},
             {"{\"ctx\": \"A\", \"endings\": [], \"label\": 0}", "there is no ending"},
             {"{\"ctx\": \"A\", \"endings\": [\"b\", \"c\"]}",
              "expected {\"ctx\": text, \"endings\": [text, ...], \"label\": number}"},
             {"{\"ctx\": \"A\", \"endings\": [\"b\", \"\"], \"label\": 0}", "an ending is not a string, or is empty"},
             {"{\"ctx\": \"A\", \"endings\": [\"b\", 7], \"label\": 0}", "an ending is not a string, or is empty"},
             {"{\"ctx\": \"A\", \"endings\": [\"b\", [\"c\"]], \"label\": 0}",
              "an ending is not a string, or is empty"},
             {"{\"ctx\": \"A\", \"endings\": [\"b\", \"c\"], \"label\": 2}",
              "label 2 is not the index of one of the 2 endings"},
             {"{\"ctx\": \"A\", \"endings\": [\"b\", \"c\"], \"label\": -1}",
              "label -1 is not the index of one of the 2 endings"}}) {
        write_file(path, good + line + "\n" + good);
        try {
            read_questions(path);
            ADD_FAILURE() << line;
        } catch (const Error& e) {
            EXPECT_EQ(e.what(), path + ": line 2: " + message);
        }
    }
    write_file(path, "\n");
    EXPECT_THROW(read_questions(path), Error);
}

TEST(Questions, EndingsAreTokenizedAfterTheContext) {
    const Tokenizer bytes = tokenizer_fixture("bytes");
    const Choice c = make_choice(bytes, "The sea", "is blue");
    EXPECT_EQ(bytes.decode(c.tokens), "The sea is blue");
    EXPECT_EQ(c.first, 7);
    EXPECT_EQ(c.characters, 7);
    EXPECT_EQ(make_choice(bytes, "Il", "été").characters, 3);
    EXPECT_EQ(make_choice(bytes, "Answer:\n", "x").first, 7);  // white space at the context's end is the ending's
    // As lm-evaluation-harness does, whose HellaSwag has such endings.
    EXPECT_EQ(bytes.decode(make_choice(bytes, "The sea", " is blue").tokens), "The sea  is blue");
    EXPECT_EQ(make_choice(bytes, "The sea", " is blue").characters, 8);
    EXPECT_EQ(make_choice(bytes, "The sea ", "is blue").first, 7);
    EXPECT_EQ(bytes.decode(make_choice(bytes, "", "x").tokens), " x");
    EXPECT_EQ(make_choice(bytes, "", "x").first, 0);
    // A tokenizer that merges over the seam still leaves the ending a token.
    const Tokenizer merging = tokenizer_fixture("gpt2");
    const Choice d = make_choice(merging, "th", "e");
    EXPECT_LT(d.first, int64_t(d.tokens.size()));
}

// A model whose loss of a token is the token's own id, which expects every token to be odd, and which notes what it was
// asked.
struct CountingModel {
    std::vector<Batch> passes;
    ChoiceScorer scorer(std::vector<int32_t> start, int64_t B, int64_t T) {
        return {std::move(start), 9, B, T, [this](const Batch& batch) {
                    passes.push_back(batch);
                    ChoiceScorer::TokenScores scores;
                    for (const int32_t target : batch.targets) {
                        scores.losses.push_back(float(std::max(target, 0)));
                        scores.missed.push_back(target > 0 && target % 2 == 0);
                    }
                    return scores;
                }};
    }
};

std::vector<double> nats_of(const std::vector<EndingScore>& scores) {
    std::vector<double> nats;
    for (const EndingScore& s : scores) nats.push_back(s.nats);
    return nats;
}

TEST(Questions, EndingsAreScoredInPackedBatches) {
    const std::vector<Choice> choices = {{{1, 2, 3}, 1, 4}, {{4, 5}, 0, 2}, {{1, 2, 3, 6, 7}, 3, 1}};
    CountingModel model;
    const std::vector<EndingScore> scores = score_choices(choices, model.scorer({}, 2, 4));
    EXPECT_EQ(nats_of(scores), (std::vector<double>{5, 9, 13}));
    EXPECT_EQ(scores[0].missed, 1);  // 2 of 2, 3; 4 of 4, 5; 6 of 6, 7
    EXPECT_EQ(scores[2].missed, 1);
    ASSERT_EQ(model.passes.size(), 1u);  // 2 + 2 + 4 tokens
    EXPECT_EQ(model.passes[0].cum_seqlens, (std::vector<int32_t>{0, 2, 4, 8}));
    EXPECT_EQ(model.passes[0].tokens, (std::vector<int32_t>{1, 2, 9, 4, 1, 2, 3, 6}));  // 9: nothing stands in front
    EXPECT_EQ(model.passes[0].positions, (std::vector<int32_t>{0, 1, 0, 1, 0, 1, 2, 3}));
    EXPECT_EQ(model.passes[0].max_seqlen, 4);
    // Two passes; the longest text loses its beginning; what the tokenizer puts in front is read and not scored.
    CountingModel small;
    EXPECT_EQ(nats_of(score_choices(choices, small.scorer({8}, 1, 3))), (std::vector<double>{5, 9, 13}));
    ASSERT_EQ(small.passes.size(), 3u);
    EXPECT_EQ(small.passes[0].tokens, (std::vector<int32_t>{8, 1, 2}));
    EXPECT_EQ(small.passes[2].tokens, (std::vector<int32_t>{2, 3, 6}));
    EXPECT_EQ(cut_choices_note(choices, 1, 3),
              "1 of 3 endings with their contexts are longer than --seq-len 3 and lose their beginning; raise "
              "--seq-len");
    EXPECT_EQ(cut_choices_note(choices, 0, 4), "");
    EXPECT_NE(cut_choices_note({{{4, 5, 6}, 0, 2}}, 0, 2), "");  // the input in front of it is cut
}

TEST(Questions, AccuracyCountsTheMostLikelyEnding) {
    std::vector<Question> questions(2);
    questions[0].endings = {"a", "b"};
    questions[0].label = 1;
    questions[1].endings = {"a", "b", "c"};
    questions[1].label = 2;
    const std::vector<Choice> choices = {{{}, 0, 1}, {{}, 0, 4}, {{}, 0, 1}, {{}, 0, 1}, {{}, 0, 1}};
    const QuestionResults a = question_results(questions, choices, {{2}, {3}, {5}, {5}, {4}});
    // By the whole ending the first question goes to "a", by the character to "b".
    EXPECT_EQ(a, (QuestionResults{{"accuracy", 0.5}, {"accuracy_norm", 1}}));
    EXPECT_TRUE(std::isnan(question_results(questions, choices, {{2}, {3}, {5}, {NAN}, {4}})[0].second));
}

TEST(Questions, LastWordsCountIfTheyArePredicted) {
    const TempDir dir;
    const std::string path = join_path(dir.path(), "last_words.jsonl");
    write_file(path, "{\"ctx\": \"A\", \"endings\": [\"b\"]}\n{\"ctx\": \"C\", \"endings\": [\"d\"], \"label\": 0}\n");
    const std::vector<Question> questions = read_questions(path);
    EXPECT_TRUE(ask_for_last_words(questions));
    const QuestionResults a = question_results(questions, {{}, {}}, {{std::log(2), 0}, {std::log(8), 1}});
    ASSERT_EQ(a.size(), 2u);
    EXPECT_EQ(a[0], (std::pair<std::string, double>("accuracy", 0.5)));
    EXPECT_EQ(a[1].first, "perplexity");
    EXPECT_NEAR(a[1].second, 4, 1e-12);
    EXPECT_TRUE(std::isnan(question_results(questions, {{}, {}}, {{NAN, 0}, {1, 0}})[0].second));
}

}  // namespace

// Questions with endings: the file, and which tokens of a text are scored.
#include "data/multiple_choice.h"

#include <gtest/gtest.h>

#include "dev/tokenizer_fixture.h"

namespace {

TEST(Questions, AreReadLineByLine) {
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

TEST(Questions, DamageIsOneClearError) {
    const TempDir dir;
    const std::string path = dir.file("q.jsonl"),
                      good = "{\"ctx\": \"A\", \"endings\": [\"b\", \"c\"], \"label\": 0}\n";
    for (const auto& [line, message] : std::vector<std::pair<std::string, std::string>>{
             {"{\"ctx\": \"A\"", "expected {\"ctx\": text, \"endings\": [text, ...], \"label\": number}"},
             {"[]", "expected {\"ctx\": text, \"endings\": [text, ...], \"label\": number}"},
             {"{\"ctx\": 1, \"endings\": [\"b\", \"c\"], \"label\": 0}",
              "expected {\"ctx\": text, \"endings\": [text, ...], \"label\": number}"},
             {"{\"ctx\": \"A\", \"endings\": [\"b\"], \"label\": 0}", "1 endings; there must be two or more"},
             {"{\"ctx\": \"A\", \"endings\": [\"b\", \"\"], \"label\": 0}", "an ending is no text or empty"},
             {"{\"ctx\": \"A\", \"endings\": [\"b\", 7], \"label\": 0}", "an ending is no text or empty"},
             {"{\"ctx\": \"A\", \"endings\": [\"b\", \"c\"], \"label\": 2}", "label 2 names none of 2 endings"},
             {"{\"ctx\": \"A\", \"endings\": [\"b\", \"c\"], \"label\": -1}", "label -1 names none of 2 endings"}}) {
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

TEST(Questions, TheEndingIsWhatFollowsTheContext) {
    const Tokenizer bytes = tokenizer_fixture("bytes");
    const Choice c = make_choice(bytes, "The sea", "is blue");
    EXPECT_EQ(bytes.decode(c.tokens), "The sea is blue");
    EXPECT_EQ(c.first, 7);
    EXPECT_EQ(c.bytes, 8);
    EXPECT_EQ(bytes.decode(make_choice(bytes, "The sea ", "is blue").tokens), "The sea is blue");
    EXPECT_EQ(bytes.decode(make_choice(bytes, "The sea", " is blue").tokens), "The sea is blue");
    EXPECT_EQ(make_choice(bytes, "", "x").first, 0);
    // A tokenizer that merges over the seam still leaves the ending a token.
    const Tokenizer merging = tokenizer_fixture("gpt2");
    const Choice d = make_choice(merging, "th", "e");
    EXPECT_LT(d.first, int64_t(d.tokens.size()));
}

}  // namespace

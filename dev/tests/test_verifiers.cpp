// What completions are worth: tables of completions and answers, files of prompts with answers, estimates of pass@k.
#include "data/verifiers.h"

#include <gtest/gtest.h>

#include "data/answers.h"
#include "data/exact_number.h"
#include "data/verifier_command.h"
#include "dev/tests/temp_dir.h"
#include "runtime/files/files.h"

namespace {

using nlohmann::json;

double score(const json& verifier, const std::string& completion, const std::string& answer) {
    return make_verifier(verifier.is_string() ? json{{"name", verifier}} : verifier, answer)(completion);
}

struct Case {
    std::string completion, answer;
    double score;
};

void check(const json& verifier, const std::vector<Case>& cases) {
    for (const Case& c : cases)
        EXPECT_EQ(score(verifier, c.completion, c.answer), c.score)
            << verifier << ": " << c.completion << " / " << c.answer;
}

TEST(ExactNumber, ComparesValues) {
    for (const auto& [a, b] : std::vector<std::pair<std::string, std::string>>{
             {"1,000", "1000"},
             {"1{,}000{,}000", "1e6"},
             {"1\xE2\x80\xAF"
              "000",
              "1000"},
             {"0.50", ".5"},
             {"1/2", "0.5"},
             {"-3/4",
              "\xE2\x88\x92"
              "0.75"},
             {"+7", "007"},
             {"-0", "0"},
             {"$1,234.50", "1234.5"},
             {"-$5", "$-5"},
             {"50%", "50"},
             {"12e-1", "1.2"},
             {"10/4", "5/2"},
             {"123456789012345678901234567890", "123,456,789,012,345,678,901,234,567,890"},
             {std::string(1500, '9'), std::string(1500, '9') + ".0"}}) {
        ASSERT_TRUE(exact_number(a) && exact_number(b)) << a << " " << b;
        EXPECT_TRUE(*exact_number(a) == *exact_number(b)) << a << " " << b;
    }
    for (const auto& [a, b] :
         std::vector<std::pair<std::string, std::string>>{{"12345678901234567890123", "12345678901234567890124"},
                                                          {"0.1", "0.10000000000000000001"},
                                                          {"1/3", "0.3333333333333333"},
                                                          {"5", "-5"},
                                                          {"1,000", "1.000"}}) {
        ASSERT_TRUE(exact_number(a) && exact_number(b)) << a << " " << b;
        EXPECT_FALSE(*exact_number(a) == *exact_number(b)) << a << " " << b;
    }
    for (const char* text : {"",   "-",  ".",       "$",   "1.",  "1,00", "1,2345", "1.2.3", "1/0", "1/2/3",
                             "e5", "1e", "1e12345", "--1", "1 2", "one",  "1/2.5",  "nan",   "inf", "0x10"})
        EXPECT_FALSE(exact_number(text)) << text;
    EXPECT_FALSE(exact_number(std::string(3000, '1')));
    EXPECT_FALSE(exact_number("1e9999"));
}

TEST(ExactNumber, TheLastOneInAText) {
    for (const auto& [text, number] :
         std::vector<std::pair<std::string, std::string>>{{"", ""},
                                                          {"no number", ""},
                                                          {"It is 42.", "42"},
                                                          {"It is 42...", "42"},
                                                          {"so ...5", "5"},
                                                          {"10-5", "5"},
                                                          {"10 - 5 = 5, so -5", "-5"},
                                                          {"x = \xE2\x88\x92"
                                                           "12",
                                                           "\xE2\x88\x92"
                                                           "12"},
                                                          {"1, 2,345 and 6,789,", "6,789"},
                                                          {"1,2,3", "3"},
                                                          {"3/4 of it", "3/4"},
                                                          {"on 1/2/2024", "2024"},
                                                          {"costs $1,234.50.", "$1,234.50"},
                                                          {"(7)", "7"},
                                                          {"42km/h", "42"},
                                                          {"f(x)-3", "3"},
                                                          {"version 1.2.3", "1.2"}})
        EXPECT_EQ(last_number(text), number) << text;
}

TEST(Verifiers, ExactMatch) {
    check("exact_match", {{"Paris", "Paris", 1},
                          {"  paris.\n", "Paris", 1},
                          {"New\n York", "new  york", 1},
                          {"Paris, France", "Paris", 0},
                          {"e\xCC\x81t\xC3\x89", "\xC3\x89T\xC3\xA9", 1},  // composed or not, in either case
                          {"\xCE\xA3\xCE\x9F\xCE\xA3", "\xCF\x83\xCE\xBF\xCF\x82", 1},
                          {"1,000.0", "1000", 1},
                          {"1/2", "0.5", 1},
                          {"", "", 1},
                          {"", "x", 0},
                          {".", "", 1},
                          {"\xFF\xFE", "\xFF\xFE", 1},
                          {"\xFF\xFE", "\xFF", 0}});
}

TEST(Verifiers, LastNumber) {
    check("last_number", {{"First 3, then 1,234.", "1234", 1},
                          {"1234 of 5", "1234", 0},
                          {"is \xE2\x88\x92"
                           "5",
                           "-5", 1},
                          {"0.50", "1/2", 1},
                          {"", "0", 0},
                          {"none", "0", 0},
                          {std::string(100000, '9'), "9", 0},
                          {"12345678901234567890123", "12345678901234567890124", 0}});
    EXPECT_THROW(score("last_number", "1", "one"), Error);
}

TEST(Verifiers, BoxedAnswer) {
    EXPECT_EQ(boxed("\\boxed{1} and \\boxed{a{b}c}"), "a{b}c");
    EXPECT_EQ(boxed("\\boxed{1} then \\boxed{2"), "1");
    EXPECT_EQ(boxed("\\fbox {x\\}y}"), "x\\}y");
    EXPECT_EQ(boxed("\\boxed"), "");
    EXPECT_EQ(boxed("boxed{1}"), "");
    check("boxed_answer", {{"So \\boxed{42}.", "42", 1},
                           {"\\boxed{\\frac{1}{2}}", "0.5", 1},
                           {"\\boxed{\\dfrac{x+1}{2}}", "\\frac{x + 1}{2}", 1},
                           {"\\boxed{\\left( 1, 2 \\right)}", "(1,2)", 1},
                           {"\\boxed{12\\text{ cm}}", "12", 1},
                           {"\\boxed{\\text{New York}}", "New York", 1},
                           {"\\boxed{90^\\circ}", "90", 1},
                           {"\\boxed{50\\%}", "50", 1},
                           {"\\boxed{\\$1{,}000}", "1000", 1},
                           {"\\boxed{-\\frac{3}{4}}", "-3/4", 1},
                           {"\\boxed{3", "3", 0},
                           {"\\boxed{}", "", 0},
                           {"\\boxed{\\text{a}", "a", 0},
                           {"42", "42", 0},
                           {"\\boxed{7}", "The answer is \\boxed{7}.", 1}});
    EXPECT_EQ(score("boxed_answer", std::string(100000, '{') + "\\boxed{" + std::string(100000, '{'), "1"), 0);
}

TEST(Verifiers, MultipleChoice) {
    check("multiple_choice", {{"B", "B", 1},
                              {" (b).\n", "B", 1},
                              {"B) because of A", "B", 1},
                              {"**C**", "C", 1},
                              {"The answer is (D).", "D", 1},
                              {"The answer is A. No, the answer is B.", "B", 1},
                              {"**Answer:** C", "C", 1},
                              {"The correct option is B, not (A).", "B", 1},
                              {"A dog is an animal", "A", 0},
                              {"I think (A) is wrong, (C) is right", "C", 1},
                              {"The answer is a dog", "A", 0},
                              {"The answer is Apple", "A", 0},
                              {"", "A", 0},
                              {"none", "A", 0}});
    EXPECT_THROW(score("multiple_choice", "A", "AB"), Error);
    EXPECT_THROW(score("multiple_choice", "A", "1"), Error);
}

TEST(Verifiers, RegularExpressions) {
    check("regex", {{"it is colour", "colou?r", 1},
                    {"col", "colou?r", 0},
                    {"\xFF"
                     "a",
                     "^.?a$", 0},
                    {"", "^$", 1}});
    check({{"name", "regex"}, {"pattern", "= *(\\S+)"}}, {{"x = 5 = 6", "5", 1}, {"x = 5.0", "5", 1}, {"x", "5", 0}});
    check({{"name", "regex"}, {"pattern", "= *(\\S+)"}, {"select", "last"}}, {{"x = 5 = 6", "6", 1}});
    check({{"name", "regex"}, {"pattern", "a*"}, {"select", "last"}}, {{"aab", "", 1}});  // empty matches end
    EXPECT_THROW(score("regex", "x", "("), Error);
    // Needs 2^40 steps.
    try {
        score("regex", std::string(40, 'a') + "!", "^(a|aa|a?a)+$");
        ADD_FAILURE();
    } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find("backtracks too much over a completion of 41 bytes"), std::string::npos)
            << e.what();
    }
}

TEST(Verifiers, Length) {
    check({{"name", "length"}, {"min", 1}, {"max", 3}},
          {{"", "", 0}, {"\xC3\xA9\xC3\xA9\xC3\xA9", "", 1}, {"abcd", "", 0}});
    check({{"name", "length"}, {"max", 3}}, {{"", "", 1}});
    for (const json& wrong : std::vector<json>{{{"name", "length"}},
                                               {{"name", "length"}, {"min", -1}},
                                               {{"name", "length"}, {"max", 1.5}},
                                               {{"name", "length"}, {"min", 3}, {"max", 2}}})
        EXPECT_THROW(score(wrong, "", ""), Error) << wrong;
}

// What lm-evaluation-harness 0.4.13 gives.
TEST(Verifiers, Gsm8k) {
    const std::string answer = "She has 1,000 - 28 = 972.\n#### 972";
    check("gsm8k_strict", {{"so\n#### 972", answer, 1},
                           {"#### 972.\n#### 5", answer, 1},
                           {"#### $972", answer, 0},
                           {"972", answer, 0},
                           {"#### 0,972", answer, 0},
                           {"#### 1,024", "#### 1024", 1}});
    check("gsm8k_flexible", {{"so\n#### 972", answer, 1},
                             {"It is $972.", answer, 1},
                             {"972.00", answer, 0},  // compared as text
                             {"972 of 5", answer, 0},
                             {"972 of it...", answer, 0},  // "..." is the last match
                             {"", answer, 0}});
}

TEST(Problems, AreReadLineByLine) {
    const TempDir dir;
    const std::string path = dir.file("p.jsonl");
    write_file(path,
               "{\"prompt\": \"2+2\", \"answer\": 4, \"verifier\": \"last_number\"}\n\n"
               "{\"messages\": [{\"role\": \"system\", \"content\": \"s\"}, {\"role\": \"user\", \"content\": \"u\"}], "
               "\"answer\": \"x\", \"verifier\": [{\"name\": \"exact_match\", \"weight\": 0.9}, "
               "{\"name\": \"length\", \"weight\": 0.1, \"max\": 3}]}");
    const std::vector<Problem> p = read_problems(path, false);
    ASSERT_EQ(p.size(), 2u);
    EXPECT_EQ(p[0].answer, "4");
    EXPECT_EQ(p[0].reward({p[0].verifiers[0].score("4")}), 1);
    EXPECT_EQ(p[1].messages.size(), 2u);
    EXPECT_EQ(p[1].prompt, "u");
    EXPECT_DOUBLE_EQ(p[1].reward({0, 1}), 0.1);
    EXPECT_GE(p[1].reward({1, 1}), CORRECT);
    write_file(path, "{\"prompt\": \"\", \"answer\": \"\"}");
    EXPECT_FALSE(read_problems(path, true)[0].verifiers[0].score);
}

TEST(Problems, DamageIsAOneLineError) {
    const TempDir dir;
    const std::string path = dir.file("p.jsonl"),
                      good = "{\"prompt\": \"A\", \"answer\": \"b\", \"verifier\": \"exact_match\"}\n";
    for (const auto& [line, message] : std::vector<std::pair<std::string, std::string>>{
             {"{\"prompt\": \"A\"", "broken JSON at byte 15"},
             {"[]", "[] is not an object"},
             {"{\"prompt\": 1, \"answer\": \"b\", \"verifier\": \"regex\"}", "key 'prompt' is 1, expected text"},
             {"{\"answer\": \"b\", \"verifier\": \"regex\"}", "expected the key 'prompt' or the key 'messages'"},
             {"{\"prompt\": \"\", \"prompt\": \"\"}", "key \"prompt\" twice"},
             {"{\"prompt\": \"\", \"label\": 1}",
              "key \"label\" is unknown; the keys are prompt, messages, answer and verifier"},
             {"{\"prompt\": \"\", \"verifier\": \"regex\"}", "key 'answer' is missing, expected text or a number"},
             {"{\"prompt\": \"\", \"answer\": null, \"verifier\": \"regex\"}",
              "key 'answer' is missing, expected text or a number"},
             {"{\"prompt\": \"\", \"answer\": 1, \"verifier\": \"best\"}",
              "verifier \"best\" is unknown; use " + verifier_names()},
             {"{\"prompt\": \"\", \"answer\": 1, \"verifier\": \"command\"}",
              "the verifier 'command' is the one that --verifier names; give that option"},
             {"{\"prompt\": \"\", \"answer\": 1, \"verifier\": [{\"name\": \"regex\", \"max\": 1}]}",
              "verifier regex has no option \"max\""},
             {"{\"prompt\": \"\", \"answer\": 1, \"verifier\": [{\"name\": \"regex\", \"weight\": -1}]}",
              "key 'weight' is -1, expected a number of at least 0"},
             {"{\"prompt\": \"\", \"answer\": \"x\", \"verifier\": \"last_number\"}",
              "answer \"x\" is not a number, which last_number compares with"},
             {"{\"prompt\": \"\", \"answer\": \"(\", \"verifier\": \"regex\"}",
              "the regular expression '(' is wrong at byte 1: missing closing parenthesis"},
             {"{\"messages\": [{\"role\": \"assistant\", \"content\": \"u\"}], \"answer\": 1, \"verifier\": \"regex\"}",
              "the last message is the assistant's; end with what it responds to"},
             {"{\"messages\": [{\"role\": \"user\"}], \"answer\": 1, \"verifier\": \"regex\"}",
              "a message is {\"role\":\"user\"}, expected a list of {\"role\": text, \"content\": text}"}}) {
        write_file(path, good + line + "\n" + good);
        try {
            read_problems(path, false);
            ADD_FAILURE() << line;
        } catch (const Error& e) {
            EXPECT_EQ(e.what(), path + ": line 2: " + message);
        }
    }
    write_file(path, "\n");
    EXPECT_THROW(read_problems(path, false), Error);
    write_file(path, good);
    EXPECT_THROW(read_problems(path, true), Error);  // the command has nothing to do
}

TEST(PassAtK, IsUnbiased) {
    EXPECT_DOUBLE_EQ(pass_at_k(4, 0, 1), 0);
    EXPECT_DOUBLE_EQ(pass_at_k(4, 1, 1), 0.25);
    EXPECT_DOUBLE_EQ(pass_at_k(4, 1, 4), 1);
    EXPECT_NEAR(pass_at_k(10, 3, 2), 1 - 7.0 * 6 / (10 * 9), 1e-12);  // 1 − C(7, 2)/C(10, 2)
}

TEST(VerifierCommand, IsSplitIntoWords) {
    const auto words = [](const std::string& command) { return command_words(command); };
    using Words = std::vector<std::string>;
    EXPECT_EQ(words("python3  v.py\t--n 1"), (Words{"python3", "v.py", "--n", "1"}));
    EXPECT_EQ(words("a 'b \"c\\' \"d 'e\\\"\\n\" f\\ g '' h'i'j"),
              (Words{"a", "b \"c\\", "d 'e\"\\n", "f g", "", "hij"}));
    EXPECT_EQ(words("echo $HOME; ls | cat"), (Words{"echo", "$HOME;", "ls", "|", "cat"}));  // no shell
    for (const char* wrong : {"", "  ", "a 'b", "a \"b\\\""}) EXPECT_THROW(words(wrong), UsageError) << wrong;
}

}  // namespace

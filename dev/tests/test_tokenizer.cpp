// Tests data/tokenizer.h against the ids of the tokenizers package (dev/peers/make_tokenizer_fixture.py; with many
// random strings by dev/peers/compare_tokenizers.py), on bytes that are not text, and on damaged files.
#include "data/tokenizer.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "data/splitter.h"
#include "data/token_text.h"
#include "data/unicode.h"
#include "dev/tests/tokenizer_fixture.h"
#include "runtime/error.h"
#include "runtime/files/files.h"
#include "runtime/rng.h"

using nlohmann::json;

namespace {

// A file that the test removes at its end.
class TemporaryFile {
  public:
    explicit TemporaryFile(const std::string& content) {
        std::string pattern = testing::TempDir() + "tokenizer_XXXXXX";
        const int fd = ::mkstemp(pattern.data());
        EXPECT_GE(fd, 0);
        ::close(fd);
        path = pattern;
        std::ofstream(path, std::ios::binary) << content;
    }
    ~TemporaryFile() { ::unlink(path.c_str()); }
    std::string path;
};

Tokenizer make(const json& description) {
    return Tokenizer(TemporaryFile(description.dump()).path);
}

json description(const std::string& name) {
    return tokenizer_description(name);
}

std::string error_of(const json& tokenizer) {
    try {
        make(tokenizer);
    } catch (const Error& e) {
        return e.what();
    }
    return "";
}

std::string random_bytes(uint64_t seed, size_t n, int values) {
    std::string text;
    for (size_t i = 0; i < n; i++) text += char(philox(seed, i, 0).v[0] % unsigned(values));
    return text;
}

}  // namespace

TEST(Tokenizer, IdsMatchTheTokenizersPackage) {
    for_each_tokenizer([](const json& one, const json& file) {
        const std::string name = one["name"];
        const Tokenizer tokenizer = make(one["tokenizer"]);
        EXPECT_EQ(tokenizer.start_of_text(), one["start"].get<std::vector<int32_t>>()) << name;
        ASSERT_FALSE(file["texts"].empty());
        for (size_t i = 0; i < file["texts"].size(); i++) {
            const std::string text = file["texts"][i];
            EXPECT_EQ(tokenizer.encode(text), one["plain"][i].get<std::vector<int32_t>>())
                << name << ": " << json(text).dump();
            const auto special = one["special"][i].get<std::vector<int32_t>>();
            EXPECT_EQ(tokenizer.encode(text, true), special) << name << " with special tokens: " << json(text).dump();
            if (name.find("missing-bytes") != 0) {  // where the package's text is not UTF-8, it has U+FFFD
                EXPECT_EQ(tokenizer.decode(special), one["decoded"][i].get<std::string>())
                    << name << ": " << json(text).dump();
            }
        }
    });
}

TEST(Tokenizer, BytesThatAreNotTextMatchMakeData) {
    for_each_tokenizer([](const json& one, const json& file) {
        const Tokenizer tokenizer = make(one["tokenizer"]);
        for (size_t i = 0; i < file["bytes"].size(); i++) {
            const std::string hex = file["bytes"][i];
            std::string text;
            for (size_t j = 0; j < hex.size(); j += 2) text += char(std::stoi(hex.substr(j, 2), nullptr, 16));
            EXPECT_EQ(tokenizer.encode(text), one["bytes"][i].get<std::vector<int32_t>>()) << one["name"] << " " << hex;
            EXPECT_EQ(tokenizer.lost_bytes(text), one["lost"][i].get<int64_t>()) << one["name"] << " " << hex;
        }
    });
}

TEST(Tokenizer, DecodeIsTheInverseForAnyBytes) {
    for_each_tokenizer([](const json& one, const json& file) {
        const std::string name = one["name"];
        const auto is = [&](std::initializer_list<const char*> names) {
            return std::find(names.begin(), names.end(), name) != names.end();
        };
        // Not every byte has a token, or added tokens take white space.
        if (is({"unknown", "missing-bytes", "missing-bytes-unknown", "rules"})) return;
        const Tokenizer tokenizer = make(one["tokenizer"]);
        const auto round_trip = [&](const std::string& text) {
            // A space is prepended to each part of the text between added tokens. Phi-3's </s> takes white space.
            const bool prefixes =
                is({"llama2", "llama2-across-spaces", "mistral-v0.1", "phi3", "metaspace-always", "prefix-space"});
            const char* const added = name == "phi3" ? "</s>" : "think>";
            if (prefixes && text.find(added) != std::string::npos) return;
            // SentencePiece reads its mark as a space.
            const bool marks = one["tokenizer"]["decoder"]["type"] == "Sequence";
            std::string expected = name == "qwen" ? nfc(text) : marks ? replace_all(text, SPACE_MARK, " ") : text;
            // If a space is prepended only where there is none, decode() cannot know whether it was added.
            const bool space = !expected.empty() && expected[0] == ' ',
                       keeps_space = !is({"metaspace-first", "metaspace-always", "mistral-v0.3"});
            if (space && !keeps_space) expected.erase(0, 1);
            if (name == "prefix-space") expected = (text.empty() || space ? "" : " ") + text;
            const std::vector<int32_t> ids = tokenizer.encode(text);
            EXPECT_EQ(tokenizer.decode(ids), expected) << name;
            if (!prefixes && keeps_space) {
                EXPECT_EQ(tokenizer.decode(tokenizer.encode(text, true)), expected) << name << " with special tokens";
            }
            // The streamed text has the same bytes, and no part of it ends inside a character.
            std::string streamed;
            TextStream stream(tokenizer, true);
            for (const int32_t id : ids) {
                const std::string piece = stream.put(id);
                for (size_t i = 0; i < piece.size();) {
                    const size_t whole = utf8_length(expected, streamed.size() + i);
                    EXPECT_LE(i + whole, piece.size())
                        << name << ": a character of "
                        << json(text).dump(-1, ' ', false, json::error_handler_t::replace) << " is cut";
                    i += std::max<size_t>(whole, 1);
                }
                streamed += piece;
            }
            EXPECT_EQ(streamed + stream.finish(), expected) << name;
        };
        for (const json& text : file["texts"]) round_trip(text.get<std::string>());
        for (uint64_t seed = 0; seed < 50; seed++) round_trip(random_bytes(seed, 1 + seed * 7, 256));
        // Invalid UTF-8: overlong forms, surrogates, code points above U+10FFFF, incomplete characters, stray
        // continuation bytes.
        for (const char* text :
             {"\xC0\x80", "\xC1\xBF", "\xE0\x80\x80", "\xED\xA0\x80", "\xF0\x80\x80\x80", "\xF4\x90\x80\x80",
              "\xF5\x80\x80\x80", "a\xE2\x82", "\xE2\x82 b", "\x80\xBF x", "\xF0\x9F\x98", "\xFF\xFE"})
            round_trip(text);
        round_trip(std::string("\0a\0\0", 4));
    });
}

TEST(Tokenizer, TheLibrarySaysWhichUnicodeItKnows) {
    int minor, unicode[3], end = 0;
    const std::string library = regex_library();
    EXPECT_EQ(std::sscanf(library.c_str(), "PCRE2 10.%d, Unicode %d.%d.%d%n", &minor, unicode, unicode + 1, unicode + 2,
                          &end),
              4)
        << library;
    EXPECT_EQ(end, int(library.size())) << library;
}

TEST(Tokenizer, BytesThatTheVocabularyLacksAreCounted) {
    const Tokenizer missing = make(description("missing-bytes"));
    const std::string text(
        "ma\xF1"
        "ana \x1F\x1F the\0 the\0 the\0",
        24);
    EXPECT_EQ(missing.decode(missing.encode(text)), "maana  the the the");
    EXPECT_EQ(missing.lost_bytes(text), 6);
    EXPECT_EQ(missing.lost_bytes("the \xC3\xA9<|endoftext|>"), 0);
    EXPECT_EQ(missing.encode("\xF1\xFF"), std::vector<int32_t>{});
    EXPECT_EQ(missing.lost_bytes("\xF1\xFF"), 2);
    EXPECT_EQ(make(description("gpt2")).lost_bytes(text), 0);
    // With an unknown token, of which fuse_unk leaves one of several in a row.
    json with_unknown = description("missing-bytes-unknown");
    const int32_t e = with_unknown["model"]["vocab"]["e"];
    EXPECT_EQ(make(with_unknown).encode("\xF1\xFF"), std::vector<int32_t>{e});
    EXPECT_EQ(make(with_unknown).lost_bytes("\xF1\xFF"), 2);
    with_unknown["model"]["fuse_unk"] = false;
    EXPECT_EQ(make(with_unknown).encode("\xF1\xFF"), (std::vector<int32_t>{e, e}));
    with_unknown["model"]["unk_token"] = "<none>";
    EXPECT_NE(error_of(with_unknown).find("unk_token"), std::string::npos);
    json complete = description("gpt2");
    complete["model"]["unk_token"] = "<none>";
    EXPECT_EQ(error_of(complete), "");  // no byte needs it
    // Without byte fallback characters become the unknown token, or are left out where there is none.
    json file = description("unknown");
    const Tokenizer unknown = make(file);
    const int32_t id = file["model"]["vocab"]["<unk>"];
    const std::vector<int32_t> ids = unknown.encode(
        "a\xE6\x97\xA5"
        "b\xFF");
    ASSERT_EQ(ids.size(), 4u);
    EXPECT_EQ(ids[1], id);
    EXPECT_EQ(ids[3], id);
    EXPECT_EQ(unknown.lost_bytes("a\xE6\x97\xA5"
                                 "b\xFF"),
              4);
    file["model"]["unk_token"] = nullptr;
    const Tokenizer without = make(file);
    EXPECT_EQ(without.decode(without.encode("a\xE6\x97\xA5"
                                            "b\xFF")),
              "ab");
    EXPECT_EQ(without.lost_bytes("a\xE6\x97\xA5"
                                 "b\xFF"),
              4);
}

TEST(Tokenizer, AddedTokensOfTheByteAlphabetAreBytes) {
    // As DeepSeek's: tokenizers' ByteLevel decoder reads U+00F5 as byte F5 and U+0120 as a space; a token with another
    // character stays as it is.
    json file = description("gpt2");
    file["model"]["vocab"].erase("\u00f5");  // its own byte, which the model lacks
    int64_t id = 0;
    for (const auto& [token, number] : file["model"]["vocab"].items()) id = std::max(id, number.get<int64_t>());
    json token = file["added_tokens"][0];
    token["special"] = false;
    for (const char* content : {"\u00f5", "<\uff5cx\u2581y\uff5c>", "\u00e9 \u00e9", "\u0120<x>"}) {
        token["id"] = ++id;
        token["content"] = content;
        file["added_tokens"].push_back(token);
    }
    const Tokenizer tokenizer = make(file);
    EXPECT_EQ(tokenizer.encode("a\u00f5"), (std::vector<int32_t>{tokenizer.encode("a")[0], int32_t(id - 3)}));
    EXPECT_EQ(tokenizer.decode(int32_t(id - 3)), "\xF5");
    EXPECT_EQ(tokenizer.decode(int32_t(id - 2)), "<\uff5cx\u2581y\uff5c>");
    EXPECT_EQ(tokenizer.decode(int32_t(id - 1)), "\u00e9 \u00e9");
    EXPECT_EQ(tokenizer.decode(int32_t(id)), " <x>");
}

TEST(Utf8Stream, HoldsBackUnfinishedCharactersOnly) {
    // Byte by byte, each character is returned with its last byte, and bytes that cannot become one at once.
    const auto pieces = [](const std::string& text) {
        Utf8Stream stream;
        std::vector<std::string> out;
        for (const char c : text) out.push_back(stream.put(std::string_view(&c, 1)));
        out.push_back(stream.finish());
        return out;
    };
    using Pieces = std::vector<std::string>;
    EXPECT_EQ(pieces("a\xC3\xA9"), (Pieces{"a", "", "\xC3\xA9", ""}));
    EXPECT_EQ(pieces("\xE2\x82\xAC"), (Pieces{"", "", "\xE2\x82\xAC", ""}));
    EXPECT_EQ(pieces("\xE0\xA0\x80"), (Pieces{"", "", "\xE0\xA0\x80", ""}));
    EXPECT_EQ(pieces("\xED\x9F\xBF"), (Pieces{"", "", "\xED\x9F\xBF", ""}));
    EXPECT_EQ(pieces("\xF0\x9F\x98\x80"), (Pieces{"", "", "", "\xF0\x9F\x98\x80", ""}));
    EXPECT_EQ(pieces("\xF4\x8F\xBF\xBF"), (Pieces{"", "", "", "\xF4\x8F\xBF\xBF", ""}));
    EXPECT_EQ(pieces("\xE0\x9F\x80"), (Pieces{"", "\xE0\x9F", "\x80", ""}));  // overlong
    EXPECT_EQ(pieces("\xED\xA0\x80"), (Pieces{"", "\xED\xA0", "\x80", ""}));  // a surrogate
    EXPECT_EQ(pieces("\xF4\x90"), (Pieces{"", "\xF4\x90", ""}));              // above U+10FFFF
    EXPECT_EQ(pieces("\xFF\x80"), (Pieces{"\xFF", "\x80", ""}));
    EXPECT_EQ(pieces("\xE2\x82 "), (Pieces{"", "", "\xE2\x82 ", ""}));
    EXPECT_EQ(pieces("\xE2\xC3\xA9"), (Pieces{"", "\xE2", "\xC3\xA9", ""}));
    EXPECT_EQ(pieces("\xF0\x9F\x98"), (Pieces{"", "", "", "\xF0\x9F\x98"}));
    for (uint32_t code : {0x24u, 0xA2u, 0x7FFu, 0x800u, 0x20ACu, 0xFFFFu, 0x10000u, 0x10FFFFu}) {
        const std::string character = utf8_character(code);
        EXPECT_EQ(utf8_length(character, 0), character.size());
        EXPECT_EQ(utf8_code_point(character, 0, character.size()), code);
    }
}

TEST(Tokenizer, SpecialTokensAtTheStart) {
    json tokenizer = description("llama2");
    EXPECT_TRUE(make(tokenizer).start_of_text().empty());
    const json s = {{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}},
               a = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
    const json processor = {{"type", "TemplateProcessing"},
                            {"single", {s, a}},
                            {"pair", {s, a}},
                            {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {1}}, {"tokens", {"<s>"}}}}}}};
    tokenizer["post_processor"] = processor;
    EXPECT_EQ(make(tokenizer).start_of_text(), std::vector<int32_t>{1});
    tokenizer["post_processor"] = {{"type", "Sequence"}, {"processors", {{{"type", "ByteLevel"}}, processor}}};
    EXPECT_EQ(make(tokenizer).start_of_text(), std::vector<int32_t>{1});
    // Templates one after the other, in Sequences inside each other: the later one is around the earlier one.
    json outer = processor;
    outer["special_tokens"]["<s>"]["ids"] = {2, 0};
    const json steps = {{{"type", "Sequence"}, {"processors", {processor}}}, outer};
    tokenizer["post_processor"] = {{"type", "Sequence"}, {"processors", steps}};
    EXPECT_EQ(make(tokenizer).start_of_text(), (std::vector<int32_t>{2, 0, 1}));
    tokenizer["post_processor"] = processor;
    tokenizer["post_processor"]["special_tokens"]["<s>"]["ids"] = {100000};
    EXPECT_NE(error_of(tokenizer).find("token 100000 of '<s>'"), std::string::npos) << error_of(tokenizer);
    tokenizer["post_processor"]["single"][0]["SpecialToken"]["id"] = "<none>";
    EXPECT_NE(error_of(tokenizer), "");
    // A token behind the text, or on both sides of it.
    for (const json& single : {json{a, s}, json{s, a, s}}) {
        tokenizer["post_processor"] = processor;
        tokenizer["post_processor"]["single"] = single;
        EXPECT_NE(error_of(tokenizer).find("puts the token '<s>' behind a text"), std::string::npos);
    }
}

// The error for a tokenizer with such a tokenizer_config.json beside it, "" if there is none.
std::string error_with_settings(const json& tokenizer, const char* settings) {
    const TempDir dir;
    write_file(dir.file("tokenizer.json"), tokenizer.dump());
    write_file(dir.file("tokenizer_config.json"), settings);
    try {
        const Tokenizer made(dir.file("tokenizer.json"));
    } catch (const Error& e) {
        return e.what();
    }
    return "";
}

// Such a file is not part of a model directory: neither settings nor declared tokens beside it are its own.
TEST(Tokenizer, AFileOfAnotherNameHasNothingToDoWithTheFilesBesideIt) {
    const TempDir dir;
    write_file(dir.file("other.json"), description("gpt2").dump());
    write_file(dir.file("tokenizer_config.json"), R"({"add_bos_token": true, "pad_token": "<new>"})");
    const Tokenizer alone(dir.file("other.json"));
    EXPECT_EQ(alone.vocab_size(), make(description("gpt2")).vocab_size());
}

TEST(Tokenizer, SettingsThatChangeTokensAreErrors) {
    const json plain = description("gpt2");
    json start = description("llama2");
    start["post_processor"] = {{"type", "TemplateProcessing"},
                               {"single", {{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}}}},
                               {"pair", json::array()},
                               {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {1}}, {"tokens", {"<s>"}}}}}}};
    json space = plain;
    space["pre_tokenizer"]["add_prefix_space"] = true;
    const struct {
        const json& tokenizer;
        const char *settings, *words;  // "": it is read
    } cases[] = {
        {plain, R"({"split_special_tokens": true})", "'split_special_tokens' is true"},
        {plain, R"({"add_eos_token": true})", "'add_eos_token' is true"},
        {plain, R"({"fix_mistral_regex": true})", "'fix_mistral_regex' is true"},
        {plain, R"({"add_bos_token": true})", "'add_bos_token' is true; tokenizer.json puts no token"},
        {start, R"({"add_bos_token": false})", "'add_bos_token' is false; tokenizer.json puts tokens"},
        {plain, R"({"add_prefix_space": true})", "'add_prefix_space' is true"},
        {space, R"({"add_prefix_space": false})", "'add_prefix_space' is false"},
        {plain, R"({"add_bos_token": 1})", "'add_bos_token' is 1, expected true or false"},
        {plain, R"({"add_bos_token": false, "add_eos_token": false, "add_prefix_space": false})", ""},
        {start, R"({"add_bos_token": true, "add_eos_token": null, "add_prefix_space": true})", ""},
        {space, R"({"add_prefix_space": true, "split_special_tokens": false})", ""},
    };
    for (const auto& c : cases) {
        const std::string error = error_with_settings(c.tokenizer, c.settings);
        EXPECT_EQ(error.empty(), !*c.words) << c.settings << error;
        EXPECT_NE(error.find(c.words), std::string::npos) << c.settings << error;
    }
}

// Short words are merged by scanning, long ones with a queue. Both must give the same ids. The words consist of two
// letters, so that merges overlap everywhere.
TEST(Tokenizer, LongWordsMergeLikeShortWords) {
    json tokenizer = description("no-regex");
    json& model = tokenizer["model"];
    model["merges"] = json::array();
    int next = 1000;
    for (const char* merge : {"a b", "b a", "ab ab", "a a", "ba ba", "abab a", "aa b", "abab abab"}) {
        std::string made = merge;
        made.erase(made.find(' '), 1);
        model["vocab"][made] = next++;
        model["merges"].push_back(merge);
    }
    const Tokenizer ours = make(tokenizer);
    // The naive algorithm: repeatedly merge the leftmost pair of the lowest rank.
    const auto naive = [&](const std::string& text) {
        std::vector<std::string> parts;
        for (const char c : text) parts.emplace_back(1, c);
        for (;;) {
            size_t best = parts.size();
            for (size_t rank = 0; rank < model["merges"].size() && best == parts.size(); rank++)
                for (size_t i = 0; i + 1 < parts.size() && best == parts.size(); i++)
                    if (parts[i] + " " + parts[i + 1] == model["merges"][rank].get<std::string>()) best = i;
            if (best == parts.size()) break;
            parts[best] += parts[best + 1];
            parts.erase(parts.begin() + int64_t(best) + 1);
        }
        std::vector<int32_t> ids;
        for (const std::string& part : parts) ids.push_back(model["vocab"][part].get<int32_t>());
        return ids;
    };
    for (const size_t n : {1, 2, 3, 31, 32, 33, 63, 64, 65, 66, 100, 300}) {
        std::string text = random_bytes(n, n, 2);
        for (char& c : text) c = c ? 'a' : 'b';
        EXPECT_EQ(ours.encode(text), naive(text)) << text;
    }
}

TEST(Tokenizer, LongRunsAreFast) {
    for (const char* kind : {"gpt2", "llama2", "llama2-across-spaces", "tekken", "qwen", "rules"}) {
        const Tokenizer tokenizer = make(description(kind));
        for (const char* unit :
             {" ", "a", "\n", "the ", "\xFF", "1", " \n", "\xF0\x9F\x98\x80"}) {  // a quadratic algorithm takes minutes
            std::string text;
            while (text.size() < 300000) text += unit;
            EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text) << kind << unit;
        }
    }
}

// Thousands of steps back from one start are matched with another limit than words.
TEST(Tokenizer, LongRunsOfSpacesAreSplitAsShortOnes) {
    for (const char* name : {"gpt2", "llama3", "qwen", "tekken"}) {
        const Tokenizer tokenizer = make(description(name));
        for (const size_t n : {10, 3000}) {
            std::vector<int32_t> expected = tokenizer.encode(std::string(n - 1, ' '));
            for (const int32_t id : tokenizer.encode(" x")) expected.push_back(id);
            EXPECT_EQ(tokenizer.encode(std::string(n, ' ') + "x"), expected) << name << n;
        }
        EXPECT_EQ(tokenizer.decode(tokenizer.encode(std::string(300000, ' '))), std::string(300000, ' ')) << name;
    }
}

TEST(Tokenizer, ExpressionsThatBacktrackForTooLongAreErrors) {
    json gpt2 = description("gpt2");
    json byte_level = gpt2["pre_tokenizer"];
    byte_level["use_regex"] = false;
    for (const char* expression : {"(?:a+)+[bc]|.", "[ab]*[bd]*[ac]*[be]|."}) {
        const json split = {{"type", "Split"}, {"pattern", {{"Regex", expression}}}, {"behavior", "Isolated"}};
        gpt2["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {split, byte_level}}};
        const Tokenizer tokenizer = make(gpt2);
        EXPECT_EQ(tokenizer.decode(tokenizer.encode("a b\xC3\xA9")), "a b\xC3\xA9");
        const auto start = std::chrono::steady_clock::now();
        try {
            tokenizer.encode(std::string(100000, 'a'));
            ADD_FAILURE() << expression;
        } catch (const Error& e) {
            const std::string found = e.what();
            EXPECT_NE(found.find(str("the regular expression '", expression, "' backtracks too much at byte ")),
                      std::string::npos)
                << found;
            EXPECT_NE(found.find(" of 100000 of a text"), std::string::npos) << found;
        }
        EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
    }
}

TEST(Tokenizer, TextThatASplitRemovesIsAnError) {
    json tokenizer = description("olmo2");
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = R"([\x00-\x7f]+)";
    const Tokenizer ascii = make(tokenizer);
    EXPECT_EQ(ascii.decode(ascii.encode("it was")), "it was");
    try {
        ascii.encode("caf\u00e9!");
        FAIL();
    } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find(": pre_tokenizer Split with behavior Removed leaves out '\u00e9'"),
                  std::string::npos)
            << e.what();
    }
}

// A special token that stays text hides the tokens inside it, and of two equal contents the special one is found.
TEST(Tokenizer, AddedTokensHideOthers) {
    json file = description("gpt2");
    int64_t id = 0;
    for (const auto& [token, number] : file["model"]["vocab"].items()) id = std::max(id, number.get<int64_t>());
    json token = file["added_tokens"][0];
    for (const char* content : {"endoftext", "|>|", "tex"}) {
        token["id"] = ++id;
        token["content"] = content;
        token["special"] = false;
        file["added_tokens"].push_back(token);
    }
    const Tokenizer tokenizer = make(file);
    EXPECT_EQ(tokenizer.encode("|>|"), std::vector<int32_t>{int32_t(id - 1)});
    EXPECT_EQ(tokenizer.encode("<|endoftext|>|", true).front(), tokenizer.end_of_text());
    for (const int32_t one : tokenizer.encode("<|endoftext|>|")) EXPECT_LT(one, id - 2);
    EXPECT_EQ(tokenizer.encode("endoftextex"),
              (std::vector<int32_t>{int32_t(id - 2), tokenizer.encode("e")[0], tokenizer.encode("x")[0]}));
}

TEST(Tokenizer, EndOfTextAndVocabulary) {
    const Tokenizer tokenizer = make(description("gpt2"));
    const int32_t end = tokenizer.end_of_text();
    EXPECT_EQ(end, 0);  // the trainer puts special tokens first
    EXPECT_EQ(tokenizer.vocab_size(), 500);
    EXPECT_EQ(tokenizer.decode(end), "<|endoftext|>");
    EXPECT_EQ(tokenizer.encode("<|endoftext|>", true), std::vector<int32_t>{end});
    for (const int32_t id : tokenizer.encode("<|endoftext|>")) EXPECT_NE(id, end);
    EXPECT_THROW(tokenizer.decode(-1), Error);
    EXPECT_THROW(tokenizer.decode(500), Error);
    EXPECT_TRUE(tokenizer.contains(0) && tokenizer.contains(499));
    EXPECT_FALSE(tokenizer.contains(-1) || tokenizer.contains(500));
    EXPECT_THROW(tokenizer.decode(std::vector<int32_t>{1, 2, 2147483647}), Error);

    json renamed = description("bytes");
    const auto rename = [&](const char* name) {
        renamed["added_tokens"][0]["content"] = name;
        json vocab;
        for (const auto& [token, id] : renamed["model"]["vocab"].items()) vocab[id == 0 ? name : token] = id;
        renamed["model"]["vocab"] = vocab;
        return make(renamed).end_of_text();
    };
    EXPECT_EQ(rename("</s>"), 0);
    EXPECT_EQ(rename("<|end_of_text|>"), 0);
    EXPECT_EQ(rename("<|other|>"), -1);
}

TEST(Tokenizer, UnsupportedTypesAreErrors) {
    const json good = description("gpt2");
    const auto with = [&](const char* pointer, const json& value) {
        json changed = good;
        changed[json::json_pointer(pointer)] = value;
        return error_of(changed);
    };
    const auto expect_named = [](const std::string& error, const std::string& what) {
        EXPECT_NE(error.find(what), std::string::npos) << error;
        EXPECT_NE(error.find("not supported"), std::string::npos) << error;
        EXPECT_EQ(error.find('\n'), std::string::npos) << error;
    };
    EXPECT_EQ(error_of(good), "");
    expect_named(with("/model/type", "WordPiece"), "WordPiece");
    expect_named(with("/model/type", "Unigram"), "Unigram");
    expect_named(with("/model/byte_fallback", true), "ByteLevel in a SentencePiece");
    expect_named(with("/model/end_of_word_suffix", "</w>"), "end_of_word_suffix");
    expect_named(with("/model/continuing_subword_prefix", "##"), "continuing_subword_prefix");
    expect_named(with("/model/dropout", 0.1), "dropout");
    for (const char* type : {"NFD", "NFKC", "NFKD", "Lowercase", "Strip", "Precompiled"}) {
        expect_named(with("/normalizer", {{"type", type}}), type);
        const json both = {{"type", "Sequence"}, {"normalizers", {{{"type", "NFC"}}, {{"type", type}}}}};
        expect_named(with("/normalizer", both), type);
    }
    expect_named(with("/decoder", {{"type", "WordPiece"}}), "WordPiece");
    expect_named(with("/pre_tokenizer", nullptr), "without a ByteLevel");
    expect_named(with("/pre_tokenizer", {{"type", "Whitespace"}}), "Whitespace");
    expect_named(with("/pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", json::array()}}), "without ByteLevel");
    const auto split = [&](const char* behavior, bool invert, const char* pattern) {
        const json step = {
            {"type", "Split"}, {"behavior", behavior}, {"invert", invert}, {"pattern", {{"Regex", pattern}}}};
        const json level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
        return with("/pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {step, level}}});
    };
    EXPECT_EQ(split("Isolated", false, "a"), "");
    EXPECT_EQ(split("Isolated", true, "a"), "");
    EXPECT_EQ(split("Removed", true, R"(\p{L}+|[^\p{L}]+)"), "");
    expect_named(split("Removed", false, "a"), "Removed");
    expect_named(split("Removed", true, "[a-z]+"), "Removed");  // leaves text out
    for (const char* behavior : {"MergedWithPrevious", "MergedWithNext", "Contiguous"})
        expect_named(split(behavior, false, "a"), behavior);
    const json broken = {
        {"type", "Split"}, {"behavior", "Isolated"}, {"invert", false}, {"pattern", {{"Regex", "(a"}}}};
    expect_named(with("/pre_tokenizer", broken), "(a");
    // What Oniguruma and PCRE2 read differently.
    for (const auto& [pattern, construct] :
         std::initializer_list<std::pair<const char*, const char*>>{{R"(\w+)", R"(\w)"},
                                                                    {R"([a\h])", R"(\h)"},
                                                                    {R"((a)\1)", R"(\1)"},
                                                                    {R"(\p{Han}+)", R"(\p{Han})"},
                                                                    {R"(\p{^Han}+)", R"(\p{^Han})"},
                                                                    {R"(\pL)", R"(\p)"},
                                                                    {R"(\p{L)", R"(\p{L)"},
                                                                    {R"(\p{N}{1,3}+)", "{}+"},
                                                                    {"[a-z&&[^b]]", "&&"},
                                                                    {"[a[bc]]", "[ in a class"},
                                                                    {"[[:alpha:]]", "[ in a class"},
                                                                    {"(?m:.)", "(?m:"},
                                                                    {"a(?i)b", "(?i)"}})
        expect_named(split("Isolated", false, pattern), str("PCRE2 may read ", construct, " differently"));
    for (const char* pattern :
         {R"(\p{L}+|\P{^Lu}?|\x{85}|\x41|[\d\-\]&]|a++|(?<=a)b|(?<!a)b|(?>a)|(?i:'s))", "a{1,3}b+", "}"})
        EXPECT_EQ(split("Isolated", false, pattern), "");
    for (const char* type : {"BertProcessing", "RobertaProcessing"}) {
        expect_named(with("/post_processor", {{"type", type}}), type);
        const json steps = {{{"type", "ByteLevel"}}, {{"type", type}}};
        expect_named(with("/post_processor", {{"type", "Sequence"}, {"processors", steps}}), type);
    }

    json other = description("llama2");
    other["decoder"] = {{"type", "Metaspace"}};
    expect_named(error_of(other), "Metaspace");
    other = description("llama2");
    other["decoder"]["decoders"].erase(1);
    expect_named(error_of(other), "decoder other than");
    other = description("llama2");
    other["normalizer"]["normalizers"][1]["content"] = "_";
    expect_named(error_of(other), "Replace");
    other = description("metaspace-first");
    other["pre_tokenizer"]["replacement"] = "_";
    expect_named(error_of(other), "replacement");
    other["pre_tokenizer"] = {{"type", "Metaspace"}, {"replacement", "\u2581"}, {"prepend_scheme", "last"}};
    expect_named(error_of(other), "prepend_scheme last");
    other = description("llama2");
    other["normalizer"]["normalizers"].push_back({{"type", "NFC"}});
    expect_named(error_of(other), "NFC in a SentencePiece");
}

TEST(Tokenizer, DamagedFilesAreErrors) {
    const json good = description("gpt2");
    const auto with = [&](const char* pointer, const json& value) {
        json changed = good;
        changed[json::json_pointer(pointer)] = value;
        return error_of(changed);
    };
    EXPECT_NE(with("/model", nullptr), "");
    EXPECT_NE(with("/model/vocab", json::array()), "");
    EXPECT_NE(with("/model/vocab", json::object()), "");
    EXPECT_NE(with("/model/vocab/a", -1), "");
    EXPECT_NE(with("/model/vocab/a", 1.5), "");
    EXPECT_NE(with("/model/vocab/a", "b"), "");
    EXPECT_NE(with("/model/vocab/a", 2000000000), "");                   // tables would take 64 GB
    EXPECT_NE(with("/model/vocab/a", good["model"]["vocab"]["b"]), "");  // a duplicate id
    EXPECT_NE(with("/model/merges", 3), "");
    EXPECT_NE(with("/model/merges/0", "ab"), "");
    EXPECT_NE(with("/model/merges/0", "a b c"), "");
    EXPECT_NE(with("/model/merges/0", json::array({"a"})), "");
    EXPECT_NE(with("/model/merges/0", json::array({"a", 3})), "");
    EXPECT_NE(with("/model/merges/0", json::array({"zzz", "a"})), "");  // not in the vocabulary
    EXPECT_NE(with("/added_tokens", 7), "");
    EXPECT_NE(with("/added_tokens/0/content", ""), "");
    EXPECT_NE(with("/added_tokens/0/id", 5), "");  // differs from the vocabulary
    EXPECT_NE(with("/pre_tokenizer", 5), "");
    EXPECT_NE(error_of(json::array()), "");
    EXPECT_THROW(Tokenizer("no/such/tokenizer.json"), Error);
    EXPECT_THROW(Tokenizer("dev"), Error);
    EXPECT_THROW(Tokenizer(TemporaryFile("").path), Error);
}

// Random damage leads to an Error or leaves a working tokenizer; it never crashes.
TEST(Tokenizer, DamagedFilesNeverCrash) {
    int errors = 0;
    for (uint64_t trial = 0; trial < 150; trial++) {
        const std::string good = description(trial % 4 ? "prefix-space" : "llama2").dump();
        const Philox4 r = philox(7, trial, 0);
        std::string bad = good;
        // Most of the file is vocabulary: put half of the damage in the keys before it.
        const size_t at = r.v[0] % (trial % 2 ? bad.size() : 900);
        if (trial % 3 == 0)
            bad.resize(at);
        else if (trial % 3 == 1)
            bad[at] = char(r.v[1]);
        else
            bad.erase(at, 1 + r.v[1] % 20);
        try {
            const Tokenizer tokenizer(TemporaryFile(bad).path);
            const std::vector<int32_t> ids = tokenizer.encode("it was the best of times <|endoftext|>", true);
            tokenizer.decode(ids);
        } catch (const Error& e) {
            errors++;
            EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
        }
    }
    EXPECT_GT(errors, 50);
}

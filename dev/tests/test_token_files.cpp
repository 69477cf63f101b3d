// data/token_files.h: what is written is read, across shards and widths; every kind of damage is one clear Error.
#include "data/token_files.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "runtime/error.h"

namespace fs = std::filesystem;

namespace {

class TokenFilesTest : public testing::Test {
  protected:
    void SetUp() override {
        std::string pattern = testing::TempDir() + "token_files_XXXXXX";
        ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
        folder = pattern;
    }
    void TearDown() override { fs::remove_all(folder); }

    void write(const std::string& name, const std::vector<uint32_t>& header, const std::string& payload) const {
        std::vector<uint32_t> full(256, 0);
        std::copy(header.begin(), header.end(), full.begin());
        std::ofstream out(folder + "/" + name, std::ios::binary);
        out.write(reinterpret_cast<const char*>(full.data()), 1024);
        out.write(payload.data(), std::streamsize(payload.size()));
    }

    template <typename T>
    void write_tokens(const std::string& name, const std::vector<T>& tokens) const {
        const bool narrow = sizeof(T) == 2;
        write(name, {narrow ? 20240520u : 20240801u, narrow ? 1u : 7u, uint32_t(tokens.size())},
              std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(T)));
    }

    std::string all() const { return folder + "/*.bin"; }

    std::string folder;
};

template <typename F>
std::string error_of(const F& f) {
    try {
        f();
    } catch (const Error& e) {
        EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
        return e.what();
    }
    return "";
}

void expect_contains(const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << "'" << text << "' lacks '" << part << "'";
}

}  // namespace

TEST_F(TokenFilesTest, MasksSelectLossTokens) {
    write_tokens<uint16_t>("a.bin", {1, 2, 3});
    write_tokens<uint16_t>("b.bin", {4, 5});
    EXPECT_FALSE(TokenFiles(all()).masked());
    write("a.mask", {20261121, 1, 3}, std::string("\0\1\0", 3));
    const TokenFiles files(all());
    EXPECT_TRUE(files.masked());
    std::vector<uint8_t> mask(5, 9);
    files.read_mask(0, 5, mask.data());
    EXPECT_EQ(mask, (std::vector<uint8_t>{0, 1, 0, 1, 1}));  // the shard without a mask is learnt whole
    files.read_mask(1, 3, mask.data());
    EXPECT_EQ(mask, (std::vector<uint8_t>{1, 0, 1, 1, 1}));
    EXPECT_THROW(files.read_mask(3, 3, mask.data()), Error);

    for (const auto& [header, payload] :
         std::vector<std::pair<std::vector<uint32_t>, std::string>>{{{20261120, 1, 3}, std::string(3, '\1')},
                                                                    {{20261121, 4, 3}, std::string(3, '\1')},
                                                                    {{20261121, 1, 2}, std::string(3, '\1')},
                                                                    {{20261121, 1, 3, 1}, std::string(3, '\1')},
                                                                    {{20261121, 1, 3}, std::string(2, '\1')},
                                                                    {{20261121, 1, 4}, std::string(4, '\1')}}) {
        write("a.mask", header, payload);
        expect_contains(error_of([&] { TokenFiles{all()}; }), "a.mask");
    }
    write("a.mask", {20261121, 1, 3}, "\1\2\1");
    expect_contains(error_of([&] { TokenFiles(all()).read_mask(0, 5, mask.data()); }), "holds a byte above 1");
    std::ofstream(folder + "/a.mask") << "x";
    expect_contains(error_of([&] { TokenFiles{all()}; }), "a.mask");
}

TEST_F(TokenFilesTest, ShardsAreOneSequence) {
    write_tokens<uint16_t>("b.bin", {10, 11, 12});
    write_tokens<uint16_t>("a.bin", {0, 65535});
    write_tokens<uint16_t>("c.bin", {20});
    const TokenFiles files(all());
    EXPECT_EQ(files.size(), 6);
    EXPECT_EQ(files.pattern(), all());
    EXPECT_EQ(files.paths(), (std::vector<std::string>{folder + "/a.bin", folder + "/b.bin", folder + "/c.bin"}));
    const std::vector<int32_t> expected = {0, 65535, 10, 11, 12, 20};
    for (int64_t begin = 0; begin <= 6; begin++) {
        for (int64_t end = begin; end <= 6; end++) {
            std::vector<int32_t> got(size_t(end - begin) + 1, -7);
            files.read(begin, end - begin, got.data(), 0);
            EXPECT_EQ(got.back(), -7);
            got.pop_back();
            EXPECT_EQ(got, std::vector<int32_t>(expected.begin() + begin, expected.begin() + end));
        }
    }
    int32_t unused;
    EXPECT_THROW(files.read(-1, 1, &unused, 0), Error);
    EXPECT_THROW(files.read(6, 1, &unused, 0), Error);
    EXPECT_THROW(files.read(0, 7, &unused, 0), Error);
    EXPECT_THROW(files.read(1, INT64_MAX, &unused, 0), Error);
}

TEST_F(TokenFilesTest, WideTokens) {
    write_tokens<uint32_t>("a.bin", {0, 128255, 65536});
    const TokenFiles files(all());
    std::vector<int32_t> got(3);
    files.read(0, 3, got.data(), 128256);
    EXPECT_EQ(got, (std::vector<int32_t>{0, 128255, 65536}));
}

TEST_F(TokenFilesTest, TokensOutOfRangeNameFileAndOffset) {
    write_tokens<uint16_t>("a.bin", {1, 2, 3});
    write_tokens<uint16_t>("b.bin", {4, 5, 300, 6});
    const TokenFiles files(all());
    std::vector<int32_t> got(7);
    EXPECT_NO_THROW(files.read(0, 7, got.data(), 301));
    EXPECT_NO_THROW(files.read(0, 5, got.data(), 6));
    const std::string error = error_of([&] { files.read(1, 6, got.data(), 300); });
    expect_contains(error, folder + "/b.bin: token 2 is 300");

    write_tokens<uint32_t>("wide.bin", {1, 0x80000000u});  // no int32, whatever the vocabulary
    const TokenFiles wide(folder + "/wide.bin");
    expect_contains(error_of([&] { wide.read(0, 2, got.data(), 0); }), "wide.bin: token 1 is 2147483648");
    expect_contains(error_of([&] { wide.read(0, 2, got.data(), int64_t(1) << 40); }), "token 1 is 2147483648");
}

TEST_F(TokenFilesTest, DamageErrorsNameTheFault) {
    const auto error = [&](const std::string& name) {
        const std::string text = error_of([&] { TokenFiles(folder + "/" + name); });
        expect_contains(text, name);
        return text;
    };
    expect_contains(error("none_*.bin"), "no token files match");
    write("magic.bin", {20240521, 1, 2}, std::string(4, '\0'));
    expect_contains(error("magic.bin"), "not a token file");
    write("version.bin", {20240520, 2, 2}, std::string(4, '\0'));
    expect_contains(error("version.bin"), "version 2");
    write("wide_version.bin", {20240801, 1, 1}, std::string(4, '\0'));
    expect_contains(error("wide_version.bin"), "version 1");
    write("short.bin", {20240520, 1, 3}, std::string(4, '\0'));
    expect_contains(error("short.bin"), "truncated");
    write("long.bin", {20240520, 1, 1}, std::string(4, '\0'));
    expect_contains(error("long.bin"), "damaged");
    write("half.bin", {20240520, 1, 1}, std::string(3, '\0'));
    expect_contains(error("half.bin"), "damaged");
    write("empty.bin", {20240520, 1, 0}, "");
    expect_contains(error("empty.bin"), "no tokens");
    write("huge.bin", {20240801, 7, 1, 0x40000000u}, std::string(4, '\0'));  // 2^62 + 1 tokens: the size overflows to 4
    expect_contains(error("huge.bin"), "truncated");
    std::ofstream(folder + "/header.bin") << "too short for a header";
    expect_contains(error("header.bin"), "too few");
    std::ofstream(folder + "/zero.bin");
    expect_contains(error("zero.bin"), "too few");
    fs::create_directory(folder + "/folder.bin");
    error("folder.bin");
    write_tokens<uint16_t>("mix_1.bin", {1});
    write_tokens<uint32_t>("mix_2.bin", {1});
    const std::string mixed = error_of([&] { TokenFiles(folder + "/mix_*.bin"); });
    expect_contains(mixed, "mix_1.bin");
    expect_contains(mixed, "mix_2.bin");
}

// More than 2^32 tokens in one file and bytes beyond 2^33, as a file with a hole: no byte of it exists.
TEST_F(TokenFilesTest, CountsBeyond32Bits) {
    const uint64_t count = (uint64_t(1) << 32) + 5;
    write("a.bin", {20240801, 7, 5, 1}, "");
    if (::truncate((folder + "/a.bin").c_str(), off_t(1024 + count * 4)) != 0)
        GTEST_SKIP() << "no sparse file of 16 GB here";
    std::fstream file(folder + "/a.bin", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(std::streamoff(1024 + (count - 1) * 4));
    const uint32_t last = 77;
    file.write(reinterpret_cast<const char*>(&last), 4);
    file.close();
    write_tokens<uint32_t>("b.bin", {88});
    const TokenFiles files(all());
    EXPECT_EQ(files.size(), int64_t(count) + 1);
    std::vector<int32_t> got(3);
    files.read(int64_t(count) - 2, 3, got.data(), 100);
    EXPECT_EQ(got, (std::vector<int32_t>{0, 77, 88}));
}

TEST_F(TokenFilesTest, Examples) {
    write_tokens<uint16_t>("a.bin", {1, 2, 3});
    write_tokens<uint16_t>("b.bin", {4, 5});
    write("a.mask", {20261121, 2, 3}, {2, 0, 1});
    expect_contains(error_of([&] { TokenFiles{all()}; }), "b.bin: has no mask that says where examples start");
    write("b.mask", {20261121, 2, 2}, {3, 1});
    const TokenFiles files(all());
    EXPECT_TRUE(files.masked() && files.has_examples());
    std::vector<uint8_t> flags(5), mask(5);
    files.read_flags(0, 5, flags.data());
    files.read_mask(0, 5, mask.data());
    EXPECT_EQ(flags, (std::vector<uint8_t>{2, 0, 1, 3, 1}));
    EXPECT_EQ(mask, (std::vector<uint8_t>{0, 0, 1, 1, 1}));
    write("b.mask", {20261121, 2, 2}, {3, 4});
    expect_contains(error_of([&] { TokenFiles(all()).read_flags(0, 5, flags.data()); }), "holds a byte above 3");
    write("b.mask", {20261121, 4, 2}, {3, 1});
    expect_contains(error_of([&] { TokenFiles{all()}; }), "b.mask: not a mask file of version 1 to 3");
    write("a.mask", {20261121, 1, 3}, {0, 0, 1});
    write("b.mask", {20261121, 2, 2}, {3, 1});
    expect_contains(error_of([&] { TokenFiles{all()}; }), "b.bin: has a mask that says where examples start");
}

TEST_F(TokenFilesTest, Pairs) {
    write_tokens<uint16_t>("a.bin", {1, 2, 3});
    write_tokens<uint16_t>("b.bin", {4, 5});
    write("a.mask", {20261121, 3, 3}, {2, 1, 6});
    write("b.mask", {20261121, 2, 2}, {1, 1});
    expect_contains(error_of([&] { TokenFiles{all()}; }), "b.bin: does not hold preference pairs, unlike ");
    write("b.mask", {20261121, 3, 2}, {1, 1});
    const TokenFiles files(all());
    EXPECT_TRUE(files.masked() && files.has_examples() && files.has_pairs());
    std::vector<uint8_t> flags(5), mask(5);
    files.read_flags(0, 5, flags.data());
    files.read_mask(0, 5, mask.data());
    EXPECT_EQ(flags, (std::vector<uint8_t>{2, 1, 6, 1, 1}));
    EXPECT_EQ(mask, (std::vector<uint8_t>{0, 1, 0, 1, 1}));
    EXPECT_EQ(files.mask_path(2), folder + "/a.mask");
    EXPECT_EQ(files.mask_path(3), folder + "/b.mask");
    write("b.mask", {20261121, 3, 2}, {1, 5});
    expect_contains(error_of([&] { TokenFiles(all()).read_flags(0, 5, flags.data()); }),
                    "b.mask: marks token 1 as the first one of a rejected response, but no example starts there");
    write("b.mask", {20261121, 3, 2}, {1, 8});
    expect_contains(error_of([&] { TokenFiles(all()).read_flags(0, 5, flags.data()); }), "holds a byte above 7");
    write("a.mask", {20261121, 2, 3}, {2, 1, 2});
    write("b.mask", {20261121, 3, 2}, {1, 1});
    expect_contains(error_of([&] { TokenFiles{all()}; }), "b.bin: holds preference pairs, unlike ");
    write("b.mask", {20261121, 2, 2}, {1, 1});
    EXPECT_FALSE(TokenFiles{all()}.has_pairs());
}

// A map would end the process with SIGBUS.
TEST_F(TokenFilesTest, TruncatedWhileOpen) {
    write_tokens<uint16_t>("a.bin", std::vector<uint16_t>(9000, 7));
    write("a.mask", {20261121, 1, 9000}, std::string(9000, '\1'));
    const TokenFiles files(all());
    ASSERT_EQ(::truncate((folder + "/a.bin").c_str(), 5000), 0);
    ASSERT_EQ(::truncate((folder + "/a.mask").c_str(), 5000), 0);
    std::vector<int32_t> got(9000);
    std::vector<uint8_t> mask(9000);
    files.read(0, 1900, got.data(), 0);
    expect_contains(error_of([&] { files.read(0, 9000, got.data(), 0); }), "a.bin: has 5000 bytes, but had 19024");
    expect_contains(error_of([&] { files.read_mask(0, 9000, mask.data()); }), "a.mask: has 5000 bytes, but had 10024");
}

TEST_F(TokenFilesTest, CountsOfMetaJson) {
    write_tokens<uint16_t>("train_000000.bin", {1, 2});
    write_tokens<uint16_t>("train_000001.bin", {3});
    write_tokens<uint16_t>("val_000000.bin", {4});
    const auto meta = [&](const std::string& train, const std::string& val) {
        std::ofstream(folder + "/meta.json")
            << R"({"vocab_size": 9, "end_of_text": 8, "train": {"bytes": 3, "documents": 1)" << train
            << R"(}, "val": {"bytes": 1, "documents": 1)" << val << "}}";
        return open_data(folder);
    };
    for (const auto& [train, val] : {std::pair(R"(, "tokens": 3)", R"(, "tokens": 1)"), std::pair("", "")}) {
        EXPECT_EQ(open_split(meta(train, val), true).size(), 3);
        EXPECT_EQ(open_split(meta(train, val), false).size(), 1);
    }
    const std::string wrong_train = error_of([&] { open_split(meta(R"(, "tokens": 2)", ""), true); });
    expect_contains(wrong_train, "meta.json: key 'train.tokens' is 2, but ");
    expect_contains(wrong_train, " holds 3 tokens");
    expect_contains(error_of([&] { open_split(meta("", R"(, "tokens": 0)"), false); }), "'val.tokens' is 0");
    expect_contains(error_of([&] { meta(R"(, "tokens": "3")", ""); }), "key 'train.tokens' is \"3\", expected a whole");
    expect_contains(error_of([&] { meta("", R"(, "tokens": -1)"); }), "key 'val.tokens' is -1");
}

TEST_F(TokenFilesTest, DataDirectory) {
    expect_contains(error_of([&] { open_data(folder + "/none"); }), "no such data directory");
    expect_contains(error_of([&] { open_data(folder); }), "holds neither");
    std::ofstream(folder + "/file") << "x";
    expect_contains(error_of([&] { open_data(folder + "/file"); }), "not a directory");

    // A folder whose name is a glob: the patterns must match it literally.
    const std::string path = folder + "/data[1]*";
    fs::create_directory(path);
    write_tokens<uint16_t>("data[1]*/train_000000.bin", {1, 2});
    write_tokens<uint16_t>("data[1]*/val_000000.bin", {3});
    DataDirectory data = open_data(path);  // llm.c's data sets have no tokenizer and no meta.json
    EXPECT_EQ(data.tokenizer_path(), "");
    EXPECT_EQ(data.vocab_size, 0);
    EXPECT_EQ(data.end_of_text, -1);
    EXPECT_EQ(data.train_bytes, 0);
    EXPECT_EQ(TokenFiles(data.train_pattern()).size(), 2);
    EXPECT_EQ(TokenFiles(data.val_pattern()).size(), 1);

    const auto meta = [&](const std::string& text) { std::ofstream(path + "/meta.json") << text; };
    const std::string splits =
        R"("train": {"bytes": 9, "documents": 2, "tokens": 2}, "val": {"bytes": 4, "documents": 1})";
    meta("{" + splits + R"(, "vocab_size": 257, "end_of_text": 256})");
    data = open_data(path);
    EXPECT_EQ(data.train_bytes, 9);
    EXPECT_EQ(data.train_documents, 2);
    EXPECT_EQ(data.val_bytes, 4);
    EXPECT_EQ(data.val_documents, 1);
    EXPECT_EQ(data.end_of_text, 256);

    std::ofstream(path + "/tokenizer.json") << R"({"model": {"type": "BPE", "vocab": {"a": 0, "</s>": 2}, "merges": []},
        "pre_tokenizer": {"type": "ByteLevel", "use_regex": false}})";
    expect_contains(error_of([&] { open_data(path); }), "another tokenizer");
    fs::remove(path + "/meta.json");
    data = open_data(path);
    EXPECT_EQ(data.tokenizer_path(), path + "/tokenizer.json");
    EXPECT_EQ(data.vocab_size, 3);
    EXPECT_EQ(data.end_of_text, 2);

    fs::remove(path + "/tokenizer.json");
    for (const std::string& bad : {std::string("{"), std::string("[]"), "{" + splits + "}",
                                   "{" + splits + R"(, "vocab_size": 257, "end_of_text": 257})",
                                   "{" + splits + R"(, "vocab_size": "x", "end_of_text": 0})",
                                   "{" + splits + R"(, "vocab_size": -3, "end_of_text": -4})",
                                   "{" + splits + R"(, "vocab_size": 99999999999, "end_of_text": 99999999998})"}) {
        meta(bad);
        expect_contains(error_of([&] { open_data(path); }), "meta.json");
    }
}

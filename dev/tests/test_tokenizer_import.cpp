// Tests data/tokenizer_import.h with files of llama2.c and llm.c, written here from the fixture's vocabularies.
#include "data/tokenizer_import.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "data/token_text.h"
#include "data/tokenizer.h"
#include "dev/tests/temp_dir.h"
#include "runtime/error.h"
#include "runtime/files/files.h"

using nlohmann::json;

namespace {

const json& fixture() {
    static const json loaded = json::parse(read_file("dev/fixtures/tokenizer/tokenizers.json"));
    return loaded;
}

const json& fixture_case(const std::string& name) {
    for (const json& one : fixture()["cases"])
        if (one["name"] == name) return one;
    throw Error("fixture lacks " + name);
}

std::vector<std::string> tokens_by_id(const json& tokenizer) {
    std::vector<std::string> tokens;
    for (const auto& [token, id] : tokenizer["model"]["vocab"].items()) {
        tokens.resize(std::max(tokens.size(), id.get<size_t>() + 1));
        tokens[id.get<size_t>()] = token;
    }
    return tokens;
}

template <typename T>
void append(std::string& to, T value) {
    char bytes[sizeof(T)];
    std::memcpy(bytes, &value, sizeof(T));
    to.append(bytes, sizeof(T));
}

// gpt2_tokenizer.bin of the fixture's GPT-2 vocabulary: end-of-text, the bytes, then tokens in the order of merges.
std::string llmc_file() {
    const std::vector<std::string> tokens = tokens_by_id(fixture_case("gpt2")["tokenizer"]);
    std::string file;
    const int32_t header[256] = {20240328, 2, int32_t(tokens.size()), 0};
    file.append(reinterpret_cast<const char*>(header), sizeof header);
    for (const std::string& token : tokens) {
        std::string bytes = token;
        const bool known = token == "<|endoftext|>" || ByteAlphabet().bytes(token, bytes);
        EXPECT_TRUE(known) << token;
        append(file, uint8_t(bytes.size()));
        file += bytes;
    }
    return file;
}

struct Scored {
    std::vector<std::string> pieces;  // in llama2.c's notation
    std::vector<float> scores;
};

// tokenizer.bin of the fixture's LLaMA-2 vocabulary. As in SentencePiece, a score is minus the rank.
Scored scored_vocabulary() {
    Scored v;
    const std::vector<std::string> tokens = tokens_by_id(fixture_case("llama2")["tokenizer"]);
    for (size_t id = 0; id < tokens.size(); id++) {
        const bool plain = id >= 259;
        v.pieces.push_back(id == 1 || id == 2 ? "\n" + tokens[id] + "\n" : replace_all(tokens[id], SPACE_MARK, " "));
        v.scores.push_back(plain ? -float(id - 259) : 0);
    }
    return v;
}

std::string llama2c_file(const Scored& v) {
    std::string file;
    append(file, int32_t(27));
    for (size_t id = 0; id < v.pieces.size(); id++) {
        append(file, v.scores[id]);
        append(file, int32_t(v.pieces[id].size()));
        file += v.pieces[id];
    }
    return file;
}

// llama2.c's encoding by a naive algorithm: prepend a space, split into characters or their bytes, then repeatedly
// merge the pair that forms the token of the best score, the leftmost pair of equal score.
std::vector<int32_t> encode_by_score(const Scored& v, const std::string& text) {
    std::map<std::string, int32_t> ids;
    for (size_t id = 0; id < v.pieces.size(); id++) ids[v.pieces[id]] = int32_t(id);
    std::vector<int32_t> out;
    const std::string all = text.empty() ? "" : " " + text;
    for (size_t i = 0, n; i < all.size(); i += n) {
        n = std::max<size_t>(utf8_length(all, i), 1);
        const auto found = ids.find(all.substr(i, n));
        if (found != ids.end())
            out.push_back(found->second);
        else
            for (const char c : all.substr(i, n)) out.push_back(3 + int32_t(uint8_t(c)));
    }
    for (;;) {
        size_t best = out.size();
        int32_t made = -1;
        for (size_t i = 0; i + 1 < out.size(); i++) {
            const auto found = ids.find(v.pieces[size_t(out[i])] + v.pieces[size_t(out[i + 1])]);
            if (found == ids.end()) continue;
            if (made >= 0 && v.scores[size_t(found->second)] <= v.scores[size_t(made)]) continue;
            best = i;
            made = found->second;
        }
        if (made < 0) return out;
        out[best] = made;
        out.erase(out.begin() + int64_t(best) + 1);
    }
}

class TokenizerImport : public testing::Test {
  protected:
    TempDir dir;
    std::string write(const std::string& content) {
        const std::string path = dir.file("file.bin");
        write_file(path, content);
        return path;
    }
    Tokenizer import(const std::string& content) {
        const std::string path = dir.file("tokenizer.json");
        write_file(path, import_tokenizer(write(content)));
        return Tokenizer(path);
    }
    std::string error_of(const std::string& content) {
        try {
            import_tokenizer(write(content));
        } catch (const Error& e) {
            EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
            EXPECT_NE(std::string(e.what()).find("file.bin"), std::string::npos) << e.what();
            return e.what();
        }
        return "";
    }
};

}  // namespace

TEST_F(TokenizerImport, RecoversMergesFromLlmc) {
    const json gpt2 = fixture_case("gpt2");
    const json imported = json::parse(import_tokenizer(write(llmc_file())));
    EXPECT_EQ(imported["model"]["vocab"], gpt2["tokenizer"]["model"]["vocab"]);
    EXPECT_EQ(imported["model"]["merges"], gpt2["tokenizer"]["model"]["merges"]);
    const Tokenizer tokenizer = import(llmc_file());
    for (size_t i = 0; i < fixture()["texts"].size(); i++) {
        EXPECT_EQ(tokenizer.encode(fixture()["texts"][i].get<std::string>(), true),
                  gpt2["special"][i].get<std::vector<int32_t>>());
    }
    EXPECT_EQ(tokenizer.end_of_text(), 0);
}

TEST_F(TokenizerImport, Llama2cEncodesByScore) {
    const Scored v = scored_vocabulary();
    const Tokenizer tokenizer = import(llama2c_file(v));
    size_t merged = 0;
    for (const json& one : fixture()["texts"]) {
        const std::string text = one;
        const std::vector<int32_t> ids = tokenizer.encode(text);
        EXPECT_EQ(ids, encode_by_score(v, text)) << json(text).dump();
        EXPECT_EQ(tokenizer.decode(ids), text);
        merged += ids.size() < text.size();
    }
    EXPECT_GT(merged, 50u);
    EXPECT_EQ(tokenizer.vocab_size(), int64_t(v.pieces.size()));
    EXPECT_EQ(tokenizer.end_of_text(), 2);
    EXPECT_EQ(tokenizer.start_of_text(), std::vector<int32_t>{1});
    EXPECT_EQ(tokenizer.encode("<s>a", true)[0], 1);
}

TEST_F(TokenizerImport, TokenizerJsonIsUnchanged) {
    const std::string text = fixture_case("llama3")["tokenizer"].dump();
    EXPECT_EQ(import_tokenizer(write(text)), text);
}

TEST_F(TokenizerImport, DamageErrorsNameTheFault) {
    const std::string llmc = llmc_file(), llama2c = llama2c_file(scored_vocabulary());
    const auto with = [](std::string file, size_t at, int32_t value) {
        std::memcpy(&file[at], &value, sizeof value);
        return file;
    };
    EXPECT_EQ(error_of(llmc), "");
    EXPECT_EQ(error_of(llama2c), "");
    for (const std::string& bad : {std::string(),
                                   std::string("abc"),
                                   llmc.substr(0, 500),
                                   llmc.substr(0, llmc.size() - 1),
                                   llmc + "x",
                                   with(llmc, 4, 3),
                                   with(llmc, 8, 1 << 30),
                                   with(llmc, 8, -1),
                                   with(llmc, 8, 499),
                                   with(llmc, 12, 500),
                                   with(llmc, 12, -1),
                                   llama2c.substr(0, 4),
                                   llama2c.substr(0, llama2c.size() - 1),
                                   llama2c + "xyz",
                                   with(llama2c, 0, 0),
                                   with(llama2c, 0, 1 << 30),
                                   with(llama2c, 0, 1),
                                   with(llama2c, 8, -5),
                                   with(llama2c, 8, 1 << 30),
                                   with(llama2c, 4, 0x7F800000),
                                   llama2c + llama2c.substr(4)}) {
        EXPECT_NE(error_of(bad), "") << bad.size() << " bytes";
    }
    // Without its first merge, the file has a token whose parts are not both earlier tokens.
    std::string swapped = llmc;
    const size_t first_merge = 1024 + 1 + 13 + 256 * 2;
    EXPECT_EQ(swapped[first_merge], 2);
    swapped.erase(first_merge, 3);
    std::memcpy(&swapped[8], "\xF3\x01\0\0", 4);
    EXPECT_NE(error_of(swapped).find("order of merges"), std::string::npos) << error_of(swapped);
}

// A fuzzer of all external input: models, tokenizers, tokens, prompts. A damaged file either gives a one-line Error or
// is still a valid file. It never causes a crash (CI runs this with the address sanitizer), another exception, or
// allocations that the size of the file does not justify.
//
// Half of the mutations change headers, lengths and offsets: the numbers of a JSON header, the integers at the start of
// a binary file. The others change any byte; a few nest JSON in more lists than a stack can hold. All follow from fixed
// seeds. FUZZ_ROUNDS=n in the environment makes n times as many.
#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <functional>
#include <new>
#include <nlohmann/json.hpp>

#include "data/chat_template.h"
#include "data/loader.h"
#include "data/multiple_choice.h"
#include "data/token_files.h"
#include "data/tokenizer.h"
#include "data/tokenizer_import.h"
#include "data/tokenizer_json.h"
#include "dev/tests/fixtures.h"
#include "dev/tests/fuzz_rounds.h"
#include "dev/tests/saved_state.h"
#include "dev/tests/temp_dir.h"
#include "dev/tests/tokenizer_fixture.h"
#include "infer/prompts.h"
#include "model.h"
#include "models/bin_models.h"
#include "models/family.h"
#include "models/gguf_writer.h"
#include "runtime/files/log.h"
#include "runtime/rng.h"

using nlohmann::json;

// ---------------------------------------------------------------------------------------------------------------------
// Memory: an allocation beyond the limit fails, and so does the test.

namespace {

constexpr int64_t MEMORY_LIMIT = 48 << 20;  // bytes; the files have at most 400 kB
std::atomic<int64_t> in_use{0}, limit{INT64_MAX};

void* counted_alloc(size_t n) {
    void* const memory = std::malloc(n ? n : 1);
    if (!memory) throw std::bad_alloc();
    if (in_use.fetch_add(int64_t(malloc_usable_size(memory))) + int64_t(n) > limit.load()) {
        in_use.fetch_sub(int64_t(malloc_usable_size(memory)));
        std::free(memory);
        throw std::bad_alloc();
    }
    return memory;
}

void counted_free(void* memory) {
    if (!memory) return;
    in_use.fetch_sub(int64_t(malloc_usable_size(memory)));
    std::free(memory);
}

}  // namespace

void* operator new(size_t n) {
    // A single request beyond the limit fails at once, because sanitizers stop the program at such a size.
    if (n > size_t(1) << 30) throw std::bad_alloc();
    return counted_alloc(n);
}
void* operator new[](size_t n) {
    return operator new(n);
}
void* operator new(size_t n, const std::nothrow_t&) noexcept {
    try {
        return operator new(n);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}
void* operator new[](size_t n, const std::nothrow_t& nothrow) noexcept {
    return operator new(n, nothrow);
}
void operator delete(void* memory) noexcept {
    counted_free(memory);
}
void operator delete[](void* memory) noexcept {
    counted_free(memory);
}
void operator delete(void* memory, size_t) noexcept {
    counted_free(memory);
}
void operator delete[](void* memory, size_t) noexcept {
    counted_free(memory);
}

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Mutations

class Random {
  public:
    explicit Random(uint64_t s) : seed(s) {}
    uint64_t next() {
        const Philox4 r = philox(seed, counter++, 0xF022);
        return uint64_t(r.v[1]) << 32 | r.v[0];
    }
    uint64_t below(uint64_t n) { return n ? next() % n : 0; }

  private:
    uint64_t seed, counter = 0;
};

// Numbers at which sizes overflow or wrap around.
int64_t awkward_number(Random& random, int64_t file_size, int64_t present) {
    const auto bits = static_cast<uint64_t>(present);  // any number may be present: no signed overflow
    const int64_t numbers[] = {0,
                               1,
                               -1,
                               2,
                               127,
                               128,
                               255,
                               256,
                               65535,
                               65536,
                               INT32_MAX,
                               INT32_MIN,
                               INT64_MAX,
                               INT64_MIN,
                               1 << 30,
                               int64_t(1) << 32,
                               int64_t(1) << 40,
                               int64_t(1) << 62,
                               file_size,
                               file_size - 1,
                               file_size + 1,
                               int64_t(bits + 1),
                               int64_t(bits - 1),
                               int64_t(-bits),
                               int64_t(bits * 2),
                               int64_t(bits + (uint64_t(1) << 32))};
    const size_t n = sizeof numbers / sizeof *numbers, i = size_t(random.below(n + 2));
    return i < n ? numbers[i] : int64_t(random.next() >> random.below(64));
}

// Replaces a decimal number in a text by another number.
void mutate_number(std::string& text, size_t end, Random& random) {
    std::vector<std::pair<size_t, size_t>> numbers;  // begin, length
    for (size_t i = 0; i < std::min(end, text.size()); i++) {
        const size_t begin = i;
        while (i < text.size() && isdigit(uint8_t(text[i]))) i++;
        if (i > begin) numbers.emplace_back(begin, i - begin);
    }
    if (numbers.empty()) return;
    const auto [begin, length] = numbers[size_t(random.below(numbers.size()))];
    const int64_t present = std::atoll(text.substr(begin, std::min<size_t>(length, 18)).c_str());
    std::string number = std::to_string(awkward_number(random, int64_t(text.size()), present));
    if (random.below(8) == 0) number = random.below(2) ? "1e308" : "0.5";
    text.replace(begin, length, number);
}

// Replaces an integer in a binary header by another integer.
void mutate_integer(std::string& bytes, size_t header, Random& random) {
    const size_t width = random.below(4) ? 4 : 8;
    const size_t places = std::min(header, bytes.size()) / 4;
    const size_t at = 4 * size_t(random.below(places));
    if (at + width > bytes.size()) return;
    int64_t value = 0;
    std::memcpy(&value, &bytes[at], width);
    value = awkward_number(random, int64_t(bytes.size()), width == 4 ? int64_t(int32_t(value)) : value);
    std::memcpy(&bytes[at], &value, width);
}

void mutate_anywhere(std::string& bytes, Random& random) {
    const size_t at = size_t(random.below(bytes.size())), n = 1 + size_t(random.below(40));
    switch (random.below(7)) {
        case 0:
            bytes[at] = char(random.next());
            break;
        case 1:
            bytes[at] = char(bytes[at] ^ 1 << random.below(8));
            break;
        case 2:
            bytes.resize(at);
            break;
        case 3:
            bytes.erase(at, n);
            break;
        case 4:
            bytes.insert(at, bytes.substr(size_t(random.below(bytes.size())), n));
            break;
        case 5:
            bytes.insert(at, n, char(random.next()));
            break;
        default:
            for (size_t i = at; i < std::min(at + n, bytes.size()); i++) bytes[i] = char(random.next());
    }
}

// Puts a JSON value, or the whole text, into one list or 100,000 nested lists, with or without their ends.
void mutate_nesting(std::string& text, Random& random) {
    const size_t depth = random.below(2) ? 1 : 100000;
    const size_t colon = random.below(4) ? text.find(':', size_t(random.below(text.size()))) : std::string::npos;
    const bool all = colon == std::string::npos;
    const size_t begin = all ? 0 : colon + 1,
                 end = std::min(text.find_first_of(all ? "\n" : ",}\n", begin), text.size());
    if (random.below(4)) text.insert(end, depth, ']');
    text.insert(begin, depth, '[');
}

// The header of a file to damage: its length, and whether it is text.
struct Header {
    size_t bytes;
    bool text;
};

std::string mutated(const std::string& good, const Header& header, uint64_t seed) {
    Random random(seed);
    std::string bad = good;
    for (uint64_t times = 1 + (random.below(4) == 0); times > 0 && !bad.empty(); times--) {
        if (header.text && random.below(32) == 0)
            mutate_nesting(bad, random);
        else if (random.below(2))
            mutate_anywhere(bad, random);
        else if (header.text && (header.bytes <= 8 || random.below(4)))
            mutate_number(bad, header.bytes, random);
        else
            mutate_integer(bad, header.text ? 8 : header.bytes, random);
    }
    return bad;
}

// ---------------------------------------------------------------------------------------------------------------------

class Fuzz : public testing::Test {
  protected:
    TempDir dir;

    // Writes `count` mutants of good to path and reads each. read returns if the file is valid.
    void fuzz(const std::string& path, const std::string& good, const Header& header, int count,
              const std::function<void()>& read) {
        put_file(path, good);
        ASSERT_NO_THROW(read()) << path;
        count *= fuzz_rounds();
        int errors = 0, sound = 0;
        for (int i = 0; i < count; i++) {
            const uint64_t seed = name_hash(path.substr(dir.path().size())) + uint64_t(i);
            put_file(path, mutated(good, header, seed));
            limit = in_use + MEMORY_LIMIT;
            std::string failure;
            try {
                read();
                sound++;
            } catch (const Error& e) {
                errors++;
                if (std::strchr(e.what(), '\n')) failure = std::string("an Error of several lines: ") + e.what();
            } catch (const std::bad_alloc&) {
                failure = str("more than ", MEMORY_LIMIT, " bytes are asked for");
            } catch (const std::exception& e) {
                failure = std::string("another exception: ") + e.what();
            }
            limit = INT64_MAX;
            ASSERT_EQ(failure, "") << path << ", mutant " << i;
        }
        put_file(path, good);
        RecordProperty("errors", errors);
        EXPECT_GT(errors, count / 10) << "the damage of " << path << " is hardly ever noticed: is it read at all?";
        EXPECT_EQ(errors + sound, count);
    }

    std::string copy_model(const std::string& fixture) {
        const std::string folder = dir.file(fixture);
        make_directories(folder);
        for (const std::string& name : list_directory(fixture_directory(fixture)))
            put_file(join_path(folder, name), read_file(join_path(fixture_directory(fixture), name)));
        return folder;
    }
};

// A table whose parameters are the tensors of a model directory.
ParamTable table_of(const std::string& directory) {
    ParamTable table;
    for (const std::string& path : glob_files(directory + "/model*.safetensors")) {
        const SafetensorsFile file(path);
        for (const auto& [name, entry] : file.entries()) {
            const int64_t rows = entry.shape[0], cols = entry.shape.size() > 1 ? entry.shape[1] : 0;
            table.params.push_back({int(table.params.size()),
                                    -1,
                                    0,
                                    name,
                                    rows,
                                    cols,
                                    rows,
                                    0,
                                    0,
                                    false,
                                    false,
                                    {{name, 0, rows, false}}});
        }
    }
    table.layout(1);
    return table;
}

void read_weights(const WeightSource& weights, const ParamTable& table) {
    std::vector<float> buffer;
    for (const Param& p : table.params) weights.fetch(p, buffer);
}

const std::string TEXT =
    "It was  the best of times,\n\tit's 1234 \xF0\x9F\x98\x80 caf\xC3\xA9 e\xCC\x81 \xFF\xC0 <|endoftext|><s> </s>  "
    "</think> t6 <t7> ";

void use_tokenizer(const std::string& path) {
    const Tokenizer tokenizer(path);
    TextStream stream(tokenizer, true);
    for (const bool special : {false, true}) {
        const std::vector<int32_t> ids = tokenizer.encode(TEXT, special);
        tokenizer.decode(ids);
        for (const int32_t id : ids) stream.put(id);
    }
    stream.finish();
}

}  // namespace

TEST_F(Fuzz, EnforcesTheMemoryLimit) {
    limit = in_use + MEMORY_LIMIT;
    EXPECT_NO_THROW(std::string(size_t(MEMORY_LIMIT) / 2, 'x'));
    EXPECT_THROW(std::string(size_t(MEMORY_LIMIT) + 1, 'x'), std::bad_alloc);
    EXPECT_THROW(std::vector<std::string>(3, std::string(size_t(MEMORY_LIMIT) / 3, 'x')), std::bad_alloc);
    limit = INT64_MAX;
}

TEST_F(Fuzz, Config) {
    for (const char* name : {"gpt2-inner-eps", "llama-rope-llama3"}) {
        const std::string folder = copy_model(name), path = folder + "/config.json";
        fuzz(path, read_file(path), {1 << 20, true}, 300, [&] {
            const ModelSource source = find_model(folder);
            config_to_json(source.config, source.original_config);
        });
    }
}

TEST_F(Fuzz, Safetensors) {
    const std::string folder = copy_model("gpt2-fp16"), path = folder + "/model.safetensors";
    const ParamTable table = table_of(folder);
    const std::string good = read_file(path);
    uint64_t header = 0;
    std::memcpy(&header, good.data(), 8);
    fuzz(path, good, {size_t(header) + 8, true}, 500, [&] { read_weights(open_weight_source(folder, table), table); });
}

TEST_F(Fuzz, SafetensorsShardsAndIndex) {
    const std::string folder = copy_model("llama-sharded");
    const ParamTable table = table_of(folder);
    for (const char* name : {"model.safetensors.index.json", "model-00002-of-00003.safetensors"}) {
        const std::string path = join_path(folder, name);
        fuzz(path, read_file(path), {2000, true}, 150, [&] { read_weights(open_weight_source(folder, table), table); });
    }
}

TEST_F(Fuzz, Gguf) {
    for (const char* name : {"llama-gqa", "gpt2-fp16"}) {
        const std::string folder = copy_model(name), path = dir.file(str(name, ".gguf"));
        const json added = json::array({added_token(3, "<|endoftext|>")}), merges = json::array({{"a", "b"}});
        put_file(folder + "/chat_template.jinja", "{{ messages }}");
        put_file(folder + "/tokenizer.json",
                 byte_level_tokenizer({"a", "b", "ab", "<|endoftext|>"}, merges, added, "qwen2", {}).dump());
        {
            const ModelSource source = find_model(folder);
            const ParamTable table = parameter_table(source.config, 1);
            write_gguf(path, source, source.files, table, open_weight_source(source, table), GgufType::Q8_0);
        }
        fuzz(path, read_file(path), {4000, false}, 500, [&] {
            const ModelSource source = find_model(path);
            const ParamTable table = parameter_table(source.config, 1);
            read_weights(open_weight_source(source, table), table);
            generation_config(source);
            if (Tokenizer::exists(source.files)) Tokenizer(source.files).encode(TEXT);
        });
    }
}

TEST_F(Fuzz, TrainingState) {
    const ParamTable table = table_of(fixture_directory("gpt2-fp16"));
    std::vector<float> arenas[3];
    for (auto& arena : arenas) arena.assign(size_t(table.total), 1.0f);
    const auto tensor = [&](int i) { return host_tensor(arenas[i].data(), {table.total}); };
    const TrainingArenas state = {tensor(0), tensor(1), tensor(2)};
    const std::string checkpoint = dir.file("step_00000001");
    save_state(checkpoint, table, state);
    for (const char* name : {"state.safetensors", "model.safetensors"}) {
        const std::string path = join_path(checkpoint, name);
        fuzz(path, read_file(path), {4000, true}, 200, [&] { load_state(checkpoint, table, state); });
    }
}

TEST_F(Fuzz, LlmcAndLlama2cModels) {
    const auto integers = [](std::initializer_list<int32_t> values, size_t bytes) {
        std::string out(bytes, '\0');
        std::memcpy(out.data(), values.begin(), values.size() * 4);
        return out;
    };
    const auto floats = [](int64_t n) { return std::string(size_t(n * 4), '\x3C'); };
    const int64_t C = 8, V = 5, L = 2, T = 6, F = 12;
    const int64_t gpt2 = (128 + T) * C + L * (12 * C * C + 13 * C) + 2 * C;
    const int64_t llama = V * C + L * (2 * C + 2 * C * C + 2 * C * 4 + 3 * C * F) + C;
    const struct {
        const char* name;
        std::string content;
        size_t header;
    } files[] = {
        {"llmc.bin", integers({20240326, 3, 6, 5, 2, 2, 8, 128}, 1024) + floats(gpt2), 32},
        {"v0.bin", integers({8, 12, 2, 2, 1, 5, 6}, 28) + floats(llama + T * 4), 28},
        {"v1.bin", integers({0x616B3432, 1, 8, 12, 2, 2, 1, 5, 6, 1}, 256) + floats(llama), 40},
    };
    for (const auto& file : files) {
        const std::string path = dir.file(file.name);
        fuzz(path, file.content, {file.header, false}, 250, [&] {
            if (bin_model_kind(path) == BinKind::Other) throw Error("neither");
            const BinModel model(path);
            const ModelConfig& c = model.config();
            ParamTable table;
            const int64_t rows = c.qkv_channels();
            table.params.push_back({0,
                                    -1,
                                    0,
                                    "wte.weight",
                                    c.vocab_size,
                                    c.channels,
                                    c.vocab_size,
                                    0,
                                    0,
                                    true,
                                    false,
                                    {{"wte", 0, c.vocab_size, false}}});
            table.params.push_back(
                {1, 0, 1, "layers.0.qkv.weight", rows, c.channels, rows, 0, 0, true, false, {{"qkv", 0, rows, false}}});
            table.layout(1);
            read_weights(model.weights(table), table);
        });
    }
}

TEST_F(Fuzz, Tokenizers) {
    for (const char* name :
         {"prefix-space", "llama3", "llama2", "metaspace-always", "unknown", "rules", "phi3", "olmo2"}) {
        const std::string path = dir.file(std::string(name) + ".json"), good = tokenizer_description(name).dump();
        fuzz(path, good, {good.size(), true}, 120, [&] { use_tokenizer(path); });
    }
}

TEST_F(Fuzz, LlmcAndLlama2cTokenizers) {
    // 256 bytes, end-of-text and two merges; <unk>, <s>, </s> and a few tokens.
    std::string llmc(1024, '\0');
    const int32_t header[] = {20240328, 2, 259, 256};
    std::memcpy(llmc.data(), header, sizeof header);
    for (int b = 0; b < 256; b++) (llmc += '\1') += char(b);
    for (const char* token : {"<|endoftext|>", "th", "the"}) (llmc += char(std::strlen(token))) += token;
    std::string llama2c("\x09\0\0\0", 4);
    int id = 0;
    for (const char* token : {"<unk>", "\n<s>\n", "\n</s>\n", " ", "t", "h", "e", " t", "he", " the"}) {
        const float score = -float(id++);
        const int32_t length = int32_t(std::strlen(token));
        llama2c.append(reinterpret_cast<const char*>(&score), 4);
        llama2c.append(reinterpret_cast<const char*>(&length), 4);
        llama2c += token;
    }
    const struct {
        const char* name;
        std::string content;
        size_t header;
    } files[] = {{"gpt2_tokenizer.bin", llmc, 16}, {"tokenizer.bin", llama2c, llama2c.size()}};
    for (const auto& file : files) {
        const std::string path = dir.file(file.name), imported = dir.file("imported.json");
        fuzz(path, file.content, {file.header, false}, 300, [&] {
            put_file(imported, import_tokenizer(path));
            use_tokenizer(imported);
        });
    }
}

TEST_F(Fuzz, TokensMasksAndMetadata) {
    const auto file = [](std::initializer_list<int32_t> header, const std::string& payload) {
        std::string out(1024, '\0');
        std::memcpy(out.data(), header.begin(), header.size() * 4);
        return out + payload;
    };
    const std::string tokens = file({20240520, 1, 200}, std::string(400, '\1')),
                      mask = file({20261121, 1, 200}, std::string(100, '\0') + std::string(100, '\1'));
    const std::string meta = R"({"train": {"bytes": 300, "documents": 2, "tokens": 200, "shards": 1},
                               "val": {"bytes": 0, "documents": 0, "tokens": 0, "shards": 0},
                               "vocab_size": 400, "end_of_text": 256})";
    put_file(dir.file("train_000000.bin"), tokens);
    put_file(dir.file("train_000000.mask"), mask);
    put_file(dir.file("meta.json"), meta);
    const auto read = [&] {
        const DataDirectory data = open_data(dir.path());
        const TokenFiles files(data.train_pattern());
        std::vector<int32_t> ids(200);
        std::vector<uint8_t> learnt(200);
        for (int64_t begin = 0; begin < files.size(); begin += 200) {
            const int64_t n = std::min<int64_t>(200, files.size() - begin);
            files.read(begin, n, ids.data(), 400);
            files.read_mask(begin, n, learnt.data());
        }
        const EvalBatches batches{files, 2, 16, 400, data.end_of_text, 0};
        for (int64_t b = 0; b < batches.num_batches(); b++) batches.batch(b);
        if (!files.has_examples()) return;
        const ExamplePacking packing(files, 40, true);
        const EvalBatches packed{files, 2, 40, 400, data.end_of_text, 0, &packing};
        for (int64_t b = 0; b < packed.num_batches(); b++) packed.batch(b);
    };
    fuzz(dir.file("train_000000.bin"), tokens, {16, false}, 250, read);
    fuzz(dir.file("train_000000.mask"), mask, {16, false}, 250, read);
    std::string pairs;  // of two examples of 20 tokens
    for (int i = 0; i < 200; i++) pairs += i % 40 == 0 ? '\2' : i % 40 == 20 ? '\6' : char(i % 3 == 0);
    const std::string pair_mask = file({20261121, 3, 200}, pairs);
    fuzz(dir.file("train_000000.mask"), pair_mask, {16, false}, 250, read);
    fuzz(dir.file("train_000000.mask"), pair_mask, {1224, false}, 250, read);
    fuzz(dir.file("meta.json"), meta, {1 << 20, true}, 150, read);
}

TEST_F(Fuzz, TrainingArraysAndMetadata) {
    std::vector<float> values(60, 1.5f);
    const std::string npy = dir.file("x.npy");
    write_npy(npy, host_tensor(values.data(), {3, 20}));
    fuzz(npy, read_file(npy), {128, true}, 200, [&] { read_npy(npy); });
    const std::string notes = dir.file("trainer.json");
    fuzz(notes, R"({"step": 12, "gemm": "", "val_loss": 1.25, "list": [1, [2, [3]], {"a": null}]})", {1 << 20, true},
         150, [&] { read_json(notes); });
}

TEST_F(Fuzz, MultipleChoiceQuestions) {
    const std::string path = dir.file("questions.jsonl");
    fuzz(path,
         "{\"ctx\": \"The cat\", \"endings\": [\"sat\", \"ran\", \"of\"], \"label\": 1}\n\n"
         "{\"ctx\": \"\", \"endings\": [\"x\", \"y\"], \"label\": 0, \"id\": 17, \"tags\": [1, [2, {}]]}\n",
         {1 << 20, true}, 300, [&] { read_questions(path); });
}

TEST_F(Fuzz, GenerationConfig) {
    ModelSource source;
    source.files = dir.path();
    const std::string path = dir.file("generation_config.json");
    fuzz(path, R"({"bos_token_id": 1, "eos_token_id": [2, 128001, 7], "temperature": 0.6, "more": {"a": [null]}})",
         {1 << 20, true}, 200, [&] { end_tokens(source, nullptr); });
}

// A damaged template is an error where it is read or rendered, or renders something.
TEST_F(Fuzz, ChatTemplates) {
    const json families = json::parse(read_file("dev/fixtures/chat_templates.json"))["families"];
    const auto render = [&] {
        const ChatTemplate chat_template(dir.path());
        const std::vector<Message> messages = {
            {"user", "Hi \xC3"}, {"assistant", "<think>\na\n</think>\nb"}, {"user", "c"}};
        chat_template.render(messages, true, local_time_now());
    };
    for (const json& family : families) {
        put_file(dir.file("tokenizer_config.json"), family["named"].dump());
        fuzz(dir.file("chat_template.jinja"), family["template"].get<std::string>(), {0, false}, 80, render);
    }
    std::filesystem::remove(dir.file("chat_template.jinja"));
    const std::string chatml = families[0]["template"].get<std::string>();
    const json one = {{"chat_template", chatml}, {"eos_token", "<|im_end|>"}, {"model_max_length", 4096}},
               several = {{"chat_template",
                           {{{"name", "tools"}, {"template", "no"}}, {{"name", "default"}, {"template", chatml}}}}};
    for (const json& config : {one, several})
        fuzz(dir.file("tokenizer_config.json"), config.dump(), {1 << 20, true}, 200, render);
}

// Random programs of a template's expensive operations on text of megabytes and long lists.
class HostileTemplate {
  public:
    explicit HostileTemplate(uint64_t seed) : random(seed) {}

    std::string program() {
        std::string out = "{% set n = namespace(t=x, l=[]) %}";
        const uint64_t loops = 1 + random.below(2);
        for (uint64_t i = 0; i < loops; i++) out += "{% for i in range(" + number() + ") %}";
        for (uint64_t i = 1 + random.below(3); i > 0; i--) out += statement();
        for (uint64_t i = 0; i < loops; i++) out += "{% endfor %}";
        return out + "{{ " + text(3) + " }}";
    }

  private:
    std::string one_of(const std::vector<std::string>& choices) { return choices[random.below(choices.size())]; }
    std::string number() { return one_of({"3", "50", "999", "20000", "99999", "999999999"}); }
    std::string statement() {
        return one_of({"{% set n.t = " + text(3) + " %}", "{% set n.l = " + list(3) + " %}", "{{ " + text(2) + " }}",
                       "{% if " + text(2) + " in " + text(2) + " %}a{% endif %}",
                       "{% set _ = n.l.append(" + one_of({text(2), list(2), "n.l", "i"}) + ") %}",
                       "{% set _ = {" + one_of({"i", "n.t", "1"}) + ": " + text(2) + "}.update(a=" + list(2) + ") %}",
                       "{% set _ = " + list(2) + " == " + list(2) + " %}"});
    }
    std::string text(int depth) {
        if (depth == 0) return one_of({"x", "w", "l", "n.t", "'a'", "'ab'", "''", "'\n'", "i|string"});
        const auto t = [&] { return "(" + text(depth - 1) + ")"; };
        return one_of({t() + " ~ " + t(),
                       t() + ".replace(" + t() + ", " + t() + ")",
                       t() + "|indent(" + number() + ")",
                       "(" + list(depth - 1) + ")|join(" + t() + ")",
                       t() + "|tojson(indent=" + number() + ")",
                       "(" + list(depth - 1) + ")|tojson(indent=99)",
                       t() + " * " + number(),
                       t() + ".strip(" + t() + ")",
                       t() + "[" + number() + ":]",
                       t() + "[::-" + number() + "]",
                       "'%" + number() + "s' % " + t(),
                       "'{:>" + number() + "}{}'.format(" + t() + ", " + t() + ")",
                       t() + "|upper",
                       t() + "|title",
                       "(" + t() + ".find(" + t() + "))|string",
                       "(" + t() + ".rfind(" + t() + "))|string",
                       "(" + t() + ".count(" + t() + "))|string",
                       "(" + t() + "|length)|string",
                       "(" + list(depth - 1) + ")|string",
                       t() + ".removesuffix(" + t() + ")"});
    }
    std::string list(int depth) {
        if (depth == 0) return one_of({"n.l", "[]", "[x, w]", "range(" + number() + ")", "l.split()", "[[[1]]]"});
        const auto t = [&] { return "(" + text(depth - 1) + ")"; };
        const auto l = [&] { return "(" + list(depth - 1) + ")"; };
        return one_of({t() + ".split(" + t() + ")", t() + ".rsplit(" + t() + ", " + number() + ")", t() + ".split()",
                       t() + ".splitlines()", t() + "|list", l() + " + " + l(), l() + " * " + number(),
                       l() + "|map('string')|list", l() + "|sort", l() + "|unique|list", l() + "|reverse|list",
                       "[" + t() + ", " + l() + "]", l() + "|map('replace', 'a', " + t() + ")|list",
                       "[{'a': 1}]|groupby('a')", l() + "|select('in', " + t() + ")|list", l() + "[::2]"});
    }

    Random random;
};

// No template takes more than 10 seconds or 256 MB. Where a sanitizer watches, each takes ten times as long; what it
// finds shows in few rounds of a loop, and other templates reach each limit.
TEST_F(Fuzz, TemplatesCostLittle) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    constexpr double SECONDS = 100;
    constexpr int HOSTILE = 8;
    const std::string loops = "{% for i in range(2) %}{% for j in range(2) %}";
#else
    constexpr double SECONDS = 10;
    constexpr int HOSTILE = 60;
    const std::string loops = "{% for i in range(99999) %}{% for j in range(999) %}";
#endif
    constexpr int64_t BYTES = 256 << 20;
    std::string lines, keys;
    for (int i = 0; i < 1 << 19; i++) lines += "a\n";
    for (int i = 0; i < 40000; i++) keys += str(i, ":0,");
    const jinja::Template::Variables variables = {{"x", jinja::Text(std::string(1 << 20, 'a'), jinja::CONTENT)},
                                                  {"w", jinja::Text(std::string(1 << 19, 'a') + "b", jinja::CONTENT)},
                                                  {"l", jinja::Text(lines, jinja::CONTENT)}};
    const auto repeated = [&](const std::string& work) { return loops + work + "{% endfor %}{% endfor %}"; };
    std::vector<std::string> programs = {
        repeated("{{ w in x }}"),
        repeated("{% set y = x.find(w) %}"),
        repeated("{% set y = x.rfind('b' ~ w) %}"),
        repeated("{% set y = x.count('a') %}"),
        repeated("{% set y = x.replace('aaaab', 'c') %}"),
        repeated("{% set y = x.split('ab') %}"),
        "{{ l.splitlines()|length }}",
        "{{ x.split('a')|length }}",
        "{{ l|indent(1000) }}",
        repeated("{% set y = x|trim('bcdefghijklmnopqrstuvwxyza') %}"),
        "{{ ([[[[[[1]]]]]] * 100000)|tojson(indent=100) }}",
        repeated("{% set y = {" + keys + "} %}"),
        "{% set n = namespace(a=[1]) %}{% for i in range(90) %}{% set n.a = [n.a, n.a] %}{% endfor %}{{ n.a == "
        "n.a|list }}",
        "{% set n = namespace(a=[]) %}{% for i in range(99999) %}{% set b = [] %}{% set _ = b.append(n.a) %}"
        "{% set n.a = b %}{% endfor %}{{ n.a }}",
        "{% set a = [] %}{% set _ = a.append(a) %}{{ a }}",
        "{% set n = namespace(a=[]) %}{% for i in range(99999) %}{% set n.a = n.a + [i] %}{% endfor %}",
        repeated("{% set y = '%.100f' % 1e300 %}"),
        "{{ x.a" + std::string(400'000, 'b') + " }}",
        std::string(100'000, ' ').replace(0, 0, "{% raw %}{%"),
    };
    for (int i = 0; i < HOSTILE * fuzz_rounds(); i++) programs.push_back(HostileTemplate(uint64_t(i)).program());
    for (const std::string& program : programs) {
        const std::clock_t start = std::clock();  // of this process: other programs may run
        limit = in_use + BYTES;
        std::string failure;
        try {
            jinja::Template(program, "t").render(variables, local_time_now());
        } catch (const Error&) {
        } catch (const std::bad_alloc&) {
            failure = "more than 256 MB are asked for";
        }
        limit = INT64_MAX;
        const double seconds = double(std::clock() - start) / CLOCKS_PER_SEC;
        EXPECT_EQ(failure, "") << program.substr(0, 1000);
        EXPECT_LT(seconds, SECONDS) << program.substr(0, 1000);
    }
}

// Invalid lines of a log are skipped, so damage is not an error.
TEST_F(Fuzz, Logs) {
    const std::string path = dir.file("log.jsonl"),
                      good =
                          "{\"step\": 1, \"loss\": 3.25}\n{\"step\": 2, \"loss\": 3.0, \"val_loss\": null}\n"
                          "{\"step\": 3, \"loss\": 2.5, \"of\": [1, [2, {}]]}\n";
    for (uint64_t i = 0; i < 300; i++) {
        put_file(path, mutated(good, {1 << 20, true}, i));
        limit = in_use + MEMORY_LIMIT;
        EXPECT_NO_THROW(RunLog(path, 2)) << i;
        limit = INT64_MAX;
        const std::string kept = read_file(path);
        for (size_t begin = 0; begin < kept.size(); begin = kept.find('\n', begin) + 1) {
            const json line = json::parse(kept.substr(begin, kept.find('\n', begin) - begin), nullptr, false);
            EXPECT_TRUE(line.is_object() && line["step"] <= 2) << i;
        }
    }
}

// Any bytes are a valid prompt. Decoding must return the encoded bytes.
TEST_F(Fuzz, Prompts) {
    put_file(dir.file("gpt2.json"), tokenizer_description("gpt2").dump());
    put_file(dir.file("llama2.json"), tokenizer_description("llama2").dump());
    for (const char* name : {"gpt2.json", "llama2.json"}) {
        const Tokenizer tokenizer(dir.file(name));
        std::string prompt = TEXT;
        for (uint64_t i = 0; i < 400; i++) {
            prompt = mutated(i % 20 ? prompt + "?" : TEXT, {0, false}, i);
            // U+2581 stands for a space in SentencePiece.
            const bool marked = prompt.find("\xE2\x96\x81") != std::string::npos;
            const bool added = prompt.find("think>") != std::string::npos;  // a space in front of what follows
            limit = in_use + MEMORY_LIMIT;
            const std::string back = tokenizer.decode(tokenizer.encode(prompt));
            tokenizer.encode(prompt, true);
            limit = INT64_MAX;
            EXPECT_TRUE(marked || added || back == prompt) << name << " " << i;
        }
    }
}

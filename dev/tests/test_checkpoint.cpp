// runtime/files/checkpoint_directory.h: loading and saving of weights and training state, model sources, and saves that
// are killed or find the disk full at every write, fsync and rename.
#include "runtime/files/checkpoint_directory.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

#include "dev/tests/preload.h"
#include "dev/tests/saved_state.h"
#include "dev/tests/stored_tensors.h"
#include "dev/tests/temp_dir.h"
#include "models/model_source.h"
#include "runtime/device/convert_dtype.h"
#include "runtime/files/crc32c.h"
#include "runtime/files/training_state.h"

using nlohmann::json;

namespace {

enum Role { WTE, WPE, QKV, QKV_BIAS, PROJ, NORM };

// A table with every difference between the layouts of files and memory: padded rows, the transposed weights of Conv1D,
// fused tensors, vectors.
ParamTable small_table() {
    ParamTable table;
    const auto add = [&](Role role, int layer, int group, const std::string& name, int64_t rows, int64_t cols,
                         int64_t padded_rows, std::vector<SourceTensor> sources) {
        table.params.push_back(
            {role, layer, group, name, rows, cols, padded_rows, 0.02f, 0, cols > 0, role == NORM, std::move(sources)});
    };
    add(WTE, -1, 0, "wte", 5, 4, 8, {{"transformer.wte.weight", 0, 5, false}});
    add(WPE, -1, 0, "wpe", 3, 4, 3, {{"transformer.wpe.weight", 0, 3, false}});
    add(QKV, 0, 1, "layers.0.qkv", 12, 4, 12,
        {{"transformer.h.0.q.weight", 0, 6, false},
         {"transformer.h.0.k.weight", 6, 2, true},
         {"transformer.h.0.v.weight", 8, 4, false}});
    add(QKV_BIAS, 0, 1, "layers.0.qkv_bias", 12, 0, 12,
        {{"transformer.h.0.q.bias", 0, 6, false}, {"transformer.h.0.kv.bias", 6, 6, false}});
    add(PROJ, 0, 1, "layers.0.proj", 70, 37, 70, {{"transformer.h.0.proj.weight", 0, 70, true}});
    add(NORM, -1, 2, "norm", 4, 0, 4, {{"transformer.ln_f.weight", 0, 4, false}});
    table.layout(2);
    return table;
}

// Weights that every 16-bit format represents exactly. Padding is poisoned, so a read of it shows.
std::vector<float> arena_of(const ParamTable& table, int seed) {
    std::vector<float> arena(size_t(table.total), NAN);
    for (const Param& p : table.params) {
        for (int64_t i = 0; i < p.numel(); i++) {
            arena[size_t(p.offset + i)] = float((i * 37 + p.offset + seed * 11) % 255 - 127) / 16;
        }
    }
    return arena;
}

Tensor tensor_of(std::vector<float>& arena) {
    return host_tensor(arena.data(), {int64_t(arena.size())});
}

void expect_weights(const ParamTable& table, const std::vector<float>& got, const std::vector<float>& expected) {
    for (const Param& p : table.params) {
        for (int64_t i = 0; i < p.padded_numel(); i++) {
            const float want = i < p.numel() ? expected[size_t(p.offset + i)] : 0.0f;
            ASSERT_EQ(got[size_t(p.offset + i)], want) << p.name << " " << i;
        }
    }
}

std::vector<float> loaded(const std::string& directory, const ParamTable& table) {
    std::vector<float> arena(size_t(table.total), NAN);
    load_weights(directory, table, tensor_of(arena));
    return arena;
}

TEST(Weights, RoundTripInEachDtype) {
    const TempDir dir;
    const ParamTable table = small_table();
    std::vector<float> arena = arena_of(table, 0);
    for (const DType dtype : {DType::F32, DType::BF16, DType::F16}) {
        save_weights(dir.file("model.safetensors"), table, tensor_of(arena), dtype);
        const StoredTensors file(dir.file("model.safetensors"));
        EXPECT_EQ(file.entries().size(), 9u);
        EXPECT_EQ(file.tensor("transformer.wte.weight").dtype, dtype);
        EXPECT_EQ(shape_string(file.tensor("transformer.wte.weight")), "[5, 4]");  // no padding in files
        expect_weights(table, loaded(dir.path(), table), arena);
    }
    expect_error([&] { save_weights(dir.file("x"), table, tensor_of(arena), DType::I32); }, {"x", "int32"});
    std::vector<float> small(10);
    expect_error([&] { save_weights(dir.file("x"), table, tensor_of(small), DType::F32); }, {"x", "arena"});
    expect_error([&] { load_weights(dir.path(), table, tensor_of(small)); }, {"arena"});
}

TEST(Weights, FusedAndTransposedTensorsHaveTheRightLayout) {
    const TempDir dir;
    const ParamTable table = small_table();
    std::vector<float> arena = arena_of(table, 1);
    save_weights(dir.file("model.safetensors"), table, tensor_of(arena), DType::F32);
    const StoredTensors file(dir.file("model.safetensors"));
    const Param& qkv = *table.find(QKV, 0);
    const auto at = [&](int64_t row, int64_t col) { return arena[size_t(qkv.offset + row * 4 + col)]; };
    const Tensor q = file.tensor("transformer.h.0.q.weight"), k = file.tensor("transformer.h.0.k.weight"),
                 v = file.tensor("transformer.h.0.v.weight");
    EXPECT_EQ(shape_string(q), "[6, 4]");
    EXPECT_EQ(shape_string(k), "[4, 2]");
    EXPECT_EQ(shape_string(v), "[4, 4]");
    const auto value = [](const Tensor& t, int64_t i) {
        float f;
        std::memcpy(&f, static_cast<const char*>(t.data) + 4 * i, 4);
        return f;
    };
    for (int64_t c = 0; c < 4; c++) {
        for (int64_t r = 0; r < 6; r++) EXPECT_EQ(value(q, r * 4 + c), at(r, c));
        for (int64_t r = 0; r < 2; r++) EXPECT_EQ(value(k, c * 2 + r), at(6 + r, c));
        for (int64_t r = 0; r < 4; r++) EXPECT_EQ(value(v, r * 4 + c), at(8 + r, c));
    }
    EXPECT_EQ(value(file.tensor("transformer.h.0.kv.bias"), 0), arena[size_t(table.find(QKV_BIAS, 0)->offset + 6)]);
}

TEST(Weights, EachTensorMayHaveADTypeOfItsOwn) {
    const TempDir dir;
    const ParamTable table = small_table();
    std::vector<float> arena = arena_of(table, 0);
    const auto dtype_of = [](const std::string& name) {
        return name.find(".k.") != std::string::npos      ? DType::F32
               : name.find("weight") != std::string::npos ? DType::BF16
                                                          : DType::F16;
    };
    const auto fetch = [&](const Param& p, std::vector<float>&) { return arena.data() + p.offset; };
    save_weights(dir.file("model.safetensors"), table, FetchParam(fetch),
                 [&](const Param&, const SourceTensor& source) { return dtype_of(source.name); });
    const StoredTensors file(dir.file("model.safetensors"));
    for (const auto& [name, entry] : file.entries()) EXPECT_EQ(entry.dtype, dtype_of(name)) << name;
    expect_weights(table, loaded(dir.path(), table), arena);
    const WeightSource source = open_weight_source(dir.path(), table);
    for (const Param& p : table.params)
        for (const SourceTensor& tensor : p.sources) EXPECT_EQ(source.dtype(p, tensor), dtype_of(tensor.name));
}

TEST(Weights, ValuesBeyondTheDTypeAreErrors) {
    const TempDir dir;
    const ParamTable table = small_table();
    std::vector<float> arena = arena_of(table, 0);
    const Param& norm = *table.find(NORM);
    float& value = arena[size_t(norm.offset + 1)];
    const auto save = [&](DType dtype) { save_weights(dir.file("model.safetensors"), table, tensor_of(arena), dtype); };
    value = 65519;  // rounded to the largest finite fp16
    save(DType::F16);
    EXPECT_EQ(loaded(dir.path(), table)[size_t(norm.offset + 1)], 65504);
    for (const float large : {65520.0f, -70000.0f}) {
        value = large;
        expect_error([&] { save(DType::F16); }, {"tensor transformer.ln_f.weight", str(large), "fp16", "use bf16"});
        save(DType::BF16);
    }
    value = std::numeric_limits<float>::max();
    expect_error([&] { save(DType::BF16); }, {"tensor transformer.ln_f.weight", "bf16", "use fp32"});
    save(DType::F32);
    // Arenas that cannot hold it. Norms stay fp32.
    arena[size_t(table.find(WPE)->offset + 3)] = 70000;
    save(DType::F32);
    std::vector<char> halves(size_t(table.total) * 2);
    std::vector<float> norms(size_t(table.fp32_total));
    WeightArenas half;
    half.weights.data = make_tensor(halves.data(), DType::F16, Device::CPU, &table.total, 1);
    half.fp32 = tensor_of(norms);
    half.fp32.origin = norm.group_begin;
    expect_error([&] { load_weights(dir.path(), table, half); },
                 {dir.path(), "tensor transformer.wpe.weight: 70000", "fp16"});
    arena[size_t(table.find(WPE)->offset + 3)] = 1;
    save(DType::F32);
    load_weights(dir.path(), table, half);
    for (const float kept : {INFINITY, NAN}) {  // these the dtype can hold
        value = kept;
        save(DType::F16);
    }
}

// Writes the tensors of `names` in file order, renamed, with `extra` ones added.
struct Extra {
    std::string name;
    DType dtype;
    std::vector<int64_t> shape;
    std::string bytes;
};
void rewrite(const std::string& from, const std::string& to,
             const std::function<std::string(const std::string&)>& rename, const std::vector<Extra>& extras = {}) {
    const StoredTensors source(from);
    SafetensorsWriter writer(to);
    for (const auto& [name, entry] : source.entries()) {
        if (!rename(name).empty()) writer.declare(rename(name), entry.dtype, entry.shape);
    }
    for (const Extra& e : extras) writer.declare(e.name, e.dtype, e.shape);
    writer.begin();
    for (const auto& [name, entry] : source.entries()) {
        if (!rename(name).empty()) writer.write(source.tensor(name).data, source.tensor(name).bytes());
    }
    for (const Extra& e : extras) writer.write(e.bytes.data(), int64_t(e.bytes.size()));
    writer.finish();
}

std::string same_name(const std::string& name) {
    return name;
}
std::string bytes_of(const Tensor& t) {
    return std::string(static_cast<const char*>(t.data), size_t(t.bytes()));
}

// Runs body on `count` ranks, which are threads.
void on_ranks(int64_t count, const std::function<void(const Ranks&)>& body) {
    std::mutex mutex;
    std::condition_variable changed;
    int64_t arrived = 0, barriers = 0;
    std::vector<char> shared;
    const auto barrier = [&] {
        std::unique_lock<std::mutex> lock(mutex);
        const int64_t number = barriers;
        if (++arrived == count) {
            arrived = 0;
            barriers++;
            changed.notify_all();
        }
        changed.wait(lock, [&] { return barriers > number; });
    };
    std::vector<std::thread> threads;
    for (int64_t rank = 0; rank < count; rank++) {
        const auto all_gather = [&, rank](void* all, const void* own, size_t bytes) {
            barrier();
            if (rank == 0) shared.resize(bytes * size_t(count));
            barrier();
            std::memcpy(shared.data() + bytes * size_t(rank), own, bytes);
            barrier();
            std::memcpy(all, shared.data(), shared.size());
        };
        threads.emplace_back([&, rank, all_gather] { body({rank, count, all_gather}); });
    }
    for (std::thread& thread : threads) thread.join();
}

TEST(Weights, PrefixesBuffersAndTiedHeads) {
    const TempDir dir;
    const ParamTable table = small_table();
    std::vector<float> arena = arena_of(table, 2);
    const std::string plain = dir.file("plain"), path = dir.file("model.safetensors");
    save_weights(plain, table, tensor_of(arena), DType::F32);

    rewrite(plain, path, [](const std::string& name) { return name.substr(std::strlen("transformer.")); });
    expect_weights(table, loaded(dir.path(), table), arena);

    rewrite(plain, path, same_name,
            {{"transformer.h.0.attn.bias", DType::U8, {1, 1, 2, 2}, "1011"},
             {"h.0.attn.masked_bias", DType::F32, {}, "1234"},
             {"model.layers.0.self_attn.rotary_emb.inv_freq", DType::F32, {1}, "1234"}});
    expect_weights(table, loaded(dir.path(), table), arena);

    const std::string embedding = bytes_of(StoredTensors(plain).tensor("transformer.wte.weight"));
    rewrite(plain, path, same_name, {{"lm_head.weight", DType::F32, {5, 4}, embedding}});
    expect_weights(table, loaded(dir.path(), table), arena);
    std::string other = embedding;
    other[3] ^= 1;
    rewrite(plain, path, same_name, {{"lm_head.weight", DType::F32, {5, 4}, other}});
    expect_error([&] { loaded(dir.path(), table); }, {path, "lm_head.weight", "tie_word_embeddings"});

    rewrite(plain, path, same_name, {{"transformer.h.0.q_norm.weight", DType::F32, {1}, "1234"}});
    expect_error([&] { loaded(dir.path(), table); }, {path, "transformer.h.0.q_norm.weight", "no such tensor"});
    rewrite(plain, path, same_name, {{"wpe.weight", DType::F32, {1}, "1234"}});
    expect_error([&] { loaded(dir.path(), table); }, {path, "wpe.weight", "twice"});
}

TEST(Weights, InvalidFilesAreErrorsAndLeaveWeightsUnchanged) {
    const TempDir dir;
    const ParamTable table = small_table();
    std::vector<float> arena = arena_of(table, 3);
    const std::string plain = dir.file("plain"), path = dir.file("model.safetensors");
    expect_error([&] { loaded(dir.path(), table); }, {dir.path(), "model.safetensors.index.json"});
    save_weights(plain, table, tensor_of(arena), DType::F32);

    rewrite(plain, path, [](const std::string& name) { return name == "transformer.ln_f.weight" ? "" : name; });
    std::vector<float> untouched(size_t(table.total), 7);
    expect_error([&] { load_weights(dir.path(), table, tensor_of(untouched)); },
                 {dir.path(), "ln_f.weight", "missing"});
    EXPECT_EQ(untouched, std::vector<float>(size_t(table.total), 7));

    const auto without_norm = [](const std::string& name) { return name == "transformer.ln_f.weight" ? "" : name; };
    rewrite(plain, path, without_norm, {{"ln_f.weight", DType::F32, {2, 2}, std::string(16, 'x')}});
    expect_error([&] { loaded(dir.path(), table); }, {path, "ln_f.weight", "[2, 2]", "expected [4]"});
    rewrite(plain, path, without_norm,
            {{"ln_f.weight", DType::F32, {5}, std::string(20, 'x')}});  // only the rank is right
    expect_error([&] { loaded(dir.path(), table); }, {path, "ln_f.weight", "[5]", "expected [4]"});
    rewrite(plain, path, without_norm, {{"ln_f.weight", DType::I32, {4}, std::string(16, 'x')}});
    expect_error([&] { loaded(dir.path(), table); }, {path, "ln_f.weight", "int32", "F32, BF16 or F16"});
    rewrite(plain, path, without_norm, {{"ln_f.weight", DType::F64, {4}, std::string(32, '\0')}});
    EXPECT_EQ(loaded(dir.path(), table)[size_t(table.find(NORM)->offset)], 0.0f);
}

TEST(Weights, TheTablesOwnNamesAreRead) {
    const TempDir dir;
    const ParamTable table = small_table();
    ParamTable own = table;
    for (Param& p : own.params) p.sources = {{p.name, 0, p.rows, false}};
    std::vector<float> arena = arena_of(table, 5);
    save_weights(dir.file("model.safetensors"), own, tensor_of(arena), DType::F32);
    ParamTable llama = table;
    for (Param& p : llama.params)
        for (SourceTensor& source : p.sources) source.name = "model.llama." + source.name;
    expect_weights(llama, loaded(dir.path(), llama), arena);
    EXPECT_EQ(open_weight_source(dir.path(), llama).dtype(llama.params[0], llama.params[0].sources[0]), DType::F32);
}

TEST(Weights, ReadsShards) {
    const TempDir dir;
    const ParamTable table = small_table();
    std::vector<float> arena = arena_of(table, 4);
    const std::string plain = dir.file("plain"), index = dir.file("model.safetensors.index.json");
    save_weights(plain, table, tensor_of(arena), DType::BF16);
    const auto in_first = [](const std::string& name) { return name.find(".h.") != std::string::npos; };
    rewrite(plain, dir.file("1.safetensors"), [&](const std::string& name) { return in_first(name) ? name : ""; });
    rewrite(plain, dir.file("2.safetensors"), [&](const std::string& name) { return in_first(name) ? "" : name; });
    json content = {{"metadata", {{"total_size", 1}}}, {"weight_map", json::object()}};
    const StoredTensors all(plain);
    for (const auto& [name, entry] : all.entries()) {
        content["weight_map"][name] = in_first(name) ? "1.safetensors" : "2.safetensors";
    }
    write_json(index, content);
    expect_weights(table, loaded(dir.path(), table), arena);

    json changed = content;
    changed["weight_map"]["transformer.wte.weight"] = "1.safetensors";
    write_json(index, changed);
    expect_error([&] { loaded(dir.path(), table); }, {index, "transformer.wte.weight", "1.safetensors", "it is not"});
    for (const json& wrong : {json(3), json("../2.safetensors"), json(""), json(std::string("1.safetensors\0x", 15))}) {
        changed["weight_map"]["transformer.wte.weight"] = wrong;
        write_json(index, changed);
        expect_error([&] { loaded(dir.path(), table); }, {index, "transformer.wte.weight"});
    }
    for (const json& wrong : {json::object(), json({{"weight_map", 1}})}) {
        write_json(index, wrong);
        expect_error([&] { loaded(dir.path(), table); }, {index, "weight_map"});
    }
    write_json(index, content);
    std::filesystem::remove(dir.file("2.safetensors"));
    expect_error([&] { loaded(dir.path(), table); }, {"2.safetensors", "No such file"});
}

TEST(State, RoundTrips) {
    const TempDir dir;
    const ParamTable table = small_table();
    std::vector<float> p = arena_of(table, 5), m = arena_of(table, 6), v = arena_of(table, 7);
    p[0] = 1.0f / 3;  // not representable in 16 bits
    for (const DType dtype : {DType::F32, DType::BF16}) {
        const std::string saved = dir.file(dtype_name(dtype));
        save_state(saved, table, {tensor_of(p), tensor_of(m), tensor_of(v)}, dtype);
        const StoredTensors state(join_path(saved, "state.safetensors"));
        EXPECT_EQ(state.entries().size(), dtype == DType::F32 ? 12u : 18u);  // what the export loses is in the state
        EXPECT_EQ(shape_string(state.tensor("m/wte")), "[5, 4]");
        const StoredTensors exported(join_path(saved, "model.safetensors"));
        int64_t bytes = 0;
        for (const SafetensorsFile* file :
             {static_cast<const SafetensorsFile*>(&state), static_cast<const SafetensorsFile*>(&exported)})
            for (const auto& [name, entry] : file->entries()) bytes += entry.end - entry.begin;
        EXPECT_EQ(bytes, table.num_weights() * (dtype == DType::F32 ? 12 : 14));
        EXPECT_EQ(checkpoint_bytes(table, {tensor_of(p), tensor_of(m), tensor_of(v)}, dtype), bytes);
        for (const auto& [name, entry] : exported.entries()) EXPECT_EQ(entry.dtype, dtype);

        for (const int64_t world : {2, 7}) {  // with another number of ranks the arenas have another layout
            ParamTable other = small_table();
            other.layout(world);
            std::vector<float> p2(size_t(other.total), NAN), m2(p2), v2(p2);
            load_state(saved, other, {tensor_of(p2), tensor_of(m2), tensor_of(v2)});
            const std::pair<const std::vector<float>*, const std::vector<float>*> pairs[] = {
                {&p, &p2}, {&m, &m2}, {&v, &v2}};
            for (const auto& [wanted, found] : pairs) {
                for (size_t i = 0; i < table.params.size(); i++) {
                    const Param &from = table.params[i], &to = other.params[i];
                    EXPECT_EQ(std::memcmp(&(*found)[size_t(to.offset)], &(*wanted)[size_t(from.offset)],
                                          size_t(from.numel()) * 4),
                              0);
                    for (int64_t j = to.numel(); j < to.padded_numel(); j++)
                        EXPECT_EQ((*found)[size_t(to.offset + j)], 0);
                }
            }
        }
    }

    const std::string saved = dir.file("fp32");
    const auto refused = [&](void (*change)(ParamTable&), const std::vector<std::string>& parts) {
        ParamTable changed = small_table();
        change(changed);
        changed.layout(2);
        std::vector<float> a(size_t(changed.total), 7), b(a), c(a);
        expect_error([&] { load_state(saved, changed, {tensor_of(a), tensor_of(b), tensor_of(c)}); }, parts);
        EXPECT_EQ(a, std::vector<float>(a.size(), 7));
    };
    refused([](ParamTable& t) { t.params[1].name = "wqe"; }, {"state", "m/wqe is missing"});
    refused([](ParamTable& t) { t.params[1].cols = 5; }, {"state", "m/wpe", "[3, 4]", "expected fp32 or bf16 [3, 5]"});
    refused([](ParamTable& t) { t.params.pop_back(); }, {"state", "12 tensors, expected 10"});
    // Weights of another program or another step are not taken for the run's.
    std::vector<float> a(p.size(), 7), b(a), c(a);
    save_weights(join_path(saved, "model.safetensors"), table, tensor_of(p), DType::F32);
    expect_error(
        [&] {
            load_state(saved, table, {tensor_of(a), tensor_of(b), tensor_of(c)});
        },
        {"model.safetensors", "was not written together with", "state.safetensors"});
    EXPECT_EQ(a, std::vector<float>(a.size(), 7));
}

// Weights in 16 bits without a master copy lose nothing in a file of bf16, so the state holds only those that are fp32.
TEST(State, SixteenBitWeightsAreStoredOnce) {
    const TempDir dir;
    const ParamTable table = small_table();
    std::vector<float> m = arena_of(table, 6), v = arena_of(table, 7), norms(size_t(table.fp32_total), 1.0f / 3);
    std::vector<uint16_t> halves(size_t(table.total), 0x3F80);
    WeightArenas weights;
    weights.weights.data = make_tensor(halves.data(), DType::BF16, Device::CPU, &table.total, 1);
    weights.fp32 = tensor_of(norms);
    weights.fp32.origin = table.total - table.fp32_total;
    save_state(dir.file("a"), table, {weights, tensor_of(m), tensor_of(v)}, DType::BF16);
    const StoredTensors state(dir.file("a/state.safetensors"));
    EXPECT_EQ(state.entries().size(), 13u);
    EXPECT_TRUE(state.entries().count("params/norm"));
    std::vector<float> p(m.size(), NAN), m2(p), v2(p);
    load_state(dir.file("a"), table, {tensor_of(p), tensor_of(m2), tensor_of(v2)});
    for (const Param& q : table.params) EXPECT_EQ(p[size_t(q.offset)], q.fp32 ? 1.0f / 3 : 1) << q.name;
}

// One rank's part of every group of an arena.
std::vector<float> part_of(const ParamTable& table, const std::vector<float>& whole, const Ranks& ranks) {
    std::vector<float> part;
    for (int g = 0; g < table.num_groups(); g++) {
        const int64_t n = table.group_size(g) / ranks.count, begin = table.group_begin[size_t(g)] + ranks.rank * n;
        part.insert(part.end(), whole.begin() + begin, whole.begin() + begin + n);
    }
    return part;
}

ParamArena arena_part(std::vector<float>& part, const Ranks& ranks) {
    ParamArena arena = tensor_of(part);
    arena.part = ranks.rank;
    arena.parts = ranks.count;
    return arena;
}

// Ranks that each write their parts, also of transposed tensors, write the files that one rank writes, and any number
// of ranks checks the checksums. As many processes as a large job has: some of them own nothing of small tensors.
TEST(State, FilesDoNotDependOnTheNumberOfRanks) {
    const TempDir dir;
    const auto values = [](const ParamTable& table, int64_t seed) {  // the same in each layout
        std::vector<float> arena(size_t(table.total), NAN);
        for (const Param& p : table.params)
            for (int64_t i = 0; i < p.numel(); i++) arena[size_t(p.offset + i)] = float(i * 37 + p.role * 11 + seed);
        return arena;
    };
    const auto save = [&](const std::string& path, int64_t count, DType dtype) {
        ParamTable table = small_table();
        table.layout(count);
        const std::vector<float> p = values(table, 0), m = values(table, 1), v = values(table, 2);
        on_ranks(count, [&](const Ranks& ranks) {
            std::vector<float> a = part_of(table, p, ranks), b = part_of(table, m, ranks), c = part_of(table, v, ranks);
            save_state(path, table, {arena_part(a, ranks), arena_part(b, ranks), arena_part(c, ranks)}, dtype, ranks);
        });
    };
    const auto load = [&](const std::string& path, int64_t count, const std::vector<std::string>& error) {
        ParamTable table = small_table();
        table.layout(count);
        const std::vector<float> p = values(table, 0), m = values(table, 1), v = values(table, 2);
        on_ranks(count, [&](const Ranks& ranks) {
            std::vector<float> a(size_t(table.total / count), NAN), b(a), c(a);
            const TrainingArenas arenas = {arena_part(a, ranks), arena_part(b, ranks), arena_part(c, ranks)};
            const auto action = [&] { load_state(path, table, arenas, ranks); };
            if (!error.empty()) return expect_error(action, error);
            EXPECT_NO_THROW(action());
            const std::pair<const std::vector<float>*, const std::vector<float>*> pairs[] = {
                {&p, &a}, {&m, &b}, {&v, &c}};
            for (const auto& [whole, found] : pairs) {
                const std::vector<float> wanted = part_of(table, *whole, ranks);
                for (const Param& q : table.params) {
                    const ParamArena::Span own = owned_span(q, ranks.rank, count);
                    EXPECT_EQ(std::memcmp(&wanted[size_t(own.at)], &(*found)[size_t(own.at)], size_t(own.count) * 4), 0)
                        << q.name;
                }
            }
        });
    };
    const char* const names[] = {"model.safetensors", "state.safetensors"};
    for (const DType dtype : {DType::F32, DType::BF16}) {
        const std::string one = dir.file(str("1", dtype_name(dtype)));
        save(one, 1, dtype);
        for (const char* name : names) {
            const StoredTensors file(join_path(one, name));
            for (const auto& [tensor, entry] : file.entries()) {
                const Tensor t = file.tensor(tensor);
                EXPECT_EQ(file.checksum(tensor), crc32c(t.data, t.bytes())) << tensor;
            }
        }
        for (const int64_t count : {2, 3, 8, 40}) {
            const std::string path = dir.file(str(count, dtype_name(dtype)));
            save(path, count, dtype);
            for (const char* name : names)
                EXPECT_EQ(read_file(join_path(path, name)), read_file(join_path(one, name)))
                    << count << " ranks, " << name;
            load(path, 1, {});
            load(one, count, {});
        }
    }
    // A flipped bit is noticed by all ranks, whichever of them reads the byte. In the model the tensor is transposed.
    const std::string one = dir.file("1fp32"), proj[] = {"transformer.h.0.proj.weight", "m/layers.0.proj"};
    for (size_t i = 0; i < 2; i++) {
        const std::string path = join_path(one, names[i]), good = read_file(path);
        const StoredTensors file(path);
        int64_t data_bytes = 0;
        for (const auto& [name, entry] : file.entries()) data_bytes = std::max(data_bytes, entry.end);
        const SafetensorsEntry& entry = file.entry(proj[i]);
        for (const int64_t byte : {entry.begin, (entry.begin + entry.end) / 2, entry.end - 1}) {
            std::string bad = good;
            bad[good.size() - size_t(data_bytes - byte)] ^= 1;
            put_file(path, bad);
            for (const int64_t count : {1, 2, 8}) load(one, count, {str(names[i], ": tensor ", proj[i]), "checksum"});
        }
        put_file(path, good);
    }
    // The state of older versions holds all weights and no checksums; it loads. One that lost a checksum does not.
    const std::string path = dir.file("1bf16/state.safetensors"), good = read_file(path);
    const auto with = [&](const std::string& from, const std::string& to) {
        std::string changed = good;
        for (size_t at = 0; (at = changed.find(from, at)) != std::string::npos; at += to.size())
            changed.replace(at, from.size(), to);
        put_file(path, changed);
        return dir.file("1bf16");
    };
    load(with("crc32c ", "other: "), 2, {});
    load(with("crc32c m/wte", "other: m/wte"), 2, {"state.safetensors", "tensor m/wte has no checksum", "damaged"});
    const std::string key = "\"crc32c m/wte\":\"";
    load(with(key + good.substr(good.find(key) + key.size(), 1), key + "x"), 2, {"eight hexadecimal digits"});
}

// A file that is truncated while it is read is an error of one line.
TEST(State, TruncatedWhileBeingLoaded) {
    const TempDir dir;
    const ParamTable table = small_table();
    std::vector<float> p = arena_of(table, 5), m = arena_of(table, 6), v = arena_of(table, 7);
    save_state(dir.file("a"), table, {tensor_of(p), tensor_of(m), tensor_of(v)});
    const WeightSource source = open_weight_source(dir.file("a"), table);
    const SafetensorsFile state(dir.file("a/state.safetensors"));
    for (const char* name : {"a/model.safetensors", "a/state.safetensors"})
        ASSERT_EQ(::truncate(dir.file(name).c_str(), 4096), 0);
    std::vector<float> buffer;
    const auto fetch = [&] {
        for (const Param& q : table.params) source.fetch(q, buffer);
    };
    expect_error(fetch, {"model.safetensors", "has 4096 bytes", "truncated"});
    const auto read = [&] {
        for (const auto& [name, entry] : state.entries()) {
            std::vector<char> bytes(size_t(entry.end - entry.begin));
            state.read(entry, 0, entry.numel(), bytes.data());
        }
    };
    expect_error(read, {"state.safetensors", "has 4096 bytes", "truncated"});
}

TEST(Json, DamageIsAOneLineError) {
    const TempDir dir;
    const std::string path = dir.file("trainer.json");
    const json content = {{"step", 10}, {"loss", 0.1 + 0.2}, {"name", "caf\xc3\xa9"}, {"list", {1, 2, 3}}};
    write_json(path, content);
    EXPECT_EQ(read_json(path), content);
    EXPECT_EQ(read_json(path)["loss"].get<double>(), 0.1 + 0.2);
    write_json(path, {{"path", "not \xff UTF-8"}});  // still written
    EXPECT_TRUE(read_json(path).is_object());
    expect_error([&] { read_json(dir.file("none")); }, {"none", "No such file"});
    for (const char* text : {"", "{", "{\"a\": nul}", "[1, 2", "{\"a\": \"\n\"}", "\xff\xfe"}) {
        put_file(path, text);
        expect_error([&] { read_json(path); }, {path, "broken JSON at byte", "damaged"});
    }
    for (const char* text : {"[1, 2]", "5", "null"}) {
        put_file(path, text);
        expect_error([&] { read_json(path); }, {path, "not an object", "damaged"});
        expect_error([&] { trained_seq_len(dir.path()); }, {path, "not an object"});
    }
    put_file(path, "{\"a\": 1e999}");
    expect_error([&] { read_json(path); }, {path, "out of range"});
    put_file(path, std::string(1000000, '['));
    expect_error([&] { read_json(path); }, {path, "nested more than 100 deep"});
    // What Python writes for numbers that JSON lacks.
    write_file(path, R"({"NaN \\\" NaN": NaN, "x": [Infinity, -Infinity, "Infinity"], "model_type": "mamba2"})");
    EXPECT_EQ(read_json(path), json::parse(R"({"NaN \\\" NaN": "NaN", "x": ["Infinity", "-Infinity", "Infinity"],
                                              "model_type": "mamba2"})"));
    // With keys in the order of the file; of a key that is there twice the last value counts.
    for (const char* text : {R"({"b": [1, -2, 2.5, null, true, {"z": {}, "a": []}], "a": "x", "b": 3, "c": {"b": 1}})",
                             R"({"": {"": 18446744073709551615}})"}) {
        write_file(path, text);
        EXPECT_EQ(read_ordered_json(path).dump(), nlohmann::ordered_json::parse(text).dump());
    }
    write_file(path, "[1]");
    expect_error([&] { read_ordered_json(path); }, {path, "not an object", "damaged"});
    write_file(path, R"({"x": Infinity, "y": nan})");
    expect_error([&] { read_json(path); }, {path, "broken JSON at byte 7"});
    for (const char* text : {"{}", "{\"seq_len\": \"x\"}", "{\"seq_len\": 1.5}"}) {
        put_file(path, text);
        expect_error([&] { trained_seq_len(dir.path()); }, {path, "seq_len", "damaged"});
    }
    put_file(path, "{\"seq_len\": 64}");
    EXPECT_EQ(trained_seq_len(dir.path()), 64);
    EXPECT_EQ(trained_seq_len(dir.file("none")), 0);
}

// Writes a run directory, with its files in the order of a training run.

ModelConfig small_config() {
    return find_model("gpt2-tiny").config;
}

void save_checkpoint(const std::string& run_dir, int step, const std::vector<ModelFiles>& carry_from = {}) {
    const ParamTable table = small_table();
    std::vector<float> p = arena_of(table, step), m = arena_of(table, step + 1), v = arena_of(table, step + 2);
    char name[32];
    std::snprintf(name, sizeof(name), "step_%08d", step);
    AtomicDirectory directory(join_path(run_dir, name));
    save_model_files(directory.path(), small_config(), json::object(), carry_from);
    save_state(directory.path(), table, {tensor_of(p), tensor_of(m), tensor_of(v)});
    write_json(join_path(directory.path(), "trainer.json"), {{"step", step}});
    directory.commit();
}

void expect_checkpoint(const std::string& directory, int step) {
    const ParamTable table = small_table();
    std::vector<float> p(size_t(table.total), NAN), m(p), v(p);
    load_state(directory, table, {tensor_of(p), tensor_of(m), tensor_of(v)});
    expect_weights(table, p, arena_of(table, step));
    expect_weights(table, m, arena_of(table, step + 1));
    expect_weights(table, v, arena_of(table, step + 2));
    expect_weights(table, loaded(directory, table), arena_of(table, step));
    EXPECT_EQ(read_json(join_path(directory, "trainer.json"))["step"], step);
    EXPECT_EQ(find_model(directory).config.layers, 4);
}

TEST(Checkpoints, ListedInStepOrder) {
    EXPECT_EQ(checkpoint_step("step_00000100"), 100);
    EXPECT_EQ(checkpoint_step("step_00000000"), 0);
    EXPECT_EQ(checkpoint_step("step_99999999"), 99999999);
    EXPECT_EQ(checkpoint_step("step_123456789"), 123456789);
    for (const char* name : {"step_100", "step_012345678", "step_0000010x", "step_-0000100", ".tmp-step_00000100-1",
                             "step_", "xstep_00000100", "step_00000100.old", "step_99999999999999999999", ""}) {
        EXPECT_EQ(checkpoint_step(name), -1) << name;
    }
    const TempDir dir;
    for (const int step : {30, 2, 123456789, 7}) save_checkpoint(dir.path(), step);
    make_directories(dir.file("step_00000099"));  // incomplete
    make_directories(dir.file(".tmp-step_00000098-1"));
    put_file(dir.file("step_00000097"), "");
    EXPECT_EQ(list_checkpoints(dir.path()),
              (std::vector<std::string>{"step_00000002", "step_00000007", "step_00000030", "step_123456789"}));
    expect_error([&] { list_checkpoints(dir.file("none")); }, {"none"});
    EXPECT_EQ(list_incomplete_checkpoints(dir.path()), (std::vector<std::string>{"step_00000097", "step_00000099"}));
    for (const char* missing : {"config.json", "model.safetensors", "state.safetensors", "trainer.json"}) {
        TempDir one;
        save_checkpoint(one.path(), 5);
        std::filesystem::remove(one.file(str("step_00000005/", missing)));
        EXPECT_TRUE(list_checkpoints(one.path()).empty()) << missing;
    }
}

TEST(Checkpoints, RemovesTheLeftoversOfAZombie) {
    const TempDir dir;
    const pid_t child = ::fork();
    if (child == 0) ::_exit(0);
    siginfo_t ended;
    ASSERT_EQ(::waitid(P_PID, id_t(child), &ended, WEXITED | WNOWAIT), 0);  // it stays a zombie
    make_directories(dir.file(".tmp-step_00000003-" + std::to_string(child)));
    remove_leftovers(dir.path(), false);
    EXPECT_EQ(list_directory(dir.path()), std::vector<std::string>{});
    EXPECT_EQ(::waitpid(child, nullptr, 0), child);
}

TEST(Checkpoints, RemovesOldCheckpoints) {
    const TempDir dir;
    for (int step = 1; step <= 6; step++) save_checkpoint(dir.path(), step);
    put_file(dir.file("log.jsonl"), "{}");
    put_file(dir.file(".tmp-log.jsonl"), "{");
    put_file(dir.file(".tmp-run.toml"), "");
    put_file(dir.file("step_00000004/trainer.json"), "{");  // a damaged one ends nothing
    EXPECT_EQ(best_checkpoint(dir.path()), "");
    make_directories(dir.file(".old-step_00000000/x"));
    make_directories(dir.file(".tmp-step_00000003-" + std::to_string(::getpid())));
    make_directories(dir.file(".tmp-step_00000003-1"));  // process 1 is running
    make_directories(dir.file(".tmp-other-99999999"));   // of another program
    make_directories(dir.file(".old-other"));
    remove_old_checkpoints(dir.path(), 2, "step_00000003");
    EXPECT_TRUE(path_exists(dir.file(".tmp-log.jsonl")));  // another thread may be writing it
    remove_leftovers(dir.path(), false);
    std::vector<std::string> left = {".old-other",    ".tmp-other-99999999", ".tmp-step_00000003-1", "log.jsonl",
                                     "step_00000003", "step_00000005",       "step_00000006"};
    EXPECT_EQ(list_directory(dir.path()), left);
    remove_leftovers(dir.path(), true);  // the lock proves that process 1 does not write here
    left.erase(left.begin() + 2);
    EXPECT_EQ(list_directory(dir.path()), left);
    remove_old_checkpoints(dir.path(), 100, "");
    EXPECT_EQ(list_checkpoints(dir.path()).size(), 3u);
    remove_old_checkpoints(dir.path(), 1, "step_00000006");
    EXPECT_EQ(list_checkpoints(dir.path()), std::vector<std::string>{"step_00000006"});
    expect_checkpoint(dir.file("step_00000006"), 6);
    expect_error([&] { remove_old_checkpoints(dir.path(), 0, ""); }, {dir.path(), "at least 1"});
}

TEST(Checkpoints, AtomicDirectory_) {
    const TempDir dir;
    {
        AtomicDirectory unfinished(dir.file("a"));
        put_file(join_path(unfinished.path(), "x"), "1");
        EXPECT_FALSE(path_exists(dir.file("a")));
    }
    EXPECT_TRUE(list_directory(dir.path()).empty());                     // not committed: removed
    make_directories(dir.file(".tmp-a-" + std::to_string(::getpid())));  // left by a killed process with the same id
    make_directories(dir.file(".tmp-a-1"));
    AtomicDirectory directory(dir.file("a/"));
    put_file(join_path(directory.path(), "x"), "2");
    directory.commit();
    EXPECT_EQ(list_directory(dir.path()), (std::vector<std::string>{".tmp-a-1", "a"}));
    EXPECT_EQ(read_file(dir.file("a/x")), "2");
    expect_error([&] { AtomicDirectory again(dir.file("a")); }, {dir.file("a"), "exists already"});
    expect_error([&] { AtomicDirectory lost(dir.file("none/a")); }, {dir.file("none")});
    AtomicDirectory raced(dir.file("b"));
    make_directories(dir.file("b"));
    expect_error([&] { raced.commit(); }, {dir.file("b"), "exists already"});
}

TEST(Checkpoints, CopiesModelFiles) {
    const TempDir dir;
    make_directories(dir.file("data"));
    make_directories(dir.file("model"));
    make_directories(dir.file("out"));
    put_file(dir.file("data/tokenizer.json"), "data's");
    put_file(dir.file("data/train_000.bin"), "tokens");
    for (const char* name : {"tokenizer.json", "tokenizer_config.json", "generation_config.json",
                             "special_tokens_map.json", "chat_template.jinja", "model.safetensors", "config.json"}) {
        put_file(dir.file(str("model/", name)), "model's");
    }
    make_directories(dir.file("model/additional_chat_templates"));
    put_file(dir.file("model/additional_chat_templates/tool_use.jinja"), "model's");
    save_model_files(dir.file("out"), small_config(), {{"unknown", 1}}, {{}, dir.file("data"), dir.file("model")});
    EXPECT_EQ(read_file(dir.file("out/additional_chat_templates/tool_use.jinja")), "model's");
    EXPECT_EQ(list_directory(dir.file("out")),
              (std::vector<std::string>{"additional_chat_templates", "chat_template.jinja", "config.json",
                                        "generation_config.json", "special_tokens_map.json", "tokenizer.json",
                                        "tokenizer_config.json"}));
    EXPECT_EQ(read_file(dir.file("out/tokenizer.json")), "data's");
    EXPECT_EQ(read_json(dir.file("out/config.json"))["unknown"], 1);
}

TEST(FindModel, FindsPresetsDirectoriesAndRuns) {
    const TempDir dir;
    const ModelSource tiny = find_model("gpt2-tiny");
    EXPECT_EQ(tiny.directory, "");
    EXPECT_EQ(tiny.original_config, json::object());
    EXPECT_EQ(tiny.config.channels, 128);
    save_checkpoint(dir.path(), 3);
    save_checkpoint(dir.path(), 20);
    EXPECT_EQ(find_model(dir.path()).directory, dir.file("step_00000020"));
    EXPECT_EQ(find_model(dir.file("step_00000003")).directory, dir.file("step_00000003"));
    EXPECT_EQ(find_model(dir.path()).original_config["model_type"], "gpt2");
    expect_error([] { find_model("gpt2-125M"); }, {"gpt2-125M", "no such model", "gpt2-124M", "llama2-7B"});
    expect_error([&] { find_model(dir.file("step_00000003/config.json")); }, {"config.json", "is a file"});
    make_directories(dir.file("empty"));
    expect_error([&] { find_model(dir.file("empty")); }, {"empty", "neither a config.json nor", "gpt2-tiny"});
    put_file(dir.file("empty/config.json"), "{");
    expect_error([&] { find_model(dir.file("empty")); }, {"empty/config.json", "broken JSON"});
}

TEST(Damage, DamagedFilesNeverCrashOrChangeAnArena) {
    const TempDir dir;
    save_checkpoint(dir.path(), 1);
    const std::string source = dir.file("step_00000001");
    const ParamTable table = small_table();
    std::mt19937 random(11);
    int errors = 0;
    for (const std::string name : {"config.json", "model.safetensors", "state.safetensors", "trainer.json"}) {
        const std::string good = read_file(join_path(source, name));
        const size_t text = std::min<size_t>(good.size(), 1500);  // the headers and a little of the data
        for (int i = 0; i < 100; i++) {
            std::string bytes = good;
            for (uint32_t changes = 1 + random() % 3; changes > 0; changes--) {
                const size_t at = random() % std::min(text, bytes.size());
                if (random() % 2)
                    bytes[at] = char(random());
                else
                    bytes.erase(at, 1);
            }
            if (i % 7 == 0) bytes.resize(random() % bytes.size());
            put_file(join_path(source, name), bytes);
            std::vector<float> p(size_t(table.total), 7), m(p), v(p), w(p);
            const std::vector<float> sevens(p);
            bool has_weights = false;
            try {
                find_model(source);
                read_json(join_path(source, "trainer.json"));
                load_weights(source, table, tensor_of(w));
                has_weights = true;
                load_state(source, table, {tensor_of(p), tensor_of(m), tensor_of(v)});
            } catch (const Error& e) {
                errors++;
                EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
                if (std::string(e.what()).find("checksum") == std::string::npos) {  // known after the last byte
                    EXPECT_EQ(p, sevens);
                    EXPECT_EQ(v, sevens);
                }
                if (!has_weights) {
                    EXPECT_EQ(w, sevens);
                }
            }
        }
        put_file(join_path(source, name), good);
    }
    EXPECT_GT(errors, 250);
    expect_checkpoint(source, 1);
}

// Interrupted saves. This binary runs itself again (see main) with dev/tests/crash_shim.c preloaded.

constexpr const char* SAVE_VARIABLE = "TEST_CHECKPOINT_SAVE";

// In the interrupted process: saves checkpoint 2 and then removes checkpoint 1.
int save_and_clean_up(const std::string& run_dir) {
    try {
        if (!path_exists(join_path(run_dir, "step_00000002"))) {
            save_checkpoint(run_dir, 2, {join_path(run_dir, "../tokens")});
        }
        remove_old_checkpoints(run_dir, 1, "");
        return 0;
    } catch (const Error& e) {
        std::fprintf(stderr, "%s\n", e.what());
        return 1;
    }
}

// Runs the save, interrupted at the n-th call (0: not interrupted). Returns waitpid's status.
int run_save(const TempDir& dir, const char* mode, int n) {
    const std::string run_dir = dir.file("run");
    std::vector<std::pair<std::string, std::string>> variables = {{SAVE_VARIABLE, run_dir},
                                                                  {"CRASH_SHIM_DIR", run_dir},
                                                                  {"CRASH_SHIM_AT", std::to_string(n)},
                                                                  {"CRASH_SHIM_MODE", mode}};
    if (n > 0) variables.emplace_back("LD_PRELOAD", preload_path("crash_shim"));
    return run_self({}, variables, dir.file("stderr"));
}

class BrokenSave : public testing::Test {
  protected:
    void SetUp() override {
        if (const char* reason = why_no_preload()) GTEST_SKIP() << reason;
    }

    // A run with checkpoint 1 and a tokenizer, which is copied into the next checkpoint.
    static void prepare(const TempDir& dir) {
        make_directories(dir.file("run"));
        make_directories(dir.file("tokens"));
        put_file(dir.file("tokens/tokenizer.json"), "{}");
        save_checkpoint(dir.file("run"), 1);
    }

    // At least one of the two checkpoints exists, and those that exist are complete.
    static void expect_complete(const std::string& run_dir) {
        const std::vector<std::string> names = list_checkpoints(run_dir);
        ASSERT_FALSE(names.empty());
        for (const std::string& name : names) expect_checkpoint(join_path(run_dir, name), int(checkpoint_step(name)));
        EXPECT_EQ(find_model(run_dir).directory, join_path(run_dir, names.back()));
    }
};

constexpr int MIN_CALLS = 40, MAX_CALLS = 500;  // a save makes about 50; fewer would mean that the shim misses some

TEST_F(BrokenSave, SurvivesKillAtEveryCall) {
    int n = 1;
    for (; n < MAX_CALLS; n++) {
        const TempDir dir;
        prepare(dir);
        const int status = run_save(dir, "kill", n);
        SCOPED_TRACE(str("killed at call ", n));
        expect_complete(dir.file("run"));
        if (exited(status, 0)) break;
        ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << read_file(dir.file("stderr"));
        ASSERT_TRUE(exited(run_save(dir, "kill", 0), 0))
            << read_file(dir.file("stderr"));  // a second, uninterrupted save
        EXPECT_EQ(list_directory(dir.file("run")), std::vector<std::string>{"step_00000002"});
        expect_complete(dir.file("run"));
        if (HasFailure()) break;
    }
    EXPECT_GT(n, MIN_CALLS);
    EXPECT_LT(n, MAX_CALLS);
}

TEST_F(BrokenSave, SurvivesFullDiskAtEveryCall) {
    int n = 1;
    for (; n < MAX_CALLS; n++) {
        const TempDir dir;
        prepare(dir);
        const int status = run_save(dir, "enospc", n);
        SCOPED_TRACE(str("disk full at call ", n));
        expect_complete(dir.file("run"));
        for (const std::string& name : list_directory(dir.file("run"))) {
            // No partial files, except a checkpoint in removal, which the next removal deletes.
            EXPECT_TRUE(checkpoint_step(name) >= 0 || name == ".old-step_00000001") << name;
        }
        if (exited(status, 0)) break;
        ASSERT_TRUE(exited(status, 1));
        const std::string message = read_file(dir.file("stderr"));
        EXPECT_NE(message.find("No space left on device"), std::string::npos) << message;
        EXPECT_NE(message.find(dir.file("run")), std::string::npos) << message;
        ASSERT_TRUE(exited(run_save(dir, "enospc", 0), 0)) << read_file(dir.file("stderr"));
        EXPECT_EQ(list_directory(dir.file("run")), std::vector<std::string>{"step_00000002"});
        if (HasFailure()) break;
    }
    EXPECT_GT(n, MIN_CALLS);
    EXPECT_LT(n, MAX_CALLS);
}

}  // namespace

int main(int argc, char** argv) {
    if (const char* run_dir = std::getenv(SAVE_VARIABLE)) return save_and_clean_up(run_dir);
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}

// runtime/model/params.h: the layout of the arenas and look-ups by role and name.
#include "runtime/model/params.h"

#include <cmath>

#include "dev/tests/temp_dir.h"
#include "runtime/device/convert_dtype.h"

namespace {

enum Role { EMBEDDING, QKV, BIAS, FINAL_NORM };

Param matrix(int role, int layer, int group, const std::string& name, int64_t rows, int64_t cols,
             int64_t padded_rows = 0) {
    Param p;
    p.role = role;
    p.layer = layer;
    p.group = group;
    p.name = name;
    p.rows = rows;
    p.cols = cols;
    p.padded_rows = padded_rows ? padded_rows : rows;
    p.init_std = 0.02f;
    p.init_value = 0;
    p.decay = cols > 0;
    p.fp32 = role == FINAL_NORM;
    p.sources = {{name, 0, rows, false}};
    return p;
}

ParamTable small_table() {
    ParamTable table;
    table.params = {matrix(EMBEDDING, -1, 0, "embedding", 5, 3, 8), matrix(QKV, 0, 1, "layers.0.qkv", 7, 3),
                    matrix(BIAS, 0, 1, "layers.0.bias", 7, 0), matrix(QKV, 1, 2, "layers.1.qkv", 7, 3),
                    matrix(FINAL_NORM, -1, 3, "norm", 3, 0)};
    return table;
}

TEST(Params, GroupLayout) {
    for (const int64_t world : {1, 2, 3, 8}) {
        ParamTable table = small_table();
        table.layout(world);
        ASSERT_EQ(table.group_begin.size(), 5u);
        int64_t end = 0;
        for (const Param& p : table.params) {
            EXPECT_EQ(p.offset % 128, 0) << p.name;
            EXPECT_GE(p.offset, end) << p.name;  // no overlap
            EXPECT_GE(p.offset, table.group_begin[size_t(p.group)]);
            EXPECT_LE(p.offset + p.padded_numel(), table.group_begin[size_t(p.group) + 1]);
            end = p.offset + p.padded_numel();
        }
        for (size_t g = 0; g < 4; g++) {
            const int64_t size = table.group_begin[g + 1] - table.group_begin[g];
            EXPECT_EQ(size % (128 * world), 0);
            EXPECT_LE(size, 256 + 128 * world);  // no more padding than needed
        }
        EXPECT_EQ(table.group_begin.front(), 0);
        EXPECT_EQ(table.group_begin.back(), table.total);
        EXPECT_EQ(table.num_weights(), 15 + 21 + 7 + 21 + 3);
    }
}

TEST(Params, FindsParametersByName) {
    ParamTable table = small_table();
    expect_error([&] { table.find(QKV, 0); }, {"layout()"});
    table.layout(1);
    EXPECT_EQ(table.find(EMBEDDING), &table.params[0]);
    EXPECT_EQ(table.find(QKV, 0), &table.params[1]);
    EXPECT_EQ(table.find(QKV, 1), &table.params[3]);
    EXPECT_EQ(table.find(BIAS, 0), &table.params[2]);
    EXPECT_EQ(table.find(FINAL_NORM), &table.params[4]);
    EXPECT_EQ(table.find(BIAS, 1), nullptr);
    EXPECT_EQ(table.find(QKV), nullptr);
    EXPECT_EQ(table.find(QKV, 2), nullptr);
    EXPECT_EQ(table.find(FINAL_NORM + 1), nullptr);
    EXPECT_EQ(table.find(-1), nullptr);
    EXPECT_EQ(&table.by_name("layers.1.qkv"), &table.params[3]);
    expect_error([&] { table.by_name("layers.2.qkv"); }, {"layers.2.qkv"});
    const ParamTable copy = table;  // look-ups follow the copy
    EXPECT_EQ(copy.find(QKV, 1), &copy.params[3]);
}

TEST(Params, TensorsOfAnArena) {
    ParamTable table = small_table();
    table.layout(2);
    std::vector<float> memory(size_t(table.total));
    const Tensor arena = host_tensor(memory.data(), {table.total});
    const Tensor embedding = param_tensor(table.params[0], arena);
    EXPECT_EQ(shape_string(embedding), "[8, 3]");
    const Tensor bias = param_tensor(table.params[2], arena);
    EXPECT_EQ(shape_string(bias), "[7]");
    EXPECT_EQ(bias.data, memory.data() + table.params[2].offset);
    expect_error([&] { param_tensor(table.params[4], host_tensor(memory.data(), {table.params[4].offset + 2})); },
                 {"norm", "too small"});
    std::vector<bf16> half(size_t(table.total));
    const Tensor part = param_tensor(table.params[2], host_tensor(half.data(), {table.total}));
    EXPECT_EQ(part.as<bf16>(), half.data() + table.params[2].offset);
}

// 16-bit weights, of which only the norm is fp32, with and without fp32 master weights. Values survive as exactly as
// the arenas allow, and kernels get the norm in fp32.
TEST(Params, WeightArenas) {
    ParamTable table = small_table();
    table.layout(2);
    const Param &embedding = table.params[0], &norm = table.params[4];
    EXPECT_EQ(table.fp32_total, 256);
    std::vector<bf16> half(size_t(table.total));
    std::vector<float> master(size_t(table.total)), compact(size_t(table.fp32_total)), buffer;
    WeightArenas arenas = host_tensor(half.data(), {table.total});
    EXPECT_FALSE(arenas.fits(table));  // no fp32 for the norm
    const float third = 1.0f / 3, values[] = {third, 1, third, 2};
    const float rounded = to_float(to_bf16(third));

    arenas.fp32 = host_tensor(compact.data(), {table.fp32_total});
    arenas.fp32.origin = table.total - table.fp32_total;
    EXPECT_TRUE(arenas.fits(table));
    arenas.store(embedding, values, 5, 4);
    arenas.store(norm, values, 0, 3);
    EXPECT_EQ(arenas.tensor(embedding).dtype, DType::BF16);
    EXPECT_EQ(arenas.tensor(norm).data, compact.data());
    const float* got = arenas.fetch(embedding, buffer);
    EXPECT_EQ((std::vector<float>(got + 5, got + 9)), (std::vector<float>{rounded, 1, rounded, 2}));
    got = arenas.fetch(norm, buffer);
    EXPECT_EQ((std::vector<float>(got, got + 3)), (std::vector<float>{third, 1, third}));

    arenas.master = host_tensor(master.data(), {table.total});
    EXPECT_TRUE(arenas.fits(table));
    arenas.store(embedding, values, 5, 4);
    arenas.store(norm, values, 0, 3);
    EXPECT_EQ(arenas.tensor(embedding).dtype, DType::BF16);
    EXPECT_EQ(arenas.tensor(norm).data, compact.data());
    got = arenas.fetch(embedding, buffer);
    EXPECT_EQ((std::vector<float>(got + 5, got + 9)), (std::vector<float>{third, 1, third, 2}));
    EXPECT_EQ(to_float(half[size_t(embedding.offset) + 5]), rounded);
    EXPECT_EQ(compact[0], third);
    arenas.master = host_tensor(master.data(), {table.total - 1});
    EXPECT_FALSE(arenas.fits(table));
    arenas.master = {};
    arenas.fp32 = {};
    EXPECT_FALSE(arenas.fits(table));
}

// Every element of every parameter is in exactly one rank's shard and can be read back from it.
TEST(Params, ShardsOfGroups) {
    for (const int64_t world : {2, 3, 8}) {
        ParamTable table = small_table();
        table.layout(world);
        std::vector<std::vector<float>> memory(size_t(world), std::vector<float>(size_t(table.total / world), NAN));
        const auto part_of = [&](int64_t rank) {
            ParamArena part = host_tensor(memory[size_t(rank)].data(), {table.total / world});
            part.part = rank;
            part.parts = world;
            return part;
        };
        std::vector<float> norms(size_t(table.fp32_total));
        for (const Param& p : table.params) {
            std::vector<float> values(size_t(p.padded_numel()));
            for (size_t i = 0; i < values.size(); i++) values[i] = float(p.offset) + float(i);
            int64_t covered = 0;
            for (int64_t rank = 0; rank < world; rank++) {
                WeightArenas arenas;
                arenas.weights = part_of(rank);
                arenas.fp32 = host_tensor(norms.data(), {table.fp32_total});
                arenas.fp32.origin = table.total - table.fp32_total;
                EXPECT_TRUE(arenas.fits(table));
                const int64_t half = p.padded_numel() / 2;
                arenas.store(p, values.data(), 0, half);
                arenas.store(p, values.data() + half, half, p.padded_numel() - half);
                const ParamArena::Span span = arenas.weights.span(p, 0, p.padded_numel());
                EXPECT_TRUE(!span.count || span.begin == covered) << p.name;
                // The rank's shard of the group, in rank order, as reduce-scatter writes it.
                const int64_t share = p.group_size / world, first = p.offset + span.begin - p.group_begin;
                if (span.count) {
                    EXPECT_LE(rank * share, first) << p.name;
                    EXPECT_LE(first + span.count, (rank + 1) * share) << p.name;
                    EXPECT_EQ(span.at, p.group_begin / world + first - rank * share) << p.name;
                }
                for (int64_t i = 0; i < span.count; i++)
                    EXPECT_EQ(arenas.weights.elements(span).as<float>()[i], values[size_t(span.begin + i)]);
                covered += span.count;
                EXPECT_EQ(arenas.needed(p, 0, p.padded_numel()).second, p.fp32 ? p.padded_numel() : span.count);
                if (!p.fp32 && span.count < p.padded_numel()) {
                    std::vector<float> buffer;
                    expect_error([&] { arenas.fetch(p, buffer); }, {p.name, "only a part of it is here"});
                    expect_error([&] { arenas.tensor(p); }, {p.name, "only a part of it is here"});
                }
            }
            EXPECT_EQ(covered, p.padded_numel()) << p.name;
        }
        const Param& norm = table.params[4];
        EXPECT_EQ(norms[2], float(norm.offset) + 2);
    }
}

// Kernels see a gathered group in its role.
TEST(Params, ViewsOfWholeGroups) {
    ParamTable table = small_table();
    table.layout(2);
    std::vector<float> parts(size_t(table.total / 2)), place(size_t(table.total));
    ParamArena arena = host_tensor(parts.data(), {table.total / 2});
    arena.parts = 2;
    for (int g = 0; g < table.num_groups(); g++)
        arena.views.push_back(host_tensor(place.data() + (g == 1 ? 0 : 1000), {table.group_size(g)}));
    const Param& bias = table.params[2];
    EXPECT_EQ(arena.tensor(bias).data, place.data() + bias.offset - table.group_begin[1]);
    EXPECT_EQ(shape_string(arena.tensor(bias)), "[7]");
    EXPECT_EQ(shape_string(arena.groups(table, 1, 3)), str("[", (table.group_size(1) + table.group_size(2)) / 2, "]"));
}

TEST(Params, RejectsInconsistentTables) {
    const auto refused = [](void (*change)(ParamTable&), const std::vector<std::string>& parts) {
        ParamTable table = small_table();
        change(table);
        expect_error([&] { table.layout(1); }, parts);
    };
    refused([](ParamTable& t) { t.params[3].layer = 0; }, {"layers.1.qkv has the role of layers.0.qkv"});
    refused([](ParamTable& t) { t.params[3].group = 0; }, {"layers.1.qkv", "comes after group 1"});
    refused([](ParamTable& t) { t.params[0].padded_rows = 4; }, {"embedding", "not valid"});
    refused([](ParamTable& t) { t.params[1].rows = 0; }, {"layers.0.qkv", "not valid"});
    refused([](ParamTable& t) { t.params[1].sources = {{"a", 0, 4, false}}; }, {"layers.0.qkv", "cover 4 of 7 rows"});
    refused(
        [](ParamTable& t) {
            t.params[1].sources = {{"a", 0, 4, false}, {"b", 3, 4, false}};
        },
        {"layers.0.qkv", "b starts at row 3, expected 4"});
    refused([](ParamTable& t) { t.params[1].sources.clear(); }, {"layers.0.qkv", "cover 0 of 7"});
    refused(
        [](ParamTable& t) {
            t.params[0].rows = t.params[0].padded_rows = int64_t(1) << 40;
            t.params[0].cols = int64_t(1) << 40;
        },
        {"embedding", "overflows"});
    refused([](ParamTable& t) { t.params[3].fp32 = true; }, {"layers.1.qkv of group 2", "the last group"});
    refused([](ParamTable& t) { t.params[3].group = 3; }, {"layers.1.qkv of group 3", "the last group"});
    ParamTable table = small_table();
    expect_error([&] { table.layout(0); }, {"0 ranks"});
}

// Adam's second moment holds the parameters that AdamW updates, packed: each part's elements without gaps of more than
// 127, and no other parameter. The embedding is large enough to be split among the ranks.
TEST(Params, PackedSecondMoment) {
    for (const int64_t world : {1, 2, 3}) {
        ParamTable table = small_table();
        table.params[0] = matrix(EMBEDDING, -1, 0, "embedding", 200, 3, 208);
        for (const size_t i : {1, 3}) {
            table.params[i].optimizer = OptimizerType::Muon;
            table.params[i].part_rows = {4, 3};
        }
        table.layout(world);
        for (const Param& p : table.params) {
            int64_t covered = 0;
            for (int64_t part = 0; part < world; part++) {
                ParamArena whole, packed;
                whole.part = packed.part = part;
                whole.parts = packed.parts = world;
                packed.starts = second_moment_starts(table, part, world);
                const ParamArena::Span a = whole.span(p, 2, p.padded_numel() - 2),
                                       b = packed.span(p, 2, p.padded_numel() - 2);
                if (p.optimizer == OptimizerType::Muon) {
                    EXPECT_EQ(b.count, 0) << p.name;
                    continue;
                }
                EXPECT_EQ(a.begin, b.begin);
                EXPECT_EQ(a.count, b.count);
                if (!b.count) continue;
                covered += b.count;
                EXPECT_EQ(packed.span(p, 0, p.padded_numel()).at, packed.starts[p.index]) << p.name;  // the first held
                EXPECT_LE(b.at + b.count, packed.starts.back());
                for (const Param& q : table.params) {
                    const ParamArena::Span other = packed.span(q, 0, q.padded_numel());
                    if (q.index == p.index || !other.count) continue;
                    EXPECT_TRUE(other.at + other.count <= b.at || b.at + b.count <= other.at)
                        << p.name << ", " << q.name;
                }
            }
            EXPECT_EQ(covered, p.optimizer == OptimizerType::AdamW ? p.padded_numel() - 2 : 0) << p.name;
        }
        EXPECT_EQ(second_moment_starts(table, 0, 1).back(), 5 * 128 + 2 * 128);  // 208 x 3, and two of one block each
        EXPECT_EQ(second_moment_size(table, 1), 5 * 128 + 2 * 128);
    }
    ParamTable table = small_table();
    table.layout(2);
    EXPECT_TRUE(second_moment_starts(table, 1, 2).empty());  // AdamW alone: v has the layout of m
    EXPECT_EQ(second_moment_size(table, 2), table.total / 2);
    table.params[1].optimizer = OptimizerType::Muon;
    table.params[1].part_rows = {4, 4};
    expect_error([&] { table.layout(1); }, {"layers.0.qkv", "parts cover 8 of 7 rows"});
}

}  // namespace

// WeightGatherer: groups of weights are complete while they are used, whether all ranks keep them or the host. Started
// alone this is a world of one rank, where gathering is a copy; dev/tests/test_weight_gatherer.py starts it on several.
#include <gtest/gtest.h>

#include <optional>

#include "dev/tests/adapters.h"
#include "dev/tests/small_table.h"
#include "dev/tests/world.h"
#include "driver/frozen_weights.h"
#include "parallel/weight_gatherer.h"
#include "runtime/device/arena.h"

namespace {

const testing::Environment* const environment = testing::AddGlobalTestEnvironment(new LaunchedWorld);

// What a rank keeps of all groups, its shards or in host memory everything, and the buffers that groups come into.
struct RankWeights {
    const Context& ctx = LaunchedWorld::context();
    const ParamTable table = table_of(ctx.world, false);
    const GroupBuffers buffers{table, WeightGatherer::LAYER_BUFFERS, false};
    const int64_t parts, own = table.total / parts;
    Arena kept, gathered{buffers.total() * 4, "buffers"};
    ParamArena weights;
    std::optional<WeightGatherer> gatherer;

    explicit RankWeights(MemoryPlace place)
        : parts(place == MemoryPlace::Host ? 1 : ctx.world), kept(own * 4, "weights", place) {
        weights = kept.at(0, DType::F32, {own});
        weights.part = parts > 1 ? ctx.rank : 0;
        weights.parts = parts;
        const Tensor all = gathered.at(0, DType::F32, {buffers.total()});
        device_fill(all.data, 0xFF, size_t(all.bytes()), ctx.stream);
        weights.views = buffers.views(table, all);
        gatherer.emplace(ctx, kept_groups(table, weights, buffers), place);
    }
    static float value(int group, int64_t element, int version) {
        return float(version * 100000 + group * 10000 + element);
    }
    // Writes what this rank keeps of every group, as an update does.
    void set(int version) {
        for (int g = 0; g < table.num_groups(); g++) {
            const Tensor part = weights.groups(table, g, g + 1);
            std::vector<float> values(size_t(part.numel()));
            for (size_t i = 0; i < values.size(); i++)
                values[i] = value(g, weights.part * part.numel() + int64_t(i), version);
            copy_to_device(part.data, values.data(), values.size() * sizeof(float), ctx.stream);
        }
    }
    void expect_whole(int group, int version) const {
        const Tensor view = weights.views[size_t(group)];
        std::vector<float> got(size_t(view.numel())), expected(got.size());
        for (size_t i = 0; i < expected.size(); i++) expected[i] = value(group, int64_t(i), version);
        copy_to_host(got.data(), view.data, got.size() * sizeof(float), ctx.stream);
        EXPECT_EQ(got, expected) << "group " << group;
    }
    int head() const { return table.num_groups() - 2; }
};

class KeptWeights : public testing::TestWithParam<MemoryPlace> {};
INSTANTIATE_TEST_SUITE_P(WeightGatherer, KeptWeights, testing::Values(MemoryPlace::Device, MemoryPlace::Host),
                         [](const auto& test) { return test.param == MemoryPlace::Host ? "host" : "ranks"; });

// Forward and backward use each group once and prefetch the next one; then again with other weights.
TEST_P(KeptWeights, GroupsAreCompleteWhileInUse) {
    RankWeights r(GetParam());
    for (const int version : {1, 2, 3}) {
        r.set(version);
        r.gatherer->begin(r.ctx.stream);
        for (int g = 0; g <= r.head(); g++) {
            const GatheredGroup use(&*r.gatherer, g, g < r.head() ? g + 1 : -1, r.ctx.stream);
            r.expect_whole(g, version);
        }
        for (int g = r.head(); g >= 0; g--) {
            const GatheredGroup use(&*r.gatherer, g, g ? g - 1 : -1, r.ctx.stream);
            r.expect_whole(g, version);
        }
    }
}

// Layers that share a buffer replace each other; each is gathered again at its next use.
TEST_P(KeptWeights, LayersThatShareABufferReplaceEachOther) {
    RankWeights r(GetParam());
    ASSERT_EQ(r.buffers.buffer(1), r.buffers.buffer(3));
    r.set(1);
    r.gatherer->begin(r.ctx.stream);
    for (const int g : {1, 3, 1, 1, 3}) {
        const GatheredGroup use(&*r.gatherer, g, -1, r.ctx.stream);
        r.expect_whole(g, 1);
    }
}

// Within a pass a group that is still in its buffer is not gathered again. A new pass sees the updated weights.
TEST_P(KeptWeights, EachPassGathersOnce) {
    RankWeights r(GetParam());
    r.set(1);
    r.gatherer->begin(r.ctx.stream);
    { const GatheredGroup use(&*r.gatherer, 2, -1, r.ctx.stream); }
    r.set(2);
    {
        const GatheredGroup use(&*r.gatherer, 2, -1, r.ctx.stream);
        r.expect_whole(2, 1);
    }
    r.gatherer->begin(r.ctx.stream);
    {
        const GatheredGroup use(&*r.gatherer, 2, -1, r.ctx.stream);
        r.expect_whole(2, 2);
    }
}

// There is no gatherer if each rank has all weights.
TEST(WeightGatherer, FullWeightsNeedNoGatherer) {
    EXPECT_NO_THROW(GatheredGroup(nullptr, 1, 2, LaunchedWorld::context().stream));
}

std::vector<Tensor> tensors_of(const Fp8Base& base, const Param& p) {
    return {base.find(p)->rows, base.find(p)->scale};
}
std::vector<Tensor> tensors_of(const Nf4Base& base, const Param& p) {
    std::vector<Tensor> all = {base.matrix(p).fp8_scale};
    for (const Nf4Matrix::Part& part : base.matrix(p).parts)
        for (const Tensor& t :
             {part.weights.codes, part.weights.absmax_codes, part.weights.group_absmax, part.weights.mean})
            all.push_back(t);
    return all;
}

// Each rank quantises and keeps a part of every layer; gathered they are the bytes of a base that a rank has whole.
template <typename Base>
void expect_whole_layers(Base& whole, Base& split, const ParamTable& table, int64_t layers) {
    const Context& ctx = LaunchedWorld::context();
    for (Base* const base : {&whole, &split}) {
        base->memory.allocate("codes");
        initialise_frozen(*base, table, 7);
    }
    EXPECT_EQ(split.memory.in_place(), ctx.world == 1);
    EXPECT_LE(split.memory.bytes(),
              whole.memory.bytes() / ctx.world + layers * ArenaPlan::ALIGNMENT);  // where a part ends
    std::optional<WeightGatherer> gatherer;
    if (!split.memory.in_place()) {
        gatherer.emplace(ctx, split.memory.groups(table.num_groups()), split.memory.place());
        gatherer->begin(ctx.stream);
    }
    const auto bytes = [&](const Tensor& t) {
        std::vector<uint8_t> host(size_t(t.bytes()));
        copy_to_host(host.data(), t.data, host.size(), ctx.stream);
        return host;
    };
    for (int l = 0; l < layers; l++) {
        const GatheredGroup use(gatherer ? &*gatherer : nullptr, 1 + l, l + 1 < layers ? 2 + l : -1, ctx.stream);
        for (const Param& p : table.params) {
            if (p.layer != l || !whole.quantises(p)) continue;
            const std::vector<Tensor> expected = tensors_of(whole, p), got = tensors_of(split, p);
            for (size_t i = 0; i < expected.size(); i++)
                EXPECT_EQ(bytes(got[i]), bytes(expected[i])) << p.name << " " << i;
        }
    }
}

TEST(FrozenBase, RanksDivideItsCodes) {
    const Context& ctx = LaunchedWorld::context();
    ModelConfig config = qlora_config(true);
    config.layers = 4;
    config.set_attention("SSSS");
    const ParamTable table = parameter_table(config, ctx.world);
    const FrozenMemory::Kept part{MemoryPlace::Device, ctx.rank, ctx.world};
    Nf4Base nf4(table), nf4_part(table, part);
    expect_whole_layers(nf4, nf4_part, table, config.layers);
    // The first layer stays in the model's dtype. The parts have one orientation, whatever is asked for.
    Fp8Base fp8(table, 1, config.layers, false, DType::F32),
        fp8_part(table, 1, config.layers, ctx.world > 1, DType::F32, part);
    expect_whole_layers(fp8, fp8_part, table, config.layers);
}

}  // namespace

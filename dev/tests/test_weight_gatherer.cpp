// WeightGatherer: groups of weights are complete while they are used. Started alone this is a world of one rank, where
// gathering is a copy; dev/tests/test_weight_gatherer.py starts it on several ranks.
#include <gtest/gtest.h>

#include "dev/tests/small_table.h"
#include "dev/tests/world.h"
#include "parallel/weight_gatherer.h"
#include "runtime/device/arena.h"

namespace {

const testing::Environment* const environment = testing::AddGlobalTestEnvironment(new LaunchedWorld);

// A rank's shards of all groups, and the buffers that groups are gathered into.
struct RankWeights {
    const Context& ctx = LaunchedWorld::context();
    const ParamTable table = table_of(ctx.world, false);
    const GroupBuffers buffers{table, WeightGatherer::LAYER_BUFFERS, false};
    const int64_t own = table.total / ctx.world;
    Arena memory{(own + buffers.total()) * 4, "weights"};
    ParamArena weights = memory.at(0, DType::F32, {own});
    WeightGatherer gatherer{ctx, table, weights, buffers};

    RankWeights() {
        weights.part = ctx.rank;
        weights.parts = ctx.world;
        const Tensor gathered = memory.at(own * 4, DType::F32, {buffers.total()});
        device_fill(gathered.data, 0xFF, size_t(gathered.bytes()), ctx.stream);
        weights.views = buffers.views(table, gathered);
    }
    static float value(int group, int64_t element, int version) {
        return float(version * 100000 + group * 10000 + element);
    }
    // Writes this rank's shard of every group, as an update does.
    void set(int version) {
        for (int g = 0; g < table.num_groups(); g++) {
            const Tensor part = weights.groups(table, g, g + 1);
            std::vector<float> values(size_t(part.numel()));
            for (size_t i = 0; i < values.size(); i++)
                values[i] = value(g, ctx.rank * part.numel() + int64_t(i), version);
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

// Forward and backward use each group once and prefetch the next one; then again with other weights.
TEST(WeightGatherer, GroupsAreCompleteWhileInUse) {
    RankWeights r;
    for (const int version : {1, 2, 3}) {
        r.set(version);
        r.gatherer.begin(r.ctx.stream);
        for (int g = 0; g <= r.head(); g++) {
            const GatheredGroup use(&r.gatherer, g, g < r.head() ? g + 1 : -1, r.ctx.stream);
            r.expect_whole(g, version);
        }
        for (int g = r.head(); g >= 0; g--) {
            const GatheredGroup use(&r.gatherer, g, g ? g - 1 : -1, r.ctx.stream);
            r.expect_whole(g, version);
        }
    }
}

// Layers that share a buffer replace each other; each is gathered again at its next use.
TEST(WeightGatherer, LayersThatShareABufferReplaceEachOther) {
    RankWeights r;
    ASSERT_EQ(r.buffers.buffer(1), r.buffers.buffer(3));
    r.set(1);
    r.gatherer.begin(r.ctx.stream);
    for (const int g : {1, 3, 1, 1, 3}) {
        const GatheredGroup use(&r.gatherer, g, -1, r.ctx.stream);
        r.expect_whole(g, 1);
    }
}

// Within a pass a group that is still in its buffer is not gathered again. A new pass sees the updated weights.
TEST(WeightGatherer, EachPassGathersOnce) {
    RankWeights r;
    r.set(1);
    r.gatherer.begin(r.ctx.stream);
    { const GatheredGroup use(&r.gatherer, 2, -1, r.ctx.stream); }
    r.set(2);
    {
        const GatheredGroup use(&r.gatherer, 2, -1, r.ctx.stream);
        r.expect_whole(2, 1);
    }
    r.gatherer.begin(r.ctx.stream);
    {
        const GatheredGroup use(&r.gatherer, 2, -1, r.ctx.stream);
        r.expect_whole(2, 2);
    }
}

// There is no gatherer if each rank has all weights.
TEST(WeightGatherer, FullWeightsNeedNoGatherer) {
    EXPECT_NO_THROW(GatheredGroup(nullptr, 1, 2, LaunchedWorld::context().stream));
}

}  // namespace

// parallel/: which elements each rank owns, sums and updates. dev/tests/test_parallel.py tests training on several
// ranks.
#include "parallel/sharding.h"

#include <gtest/gtest.h>

#include <map>

#include "dev/tests/small_table.h"
#include "model.h"
#include "models/family.h"
#include "parallel/distributed_muon.h"
#include "runtime/rng.h"

namespace {

TEST(GroupBuffers, GroupsUsedTogetherDoNotOverlap) {
    for (const bool tied : {false, true}) {
        const ParamTable table = table_of(2, tied);
        const GroupBuffers buffers(table, 2, true);
        std::vector<float> memory(size_t(buffers.total()));
        const std::vector<Tensor> views =
            buffers.views(table, make_tensor(memory.data(), DType::F32, Device::CPU, {buffers.total()}));
        const auto overlap = [&](int a, int b) {
            const Tensor &x = views[size_t(a)], &y = views[size_t(b)];
            return x.as<float>() < y.as<float>() + y.numel() && y.as<float>() < x.as<float>() + x.numel();
        };
        for (int g = 0; g < table.num_groups(); g++) EXPECT_EQ(views[size_t(g)].numel(), table.group_size(g));
        for (int g = 1; g < LAYERS; g++) EXPECT_FALSE(overlap(g, g + 1));        // consecutive layers
        for (int g = 1; g <= LAYERS; g++) EXPECT_FALSE(overlap(0, g));           // the embedding and a layer
        for (int g = 0; g <= LAYERS; g++) EXPECT_FALSE(overlap(g, LAYERS + 2));  // the fp32 group and any other
        EXPECT_TRUE(overlap(1, 3));
        EXPECT_LT(buffers.total(), table.total);
        const GroupBuffers weights(table, 2, false);
        EXPECT_EQ(weights.buffer(LAYERS + 2), -1);
        EXPECT_EQ(buffers.total() - weights.total(), table.fp32_total);
    }
}

// The memory of one rank, with the driver's layout.
struct Rank {
    Sharding sharding;
    std::vector<float> weights, master, fp32, grads, m, v;
    std::vector<bf16> half;
    WeightArenas arenas;
    Gradients gradients;
    ParamArena m_arena, v_arena;

    Rank(const ParamTable& table, const Sharding& s, bool sixteen, bool with_master) : sharding(s) {
        const auto arena = [&](std::vector<float>& memory, bool split) {
            memory.resize(size_t(table.total / s.parts(split)));
            return s.arena(make_tensor(memory.data(), DType::F32, Device::CPU, {int64_t(memory.size())}), split);
        };
        if (sixteen) {
            half.resize(size_t(table.total / s.parts(s.splits_weights())));
            arenas.weights =
                s.arena(make_tensor(half.data(), DType::BF16, Device::CPU, {int64_t(half.size())}), s.splits_weights());
            if (with_master) arenas.master = arena(master, s.splits_optimizer());
        } else {
            arenas.weights = arena(weights, s.splits_weights());
        }
        if (sixteen || s.splits_weights()) {
            fp32.resize(size_t(table.fp32_total));
            arenas.fp32 = make_tensor(fp32.data(), DType::F32, Device::CPU, {table.fp32_total});
            arenas.fp32.origin = table.total - table.fp32_total;
        }
        const int64_t bytes = Gradients::memory(table, s, {}).bytes();
        grads.resize(size_t(bytes / 4));
        gradients.allocate(table, s, {}, make_tensor(grads.data(), DType::U8, Device::CPU, {bytes}), nullptr);
        m_arena = arena(m, s.splits_optimizer());
        v_arena = arena(v, s.splits_optimizer());
    }
    std::vector<UpdateSlice> slices(const ParamTable& table) const {
        return make_update_slices(table, sharding, arenas, gradients, m_arena, v_arena, HyperparametersByGroup{});
    }
};

// Every element is updated once, by one rank (in stage 0 by every rank), and counted once in the norm.
TEST(UpdateSlices, CoverEveryElementOnce) {
    for (const int64_t world : {1, 2, 3, 4}) {
        for (const int64_t stage : {0, 1, 2, 3}) {
            for (const int mode : {0, 1, 2}) {  // fp32; 16 bits with master weights, and without
                const ParamTable table = table_of(world, false);
                std::map<uint64_t, std::vector<int>> updates;
                for (const Param& p : table.params) updates[name_hash(p.name)].resize(size_t(p.numel()));
                int64_t normed = 0;
                for (int64_t rank = 0; rank < world; rank++) {
                    const Rank r(table, {stage, rank, world}, mode > 0, mode == 1);
                    for (const UpdateSlice& slice : r.slices(table)) {
                        normed += slice.own_grads.numel();
                        EXPECT_EQ(slice.m.numel(), slice.grads.numel());
                        EXPECT_TRUE(!slice.params || slice.params.numel() == slice.m.numel());
                        EXPECT_TRUE(!slice.params_T || slice.params_T.numel() == slice.m.numel());
                        const bool fp32_group = !slice.params_T && mode > 0;
                        EXPECT_EQ(bool(slice.params), mode != 2 || fp32_group);
                        EXPECT_EQ(bool(slice.gathered),
                                  world > 1 && (stage == 1 || stage == 2 ||
                                                (stage == 3 && slice.m.numel() * world == table.fp32_total)));
                        for (const ParamSegment& s : slice.segments[size_t(OptimizerType::AdamW)])
                            for (int64_t i = 0; i < s.end - s.begin; i++)
                                updates.at(s.key).at(size_t(s.first_element + i))++;
                    }
                }
                EXPECT_EQ(normed, table.total);
                const int expected = stage == 0 ? int(world) : 1;
                for (const auto& [key, counts] : updates)
                    for (const int count : counts) ASSERT_EQ(count, expected) << "stage " << stage << " of " << world;
            }
        }
    }
}

// A table whose layer matrices are Muon's: one of them fused of two.
ParamTable muon_table(int64_t world) {
    ParamTable table = table_of(world, false);
    for (Param& p : table.params) {
        if (p.role != 1) continue;
        p.optimizer = OptimizerType::Muon;
        p.rate_group = RateGroup::HiddenMatrices;
        p.part_rows = p.layer == 1 ? std::vector<int64_t>{5, 32} : std::vector<int64_t>{37};
    }
    table.layout(world);
    return table;
}

// In every round, what a rank sends to an owner is what the owner expects, and each owner gets its whole matrices.
// Every element of a matrix is updated once (in stage 0 by every rank). Owners are the same in all stages.
TEST(Muon, RanksAgreeOnWhatTravels) {
    for (const int64_t world : {1, 2, 3, 8}) {
        const ParamTable table = muon_table(world);
        const std::vector<MuonMatrix> matrices = muon_matrices(table, world);
        ASSERT_EQ(matrices.size(), 4u);
        for (const int64_t stage : {0, 1, 3}) {
            SCOPED_TRACE(str("stage ", stage, " of ", world));
            const int64_t bytes = muon_workspace(table, {stage, 0, world}, DType::F32).bytes();
            std::vector<Muon> ranks;
            std::map<uint64_t, std::vector<int>> updates;
            for (const Param& p : table.params) updates[name_hash(p.name)].resize(size_t(p.numel()));
            for (int64_t rank = 0; rank < world; rank++) {
                const Sharding sharding{stage, rank, world};
                const Rank r(table, sharding, false, false);
                ranks.emplace_back(table, sharding, r.slices(table), r.m_arena, HyperparametersByGroup{}, DType::F32,
                                   MuonOptions{newton_schulz_coefficients("quintic")});
                EXPECT_EQ(muon_workspace(table, sharding, DType::F32).bytes(), bytes);
                for (const Muon::Round& round : ranks.back().all_rounds())
                    for (const Muon::Pieces& pieces : round.pieces)
                        for (const MuonSegment& s : pieces.segments)
                            for (int64_t i = 0; i < s.end - s.begin; i++)
                                updates.at(s.key).at(size_t(s.first_element + i))++;
            }
            for (const Param& p : table.params)
                for (const int count : updates.at(name_hash(p.name)))
                    ASSERT_EQ(count, p.optimizer == OptimizerType::AdamW ? 0 : stage ? 1 : world) << p.name;
            int64_t owned = 0;
            for (size_t rank = 0; rank < ranks.size(); rank++) {
                for (size_t i = 0; i < ranks[rank].all_rounds().size(); i++) {
                    const Muon::Round& round = ranks[rank].all_rounds()[i];
                    EXPECT_EQ(round.transfers.empty(), stage == 0 || world == 1);
                    for (const Muon::Batch& b : round.batches) owned += b.count * b.rows * b.cols;
                    for (size_t j = 0; j < round.transfers.size(); j++)
                        for (size_t other = 0; other < ranks.size(); other++)
                            EXPECT_EQ(round.transfers[j].matrix[other],
                                      ranks[other].all_rounds()[i].transfers[j].updates[rank]);
                }
            }
            EXPECT_EQ(owned, 3 * 37 * 11);
        }
    }
}

// Costs: a matrix of twice the size on its larger side takes about twice as long.
TEST(Muon, OwnersHaveEqualWork) {
    ModelConfig config;
    ASSERT_TRUE(preset("gpt2-124M", config));
    for (const int64_t world : {2, 4, 8}) {
        std::vector<std::map<int64_t, int>> of_rows(static_cast<size_t>(world));
        for (const MuonMatrix& x : muon_matrices(parameter_table(config, world, OptimizerType::Muon), world))
            of_rows[size_t(x.owner)][x.rows * x.cols]++;
        for (const auto& counts : of_rows) {
            EXPECT_NEAR(counts.at(768 * 768), 48 / double(world), 3);
            EXPECT_EQ(counts.at(768 * 3072), 24 / world);
        }
    }
}

}  // namespace

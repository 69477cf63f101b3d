// Gradients: buckets, micro-steps, and sums over ranks. Started alone this is a world of one rank;
// dev/test_gradients.py starts it on several ranks.
#include "parallel/gradients.h"

#include <gtest/gtest.h>

#include "dev/small_table.h"
#include "dev/world.h"
#include "runtime/device/arena.h"

namespace {

const testing::Environment* const environment = testing::AddGlobalTestEnvironment(new LaunchedWorld);

TEST(Buckets, CoverEveryGroupOnceInBackwardOrder) {
    for (const bool tied : {false, true}) {
        const ParamTable table = table_of(2, tied);
        for (const int64_t stage : {0, 1, 2, 3}) {
            for (const int64_t bytes : {0, 1, 4096, 1 << 30}) {
                const Sharding sharding{stage, 0, 2};
                const std::vector<Bucket> buckets = make_buckets(table, sharding, {DType::F32, bytes});
                ASSERT_GE(buckets.size(), 2u);
                EXPECT_EQ(buckets.back().first, LAYERS + 2);  // the fp32 group
                int next = tied ? LAYERS + 1 : LAYERS + 2;
                for (size_t i = 0; i + 1 < buckets.size(); i++) {
                    EXPECT_EQ(buckets[i].last, next);
                    next = buckets[i].first;
                    const int64_t size =
                        table.group_begin[size_t(buckets[i].last)] - table.group_begin[size_t(buckets[i].first)];
                    if (stage < 2 && next > 0) {
                        EXPECT_GE(size * 4, bytes);
                    }
                    if (stage >= 2 || bytes <= 1) {
                        EXPECT_EQ(buckets[i].last - buckets[i].first, 1);
                    }
                }
                EXPECT_EQ(next, 0);
                if (stage < 2 && bytes > 4096) {
                    EXPECT_EQ(buckets.size(), 2u);
                }
            }
        }
    }
}

// The gradients that a rank's backward pass writes: integers, whose sums are exact in bf16 too.
float gradient(int64_t rank, int micro_step, int64_t i) {
    return float(rank + 1 + 2 * micro_step + i % 5);
}

// The gradients of one rank, and backward passes that write them.
struct RankGradients {
    const Context& ctx = LaunchedWorld::context();
    const Sharding sharding;
    const ParamTable table;
    Arena memory;
    Gradients grads;

    RankGradients(int64_t stage, const ReduceOptions& options)
        : sharding{stage, ctx.rank, ctx.world},
          table(table_of(ctx.world, false)),
          memory(Gradients::memory(table, sharding, options).bytes(), "gradients") {
        const Tensor all = memory.at(0, DType::U8, {memory.bytes()});
        device_fill(all.data, 0, size_t(all.bytes()), ctx.stream);
        grads.allocate(table, sharding, options, all, &ctx);
    }

    void write(int group, int micro_step) {
        for (const Param& p : table.params) {
            if (p.group != group) continue;
            const Tensor t = grads.tensor(p);
            std::vector<float> values(size_t(p.padded_numel()));
            if (grads.accumulate()) copy_to_host(values.data(), t.data, values.size() * sizeof(float), ctx.stream);
            for (size_t i = 0; i < values.size(); i++)
                values[i] = (grads.accumulate() ? values[i] : 0) + gradient(ctx.rank, micro_step, int64_t(i));
            copy_to_device(t.data, values.data(), values.size() * sizeof(float), ctx.stream);
        }
    }
    // Groups in the order of the model's backward pass.
    void step(int micro_steps) {
        const int fp32 = table.num_groups() - 1;
        for (int micro = 0; micro < micro_steps; micro++) {
            grads.begin(micro == 0, micro + 1 == micro_steps);
            grads.open(fp32, ctx.stream);
            for (int g = fp32 - 1; g >= 0; g--) {
                grads.open(g, ctx.stream);
                write(g, micro);
                if (g == 0) write(fp32, micro);
                grads.close(g, ctx.stream);
            }
            grads.close(fp32, ctx.stream);
            grads.end(ctx.stream);
        }
    }
    // The sum over ranks and micro-steps of a group, gaps between its tensors included.
    std::vector<float> expected(int group, int micro_steps) const {
        std::vector<float> sum(size_t(table.group_size(group)));
        for (const Param& p : table.params) {
            if (p.group != group) continue;
            for (int64_t i = 0; i < p.padded_numel(); i++)
                for (int64_t rank = 0; rank < ctx.world; rank++)
                    for (int micro = 0; micro < micro_steps; micro++)
                        sum[size_t(p.offset - p.group_begin + i)] += gradient(rank, micro, i);
        }
        return sum;
    }
    std::vector<float> fetch(const Tensor& t) const {
        std::vector<float> values(size_t(t.numel()));
        copy_to_host(values.data(), t.data, values.size() * sizeof(float), ctx.stream);
        return values;
    }
};

TEST(Gradients, OwnShardHoldsTheSumOfRanksAndMicroSteps) {
    for (const int64_t stage : {0, 1, 2, 3}) {
        for (const DType dtype : {DType::F32, DType::BF16}) {
            for (const int64_t bucket_bytes : {0, 8192}) {
                RankGradients r(stage, {dtype, bucket_bytes});
                for (const int micro_steps :
                     {1, 3, 2}) {  // the second and third step start with the gradients of the first
                    r.step(micro_steps);
                    for (int g = 0; g < r.table.num_groups(); g++) {
                        const std::vector<float> whole = r.expected(g, micro_steps);
                        const auto n = long(whole.size()) / long(r.ctx.world);
                        const std::vector<float> part(whole.begin() + n * r.ctx.rank,
                                                      whole.begin() + n * (r.ctx.rank + 1));
                        EXPECT_EQ(r.fetch(r.grads.own(g, g + 1)), part)
                            << "group " << g << ", stage " << stage << ", " << dtype_name(dtype) << ", " << micro_steps
                            << " micro-steps";
                    }
                }
            }
        }
    }
}

// In stage 0 every rank has the full sum.
TEST(Gradients, StageZeroSumsWholeGroups) {
    RankGradients r(0, {});
    r.step(2);
    for (int g = 0; g < r.table.num_groups(); g++)
        EXPECT_EQ(r.fetch(r.grads.arena.groups(r.table, g, g + 1)), r.expected(g, 2)) << "group " << g;
}

// Kernels accumulate from the second micro-step on, unless each micro-step is reduced separately.
TEST(Gradients, LaterMicroStepsAccumulate) {
    for (const int64_t stage : {0, 1, 2, 3}) {
        RankGradients r(stage, {});
        r.grads.begin(true, false);
        EXPECT_FALSE(r.grads.accumulate());
        r.grads.begin(false, true);
        EXPECT_EQ(r.grads.accumulate(), stage < 2 || r.ctx.world == 1);
    }
}

TEST(Gradients, MemoryMatchesTheStage) {
    const ParamTable table = table_of(4, false);
    const auto memory = [&](int64_t stage, DType dtype) { return Gradients::memory(table, {stage, 0, 4}, {dtype, 0}); };
    for (const int64_t stage : {0, 1}) {
        EXPECT_EQ(memory(stage, DType::F32).arena, table.total);
        EXPECT_EQ(memory(stage, DType::F32).slots, 0);
    }
    for (const int64_t stage : {2, 3}) {
        EXPECT_EQ(memory(stage, DType::F32).arena, table.total / 4);
        EXPECT_GT(memory(stage, DType::F32).slots, 0);
        EXPECT_LT(memory(stage, DType::F32).slots, table.total);
    }
    EXPECT_EQ(memory(0, DType::F32).buffer_bytes, 0);
    EXPECT_GT(memory(0, DType::BF16).buffer_bytes, 0);
}

}  // namespace

// Gradients: buckets, micro-steps, and sums over ranks. Started alone this is a world of one rank;
// dev/tests/test_gradients.py starts it on several ranks.
#include "parallel/gradients.h"

#include <gtest/gtest.h>

#include <functional>

#include "dev/oracle/stochastic_rounding.h"
#include "dev/tests/small_table.h"
#include "dev/tests/test_util.h"
#include "dev/tests/world.h"
#include "runtime/device/arena.h"
#include "runtime/device/convert_dtype.h"

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
    Arena memory, number{sizeof(int64_t), "number of the micro-step"};
    Gradients grads;

    RankGradients(int64_t stage, const GradientOptions& options)
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
            std::vector<float> values = fetch(t);
            for (size_t i = 0; i < values.size(); i++)
                values[i] = (grads.accumulate() ? values[i] : 0) + value(ctx.rank, micro_step, int64_t(i));
            if (t.dtype == DType::F32) {
                copy_to_device(t.data, values.data(), values.size() * sizeof(float), ctx.stream);
            } else {
                std::vector<bf16> rounded(values.size());
                for (size_t i = 0; i < values.size(); i++) rounded[i] = to_bf16(values[i]);
                copy_to_device(t.data, rounded.data(), rounded.size() * sizeof(bf16), ctx.stream);
            }
        }
    }
    // Groups in the order of the model's backward pass.
    void step(int micro_steps) {
        const int fp32 = table.num_groups() - 1;
        for (int micro = 0; micro < micro_steps; micro++) {
            const int64_t micro_step = FIRST_MICRO_STEP + micro;
            const Tensor on_device = number.at(0, DType::I64, {1});
            copy_to_device(on_device.data, &micro_step, sizeof micro_step, ctx.stream);
            grads.begin(micro == 0, micro + 1 == micro_steps, on_device);
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
        synchronize(ctx.stream);
        std::vector<float> buffer;
        const float* values = fetch_values(t, buffer);
        return {values, values + t.numel()};
    }

    static constexpr int64_t FIRST_MICRO_STEP = 1000;
    std::function<float(int64_t rank, int micro_step, int64_t i)> value = gradient;
};

TEST(Gradients, OwnShardHoldsTheSumOfRanksAndMicroSteps) {
    for (const int64_t stage : {0, 1, 2, 3}) {
        const struct {
            DType dtype, kept;
            bool in_matmul;
        } all[] = {{DType::F32, DType::F32, false},   {DType::BF16, DType::F32, false},
                   {DType::F32, DType::BF16, false},  {DType::F32, DType::BF16, true},
                   {DType::BF16, DType::BF16, false}, {DType::BF16, DType::BF16, true}};
        for (const auto& [dtype, kept, in_matmul] : all) {
            for (const int64_t bucket_bytes : {0, 8192}) {
                if (in_matmul && stage >= 2) continue;
                RankGradients r(stage, {dtype, bucket_bytes, kept, 0, in_matmul});
                // Later steps start with the gradients of the one before, also that of a single micro-step.
                for (const int micro_steps : {3, 1, 2}) {
                    r.step(micro_steps);
                    for (int g = 0; g < r.table.num_groups(); g++) {
                        const std::vector<float> whole = r.expected(g, micro_steps);
                        const auto n = long(whole.size()) / long(r.ctx.world);
                        const std::vector<float> part(whole.begin() + n * r.ctx.rank,
                                                      whole.begin() + n * (r.ctx.rank + 1));
                        EXPECT_EQ(r.fetch(r.grads.own(g, g + 1)), part)
                            << "group " << g << ", stage " << stage << ", " << dtype_name(dtype) << ", kept in "
                            << dtype_name(kept) << (in_matmul ? " by matmuls, " : ", ") << micro_steps
                            << " micro-steps";
                    }
                }
            }
        }
    }
}

// In stage 0 every rank has the full sum.
TEST(Gradients, StageZeroSumsWholeGroups) {
    for (const DType kept : {DType::F32, DType::BF16}) {
        RankGradients r(0, {DType::F32, 0, kept});
        r.step(2);
        for (int g = 0; g < r.table.num_groups(); g++)
            EXPECT_EQ(r.fetch(r.grads.arena.groups(r.table, g, g + 1)), r.expected(g, 2)) << "group " << g;
    }
}

// The roundings of each micro-step, to the bit. The numbers need more than 8 bits, and their sums are exact in fp32.
TEST(Gradients, SumsInBf16AreRoundedAfterEachMicroStep) {
    const auto fine = [](int64_t rank, int micro_step, int64_t i) {
        return float(rank + 1) / 64 + float(i % 7 * (micro_step + 1)) + float(i % 1000) / 4096;
    };
    const uint64_t seed = 99;
    const int micro_steps = 3;
    for (const int64_t stage : {0, 1, 2, 3}) {
        RankGradients r(stage, {DType::F32, 0, DType::BF16, seed});
        r.value = fine;
        r.step(micro_steps);
        for (const Param& p : r.table.params) {
            const uint64_t key = name_hash(str("gradients of group ", p.group));
            const auto rounded_in = [&](int micro, double sum, int64_t i) {
                const int64_t t = RankGradients::FIRST_MICRO_STEP + micro;
                return round_by(sum, noise_of(seed, t, key, p.offset - p.group_begin + i));
            };
            const auto expected = [&](int64_t i) {
                double sum = 0;  // of all ranks
                if (stage >= 2) {
                    for (int micro = 0; micro < micro_steps; micro++) {
                        for (int64_t rank = 0; rank < r.ctx.world; rank++) sum += fine(rank, micro, i);
                        sum = rounded_in(micro, sum, i);
                    }
                    return sum;
                }
                for (int64_t rank = 0; rank < r.ctx.world; rank++) {
                    double own = 0;
                    for (int micro = 0; micro + 1 < micro_steps; micro++)
                        own = rounded_in(micro, own + fine(rank, micro, i), i);
                    sum += own + fine(rank, micro_steps - 1, i);
                }
                return rounded_in(micro_steps - 1, sum, i);
            };
            const ParamArena& arena = r.grads.arena;
            ParamArena::Span span = arena.span(p, 0, p.numel());
            if (stage == 1) span = owned_span(p, r.ctx.rank, r.ctx.world);  // elsewhere is no sum
            if (!span.count) continue;
            const std::vector<float> got = r.fetch(arena.elements(arena.span(p, span.begin, span.count)));
            // Not ASSERT_EQ: a rank that leaves the test lets the others wait for it in their next step.
            for (int64_t i = 0; i < span.count && !HasFailure(); i++)
                EXPECT_EQ(got[size_t(i)], expected(span.begin + i)) << p.name << " " << i << ", stage " << stage;
        }
    }
}

// Matmuls add to the matrices' sums in bf16, here with a rounding to nearest after each micro-step. Other sums are in
// fp32 and rounded once. The sum over the ranks is in fp32 and rounded once more. Nothing is left of an earlier step.
TEST(Gradients, MatmulsAddToSumsInBf16) {
    const GradientOptions options{DType::F32, 0, DType::BF16, 0, true};
    const int64_t world = LaunchedWorld::context().world;
    if (world > 1)
        expect_error([&] { RankGradients(2, options); },
                     "gradients: matmuls add to sums in bf16 of whole groups, not of parts (stage 2) in bf16");
    for (const int64_t stage : {0, 1}) {
        RankGradients r(stage, options);
        r.value = [](int64_t rank, int micro_step, int64_t i) {
            return float(i % 7 * (micro_step + 1)) + float((i + rank) % 100) / 256;
        };
        int matrices = 0;
        for (const int micro_steps : {3, 1, 2}) {
            r.step(micro_steps);
            for (const Param& p : r.table.params) {
                const bool apart = options.sums_apart(p);
                const ParamArena& arena = r.grads.arena;
                const ParamArena::Span span =
                    stage == 1 ? owned_span(p, r.ctx.rank, world) : arena.span(p, 0, p.numel());
                const auto expected = [&](int64_t i) {
                    float all = 0;
                    for (int64_t rank = 0; rank < world; rank++) {
                        float sum = 0;
                        for (int micro = 0; micro < micro_steps; micro++) {
                            sum += r.value(rank, micro, i);
                            if (!apart) sum = to_float(to_bf16(sum));
                        }
                        all += to_float(to_bf16(sum));
                    }
                    return to_float(to_bf16(all));
                };
                matrices += !apart;
                if (!span.count) continue;
                const std::vector<float> got = r.fetch(arena.elements(arena.span(p, span.begin, span.count)));
                for (int64_t i = 0; i < span.count && !HasFailure(); i++)
                    EXPECT_EQ(got[size_t(i)], expected(span.begin + i)) << p.name << " " << i << ", stage " << stage;
            }
        }
        EXPECT_EQ(matrices, 3 * (LAYERS + 1));
    }
}

// Kernels accumulate from the second micro-step on, unless each micro-step is reduced separately.
TEST(Gradients, LaterMicroStepsAccumulate) {
    for (const int64_t stage : {0, 1, 2, 3}) {
        RankGradients r(stage, {});
        r.grads.begin(true, false);
        EXPECT_FALSE(r.grads.accumulate());
        r.grads.begin(false, true);
        EXPECT_EQ(r.grads.accumulate(), stage < 2 || r.ctx.world == 1);
        RankGradients rounded(stage, {DType::F32, 0, DType::BF16});
        rounded.grads.begin(false, true);
        EXPECT_FALSE(rounded.grads.accumulate());
    }
    RankGradients in_matmul(0, {DType::F32, 0, DType::BF16, 0, true});
    in_matmul.grads.begin(false, true);
    EXPECT_TRUE(in_matmul.grads.accumulate());
}

TEST(Gradients, MemoryMatchesTheStage) {
    const ParamTable table = table_of(4, false);
    const auto memory = [&](int64_t stage, DType dtype, DType kept = DType::F32) {
        return Gradients::memory(table, {stage, 0, 4}, {dtype, 0, kept});
    };
    for (const int64_t stage : {0, 1}) {
        EXPECT_EQ(memory(stage, DType::F32).arena, table.total * 4);
        EXPECT_EQ(memory(stage, DType::F32).buffers, 0);
    }
    for (const int64_t stage : {2, 3}) {
        EXPECT_EQ(memory(stage, DType::F32).arena, table.total);
        EXPECT_GT(memory(stage, DType::F32).buffers, 0);
        EXPECT_LT(memory(stage, DType::F32).buffers, table.total * 4);
    }
    for (const int64_t stage : {0, 1, 2, 3}) {
        EXPECT_EQ(memory(stage, DType::F32, DType::BF16).arena * 2, memory(stage, DType::F32).arena);
        EXPECT_EQ(memory(stage, DType::F32, DType::BF16).buffers, memory(2, DType::F32).buffers);
    }
    const ParamTable alone = table_of(1, false);
    const Gradients::Memory in_matmul = Gradients::memory(alone, {}, {DType::F32, 0, DType::BF16, 0, true});
    EXPECT_EQ(in_matmul.arena, alone.total * 2);
    EXPECT_EQ(in_matmul.buffers, 0);
    EXPECT_EQ(in_matmul.sums, (768 + LAYERS * (128 + 128)) * 4);  // the embedding; biases and norms, all padded
    EXPECT_EQ(in_matmul.exchanged, 0);
    for (const int64_t stage : {0, 1}) {  // one group at a time, in fp32
        const Gradients::Memory m = Gradients::memory(table, {stage, 0, 4}, {DType::F32, 0, DType::BF16, 0, true});
        EXPECT_EQ(m.arena, table.total * 2);
        EXPECT_EQ(m.buffers, 0);
        EXPECT_EQ(m.exchanged * 2, memory(stage, DType::BF16).exchanged * 4);
        EXPECT_EQ(Gradients::memory(table, {stage, 0, 4}, {DType::BF16, 0, DType::BF16, 0, true}).exchanged, 0);
    }
    EXPECT_EQ(memory(0, DType::F32).exchanged, 0);
    EXPECT_GT(memory(0, DType::BF16).exchanged, 0);
}

}  // namespace

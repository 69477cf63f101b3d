// The search for options that fit into memory (driver/fit.h), with made-up memory plans.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "driver/fit.h"
#include "model.h"
#include "runtime/host_memory.h"

namespace {

Target gpu_target() {
    Target target;
    target.device = Device::CUDA;
    return target;
}

RunOptions bf16_run(int64_t batch_size = 6) {
    RunOptions o;
    o.model.dtype = "bf16";
    o.batch_size = batch_size;
    return o;
}

// 100 bytes a sequence and 1,000 for the state. Each saving takes off a different power of two, recomputation a quarter
// of it in each of 4 layers.
int64_t bytes_of(const RunOptions& o) {
    int64_t bytes = 1000 + 100 * o.batch_size - 100 * o.sharding.zero_stage;
    bytes -= std::min<int64_t>(o.recompute_layers, 4) * int64_t(o.recompute) + 16 * (o.optimizer_dtype == "bf16") +
             32 * !o.master_weights;
    return bytes - 64 * (o.grad_dtype == "bf16") - 128 * (o.offload != "none");
}

TEST(Fit, TakesTheFirstThatFits) {
    const RunOptions given = bf16_run();
    const std::string all_bf16 =
        "--optimizer-dtype bf16 --master-weights off --grad-dtype bf16 --grad-rounding nearest";
    const std::pair<int64_t, std::string> cases[] = {
        {1600, ""},
        {1599, "--recompute activation"},
        {1595, "--recompute norms"},
        {1591, "--optimizer-dtype bf16"},
        {1583, "--recompute activation --optimizer-dtype bf16"},
        {1575, "--optimizer-dtype bf16 --master-weights off"},
        {1500, all_bf16},
        {1479, "--recompute block:3 " + all_bf16},
        {1478, "--recompute block " + all_bf16},
        {1475, "--recompute block:1 --offload activations"},
        {1460, "--recompute block --offload activations"},
        {1459, "--recompute block:1 --optimizer-dtype bf16 --offload activations"},
        {1347, "--batch-size 3"},
        {1299, "--batch-size 3 --recompute activation"},
    };
    for (const auto& [available, options] : cases) {
        RunOptions o = given;
        const FitReport fit = find_fit(o, 4, 1, gpu_target(), available, bytes_of);
        ASSERT_TRUE(fit.found()) << available;
        EXPECT_EQ(fit.tried.back().options, options) << available;
        EXPECT_EQ(fit.tried.back().bytes, bytes_of(o)) << available;
        EXPECT_LE(bytes_of(o), available);
        EXPECT_EQ(o.grad_rounding, o.grad_dtype == "bf16" ? "nearest" : "stochastic");
        for (size_t i = 0; i + 1 < fit.tried.size(); i++) EXPECT_GT(fit.tried[i].bytes, available);
    }
}

// Matmuls add to sums of whole gradients only, so stages that divide them keep the stochastic rounding.
TEST(Fit, RoundsToNearestWhereGradientsAreWhole) {
    for (const int64_t stage : {0, 1, 2, 3}) {
        for (const int64_t world : {1, 4}) {
            RunOptions o = bf16_run();
            o.sharding.zero_stage = stage;
            o.recompute = Recompute::Block;
            find_fit(o, 4, world, gpu_target(), 0, [&](const RunOptions& tried) {
                const bool whole = world == 1 || tried.sharding.zero_stage < 2;
                EXPECT_EQ(tried.grad_rounding, tried.grad_dtype == "bf16" && whole ? "nearest" : "stochastic")
                    << world << " ranks, stage " << tried.sharding.zero_stage;
                return int64_t(1);
            });
        }
    }
}

TEST(Fit, TriesDivisorsOfTheBatchSize) {
    for (const auto& [batch_size, sizes] : {std::pair<int64_t, std::vector<int64_t>>{12, {12, 6, 4, 3, 2, 1}},
                                            {9, {9, 3, 1}},
                                            {1, {1}},
                                            {(int64_t(1) << 40) - 87, {(int64_t(1) << 40) - 87, 1}}}) {  // a prime
        RunOptions o = bf16_run(batch_size);
        std::vector<int64_t> tried;
        find_fit(o, 4, 1, gpu_target(), 0, [&](const RunOptions& run) {
            if (tried.empty() || tried.back() != run.batch_size) tried.push_back(run.batch_size);
            return run.batch_size;
        });
        EXPECT_EQ(tried, sizes);
    }
}

TEST(Fit, TriesNothingTwiceAndUndoesNothing) {
    RunOptions o = bf16_run();
    o.recompute = Recompute::Norms;
    o.optimizer_dtype = "bf16";
    o.offload = "optimizer";
    o.sharding.zero_stage = 1;
    const RunOptions given = o;
    const FitReport fit = find_fit(o, 4, 4, gpu_target(), 0, [&](const RunOptions& tried) {
        EXPECT_GE(tried.recompute, given.recompute);
        EXPECT_EQ(tried.optimizer_dtype, "bf16");
        EXPECT_EQ(tried.offload.find("optimizer"), 0U) << tried.offload;
        EXPECT_GE(tried.sharding.zero_stage, 1);
        EXPECT_LE(tried.batch_size, 6);
        EXPECT_EQ(given.batch_size % tried.batch_size, 0);
        return bytes_of(tried);
    });
    EXPECT_FALSE(fit.found());
    EXPECT_EQ(bytes_of(o), bytes_of(given));
    std::set<std::string> names;
    std::set<int64_t> stages;
    for (const FitReport::Try& t : fit.tried) {
        EXPECT_TRUE(names.insert(t.options).second) << t.options;
        const size_t stage = t.options.find("--zero-stage ");
        stages.insert(stage == std::string::npos ? 1 : t.options[stage + 13] - '0');
    }
    EXPECT_EQ(stages, (std::set<int64_t>{1, 2, 3}));
    EXPECT_TRUE(
        names.count("--batch-size 2 --zero-stage 3 --recompute block --master-weights off --grad-dtype bf16 "
                    "--offload optimizer,activations"));
    EXPECT_EQ(fit.remedy().find("the least is "), 0U) << fit.remedy();
    EXPECT_NE(fit.remedy().find(", with --batch-size 1 --zero-stage 3 "), std::string::npos) << fit.remedy();
}

// Frozen weights in host memory come after every batch size without them, the largest batch first.
TEST(Fit, OffloadsFrozenWeightsLast) {
    RunOptions adapters = bf16_run();
    adapters.lora.rank = 8;
    const auto bytes = [](const RunOptions& o) {
        return 1000 + 10 * o.batch_size - 2 * int64_t(o.recompute) -
               500 * (o.offload.find("weights") != std::string::npos);
    };
    RunOptions o = adapters;
    const FitReport fit = find_fit(o, 4, 2, gpu_target(), 559, bytes);
    ASSERT_TRUE(fit.found());
    EXPECT_EQ(fit.tried.back().options, "--recompute activation --offload weights");
    EXPECT_EQ(o.offload, "weights");
    const auto before = std::find_if(fit.tried.begin(), fit.tried.end(), [](const FitReport::Try& t) {
        return t.options.find("weights") != std::string::npos;
    });
    ASSERT_GT(before - fit.tried.begin(), 0);
    EXPECT_EQ((before - 1)->options,
              "--batch-size 1 --zero-stage 3 --recompute block --optimizer-dtype bf16 --offload activations");
    o = adapters;
    o.offload = "activations";
    EXPECT_EQ(find_fit(o, 4, 1, gpu_target(), 560, bytes).tried.back().options, "--offload activations,weights");
    for (RunOptions whole : {bf16_run(), adapters}) {
        if (whole.lora.on()) whole.rollout.prompts = 1;  // rollouts read whole weights
        EXPECT_FALSE(find_fit(whole, 4, 1, gpu_target(), 559, bytes).found());
    }
}

// What fits the GPU is left out where hosts have no memory for what it offloads. If they have for nothing, the error is
// about them.
TEST(Fit, AsksWhetherHostsHaveMemory) {
    RunOptions adapters = bf16_run();
    adapters.lora.rank = 8;
    const auto bytes = [](const RunOptions& o) { return 1000 + 10 * o.batch_size - 500 * (o.offload != "none"); };
    const auto lacks_inputs = [](const RunOptions& o) {
        return std::string(offload_options(o.offload).activations && o.batch_size > 2 ? "too little" : "");
    };
    RunOptions o = adapters;
    const FitReport fit = find_fit(o, 4, 1, gpu_target(), 560, bytes, lacks_inputs);
    ASSERT_TRUE(fit.found());
    EXPECT_EQ(fit.tried.back().options, "--batch-size 2 --recompute block:1 --offload activations");
    for (const FitReport::Try& t : fit.tried)
        EXPECT_EQ(t.lacks.empty(), t.bytes > 560 || &t == &fit.tried.back()) << t.options;
    o = adapters;
    const FitReport none = find_fit(o, 4, 1, gpu_target(), 560, bytes, [](const RunOptions&) { return "too little"; });
    EXPECT_FALSE(none.found());
    EXPECT_EQ(o.offload, "none");
    EXPECT_EQ(none.remedy().find("with --recompute block --offload activations too little; free memory of the host; "),
              0U)
        << none.remedy();
    EXPECT_NE(none.remedy().find("lower --seq-len, "), std::string::npos) << none.remedy();
    o.rollout.prompts = 1;
    const FitReport of_rollouts = find_fit(o, 4, 1, gpu_target(), 1, bytes);
    EXPECT_NE(of_rollouts.remedy().find("lower --rollout-batch-size, use"), std::string::npos) << of_rollouts.remedy();
}

TEST(Fit, RanksOfOneHostShareItsMemory) {
    const std::vector<RankHost> ranks = {{1, 100}, {2, 50}, {1, 90}};
    EXPECT_EQ(lacks_host_memory(ranks, std::vector<int64_t>{40, 50, 50}), "");
    const std::string missing = lacks_host_memory(ranks, std::vector<int64_t>{41, 50, 50});
    EXPECT_NE(missing.find("91 B of host memory would be needed and 90 B are free"), std::string::npos) << missing;
    EXPECT_NE(lacks_host_memory(ranks, std::vector<int64_t>{0, 51, 0}), "");
    MemoryPlan plan;
    plan.device = Device::CUDA;
    plan.add("weights", 1000);
    EXPECT_EQ(lacks_host_memory(ranks, plan), "");
    plan.add("block inputs", 46, MemoryPlace::Host);
    EXPECT_NE(lacks_host_memory(ranks, plan), "");
    EXPECT_EQ(lacks_host_memory({ranks[0], ranks[1]}, plan), "");
}

TEST(Fit, LeavesOutWhatHasNoEffect) {
    const auto tried_words = [](RunOptions o, int64_t world, const Target& target) {
        std::string all;
        for (const FitReport::Try& t : find_fit(o, 4, world, target, 0, bytes_of).tried) all += t.options + "\n";
        return all;
    };
    const auto has = [](const std::string& all, const char* word) { return all.find(word) != std::string::npos; };
    RunOptions fp32 = bf16_run(1);
    fp32.model.dtype = "fp32";
    const std::string on_cpu = tried_words(fp32, 1, Target{});
    EXPECT_TRUE(has(on_cpu, "--grad-dtype bf16"));
    for (const char* word : {"--master-weights", "--offload", "--zero-stage", "--batch-size", "--grad-rounding"})
        EXPECT_FALSE(has(on_cpu, word)) << on_cpu;
    RunOptions adapters = bf16_run();
    adapters.lora.rank = 8;
    const std::string of_lora = tried_words(adapters, 2, gpu_target());
    EXPECT_TRUE(has(of_lora, "--optimizer-dtype bf16") && has(of_lora, "--zero-stage 3"));
    EXPECT_FALSE(has(of_lora, "--grad-dtype") || has(of_lora, "--master-weights")) << of_lora;
    adapters.offload = "weights";  // each rank copies all weights from its host
    EXPECT_FALSE(has(tried_words(adapters, 2, gpu_target()), "--zero-stage 3"));
}

}  // namespace

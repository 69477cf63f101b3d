// Training: the loss of one batch, the update, and steps as the command `train` runs them.
#include "dev/allocations.h"
#include "dev/model_fixture.h"
#include "runtime/files/files.h"
#include "runtime/model/initialise.h"
#include "trainer.h"

namespace {

class Overfit : public testing::TestWithParam<std::string> {};

TEST_P(Overfit, FitsOneBatch) {
    ModelConfig config;
    const size_t end = GetParam().find(' ');  // of the preset's name; attention types may follow
    ASSERT_TRUE(preset(GetParam().substr(0, end), config));
    if (end != std::string::npos) config.attention = GetParam().substr(end + 1);
    config.vocab_size = 256;
    Driver driver(config, training_shape(2, 24));
    initialise_weights(driver.model.table, driver.model.arenas, 42, driver.ctx.stream);
    const Batch batch = random_batch(config, 2, 24, 1);
    const double first = driver.step(batch, 3e-3);
    EXPECT_NEAR(first, std::log(256.0), 0.2);  // an untrained model: all tokens are equally likely
    double loss = first;
    for (int step = 1; step < 60 && loss >= 0.01; step++) loss = driver.step(batch, 3e-3);
    EXPECT_LT(loss, 0.01);
}

INSTANTIATE_TEST_SUITE_P(Presets, Overfit,
                         testing::Values("gpt2-tiny", "llama-tiny", "gpt2-tiny LLLL", "llama-tiny GGLS"),
                         [](const auto& test) {
                             std::string name = test.param;
                             std::replace_if(
                                 name.begin(), name.end(), [](char c) { return !std::isalnum(c); }, '_');
                             return name;
                         });

// A non-finite loss changes neither the weights nor Adam's moments.
TEST(Update, SkipsNonFiniteSteps) {
    Driver driver(base_config(), training_shape(2, 11));
    driver.randomise(3);
    const Batch batch = random_batch(base_config(), 2, 11, 5);
    driver.step(batch, 1e-2);
    const std::vector<float> params = driver.params(), m = fetch<float>(driver.optimizer.m.data),
                             v = fetch<float>(driver.optimizer.v.data);
    const Tensor bias = driver.model.weight(NORMF_B);
    const float saved = fetch<float>(bias)[0], poison = INFINITY;
    copy_to_device(bias.data, &poison, sizeof poison, {});
    driver.step(batch, 1e-2);
    copy_to_device(bias.data, &saved, sizeof saved, {});
    const StepScalars s = read_scalars(driver.ctx, driver.acts);
    EXPECT_EQ(s.skip, 1);
    EXPECT_EQ(s.t, 1);
    EXPECT_TRUE(same_bits(driver.params(), params));
    EXPECT_TRUE(same_bits(fetch<float>(driver.optimizer.m.data), m));
    EXPECT_TRUE(same_bits(fetch<float>(driver.optimizer.v.data), v));
    driver.step(batch, 1e-2);
    EXPECT_EQ(read_scalars(driver.ctx, driver.acts).t, 2);
    EXPECT_FALSE(same_bits(driver.params(), params));
}

// A run on random tokens in a temporary directory.
struct TrainingRun {
    TempDir dir;
    Context ctx;
    std::unique_ptr<TokenFiles> files;
    std::unique_ptr<Trainer> trainer;
    std::unique_ptr<Loader> loader;

    explicit TrainingRun(const Args& args) {
        constexpr int32_t N = 20000;
        std::string file(1024, '\0');
        const int32_t header[3] = {20240520, 1, N};
        std::memcpy(file.data(), header, sizeof header);
        for (int32_t i = 0; i < N; i++) {
            const uint16_t token = uint16_t(philox(1, uint64_t(i), 0).v[0] % 200);
            file.append(reinterpret_cast<const char*>(&token), 2);
        }
        write_file(dir.file("train_000.bin"), file);
        Args all = {"--data", dir.path(), "--out", dir.file("run"), "--steps", "1000"};
        all.insert(all.end(), args.begin(), args.end());
        trainer = std::make_unique<Trainer>(ctx, check_training(parse_train(all), 1));
        files = std::make_unique<TokenFiles>(dir.file("train_*.bin"));
        loader = std::make_unique<Loader>(*files, trainer->loader_options(), 0);
    }

    void steps(int n) {
        for (int i = 0; i < n; i++) trainer->queue_step(*loader);
        synchronize(ctx.stream);
    }
};

// A run uses as much GPU memory as its plan says. (bench_cpu.py compares the CPU's plan with a whole process.)
TEST(Training, MemoryMatchesThePlan) {
    if (backend_device() == Device::CPU) GTEST_SKIP() << "a test's process holds more than a run does";
    for (const Recompute level : {Recompute::None, Recompute::Block}) {
        const int64_t before = device_memory_available();
        TrainingRun run({"--model", "gpt2-124M", "--dtype", "bf16", "--batch-size", "8", "--seq-len", "1024",
                         "--recompute", level == Recompute::None ? "none" : "block"});
        run.steps(3);
        const double used = double(before - device_memory_available());
        ModelConfig config;
        ASSERT_TRUE(preset("gpt2-124M", config));
        const Model model(config, {}, {DType::BF16, true});
        RunShape shape = training_shape(8, 1024, DType::BF16);
        shape.recompute = level;
        shape.gelu_epilogue = GeluEpilogue::Both;
        const Activations acts(config, shape);
        EXPECT_NEAR(double(memory_plan(model, acts).total) / used, 1, 0.02) << "used " << used / (1 << 20) << " MiB";
    }
}

// A step of fixed shape, from reading its batch to copying its scalars, allocates no host or device memory, neither in
// this program nor in libraries. (Its log line does.)
TEST(Training, AllocatesNothingAfterTheFirstStep) {
    if (backend_device() == Device::CPU) GTEST_SKIP() << "oneDNN allocates its packing buffers in every matmul";
    if (why_no_preload()) GTEST_SKIP() << why_no_preload();
    const Allocations allocations("Training.AllocatesNothingAfterTheFirstStep");
    if (!allocations.counting) return;
    const Args small = {"--batch-size", "2", "--seq-len", "32", "--layers", "2", "--channels", "64", "--heads", "2"};
    for (const Args& args : {Args{"--model", "gpt2-tiny", "--dtype", "bf16", "--total-batch-tokens", "192"},
                             Args{"--model", "llama-tiny", "--kv-heads", "1", "--recompute", "block"},
                             Args{"--model", "gpt2-tiny", "--dtype", "bf16", "--master-weights", "off"}}) {
        Args all = args;
        all.insert(all.end(), small.begin(), small.end());
        TrainingRun run(all);
        run.steps(1);
        allocations.expect_none(args[1], [&] { run.steps(20); });
    }
}

}  // namespace

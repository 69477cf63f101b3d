// Training: the loss of one batch, the update, and steps as the command `train` runs them.
// run_tests.py: alone, because it measures the memory in use.
#include <algorithm>

#include "commands/commands.h"
#include "dev/oracle/reference.h"
#include "dev/tests/allocations.h"
#include "dev/tests/model_fixture.h"
#include "dev/tests/test_util.h"
#include "driver/trainer.h"
#include "models/family.h"
#include "runtime/files/files.h"
#include "runtime/model/initialise.h"

namespace {

class Overfit : public testing::TestWithParam<std::string> {};

TEST_P(Overfit, FitsOneBatch) {
    ModelConfig config;
    const size_t end = GetParam().find(' ');  // of the preset's name; attention types may follow
    ASSERT_TRUE(preset(GetParam().substr(0, end), config));
    if (end != std::string::npos) config.set_attention(GetParam().substr(end + 1));
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

// A non-finite loss changes neither the weights nor the optimizer's state.
TEST(Update, SkipsNonFiniteSteps) {
    for (size_t type = 0; type < NUM_OPTIMIZERS; type++) {
        SCOPED_TRACE(OPTIMIZERS[type].name);
        const OptimizerType optimizer = OptimizerType(type);
        Driver driver(base_config(), training_shape(2, 11), true, Driver::default_options(), optimizer);
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
}

// Muon's update of a matrix in float64, and how far fp32 may be from it: 4 times the RMS change that rounding errors of
// random sign make, of a unit roundoff for each stored number and √K of them for a sum of K products. (Newton-Schulz
// makes small singular values large, and their errors with them, so there is no bound that holds for every matrix.)
struct ExactUpdate {
    std::vector<double> value;
    double limit;
};
ExactUpdate exact_update(const std::vector<double>& u, int64_t rows, int64_t cols, const NewtonSchulz& coefficients) {
    ExactUpdate exact;
    exact.value = reference::newton_schulz(u.data(), rows, cols, coefficients,
                                           [](reference::Value, double, int64_t) { return 0.0; });
    uint64_t i = 0;
    const std::vector<double> rounded = reference::newton_schulz(
        u.data(), rows, cols, coefficients, [&](reference::Value sum, double stored, int64_t K) {
            return normal01(1, 0, i++) * UNIT_ROUNDOFF * (stored + std::sqrt(double(K)) * sum.mag);
        });
    exact.limit = 4 * rms(difference(rounded, exact.value));
    return exact;
}

TEST(MuonOptions, ScalesOfShapes) {
    EXPECT_FLOAT_EQ(shape_scale(MuonScale::Spectral, 768, 768), 1);
    EXPECT_FLOAT_EQ(shape_scale(MuonScale::Spectral, 3072, 768), 2);
    EXPECT_FLOAT_EQ(shape_scale(MuonScale::Spectral, 768, 3072), 1);
    EXPECT_FLOAT_EQ(shape_scale(MuonScale::RMS, 2500, 100), 10);
    EXPECT_FLOAT_EQ(shape_scale(MuonScale::RMS, 100, 2500), 10);
}

TEST(MuonOptions, MomentumGrowsLinearly) {
    TrainOptions o;
    EXPECT_DOUBLE_EQ(momentum(o, 0), 0.95);
    o.muon.momentum_warmup = 300;
    EXPECT_DOUBLE_EQ(momentum(o, 0), 0.85);
    EXPECT_DOUBLE_EQ(momentum(o, 150), 0.9);
    EXPECT_DOUBLE_EQ(momentum(o, 300), 0.95);
    EXPECT_DOUBLE_EQ(momentum(o, 1000), 0.95);
    o.muon.momentum = 0.5;  // does not begin above its value
    EXPECT_DOUBLE_EQ(momentum(o, 0), 0.5);
    EXPECT_DOUBLE_EQ(momentum(o, 150), 0.5);
}

// Two whole steps of Muon and of AdamW in its groups. The second continues from a state of its own momentum.
TEST(Update, MuonStepMatchesReference) {
    const double lr = 0.03, momentum = 0.9;
    for (const ModelVariant& variant : MODEL_VARIANTS) {
        SCOPED_TRACE(variant.name);
        const bool llama = std::string(variant.name).find("llama") == 0;
        ModelConfig config = base_config();
        variant.apply(config);
        OptimizerOptions options = Driver::default_options();
        options.rates = {GroupHyperparameters{1, 0.1f}, GroupHyperparameters{0.5f, 0.02f},
                         GroupHyperparameters{2, 0.03f}, GroupHyperparameters{0.1f, 0}};
        options.muon.newton_schulz = newton_schulz_coefficients(llama ? "polar-express" : "simple");
        options.muon.scale = llama ? MuonScale::RMS : MuonScale::Spectral;
        Driver d(config, training_shape(2, 11), true, options, OptimizerType::Muon);
        d.randomise(3);
        for (int64_t t = 1; t <= 2; t++) {
            const std::vector<float> before = d.params(), m0 = fetch<float>(d.optimizer.m.data),
                                     v0 = fetch<float>(d.optimizer.v.data);
            d.step(random_batch(config, 2, 11, uint64_t(t)), lr, 1, momentum);
            const std::vector<float> after = d.params(), grads = d.grads(), m1 = fetch<float>(d.optimizer.m.data);
            const StepScalars s = read_scalars(d.ctx, d.acts);
            ASSERT_EQ(s.skip, 0);
            for (const Param& p : d.model.table.params) {
                SCOPED_TRACE(p.name);
                const GroupHyperparameters& rate = options.rates[size_t(p.rate_group)];
                const double group_lr = double(s.lr) * rate.lr_scale, decay = p.decay ? rate.weight_decay : 0;
                if (p.optimizer == OptimizerType::AdamW) {
                    const ParamArena::Span v = d.optimizer.v.span(p, 0, p.numel());
                    ASSERT_EQ(v.count, p.numel());
                    for (int64_t i = 0; i < p.numel(); i++) {
                        const size_t at = size_t(p.offset + i);
                        const reference::AdamW r = reference::adamw(before[at], m0[at], v0[size_t(v.at + i)], grads[at],
                                                                    s.grad_scale, group_lr, options.adamw.beta1,
                                                                    options.adamw.beta2, options.adamw.eps, decay, t);
                        const double change = r.param.value - before[at];  // bounded as in test_adamw.cpp
                        ASSERT_NEAR(after[at] - before[at], change,
                                    1e-5 * std::fabs(change) + 2 * UNIT_ROUNDOFF * r.param.mag);
                    }
                    continue;
                }
                EXPECT_EQ(d.optimizer.v.span(p, 0, p.numel()).count, 0);
                int64_t row = 0;
                for (const int64_t rows : p.part_rows) {
                    const size_t first = size_t(p.offset + row * p.cols), n = size_t(rows * p.cols);
                    row += rows;
                    std::vector<double> u(n), change(n), expected(n);
                    for (size_t i = 0; i < n; i++) {
                        const reference::Muon r =
                            reference::muon_momentum(m0[first + i], grads[first + i], s.grad_scale, s.momentum);
                        // Four roundings at most: of 1 - μ, of grad·grad_scale, of their product, of the sum.
                        ASSERT_NEAR(m1[first + i], r.m.value, 4 * UNIT_ROUNDOFF * r.m.mag);
                        u[i] = r.u.value;
                    }
                    const ExactUpdate exact = exact_update(u, rows, p.cols, options.muon.newton_schulz);
                    const double scale = shape_scale(options.muon.scale, rows, p.cols);
                    double weight = 0;
                    for (size_t i = 0; i < n; i++) {
                        change[i] = double(after[first + i]) - before[first + i];
                        expected[i] =
                            reference::muon_update(before[first + i], exact.value[i], group_lr, scale, decay).value -
                            before[first + i];
                        weight = std::max(weight, std::fabs(double(before[first + i])));
                    }
                    const double limit = group_lr * scale * exact.limit + 2 * UNIT_ROUNDOFF * weight;
                    EXPECT_LE(rms(difference(change, expected)), limit) << "rows " << row - rows << " to " << row;
                    EXPECT_LE(limit, 1e-2 * rms(expected)) << "rows " << row - rows << " to " << row;
                }
            }
        }
    }
}

// Where the state lies changes no bit. On the CPU there are no master weights.
TEST(Update, OffloadedStateHasTheSameBits) {
    const DType dtype = backend_device() == Device::CPU ? DType::F32 : DType::BF16;
    const Batch batch = random_batch(base_config(), 2, 11, 5);
    for (size_t type = 0; type < NUM_OPTIMIZERS; type++) {
        SCOPED_TRACE(OPTIMIZERS[type].name);
        const OptimizerType optimizer = OptimizerType(type);
        for (const Offload offload :
             {Offload{true, false, false}, Offload{false, true, false}, Offload{true, true, true}}) {
            const auto trained = [&](Offload chosen) {
                RunShape shape = training_shape(2, 11, dtype);
                shape.offload_inputs = chosen.activations;
                Driver driver(base_config(), shape, true, Driver::default_options(), optimizer, {}, chosen);
                driver.randomise(3);
                for (int i = 0; i < 3; i++) driver.step(batch, 1e-2);
                std::vector<std::vector<float>> state = {driver.params()};
                for (const ParamArena* arena : {&driver.optimizer.m, &driver.optimizer.v})
                    state.push_back(fetch<float>(arena->data));
                return state;
            };
            const auto expected = trained({}), got = trained(offload);
            for (size_t i = 0; i < expected.size(); i++) EXPECT_TRUE(same_bits(got[i], expected[i])) << i;
        }
    }
}

// AdamW's second moment has no memory for the matrices of Muon, and the workspace no more than a few rounds.
TEST(Update, MemoryOfMuon) {
    ModelConfig config;
    ASSERT_TRUE(preset("gpt2-124M", config));
    const Model adamw(config, {}, {DType::BF16, true}), muon(config, {}, {DType::BF16, true}, OptimizerType::Muon);
    const int64_t hidden = 12 * 12 * 768 * 768, others = muon.table.total - hidden;
    EXPECT_EQ(Optimizer::second_moments(adamw), adamw.table.total);
    EXPECT_LE(Optimizer::second_moments(muon), others);
    EXPECT_GE(Optimizer::second_moments(muon), others - 128 * 14);  // less the padding of groups
    EXPECT_EQ(update_workspace_bytes(adamw), 0);
    EXPECT_LT(update_workspace_bytes(muon), int64_t(600) << 20);
    RunShape shape = training_shape(8, 1024, DType::BF16);
    const int64_t before = Activations(config, shape).plan.bytes();
    shape.update_bytes = update_workspace_bytes(muon);
    EXPECT_EQ(Activations(config, shape).plan.bytes(), before);  // it lies where activations were
}

// A matmul that applies the activation function writes act while it reads norm2, so the two may not share memory.
TEST(ActivationPlan, OutputOfAMatmulIsApartFromItsInput) {
    for (const Activation activation : {Activation::GELU, Activation::SwiGLU, Activation::ReLU2})
        for (const Recompute level : {Recompute::None, Recompute::Activation, Recompute::Norms, Recompute::Block}) {
            ModelConfig config = base_config();
            config.activation = activation;
            RunShape shape = training_shape(2, 16, DType::BF16);
            shape.recompute = level;
            shape.activation_epilogue = ActivationEpilogue::Both;
            const Activations acts(config, shape);
            if (acts.shape.activation_epilogue != ActivationEpilogue::Both) continue;  // GELU, recomputed by itself
            const auto find = [&](const std::string& name) {
                const auto& all = acts.plan.entries();
                const auto found = std::find_if(all.begin(), all.end(), [&](const auto& e) { return e.name == name; });
                EXPECT_NE(found, all.end()) << name;
                return *found;
            };
            for (const char* layer : {"layers.0.", "layers.1."}) {
                const ArenaPlan::Entry out = find(str(layer, "act")), inp = find(str(layer, "norm2"));
                EXPECT_LE(out.first, inp.last)
                    << layer << " activation " << int(activation) << " recompute " << int(level);
                EXPECT_TRUE(out.offset + out.bytes <= inp.offset || inp.offset + inp.bytes <= out.offset);
            }
        }
}

// A run on random tokens in a temporary directory.
struct TrainingRun {
    TempDir dir;
    Context ctx;
    std::unique_ptr<Trainer> trainer;
    std::unique_ptr<LoadedBatches> batches;

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
        batches = std::make_unique<LoadedBatches>(*trainer);
    }

    void steps(int n) {
        for (int i = 0; i < n; i++) queue_step(*trainer, *batches);
        synchronize(ctx.stream);
    }
};

// A run uses as much GPU memory as its plan says. (bench_cpu.py compares the CPU's plan with a whole process.)
TEST(Training, MemoryMatchesThePlan) {
    if (backend_device() == Device::CPU) GTEST_SKIP() << "a test's process holds more than a run does";
    struct Run {
        Recompute level;
        OptimizerType optimizer;
        bool fp8;
        const char* offload = "none";
        bool adapters = false, nf4 = false;
    };
    const Run runs[] = {{Recompute::None, OptimizerType::AdamW, false},
                        {Recompute::Block, OptimizerType::AdamW, false},
                        {Recompute::Block, OptimizerType::Muon, false},
                        {Recompute::None, OptimizerType::AdamW, true},
                        {Recompute::None, OptimizerType::AdamW, false, "optimizer,master"},
                        {Recompute::Block, OptimizerType::AdamW, false, "optimizer,master,activations"},
                        {Recompute::Block, OptimizerType::AdamW, false, "weights", true},
                        {Recompute::Block, OptimizerType::AdamW, false, "activations,weights", true, true}};
    for (const auto& [level, optimizer, fp8, offload, adapters, nf4] : runs) {
        if (fp8 && !matmul_fp8_unavailable().empty()) continue;
        const int64_t before = device_memory_available();
        // What the driver and the libraries take differs by 24 MiB between machines, which has to be less than 2%.
        const int64_t B = adapters ? 32 : 8;
        Args args = {"--model",        "gpt2-124M",
                     "--dtype",        "bf16",
                     "--batch-size",   std::to_string(B),
                     "--seq-len",      "1024",
                     "--recompute",    level == Recompute::None ? "none" : "block",
                     "--optimizer",    facts_of(optimizer).name,
                     "--matmul-dtype", fp8 ? "fp8" : "model",
                     "--offload",      offload};
        LoraOptions lora;
        lora.nf4 = nf4;
        if (adapters) {
            lora.rank = 16;
            args.insert(args.end(), {"--random-weights", "--lora-rank", "16"});
        }
        if (nf4) args.push_back("--qlora");
        TrainingRun run(args);
        run.steps(3);
        const double used = double(before - device_memory_available());
        ModelConfig config;
        ASSERT_TRUE(preset("gpt2-124M", config));
        const Model model(config, {}, {DType::BF16, true}, optimizer, offload_options(offload), lora);
        RunShape shape = Driver::with_workspace(training_shape(B, 1024, DType::BF16), model);
        shape.recompute = level;
        shape.activation_epilogue = ActivationEpilogue::Both;
        shape.fp8.on = fp8;
        shape.offload_inputs = model.offload.moves_inputs(shape.target);
        const Activations acts(config, shape);
        EXPECT_NEAR(double(memory_plan(model, acts).total) / used, 1, 0.02) << "used " << used / (1 << 20) << " MiB";
    }
}

// A step of fixed shape, from reading its batch to copying its scalars, allocates no host or device memory, neither in
// this program nor in libraries. (Its log line does. With Muon cuBLASLt allocates on the host in each matmul of the
// update, which is not replayed from a graph.)
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

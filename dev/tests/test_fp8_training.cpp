// Training with fp8 matmuls: every variant of the model, every level of recomputation and plan against itself; scales,
// their history, micro-steps, steps that are skipped; learning.
#include <algorithm>
#include <iterator>

#include "dev/oracle/reference_gradients.h"
#include "dev/tests/fp8_fixture.h"
#include "models/family.h"
#include "runtime/model/initialise.h"

namespace {

constexpr int64_t B = 2, T = 16;

RunShape fp8_shape(int64_t batch_size = B) {
    return fp8_training_shape(batch_size, T);
}

std::vector<double> wide(const std::vector<float>& x) {
    return {x.begin(), x.end()};
}

// Norms after attention and the MLP do not write fp8 (check_fp8()).
std::vector<ModelVariant> fp8_variants() {
    std::vector<ModelVariant> variants;
    std::copy_if(std::begin(MODEL_VARIANTS), std::end(MODEL_VARIANTS), std::back_inserter(variants),
                 [](const ModelVariant& v) { return !fp8_config(v).norm_after; });
    return variants;
}

class Fp8Variants : public testing::TestWithParam<ModelVariant> {
  protected:
    void SetUp() override {
        if (!matmul_fp8_unavailable().empty()) GTEST_SKIP() << matmul_fp8_unavailable();
    }
    static Driver driver(const RunShape& shape) {
        return Driver(fp8_config(GetParam()), shape, true, Driver::default_options());
    }
    const Batch batch = random_batch(fp8_config(GetParam()), B, T, 5);
};

// The gradients of two steps.
std::vector<float> two_steps(const ModelConfig& config, const RunShape& shape, const Batch& batch) {
    Driver d(config, shape);
    d.randomise(3);
    d.step(batch, 1e-2);
    std::vector<float> all = d.grads();
    d.step(batch, 1e-2);
    const std::vector<float> second = d.grads(), params = d.params();
    all.insert(all.end(), second.begin(), second.end());
    all.insert(all.end(), params.begin(), params.end());
    return all;
}

}  // namespace

// The recompute level, the overlap of lifetimes in memory and kept weights change no bit.
TEST_P(Fp8Variants, RecomputationAndPlansGiveTheSameBits) {
    const ModelConfig config = fp8_config(GetParam());
    for (const bool delayed : {true, false}) {
        RunShape shape = fp8_shape();
        shape.fp8.delayed = delayed;
        const std::vector<float> expected = two_steps(config, shape, batch);
        ASSERT_TRUE(std::all_of(expected.begin(), expected.end(), [](float x) { return std::isfinite(x); }));
        for (const Recompute level : {Recompute::None, Recompute::Activation, Recompute::Norms, Recompute::Block})
            for (const bool overlap : {true, false}) {
                shape.recompute = level;
                shape.overlap = overlap;
                shape.fp8.keep_weights = !overlap;
                shape.offload_inputs = overlap;
                EXPECT_TRUE(same_bits(two_steps(config, shape, batch), expected))
                    << "recompute level " << int(level) << " overlap " << overlap << " delayed " << delayed;
            }
    }
}

// Each level of recomputation saves memory, and codes take less of it than what they replace.
TEST_P(Fp8Variants, PlansAreSmaller) {
    const ModelConfig config = fp8_config(GetParam());
    RunShape shape = fp8_shape(64);
    int64_t before = INT64_MAX;
    for (const Recompute level : {Recompute::None, Recompute::Activation, Recompute::Norms, Recompute::Block}) {
        shape.recompute = level;
        const int64_t bytes = Activations(config, shape).plan.bytes();
        EXPECT_LE(bytes, before) << int(level);
        before = bytes;
    }
}

// Rounding to 3 or 2 bits of mantissa errs by 2% or 4% of an element (uniform in its last place, over mantissas), and
// errors of different elements are independent. So gradients err by some percent of their RMS; layers add up. Gated
// linear attention and QK-norm may divide by small numbers, which multiplies any error (test_model.cpp, micro-steps).
TEST_P(Fp8Variants, GradientsAreNearThoseOfFullPrecision) {
    const ModelConfig config = fp8_config(GetParam());
    RunShape shape = fp8_shape();
    Driver fp8(config, shape);
    shape.fp8.on = false;
    Driver full(config, shape);
    for (Driver* d : {&fp8, &full}) d->randomise(3);
    const double loss = fp8.gradients({batch}), expected = full.gradients({batch});
    EXPECT_NEAR(loss, expected, 0.03 * expected);
    EXPECT_NE(loss, expected);
    const std::vector<double> x = wide(fp8.grads()), y = wide(full.grads());
    const bool amplifies = config.layers_of(AttentionType::GatedLinear) > 0 || config.qk_norm != QkNorm::Off;
    EXPECT_LE(rms(difference(x, y)), (amplifies ? 4 : 0.25) * rms(y));
    EXPECT_GE(rms(difference(x, y)), 1e-3 * rms(y));
}

// The recipe as a whole, against float64 that rounds the same operands to fp8: 2e-7, as without fp8. Where an operand
// lies so close to the middle between two codes that the error of fp32 tips it over (one in about 10,000), gradients
// behind it change by a thousandth. Without the rounding in the oracle they differ by some percent.
TEST(Fp8Model, GradientsMatchTheOracleThatRoundsAlike) {
    if (backend_device() != Device::CPU) GTEST_SKIP() << "the oracle does not round to bf16";
    int64_t tensors = 0, tipped = 0;
    for (const ModelVariant& variant : MODEL_VARIANTS) {
        const ModelConfig config = fp8_config(variant);
        if (!reference::has_gradients(config)) continue;
        const Batch batch = random_batch(config, B, T, 5);
        for (const reference::Fp8Rounding rounding :
             {reference::Fp8Rounding{false}, {true, Fp8Format::E5M2}, {true, Fp8Format::E4M3}}) {
            SCOPED_TRACE(str(variant.name, " fp8 ", rounding.on, ' ', FP8_FORMAT_NAMES[size_t(rounding.gradients)]));
            RunShape shape = fp8_shape();
            shape.fp8.on = rounding.on;
            shape.fp8.gradients = rounding.gradients;
            Driver d(config, shape);
            d.randomise(3);
            const double loss = d.gradients({batch});
            const reference::ModelGradients ref =
                reference::model_gradients(config, reference::widen(d.model.table, d.params().data()), batch.tokens,
                                           batch.targets, B, T, rounding);
            EXPECT_NEAR(loss, ref.loss, (rounding.on ? 1e-3 : 1e-6) * ref.loss);
            for (const Param& p : d.model.table.params) {
                std::vector<double> got = wide(fetch<float>(d.optimizer.grads.tensor(p)));
                got.resize(size_t(p.numel()));  // without padding
                const std::vector<double>& expected = ref.gradients.at(p.name);
                const double error = rms(difference(got, expected)) / rms(expected);
                EXPECT_LE(error, rounding.on ? 0.02 : 1e-5) << p.name;
                tensors += rounding.on;
                tipped += rounding.on && error > 1e-5;
            }
        }
    }
    EXPECT_GT(tensors, 500);
    EXPECT_LE(tipped, tensors / 10);  // 9 of 542
}

// A layer that is left out computes what it does without fp8.
TEST_P(Fp8Variants, LayersCanBeLeftOut) {
    const ModelConfig config = fp8_config(GetParam());
    if (config.layers < 2) GTEST_SKIP() << "one layer";
    RunShape shape = fp8_shape();
    shape.overlap = false;
    shape.adds_in_matmul = false;  // as in fp8, also without it
    std::vector<std::vector<float>> first_layer, gradients;
    for (int i = 0; i < 3; i++) {
        shape.fp8.on = i > 0;
        shape.fp8.skip_first = i == 1;
        shape.fp8.skip_last = i == 2;
        Driver d(config, shape);
        d.randomise(3);
        d.gradients({batch});
        first_layer.push_back(fetch_floats(d.ctx, d.acts.forward[1].res1));
        gradients.push_back(d.grads());
    }
    EXPECT_TRUE(same_bits(first_layer[1], first_layer[0]));
    EXPECT_FALSE(same_bits(first_layer[2], first_layer[0]));
    EXPECT_FALSE(same_bits(gradients[1], gradients[0]));
}

INSTANTIATE_TEST_SUITE_P(Model, Fp8Variants, testing::ValuesIn(fp8_variants()), variant_name);

namespace {

class Fp8Training : public testing::Test {
  protected:
    void SetUp() override {
        if (!matmul_fp8_unavailable().empty()) GTEST_SKIP() << matmul_fp8_unavailable();
    }
    const ModelConfig config = fp8_config(MODEL_VARIANTS[1]);
    const Batch batch = random_batch(config, B, T, 5);
};

// Of the role of QKV's input in layer 0, the newest step first.
std::vector<float> qkv_history(const Driver& d) {
    const std::vector<float> all = d.acts.fp8->history(d.ctx.stream);
    std::vector<float> own;
    for (int64_t step = 0; step < FP8_HISTORY; step++)
        own.push_back(all[size_t(step * 2 * d.model.config.layers * NUM_LINEAR_LAYERS)]);
    return own;
}

float largest(const std::vector<float>& x) {
    float most = 0;
    for (const float v : x) most = std::max(most, std::fabs(v));
    return most;
}

}  // namespace

TEST_F(Fp8Training, HistoryHoldsTheAmaxOfEachStep) {
    RunShape shape = fp8_shape();
    shape.overlap = false;
    Driver d(config, shape);
    d.randomise(3);
    std::vector<float> expected(FP8_HISTORY, 0.0f);
    for (int step = 0; step < FP8_HISTORY + 3; step++) {
        EXPECT_EQ(d.acts.fp8->calibrates(), step < FP8_HISTORY);
        d.step(batch, 1e-2);
        expected.insert(expected.begin(), largest(fetch_floats(d.ctx, d.acts.forward[0].norm1)));
        expected.resize(FP8_HISTORY);
        EXPECT_EQ(qkv_history(d), expected) << "step " << step;
        EXPECT_EQ(d.acts.fp8->recorded(), step + 1);
    }
}

// The operands of a sequence have the same codes in any micro-batch: with delayed scaling because the scale is the
// step's; with current scaling because scales are powers of two, by which only what underflows is rounded differently.
// The remaining differences are the orders of sums, and roundings to codes that they tip over.
TEST_F(Fp8Training, MicroStepsSumToTheFullBatch) {
    for (const bool delayed : {true, false}) {
        RunShape shape = fp8_shape();
        shape.fp8.delayed = delayed;
        Driver d(config, shape);
        d.randomise(3);
        for (int step = 0; step < FP8_HISTORY; step++) {
            d.gradients({batch});
            d.acts.fp8->update(d.ctx);
        }
        d.gradients({batch});
        const std::vector<double> whole = wide(d.grads());
        d.gradients(split(batch, B, T));
        const double error = rms(difference(wide(d.grads()), whole)) / rms(whole);
        EXPECT_LE(error, backend_device() == Device::CPU ? 1e-4 : 1e-2) << "delayed " << delayed;
    }
}

TEST_F(Fp8Training, EvaluationDoesNotChangeTraining) {
    std::vector<std::vector<float>> params;
    for (const bool evaluates : {false, true}) {
        Driver d(config, fp8_shape());
        d.randomise(3);
        for (int step = 0; step < FP8_HISTORY + 2; step++) {
            d.step(batch, 1e-2);
            if (evaluates) d.logits(random_batch(config, B, T, 6));
        }
        params.push_back(d.params());
    }
    EXPECT_TRUE(same_bits(params[0], params[1]));
}

// Scales are of the weights as they are, not of larger ones before.
TEST_F(Fp8Training, ScalesFollowWeightsThatShrink) {
    std::vector<std::vector<double>> logits;
    for (const bool larger_before : {false, true}) {
        Driver d(config, fp8_shape());
        d.randomise(3);
        if (larger_before) d.logits(batch);
        d.acts.fp8->begin_step(d.ctx.stream);
        for (const Param& p : d.model.table.params) {
            if (linear_layer_index(p.role) < 0) continue;
            std::vector<float> values(size_t(p.padded_numel()));
            normal_numbers(values.data(), 7, name_hash(p.name), 0, p.numel());
            for (float& x : values) x *= 1e-3f;
            d.model.arenas.store(p, values.data(), 0, p.padded_numel());
        }
        logits.push_back(d.logits(batch));
    }
    EXPECT_EQ(logits[0], logits[1]);
}

// An infinite weight makes loss and amaxes infinite or NaN: the step is skipped, and no history holds it.
TEST_F(Fp8Training, StepsThatAreNotFiniteAreSkipped) {
    for (const bool keeps : {true, false}) {
        RunShape shape = fp8_shape();
        shape.fp8.keep_weights = keeps;
        Driver d(config, shape);
        d.randomise(3);
        for (int step = 0; step < FP8_HISTORY; step++) d.step(batch, 1e-3);
        const Tensor weight = d.model.weight(NORM1_W, 0);
        const float saved = fetch<float>(weight)[0], poison = INFINITY;
        copy_to_device(weight.data, &poison, sizeof poison, {});
        d.step(batch, 1e-3);
        EXPECT_EQ(read_scalars(d.ctx, d.acts).skip, 1);
        copy_to_device(weight.data, &saved, sizeof saved, {});
        for (const float amax : d.acts.fp8->history(d.ctx.stream)) EXPECT_TRUE(std::isfinite(amax));
        d.step(batch, 1e-3);
        EXPECT_EQ(read_scalars(d.ctx, d.acts).skip, 0);
    }
}

// Values beyond the range of the history saturate, and are counted.
TEST_F(Fp8Training, CountsWhatSaturatesAndUnderflows) {
    Driver d(config, fp8_shape());
    d.randomise(3);
    const auto counts = [&] { return fetch<int64_t>(d.acts.fp8->counts()); };
    for (int step = 0; step < FP8_HISTORY; step++) d.step(batch, 0);
    EXPECT_EQ(counts()[FP8_SATURATED], 0);
    // Each element of each operand once: inputs and outputs of the linear layers.
    int64_t elements = 0;
    for (const Role role : LINEAR_LAYERS)
        elements += linear_layer_sizes(config, role).inputs + linear_layer_sizes(config, role).outputs;
    EXPECT_EQ(counts()[FP8_ELEMENTS], elements * config.layers * B * T);
    const Tensor weight = d.model.weight(NORM1_W, 0);
    std::vector<float> larger = fetch<float>(weight);
    for (float& w : larger) w *= 64;
    copy_to_device(weight.data, larger.data(), larger.size() * sizeof(float), {});
    d.step(batch, 0);
    EXPECT_GT(counts()[FP8_SATURATED], B * T);
    EXPECT_LT(counts()[FP8_SATURATED], counts()[FP8_ELEMENTS] / 4);
}

// The history of a checkpoint gives the scales that the run had.
TEST_F(Fp8Training, RestoredHistoryGivesTheSameBits) {
    Driver a(config, fp8_shape()), b(config, fp8_shape());
    for (Driver* d : {&a, &b}) d->randomise(3);
    for (int step = 0; step < FP8_HISTORY + 1; step++) a.step(batch, 0);
    b.acts.fp8->restore(a.acts.fp8->history(a.ctx.stream), a.acts.fp8->recorded(), b.ctx.stream);
    EXPECT_FALSE(b.acts.fp8->calibrates());
    for (Driver* d : {&a, &b}) d->gradients({random_batch(config, B, T, 7)});
    EXPECT_TRUE(same_bits(a.grads(), b.grads()));
}

TEST_F(Fp8Training, GraphsReplayTheSameBits) {
    for (const bool delayed : {true, false}) {
        RunShape shape = fp8_shape();
        shape.fp8.delayed = delayed;
        Driver ordinary(config, shape), recorded(config, shape);
        for (Driver* d : {&ordinary, &recorded}) {
            d->randomise(3);
            for (int step = 0; step < FP8_HISTORY; step++) d->step(batch, 1e-3);
        }
        Graph graph;
        for (uint64_t seed = 10; seed < 13; seed++) {
            const Batch other = random_batch(config, B, T, seed);
            ordinary.gradients({other});
            const Input in = upload(recorded.ctx, recorded.acts, other);
            graph.run(recorded.ctx.stream, [&] {
                recorded.acts.fp8->begin_step(recorded.ctx.stream);
                forward({recorded.ctx, recorded.model, recorded.acts, in});
                backward({recorded.ctx, recorded.model, recorded.acts, in, &recorded.optimizer.grads},
                         static_cast<float>(1.0 / double(B * T)), true);
            });
            EXPECT_TRUE(same_bits(recorded.grads(), ordinary.grads())) << "run " << seed - 10;
            for (Driver* d : {&ordinary, &recorded}) d->acts.fp8->update(d->ctx);
        }
    }
}

// fp8 learns: one batch by heart, with each format of gradients, each method of scaling, and Muon.
TEST_F(Fp8Training, FitsOneBatch) {
    const auto fit = [](const char* name, const RunShape& shape, OptimizerType optimizer, double lr) {
        ModelConfig c;
        ASSERT_TRUE(preset(name, c));
        c.vocab_size = 256;
        Driver d(c, shape, true, Driver::default_options(), optimizer);
        initialise_weights(d.model.table, d.model.arenas, 42, d.ctx.stream);
        const Batch one = random_batch(c, B, T, 1);
        double loss = d.step(one, lr);
        EXPECT_NEAR(loss, std::log(256.0), 0.2);
        for (int step = 1; step < 100 && loss >= 0.01; step++) loss = d.step(one, lr);
        EXPECT_LT(loss, 0.01) << name;
    };
    RunShape shape = fp8_shape();
    fit("gpt2-tiny", shape, OptimizerType::AdamW, 3e-3);
    fit("llama-tiny", shape, OptimizerType::Muon, 0.02);
    shape.fp8.gradients = Fp8Format::E4M3;
    fit("llama-tiny", shape, OptimizerType::AdamW, 3e-3);
    shape.fp8.delayed = false;
    fit("gpt2-tiny", shape, OptimizerType::AdamW, 3e-3);
}

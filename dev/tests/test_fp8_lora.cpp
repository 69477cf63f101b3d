// Adapters beside fp8 matmuls with a frozen base: against a float64 model that rounds alike, against itself in every
// plan of memory, and out of NF4.
#include "driver/fp8_base.h"

#include "dev/tests/adapters.h"
#include "dev/tests/fp8_fixture.h"
#include "kernels/fp8.h"
#include "models/family.h"
#include "runtime/device/gpu_table.h"

namespace {

constexpr int64_t B = 2, T = 16;

// The variants of which float64 gradients exist. Norms after attention and the MLP do not write fp8 (check_fp8()).
std::vector<ModelVariant> oracle_variants() {
    std::vector<ModelVariant> variants;
    std::copy_if(std::begin(MODEL_VARIANTS), std::end(MODEL_VARIANTS), std::back_inserter(variants),
                 [](const ModelVariant& v) {
                     const ModelConfig c = fp8_config(v);
                     return reference::has_gradients(c) && !c.norm_after;
                 });
    return variants;
}

ModelConfig config_of(const std::string& name) {
    for (const ModelVariant& v : MODEL_VARIANTS)
        if (v.name == name) return fp8_config(v);
    throw Error("no variant " + name);
}

// s·B·A of each weight with adapters, by the weights' names.
reference::Weights deltas_of(const Driver& lora) {
    reference::Weights deltas;
    const double s = lora.model.lora->options.scale();
    for_each_adapter(lora.model, [&](const Param& p, const Param& a, const Param& b, const LoraPart& part,
                                     int64_t a_row, int64_t b_row) {
        std::vector<double>& delta = deltas[p.name];
        delta.resize(size_t(p.numel()));
        const std::vector<float> A = fetch_param(*lora.model.adapters, a),
                                 B_rows = fetch_param(*lora.model.adapters, b);
        for (int64_t i = 0; i < part.rows; i++)
            for (int64_t r = 0; r < b.cols; r++)
                for (int64_t c = 0; c < p.cols; c++)
                    delta[size_t((part.row + i) * p.cols + c)] += s * double(B_rows[size_t((b_row + i) * b.cols + r)]) *
                                                                  double(A[size_t((a_row + r) * p.cols + c)]);
    });
    return deltas;
}

class Fp8Lora : public testing::Test {
  protected:
    void SetUp() override {
        if (!matmul_fp8_unavailable().empty()) GTEST_SKIP() << matmul_fp8_unavailable();
    }
};

// The gradients and the adapters of two steps.
std::vector<float> two_steps(const ModelConfig& config, const RunShape& shape, const LoraOptions& lora,
                             const Batch& batch) {
    Driver d = lora_driver(config, shape, lora);
    d.randomise(3);
    std::vector<float> all;
    for (int step = 0; step < 2; step++) {
        d.step(batch, 1e-2);
        for (const std::vector<float>& part : {d.grads(), d.params()}) all.insert(all.end(), part.begin(), part.end());
    }
    return all;
}

// Codes of fp32 values, where Fp8Base::store() would round them to the model's dtype first.
void store_codes(const Driver& d, const Param& p, const std::vector<float>& values) {
    const Fp8Weight& to = *d.model.fp8->find(p);
    std::vector<uint8_t> codes(values.size());
    float scale[FP8_SCALE_FLOATS];
    fp8_quantise_on_host(host_tensor(codes.data(), {p.rows, p.cols}), host_tensor(scale, {FP8_SCALE_FLOATS}),
                         host_tensor(values.data(), {p.rows, p.cols}), DType::F32, 0, p.numel());
    copy_to_device(to.rows.data, codes.data(), codes.size(), d.ctx.stream);
    copy_to_device(to.scale.data, scale, sizeof scale, d.ctx.stream);
    if (to.columns) fp8_transpose(to.columns, to.rows, d.ctx.stream);
    synchronize(d.ctx.stream);  // `codes` is a local variable
}

int64_t planned(const MemoryPlan& plan, const std::string& name) {
    for (const auto& [what, bytes] : plan.lines)
        if (what == name) return bytes;
    return 0;
}

}  // namespace

// Loss and gradients, against float64 that rounds the operands of the frozen matmuls to fp8 and those of adapters not
// at all: to 1e-5, as without fp8, except where an operand lies so close to the middle between two codes that the error
// of fp32 tips it over (test_fp8_training.cpp).
TEST_F(Fp8Lora, GradientsMatchTheOracleThatRoundsAlike) {
    if (backend_device() != Device::CPU) GTEST_SKIP() << "the oracle does not round to bf16";
    int64_t matrices = 0, tipped = 0;
    const auto compare = [&](const std::string& name, const std::vector<std::string>& targets, Fp8Format gradients) {
        SCOPED_TRACE(str(name, " ", targets[0], " ", FP8_FORMAT_NAMES[size_t(gradients)]));
        const ModelConfig config = config_of(name);
        const Batch batch = random_batch(config, B, T, 5);
        RunShape shape = fp8_training_shape(B, T);
        shape.fp8.gradients = gradients;
        Driver lora = lora_driver(config, shape, lora_options(targets)), base(config, training_shape(B, T));
        for (Driver* d : {&lora, &base}) d->randomise(3);
        const double loss = lora.gradients({batch});
        const reference::ModelGradients ref =
            reference::model_gradients(config, reference::widen(base.model.table, base.params().data()), batch.tokens,
                                       batch.targets, B, T, {true, gradients}, deltas_of(lora));
        EXPECT_NEAR(loss, ref.loss, 1e-3 * ref.loss);
        bool tips = false;
        for (const AdapterGradients& g : adapter_gradients(lora, ref.gradients))
            for (const auto& [got, expected] : {std::pair(&g.a, &g.expected_a), {&g.b, &g.expected_b}}) {
                const double error = relative_rms(*got, *expected);
                EXPECT_LE(error, 0.02) << g.name;
                matrices++;
                tips |= error > 1e-5;
            }
        tipped += tips;
    };
    for (const ModelVariant& v : oracle_variants()) compare(v.name, {"all-linear"}, Fp8Format::E5M2);
    for (const std::vector<std::string>& targets :
         {std::vector<std::string>{"k_proj"}, {"q_proj", "v_proj"}, {"up_proj", "o_proj"}, {"down_proj"}})
        compare("llama", targets, Fp8Format::E4M3);
    compare("gpt2", {"fcproj"}, Fp8Format::E4M3);
    EXPECT_GT(matrices, 250);
    // An operand that tips over changes the gradients of all matrices before it, so calls of compare() are counted.
    // One has such an operand in the build under sanitizers, where 6 matrices differ.
    EXPECT_LE(tipped, 1);
}

// Recomputation, the overlap of lifetimes, blocks' inputs in host memory, both orientations of a weight or one change
// no bit. (Codes that the ranks divide: dev/tests/test_lora_training.py.)
TEST_F(Fp8Lora, RecomputationAndPlansGiveTheSameBits) {
    for (const char* name : {"gpt2", "llama", "gated_linear_rope", "qk_norm_with_weights_gqa"}) {
        const ModelConfig config = config_of(name);
        const Batch batch = random_batch(config, B, T, 5);
        RunShape shape = fp8_training_shape(B, T);
        shape.fp8.delayed = config.positions == Positions::Learned;
        const std::vector<float> expected = two_steps(config, shape, lora_options(), batch);
        ASSERT_TRUE(std::all_of(expected.begin(), expected.end(), [](float x) { return std::isfinite(x); }));
        for (const Recompute level : {Recompute::None, Recompute::Activation, Recompute::Norms, Recompute::Block}) {
            const bool odd = int(level) % 2;
            shape.recompute = level;
            shape.overlap = shape.offload_inputs = odd;
            shape.fp8.keep_weights = !odd;
            EXPECT_TRUE(same_bits(two_steps(config, shape, lora_options(), batch), expected))
                << name << " recompute level " << int(level);
        }
    }
}

// Codes straight out of NF4 are those of the weights that NF4 makes of the base, also where some layers are not in fp8.
// The first of a weight's matrices (q of q, k, v) has the largest magnitude, so the scale is not the last one's.
TEST_F(Fp8Lora, OutOfNf4) {
    for (const bool llama : {true, false})
        for (const int64_t skipped : {0, 1}) {
            const ModelConfig config = qlora_config(llama);
            const Batch batch = random_batch(config, B, T, 5);
            RunShape shape = fp8_training_shape(B, T);
            shape.fp8.skip_last = skipped;
            LoraOptions qlora = lora_options();
            qlora.nf4 = true;
            Driver quantised = lora_driver(config, shape, qlora), whole = lora_driver(config, shape, lora_options()),
                   exact = lora_driver(config, training_shape(B, T, shape.dtype), lora_options());
            exact.randomise(3);
            for (const Param& p : exact.model.table.params) {
                if (!Nf4Base::quantises(p)) continue;
                std::vector<float> values = fetch_param(exact.model, p);
                values[0] = 4 * std::fabs(*std::max_element(values.begin(), values.end()));
                exact.model.arenas.store(p, values.data(), 0, p.numel());
            }
            quantise_base(quantised, exact);
            copy_weights(*whole.model.adapters, *exact.model.adapters);
            std::vector<float> buffer;
            for (const Param& p : exact.model.table.params) {
                const float* const values = exact.model.arenas.fetch(p, buffer);
                whole.model.arenas.store(p, values, 0, p.padded_numel());
                if (whole.model.fp8->quantises(p)) store_codes(whole, p, nf4_values(quantised, p));
            }
            for (int step = 0; step < 2; step++)
                EXPECT_EQ(quantised.step(batch, 1e-2), whole.step(batch, 1e-2)) << "step " << step;
            EXPECT_TRUE(same_bits(quantised.grads(), whole.grads()));
            EXPECT_TRUE(same_bits(quantised.params(), whole.params()));
            EXPECT_EQ(bool(quantised.acts.base_weight), skipped > 0);  // where weights in the model's dtype go
        }
}

// Each operand that a matmul reads is counted once: the gradient of layer 0's QKV output is not quantised.
TEST_F(Fp8Lora, CountsWhatIsQuantised) {
    const ModelConfig config = config_of("llama");
    Driver d = lora_driver(config, fp8_training_shape(B, T), lora_options());
    d.randomise(3);
    d.step(random_batch(config, B, T, 5), 1e-2);
    int64_t elements = -linear_layer_sizes(config, QKV_W).outputs;
    for (const Role role : LINEAR_LAYERS)
        elements +=
            config.layers * (linear_layer_sizes(config, role).inputs + linear_layer_sizes(config, role).outputs);
    EXPECT_EQ(fetch<int64_t>(d.acts.fp8->counts())[FP8_ELEMENTS], elements * B * T);
}

TEST_F(Fp8Lora, WeightsThatAreNotFiniteAreNamed) {
    const ModelConfig config = config_of("llama");
    Driver d = lora_driver(config, fp8_training_shape(B, T), lora_options());
    const Param& p = *d.model.table.find(FC_W, 1);
    std::vector<float> values(size_t(p.numel()), 1.0f);
    values[7] = NAN;
    expect_error([&] { d.model.fp8->store(p, values.data()); },
                 "--matmul-dtype fp8: layers.1.fc.weight has weights that are not finite in " +
                     std::string(dtype_name(d.model.precision.dtype)) + "; check the model's files");
}

// 8B: two bytes a weight of the blocks, or one and room for the largest weight; none in bf16. Inputs of matmuls are
// kept in bf16 for the adapters' gradients, and no codes of them.
TEST(Fp8LoraPlan, MemoryOfTheFrozenBase) {
    ModelConfig config;
    ASSERT_TRUE(preset("llama-8B", config));
    LoraOptions lora = lora_options();
    lora.rank = 16;
    RunShape shape = training_shape(1, 2048, DType::BF16);
    shape.recompute = Recompute::Block;
    shape.target = find_gpu("H100 80GB HBM3").target();
    int64_t matrices = 0;
    for (const Role role : LINEAR_LAYERS)
        matrices += config.layers * linear_layer_sizes(config, role).inputs * linear_layer_sizes(config, role).outputs;
    const int64_t largest = linear_layer_sizes(config, FC_W).inputs * linear_layer_sizes(config, FC_W).outputs,
                  scales = config.layers * NUM_LINEAR_LAYERS * ArenaPlan::ALIGNMENT;
    const auto plan_of = [&](bool on, bool both) {
        RunShape s = shape;
        s.fp8.on = on;
        s.fp8.keep_weights = both;
        const Model model(config, {}, {DType::BF16, true}, OptimizerType::AdamW, {}, lora, s.fp8);
        set_adapters(s, model);
        return memory_plan(model, Activations(config, s));
    };
    const MemoryPlan plain = plan_of(false, true), both = plan_of(true, true), one = plan_of(true, false);
    EXPECT_EQ(planned(both, "weights"), planned(plain, "weights") - 2 * matrices);
    EXPECT_EQ(planned(both, "fp8 weights"), 2 * matrices + scales);
    EXPECT_EQ(planned(one, "fp8 weights"), matrices + scales);
    EXPECT_EQ(planned(one, "activations"), planned(both, "activations") + largest);
    // The codes of one operand at a time, the widest of which is FC's output.
    EXPECT_EQ(planned(both, "activations"), planned(plain, "activations") + 2048 * 2 * config.ffn);
}

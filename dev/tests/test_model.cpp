// The model as a whole, from tokens to gradients: against PyTorch in float64, against the float64 reference model, and
// with every variant of the model, plan and level of recomputation against itself.
#include <functional>
#include <map>
#include <numeric>
#include <random>

#include "dev/oracle/reference_model.h"
#include "dev/tests/fixtures.h"
#include "dev/tests/model_fixture.h"
#include "models/family.h"
#include "runtime/device/convert_dtype.h"
#include "runtime/files/checkpoint_directory.h"
#include "runtime/model/initialise.h"
#ifdef HAVE_SM90A
#include "runtime/device/blas.h"
#endif

namespace {

// How far the float64 logits move when each weight moves by up to its last bit in bf16: how well the model is
// conditioned. Linear attention behind QK-norm can be 20 times worse than softmax attention: where q·k cancels, the
// norm of its output makes a small difference large.
double sensitivity(const ModelConfig& config, const reference::Weights& weights, const Batch& batch, int64_t B,
                   int64_t T) {
    const auto logits = [&](const reference::Weights& w) {
        return reference::model_forward(config, w, batch.tokens, batch.targets, B, T).logits;
    };
    const std::vector<double> exact = logits(weights);
    std::mt19937 random(1);
    std::uniform_real_distribution<double> last_bit(-0x1p-8, 0x1p-8);
    double most = 0;
    for (int draw = 0; draw < 8; draw++) {
        reference::Weights moved = weights;
        for (auto& [name, values] : moved)
            for (double& w : values) w *= 1 + last_bit(random);
        most = std::max(most, max_abs(difference(logits(moved), exact)));
    }
    return most;
}

// The bound on the error of logits. In bf16 a block rounds its activations about nine times, and the sensitivity moves
// each weight once: rounding errors that add up at random are sqrt(9) times as large. Over 9 variants and 12 seeds the
// error was 0.5 times the sensitivity (median) and in 106 of 108 below 2.2 times; in the fixtures at most 0.95 times.
double logits_limit(DType dtype, const ModelConfig& config, const reference::Weights& weights, const Batch& batch,
                    int64_t B, int64_t T, const std::vector<double>& logits) {
    const double limit = bounds(dtype).logits * max_abs(logits);
    return dtype == DType::BF16 ? std::max(limit, 3 * sensitivity(config, weights, batch, B, T)) : limit;
}

// --------------------------------------------------------------------------------------------------------------------
// Against PyTorch in float64: each family and option. test_gpt.cu proves training steps on two of them.

class Fixtures : public testing::TestWithParam<std::tuple<std::string, DType>> {
  protected:
    const Fixture f{std::get<0>(GetParam())};
    const DType dtype = std::get<1>(GetParam());
    Driver driver{f.config, training_shape(f.B, f.T, dtype)};
    const Batch batch = make_batch(f.tokens(), f.targets(), f.B, f.T);

    void SetUp() override { load_weights(f.directory, driver.model.table, driver.model.arenas); }
    reference::Weights weights() { return reference::widen(driver.model.table, driver.params().data()); }
};

TEST_P(Fixtures, LogitsAndLoss) {
    const std::vector<double> ref = f.values<double>("logits");
    const double limit = logits_limit(dtype, f.config, weights(), batch, f.B, f.T, ref);
    EXPECT_LE(max_abs(difference(driver.logits(batch), ref)), limit);
    // In 16 bits the loss, a difference of two logits on average, has the error of both.
    EXPECT_LE(std::fabs(driver.gradients({batch}) - f.loss()), dtype == DType::F32 ? 1e-5 * f.loss() : 2 * limit);
}

// Every tensor of the file within the bound on its relative RMS. The gradient of the key bias is the residue of a
// cancellation: softmax sees only what RoPE makes of it (nothing in GPT-2). With dy the gradient of a layer's outputs,
// a bias sums dy over the tokens and the weights sum dy times inputs, here a norm's output with an RMS of about 1. So
// the weights' gradient has the size that the bias's would have without cancellation, and rounding errors have this
// size.
// The gradients of q and k pass through dS = P∘(dP − Σ P·dP), a difference of numbers of the size that v's gradient
// has: an error of one unit of the dtype relative to v's. In OLMo2's fixture q's and k's are 4% to 9% of v's, and
// PyTorch in bf16 errs there by up to 9%. A model whose logits move more than usual when it is rounded has gradients
// that move more: their bound grows with that of the logits.
TEST_P(Fixtures, Gradients) {
    const std::vector<double> logits = f.values<double>("logits");
    const double usual = bounds(dtype).logits * max_abs(logits),
                 limit_of_logits = logits_limit(dtype, f.config, weights(), batch, f.B, f.T, logits),
                 gradient_bound = bounds(dtype).gradients * limit_of_logits / usual;
    driver.gradients({batch});
    const std::vector<float> grads = driver.grads();
    size_t compared = 0;
    std::map<std::pair<int64_t, int64_t>, double> qkv_sizes;  // of the weights' gradient, by layer and first row
    std::vector<double> v_gradient;  // of the layer's weights; they come before all that uses it
    const double unit = dtype == DType::F32 ? 0x1p-24 : 0x1p-8;
    for (const Param& p : driver.model.table.params) {
        std::vector<double> got(grads.begin() + p.offset, grads.begin() + p.offset + p.numel()), ref(got.size(), NAN);
        for (const SourceTensor& source : p.sources) {
            const std::vector<float> file = f.values<float>("grad/" + source.name);
            ASSERT_EQ(int64_t(file.size()), source.rows * p.row_size()) << source.name;
            for (int64_t r = 0; r < source.rows; r++) {
                for (int64_t c = 0; c < p.row_size(); c++) {
                    ref[size_t((source.row + r) * p.row_size() + c)] =
                        file[size_t(source.transposed ? c * source.rows + r : r * p.row_size() + c)];
                }
            }
            compared++;
        }
        // q, k and v are compared one by one, gate and up too, also where the file holds them in one source.
        std::vector<std::pair<int64_t, int64_t>> parts = {{0, p.rows}};
        const int64_t Q = f.config.heads * f.config.head_size, K = f.config.kv_heads * f.config.head_size;
        const bool qkv = p.role == QKV_W || p.role == QKV_B;
        if (qkv) parts = {{0, Q}, {Q, Q + K}, {Q + K, Q + 2 * K}};
        if (p.role == QKV_W) v_gradient.assign(ref.begin() + (Q + K) * p.row_size(), ref.end());
        if (f.config.activation == Activation::SwiGLU && (p.role == FC_W || p.role == FC_B))
            parts = {{0, f.config.ffn}, {f.config.ffn, 2 * f.config.ffn}};
        for (const auto& [begin, end] : parts) {
            auto rows = [&, first = begin, last = end](const std::vector<double>& x) {
                return std::vector<double>(x.begin() + first * p.row_size(), x.begin() + last * p.row_size());
            };
            double size = rms(rows(ref));
            if (p.role == QKV_W) qkv_sizes[{p.layer, begin}] = size;
            if (p.role == QKV_B) size = std::max(size, qkv_sizes.at({p.layer, begin}));
            double limit = gradient_bound * size;
            const bool qk = p.role == QNORM_W || p.role == KNORM_W || (qkv && begin < Q + K);
            if (qk) limit += unit * rms(v_gradient);
            EXPECT_LE(rms(difference(rows(got), rows(ref))), limit) << p.name << " rows " << begin << " to " << end;
        }
    }
    size_t in_file = 0;
    for (const auto& entry : f.file.entries()) in_file += entry.first.rfind("grad/", 0) == 0;
    EXPECT_EQ(compared, in_file);
}

INSTANTIATE_TEST_SUITE_P(PyTorch, Fixtures,
                         testing::Combine(testing::ValuesIn(fixture_names()), testing::ValuesIn(dtypes())),
                         [](const auto& test) {
                             std::string name = std::get<0>(test.param) + "_" + dtype_name(std::get<1>(test.param));
                             std::replace_if(
                                 name.begin(), name.end(), [](char c) { return !std::isalnum(c); }, '_');
                             return name;
                         });

// --------------------------------------------------------------------------------------------------------------------
// Against the float64 reference model, with combinations of options that no other program has.

class ModelVariants : public ModelVariantTest {
  protected:
    double loss(const reference::Weights& w) const {
        return reference::model_forward(driver.model.config, w, batch.tokens, batch.targets, B, T).loss;
    }

    // Derivative of the float64 loss along d by central differences. The step is small because ReLU² has a kink in its
    // slope: units that change sign within the step cost an error of order h².
    double derivative(const reference::Weights& weights, const reference::Weights& d) const {
        constexpr double h = 1e-6;
        auto at = [&](double s) {
            reference::Weights w = weights;
            for (const auto& [name, direction] : d) {
                for (size_t i = 0; i < direction.size(); i++) w[name][i] += s * direction[i];
            }
            return loss(w);
        };
        return (at(h) - at(-h)) / (2 * h);
    }
};

TEST_P(ModelVariants, LogitsAndLoss) {
    for (const DType dtype : dtypes()) {
        for (const bool adds_in_matmul : {false, true}) {
            SCOPED_TRACE(str(dtype_name(dtype), ", residual added in matmuls: ", adds_in_matmul));
            RunShape shape = training_shape(B, T, dtype);
            shape.adds_in_matmul = adds_in_matmul;
            Driver d(config(), shape);
            d.randomise(3);
            const reference::Weights weights = reference::widen(d.model.table, d.params().data());
            const reference::ModelOutput ref =
                reference::model_forward(config(), weights, batch.tokens, batch.targets, B, T);
            const double limit = logits_limit(dtype, config(), weights, batch, B, T, ref.logits);
            EXPECT_LE(max_abs(difference(d.logits(batch), ref.logits)), limit);
            EXPECT_LE(std::fabs(d.gradients({batch}) - ref.loss), dtype == DType::F32 ? 1e-5 * ref.loss : 2 * limit);
        }
    }
}

// 20 random directions through all weights, and one through each tensor alone. Along a standard normal direction d the
// derivative g·d has standard deviation |g|: that is what 1e-5 is relative to.
TEST_P(ModelVariants, DirectionalDerivatives) {
    driver.gradients({batch});
    const ParamTable& table = driver.model.table;
    const reference::Weights weights = reference::widen(table, driver.params().data()),
                             grads = reference::widen(table, driver.grads().data());
    auto check = [&](uint64_t seed, const std::vector<const Param*>& params, const std::string& what) {
        reference::Weights d;
        double along = 0, square = 0;
        for (const Param* p : params) {
            const std::vector<double>& g = grads.at(p->name);
            for (size_t i = 0; i < g.size(); i++) {
                d[p->name].push_back(normal01(seed, name_hash(p->name), i));
                along += g[i] * d[p->name][i];
                square += g[i] * g[i];
            }
        }
        EXPECT_GT(square, 0) << what;
        EXPECT_LE(std::fabs(derivative(weights, d) - along), 1e-5 * std::sqrt(square)) << what;
    };
    std::vector<const Param*> all;
    for (const Param& p : table.params) {
        all.push_back(&p);
        check(100, {&p}, p.name);
    }
    for (uint64_t seed = 0; seed < 20; seed++) check(seed, all, str("direction ", seed));
}

namespace {

// The dtypes, and for each the matmuls' kernels of a stream that is not tuned: 0 is the library.
std::vector<std::pair<DType, int>> dtypes_and_kernels(const std::vector<DType>& dtypes) {
    std::vector<std::pair<DType, int>> all;
    for (const DType dtype : dtypes) {
        all.emplace_back(dtype, 0);
#ifdef HAVE_SM90A
        if (dtype == DType::BF16)
            for (const GemmKernel kernel : {GemmKernel::Hopper1, GemmKernel::Hopper2})
                all.emplace_back(dtype, int(kernel));
#endif
    }
    return all;
}

void use_kernel([[maybe_unused]] Stream stream, [[maybe_unused]] int kernel) {
#ifdef HAVE_SM90A
    blas_of("test", stream).only_kernel = GemmKernel(kernel);
#endif
}

}  // namespace

// The plan in which tensors share memory computes the same bits as the one in which each has its own, at every level
// of recomputation, with each kernel of the matmuls. Two micro-steps, so that the second finds used memory. Levels that
// recompute GELU alone take it out of the forward matmul, so they are not compared with runs that compute it there.
TEST_P(ModelVariants, MemoryPlansAgreeBitwise) {
    const std::vector<Batch> batches = {batch, random_batch(config(), B, T, 6)};
    for (const auto& [dtype, kernel] : dtypes_and_kernels(dtypes())) {
        for (const ActivationEpilogue epilogue :
             {ActivationEpilogue::Off, ActivationEpilogue::Backward, ActivationEpilogue::Both}) {
            auto run = [&](Recompute level, bool overlap, auto check) {
                RunShape shape = training_shape(B, T, dtype);
                shape.recompute = level;
                shape.overlap = overlap;
                shape.activation_epilogue = epilogue;
                shape.adds_in_matmul = epilogue != ActivationEpilogue::Off;  // both ways in each dtype
                Driver d(config(), shape);
                use_kernel(d.ctx.stream, kernel);
                d.randomise(3);
                const double loss = d.gradients(batches);
                check(loss, d.grads(), d.acts.plan.bytes());
            };
            double expected_loss = 0;
            std::vector<float> expected;
            int64_t kept_bytes = 0;
            run(Recompute::None, true, [&](double loss, const std::vector<float>& grads, int64_t bytes) {
                expected_loss = loss;
                expected = grads;
                kept_bytes = bytes;
            });
            for (const float g : expected) ASSERT_TRUE(std::isfinite(g));
            for (const Recompute level : {Recompute::None, Recompute::Activation, Recompute::Norms, Recompute::Block}) {
                const bool alone = level == Recompute::Activation || level == Recompute::Norms;
                const bool gelu = config().activation == Activation::GELU;
                if (alone && gelu && epilogue == ActivationEpilogue::Both) continue;
                for (const bool overlap : {true, false}) {
                    run(level, overlap, [&](double loss, const std::vector<float>& grads, int64_t bytes) {
                        EXPECT_EQ(loss, expected_loss);
                        EXPECT_TRUE(same_bits(grads, expected))
                            << "recompute level " << int(level) << ", overlap " << overlap << ", " << dtype_name(dtype)
                            << ", activation in matmuls " << int(epilogue) << ", kernel " << kernel;
                        if (!overlap)
                            EXPECT_GT(bytes, kept_bytes);
                        else {
                            EXPECT_LE(bytes, kept_bytes) << "recompute level " << int(level) << " saves nothing";
                            kept_bytes = bytes;
                        }
                    });
                }
            }
        }
    }
}

// A recorded micro-step, replayed on other batches, gives the bits of an ordinary one.
TEST_P(ModelVariants, GraphsReplayTheSameBits) {
    for (const DType dtype : dtypes()) {
        Driver ordinary(config(), training_shape(B, T, dtype)), recorded(config(), training_shape(B, T, dtype));
        ordinary.randomise(3);
        recorded.randomise(3);
        Graph graph;
        for (uint64_t seed = 10; seed < 13; seed++) {
            const Batch other = random_batch(config(), B, T, seed);
            ordinary.gradients({other});
            const Input in = upload(recorded.ctx, recorded.acts, other);
            graph.run(recorded.ctx.stream, [&] {
                forward({recorded.ctx, recorded.model, recorded.acts, in});
                backward({recorded.ctx, recorded.model, recorded.acts, in, &recorded.optimizer.grads},
                         static_cast<float>(1.0 / double(B * T)), true);
            });
            EXPECT_TRUE(same_bits(recorded.grads(), ordinary.grads())) << dtype_name(dtype) << ", run " << seed - 10;
        }
    }
}

// A model of four layers: those of `config` repeated.
ModelConfig four_layers(ModelConfig config) {
    const auto layers = config.layer;
    config.layers = 4;
    config.layer.clear();
    for (size_t l = 0; l < 4; l++) config.layer.push_back(layers[l % layers.size()]);
    return config;
}

// Recomputation in the first layers alone: the same bits, in less memory the more layers there are.
TEST_P(ModelVariants, RecomputationInSomeLayersHasTheSameBits) {
    const ModelConfig c = four_layers(config());
    for (const DType dtype : dtypes()) {
        const auto run = [&](Recompute level, int64_t layers) {
            RunShape shape = training_shape(B, T, dtype);
            shape.recompute = level;
            shape.recompute_layers = layers;
            Driver d(c, shape);
            d.randomise(3);
            d.gradients({batch, random_batch(c, B, T, 6)});
            return std::pair(d.grads(), d.acts.plan.bytes());
        };
        const auto [expected, all_kept] = run(Recompute::None, ALL_LAYERS);
        for (const Recompute level : {Recompute::Activation, Recompute::Norms, Recompute::Block}) {
            int64_t before = all_kept;
            for (const int64_t layers : {1, 3}) {
                const auto [gradients, bytes] = run(level, layers);
                EXPECT_TRUE(same_bits(gradients, expected)) << int(level) << ", " << layers << " layers";
                EXPECT_LE(bytes, before) << int(level) << ", " << layers << " layers";
                before = bytes;
            }
        }
    }
}

// The inputs of blocks that wait in host memory: in recorded micro-steps, and with a shorter batch between them.
TEST_P(ModelVariants, OffloadedInputsHaveTheSameBits) {
    const ModelConfig c = four_layers(config());
    for (const DType dtype : dtypes()) {
        for (const Recompute level : {Recompute::None, Recompute::Activation, Recompute::Block}) {
            for (const bool overlap : {true, false}) {
                const auto run = [&](bool offload) {
                    RunShape shape = training_shape(B, T, dtype);
                    shape.recompute = level;
                    shape.overlap = overlap;
                    shape.offload_inputs = offload;
                    shape.adds_in_matmul = level == Recompute::Activation;
                    Driver d(c, shape);
                    d.randomise(3);
                    EXPECT_EQ(d.acts.host_bytes(), offload ? 3 * B * T * c.channels * dtype_size(dtype) : 0);
                    Graph graph;
                    std::vector<float> results;
                    for (uint64_t seed = 10; seed < 13; seed++) {
                        const Input in = upload(d.ctx, d.acts, random_batch(c, B, T, seed));
                        graph.run(d.ctx.stream, [&] {
                            forward({d.ctx, d.model, d.acts, in});
                            backward({d.ctx, d.model, d.acts, in, &d.optimizer.grads}, float(1.0 / double(B * T)),
                                     true);
                        });
                        for (const float g : d.grads()) results.push_back(g);
                        for (const double x : d.logits(random_batch(c, 1, 5, seed))) results.push_back(float(x));
                    }
                    for (const float x : results) EXPECT_TRUE(std::isfinite(x));
                    return results;
                };
                EXPECT_TRUE(same_bits(run(true), run(false)))
                    << dtype_name(dtype) << ", recompute level " << int(level) << ", overlap " << overlap;
            }
        }
    }
}

// The plan without training keeps less and computes the same.
TEST_P(ModelVariants, InferencePlanAgreesBitwise) {
    Driver inference(config(), training_shape(B, T));
    inference.randomise(3);
    const std::vector<double> expected = inference.logits(batch);
    Activations acts(config(), inference_shape(B, T));
    acts.allocate(driver.ctx);
    EXPECT_LT(acts.plan.bytes(), driver.acts.plan.bytes());
    const Input in = upload(driver.ctx, acts, batch);
    forward({driver.ctx, driver.model, acts, in});
    for (int64_t n = 0; n < in.n; n++) {
        const std::vector<float> row =
            fetch_floats(driver.ctx, head_logits({driver.ctx, driver.model, acts, in}, n, n + 1));
        for (int64_t v = 0; v < config().vocab_size; v++)
            ASSERT_EQ(row[size_t(v)], expected[size_t(n * config().vocab_size + v)]);
    }
}

// A pass calls the attention that it was given, once for each layer, and takes what that wrote.
TEST_P(ModelVariants, AttentionOfTheCaller) {
    const Input in = upload(driver.ctx, driver.acts, batch);
    std::vector<int64_t> layers;
    const auto loss = [&](const std::function<void(const Block&)>& attention) {
        layers.clear();
        const Pass pass{
            .ctx = driver.ctx, .model = driver.model, .acts = driver.acts, .in = in, .attention = attention};
        forward(pass);
        evaluate_loss(pass, false);
        return fetch<double>(driver.acts.loss_sum)[0];
    };
    const double ordinary = loss(attention_in_sequences);
    const double counted = loss([&](const Block& b) {
        layers.push_back(b.l);
        attention_in_sequences(b);
    });
    EXPECT_EQ(counted, ordinary);
    std::vector<int64_t> all(size_t(config().layers));
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(layers, all);
    const double none =
        loss([](const Block& b) { device_fill(b.a.att.data, 0, size_t(b.a.att.bytes()), b.p.stream()); });
    EXPECT_NE(none, ordinary);
}

// Other tokens leave the logits before them the same, to the bit.
TEST_P(ModelVariants, FutureTokensDoNotAffectPastLogits) {
    constexpr int64_t PAST = 6;
    for (const DType dtype : dtypes()) {
        Driver d(config(), training_shape(1, T, dtype));
        d.randomise(3);
        Batch one = random_batch(config(), 1, T, 5);
        const std::vector<double> before = d.logits(one);
        for (size_t t = PAST; t < size_t(T); t++) one.tokens[t] = (one.tokens[t] + 7) % int32_t(config().vocab_size);
        const std::vector<double> after = d.logits(one);
        const size_t n = size_t(PAST * config().vocab_size);
        EXPECT_EQ(std::vector<double>(before.begin(), before.begin() + long(n)),
                  std::vector<double>(after.begin(), after.begin() + long(n)));
        EXPECT_NE(before[n], after[n]);
    }
}

// Gradients of micro-steps add up to those of the whole batch, except for the order of sums: 4e-7 for most tensors.
// Gated linear attention loses more: at a sequence's first token its output is v times a number that the heads' norm
// divides out again, so that q's and k's gradients there are only rounding errors, divided by that number, which may be
// small. This alone causes up to 3e-6 in those tensors. QK-norm multiplies gradients by 1/RMS of a head of q or k,
// which with few channels may be small too, and its two terms cancel in part: up to 1.1e-6 in all tensors. Both kinds
// of models get the bound of gradients against the oracle.
TEST_P(ModelVariants, MicroStepsSumToTheFullBatch) {
    driver.gradients({batch});
    const std::vector<float> whole = driver.grads();
    driver.gradients(split(batch, B, T));
    const std::vector<float> sum = driver.grads();
    const std::vector<double> x(whole.begin(), whole.end()), y(sum.begin(), sum.end());
    const ModelConfig& c = driver.model.config;
    const bool amplifies = c.layers_of(AttentionType::GatedLinear) > 0 || c.qk_norm != QkNorm::Off;
    EXPECT_LE(rms(difference(x, y)), (amplifies ? 1e-5 : 1e-6) * rms(x));
}

// The sum of micro-steps in bf16 is at most a unit per rounding, 2⁻⁷ of the largest sum on the way, from the exact one;
// 2⁻¹⁴⁹ is where fp32 ends. After one micro-step it is a neighbour of the gradient itself. docs/understand/numerics.md.
TEST_P(ModelVariants, GradientsInBf16AreRoundedSums) {
    Driver rounding(driver.model.config, driver.acts.shape, true, Driver::default_options(), OptimizerType::AdamW,
                    {DType::F32, 0, DType::BF16});
    rounding.randomise(3);
    const std::vector<Batch> parts = split(batch, B, T);
    driver.randomise(3);
    for (const auto& batches : {std::vector<Batch>{batch}, parts}) {
        driver.gradients(batches);
        rounding.gradients(batches);
        const std::vector<float> exact = driver.grads(), got = rounding.grads();
        ASSERT_EQ(got.size(), exact.size());
        if (batches.size() == 1) {
            for (size_t i = 0; i < got.size(); i++)
                ASSERT_LT(std::fabs(got[i] - exact[i]), 0x1p-7 * std::fabs(exact[i]) + 0x1p-149) << i;
            continue;
        }
        const std::vector<double> x(exact.begin(), exact.end()), y(got.begin(), got.end());
        EXPECT_LE(rms(difference(x, y)), 0x1p-7 * rms(x));
        EXPECT_GT(rms(difference(x, y)), 0x1p-11 * rms(x));
    }
}

// Matmuls that add to bf16 themselves round to nearest, with an error of up to 2⁻⁸ of the sum so far. A GPU may also
// round the term before it adds it. The other gradients are the fp32 sums, rounded once.
TEST_P(ModelVariants, MatmulsAddToGradientsInBf16) {
    if (backend_device() == Device::CUDA && driver.acts.shape.dtype != DType::BF16) GTEST_SKIP() << "needs bf16";
    const GradientOptions options{DType::F32, 0, DType::BF16, 0, true};
    Driver rounding(driver.model.config, driver.acts.shape, true, Driver::default_options(), OptimizerType::AdamW,
                    options);
    rounding.randomise(3);
    driver.randomise(3);
    for (const auto& batches : {std::vector<Batch>{batch}, split(batch, B, T)}) {
        driver.gradients(batches);
        rounding.gradients(batches);
        const std::vector<float> exact = driver.grads(), got = rounding.grads();
        int apart = 0, in_matmuls = 0;
        for (const Param& p : driver.model.table.params) {
            const auto of = [&](const std::vector<float>& arena) {
                return std::vector<double>(arena.begin() + p.offset, arena.begin() + p.offset + p.padded_numel());
            };
            const std::vector<double> x = of(exact), y = of(got);
            if (options.sums_apart(p)) {
                for (size_t i = 0; i < x.size(); i++)
                    ASSERT_EQ(y[i], to_float(to_bf16(float(x[i])))) << p.name << " " << i;
                apart++;
            } else {
                EXPECT_LE(rms(difference(x, y)), (batches.size() == 1 ? 0x1p-8 : 0x1p-7) * rms(x)) << p.name;
                EXPECT_GT(rms(difference(x, y)), 0x1p-12 * rms(x)) << p.name;
                in_matmuls++;
            }
        }
        EXPECT_TRUE(apart && in_matmuls);
    }
}

// With this vocabulary the head takes 70 tokens (on a GPU 1,040) in two chunks.
ModelConfig large_vocabulary(int64_t T) {
    ModelConfig config = base_config();
    config.layers = config.heads = config.kv_heads = 1;
    config.set_attention("S");
    config.channels = config.head_size = config.ffn = 4;
    config.max_positions = T;
    config.vocab_size = (1 << 18) - 100;
    return config;
}

// Each half takes one chunk.
TEST(Head, ChunksSumToTheWhole) {
    const int64_t B = 2, T = backend_device() == Device::CPU ? 35 : 520;
    const ModelConfig config = large_vocabulary(T);
    Driver whole(config, training_shape(B, T)), halves(config, training_shape(1, T));
    ASSERT_LT(whole.acts.logits.shape[0], B * T);
    ASSERT_EQ(halves.acts.logits.shape[0], T);
    whole.randomise(3);
    halves.randomise(3);
    const Batch batch = random_batch(config, B, T, 5);
    const double loss = whole.gradients({batch});
    EXPECT_NEAR(halves.gradients(split(batch, B, T)), loss, 1e-6 * loss);
    const std::vector<float> g = whole.grads(), h = halves.grads();
    const std::vector<double> x(g.begin(), g.end()), y(h.begin(), h.end());
    EXPECT_LE(rms(difference(x, y)), 1e-6 * rms(x));
}

// Two chunks of tokens, few of which have a target: these fit into one chunk.
TEST(Head, LossTokensAloneTakeFewerChunks) {
    const int64_t B = 2, T = backend_device() == Device::CPU ? 35 : 520;
    Driver driver(large_vocabulary(T), training_shape(B, T));
    driver.randomise(3);
    Batch batch = random_batch(driver.model.config, B, T, 5);
    for (size_t n = 0; n < batch.targets.size(); n++)
        if (n % 7 != 6) batch.targets[n] = Batch::NO_TARGET;
    const double loss = driver.gradients({batch});
    const std::vector<float> all = driver.grads();
    driver.loss_tokens_only = true;
    const Input in = upload(driver.ctx, driver.acts, batch, true);
    EXPECT_EQ(in.head_tokens(), backend_device() == Device::CPU ? 10 : driver.acts.logits.shape[0]);
    EXPECT_EQ(in.targets.shape[0], in.head_tokens());
    EXPECT_EQ(upload(driver.ctx, driver.acts, batch).head_tokens(), B * T);
    EXPECT_NEAR(driver.gradients({batch}), loss, 1e-6 * loss);
    const std::vector<float> some = driver.grads();
    const std::vector<double> x(all.begin(), all.end()), y(some.begin(), some.end());
    EXPECT_LE(rms(difference(x, y)), 1e-6 * rms(x));
}

// Documents of unequal length packed into one sequence attend only to themselves.
TEST_P(ModelVariants, PackedDocuments) {
    const std::vector<int32_t> starts = {0, 5, 6, 13, 22};
    Batch packed = batch;
    packed.cum_seqlens = starts;
    packed.max_seqlen = 9;
    const reference::Weights weights = reference::widen(driver.model.table, driver.params().data());
    std::vector<double> ref;
    for (size_t s = 0; s + 1 < starts.size(); s++) {
        for (int32_t n = starts[s]; n < starts[s + 1]; n++) packed.positions[size_t(n)] = n - starts[s];
        auto part = [&](const std::vector<int32_t>& x) {
            return std::vector<int32_t>(x.begin() + starts[s], x.begin() + starts[s + 1]);
        };
        const std::vector<double> logits = reference::model_forward(driver.model.config, weights, part(batch.tokens),
                                                                    part(batch.targets), 1, starts[s + 1] - starts[s])
                                               .logits;
        ref.insert(ref.end(), logits.begin(), logits.end());
    }
    EXPECT_LE(max_abs(difference(driver.logits(packed), ref)), 1e-5 * max_abs(ref));
}

// Examples of 6, 4 and 8 tokens and the rest as padding; every other target counts.
Batch packed_examples(Batch batch) {
    const std::vector<int32_t> ends = {6, 10, 18, int32_t(batch.tokens.size())};
    batch.cum_seqlens = {0};
    for (const int32_t end : ends) {
        const int32_t begin = batch.cum_seqlens.back();
        for (int32_t n = begin; n < end; n++) {
            batch.positions[size_t(n)] = n - begin;
            if (n % 2 == 0 || end == ends.back()) batch.targets[size_t(n)] = Batch::NO_TARGET;
        }
        batch.cum_seqlens.push_back(end);
    }
    batch.max_seqlen = 8;
    return batch;
}

// Packed examples have the mean loss and the gradients that they have in batches of their own, up to the order of sums
// (the bounds of MicroStepsSumToTheFullBatch).
TEST_P(ModelVariants, PackedExamplesHaveTheGradientsOfSeparateOnes) {
    const Batch packed = packed_examples(batch);
    std::vector<Batch> separate;
    for (size_t s = 0; s < 3; s++) {
        const int32_t begin = packed.cum_seqlens[s], end = packed.cum_seqlens[s + 1];
        const auto part = [&](const std::vector<int32_t>& x) {
            return std::vector<int32_t>(x.begin() + begin, x.begin() + end);
        };
        separate.push_back(make_batch(part(packed.tokens), part(packed.targets), 1, end - begin));
    }
    const double loss = driver.gradients({packed});
    const std::vector<float> together = driver.grads();
    EXPECT_NEAR(driver.gradients(separate), loss, 1e-6 * loss);
    const std::vector<float> alone = driver.grads();
    const std::vector<double> x(together.begin(), together.end()), y(alone.begin(), alone.end());
    const ModelConfig& c = driver.model.config;
    const bool amplifies = c.layers_of(AttentionType::GatedLinear) > 0 || c.qk_norm != QkNorm::Off;
    EXPECT_GT(rms(y), 0);
    EXPECT_LE(rms(difference(x, y)), (amplifies ? 1e-5 : 1e-6) * rms(y));
}

// Leaving out tokens without a target changes the gradients only by the order of sums (the bounds of
// MicroStepsSumToTheFullBatch). Without a single target they are zero.
TEST_P(ModelVariants, HeadOfLossTokensOnly) {
    const Batch packed = packed_examples(batch);
    const double loss = driver.gradients({packed});
    const std::vector<float> all = driver.grads();
    driver.loss_tokens_only = true;
    const double loss_alone = driver.gradients({packed});
    EXPECT_NEAR(loss_alone, loss, 1e-6 * loss);
    const std::vector<float> some = driver.grads();
    const std::vector<double> x(all.begin(), all.end()), y(some.begin(), some.end());
    const ModelConfig& c = driver.model.config;
    const bool amplifies = c.layers_of(AttentionType::GatedLinear) > 0 || c.qk_norm != QkNorm::Off;
    EXPECT_LE(rms(difference(x, y)), (amplifies ? 1e-5 : 1e-6) * rms(x));
    Batch none = batch;
    none.targets.assign(none.targets.size(), Batch::NO_TARGET);
    EXPECT_EQ(driver.gradients({packed, none}), loss_alone);
    EXPECT_TRUE(same_bits(driver.grads(), some));
    driver.gradients({none});
    for (const float g : driver.grads()) ASSERT_EQ(g, 0);
}

// Packed batches with room for more sequences are replayed by one graph, with the bits of ordinary steps.
TEST_P(ModelVariants, GraphsReplayPackedExamples) {
    if (config().has_linear_attention()) GTEST_SKIP() << "micro-steps with linear attention are not recorded";
    for (const DType dtype : dtypes()) {
        Driver ordinary(config(), training_shape(B, T, dtype)), recorded(config(), training_shape(B, T, dtype));
        ordinary.randomise(3);
        recorded.randomise(3);
        Graph graph;
        for (uint64_t seed = 10; seed < 14; seed++) {
            Batch other = random_batch(config(), B, T, seed);
            if (seed % 2) other = packed_examples(other);
            ordinary.gradients({other});
            other.num_sequences = int64_t(other.cum_seqlens.size()) - 1;
            other.cum_seqlens.resize(8, other.cum_seqlens.back());
            other.max_seqlen = T;
            const Input in = upload(recorded.ctx, recorded.acts, other);
            const double counted = double(std::count_if(other.targets.begin(), other.targets.end(),
                                                        [](int32_t t) { return t != Batch::NO_TARGET; }));
            // dloss is recorded, too: the gradients are those of the sum of losses.
            graph.run(recorded.ctx.stream, [&] {
                forward({recorded.ctx, recorded.model, recorded.acts, in});
                backward({recorded.ctx, recorded.model, recorded.acts, in, &recorded.optimizer.grads}, 1.0f / 16, true);
            });
            const std::vector<float> got = recorded.grads(), expected = ordinary.grads();
            std::vector<double> x(got.begin(), got.end()), y(expected.begin(), expected.end());
            for (double& v : x) v *= 16 / counted;
            EXPECT_LE(rms(difference(x, y)), bounds(dtype).gradients * rms(y)) << dtype_name(dtype) << seed;
        }
    }
}

// A NaN in one example, here of its first token's embedding, does not reach the others' outputs.
TEST_P(ModelVariants, NanStaysInItsExample) {
    Batch packed = packed_examples(batch);
    const int32_t bad = int32_t(config().vocab_size) - 1;
    for (int32_t& token : packed.tokens) token %= bad;
    packed.tokens[size_t(packed.cum_seqlens[1])] = bad;
    const auto outputs = [&] {
        const Input in = upload(driver.ctx, driver.acts, packed);
        forward({driver.ctx, driver.model, driver.acts, in});
        return fetch_floats(driver.ctx, driver.acts.normf.rows(0, in.n));
    };
    const std::vector<float> good = outputs();
    const Param& p = *driver.model.table.find(WTE);
    const std::vector<float> nan(size_t(p.cols), NAN);
    driver.model.arenas.store(p, nan.data(), bad * p.cols, p.cols);
    const std::vector<float> with_nan = outputs();
    const auto rows = [&](const std::vector<float>& x, int32_t begin, int32_t end) {
        const int64_t C = config().channels;
        return std::vector<float>(x.begin() + begin * C, x.begin() + end * C);
    };
    const int32_t begin = packed.cum_seqlens[1], end = packed.cum_seqlens[2];
    EXPECT_TRUE(std::isnan(rows(with_nan, begin, end)[0]));
    EXPECT_TRUE(same_bits(rows(with_nan, 0, begin), rows(good, 0, begin)));
    EXPECT_TRUE(
        same_bits(rows(with_nan, end, int32_t(packed.tokens.size())), rows(good, end, int32_t(packed.tokens.size()))));
}

INSTANTIATE_TEST_SUITE_P(Reference, ModelVariants, testing::ValuesIn(MODEL_VARIANTS), variant_name);

// Beyond the original length of 7 each sequence of a pass has angles of its own. Generation differs from forward() by
// design (test_engine.cpp), so its tests do not have this variant.
const ModelVariant DYNAMIC_ROPE[] = {{"dynamic_rope",
                                      [](ModelConfig& c) {
                                          c.norm = Norm::RMSNorm;
                                          c.positions = Positions::RoPE;
                                          c.activation = Activation::SwiGLU;
                                          c.kv_heads = 2;
                                          c.qkv_bias = c.proj_bias = c.mlp_bias = c.tied = false;
                                          c.rope_scaling.kind = RopeScaling::Kind::Dynamic;
                                          c.rope_scaling.factor = 2;
                                          c.rope_scaling.original_max_position = 7;
                                      }},
                                     {"dynamic_rope_qk_norm", [](ModelConfig& c) {
                                          DYNAMIC_ROPE[0].apply(c);
                                          c.qk_norm = QkNorm::Weights;
                                      }}};
INSTANTIATE_TEST_SUITE_P(DynamicRope, ModelVariants, testing::ValuesIn(DYNAMIC_ROPE), variant_name);

// --------------------------------------------------------------------------------------------------------------------
// The parameter table.

// Weights of the presets as their authors count them.
TEST(ParameterTable, PresetSizes) {
    const std::pair<const char*, int64_t> sizes[] = {
        {"gpt2-124M", 124439808},   {"gpt2-350M", 354823168},  {"gpt2-774M", 774030080},
        {"gpt2-1558M", 1557611200}, {"llama-1B", 1235814400},  {"llama-3B", 3212749824},
        {"llama-8B", 8030261248},   {"llama2-7B", 6738415616}, {"modern-124M", 162282577}};
    for (const auto& [name, weights] : sizes) {
        ModelConfig config;
        ASSERT_TRUE(preset(name, config)) << name;
        EXPECT_EQ(parameter_table(config, 1).num_weights(), weights) << name;
    }
}

// Every parameter belongs to one rate group. Matrices of the blocks are hidden matrices, whose parts cover the rows.
TEST(ParameterTable, RateGroupsOfPresets) {
    const auto groups = [](const ParamTable& table) {
        std::map<std::string, int64_t> weights;
        for (const Param& p : table.params) weights[RATE_GROUP_NAMES[size_t(p.rate_group)]] += p.numel();
        return weights;
    };
    const auto parts = [](const ParamTable& table, Role role) { return table.find(role, 0)->part_rows; };
    ModelConfig config;
    ASSERT_TRUE(preset("gpt2-124M", config));
    const ParamTable gpt2 = parameter_table(config, 1, OptimizerType::Muon);
    EXPECT_EQ(groups(gpt2), (std::map<std::string, int64_t>{{"hidden_matrices", 12 * 12 * 768 * 768},
                                                            {"embeddings", (50257 + 1024) * 768},
                                                            {"vectors", 12 * 13 * 768 + 2 * 768}}));
    EXPECT_EQ(parts(gpt2, QKV_W), (std::vector<int64_t>{768, 768, 768}));
    EXPECT_EQ(parts(gpt2, FC_W), std::vector<int64_t>{3072});
    ASSERT_TRUE(preset("llama-8B", config));  // 32 heads on 8, of 128; untied
    const ParamTable llama = parameter_table(config, 1, OptimizerType::Muon);
    EXPECT_EQ(groups(llama),
              (std::map<std::string, int64_t>{{"hidden_matrices", 32LL * (2 * 4096 + 2 * 1024 + 3 * 14336) * 4096},
                                              {"embeddings", 128256 * 4096},
                                              {"head", 128256 * 4096},
                                              {"vectors", 65 * 4096}}));
    EXPECT_EQ(parts(llama, QKV_W), (std::vector<int64_t>{4096, 1024, 1024}));
    EXPECT_EQ(parts(llama, FC_W), (std::vector<int64_t>{14336, 14336}));
    EXPECT_EQ(parts(llama, FCPROJ_W), std::vector<int64_t>{4096});
    ASSERT_TRUE(preset("gpt2-tiny", config));
    config.set_attention("SSSG");
    const ParamTable gated = parameter_table(config, 1, OptimizerType::Muon);
    EXPECT_EQ(gated.by_name("layers.3.gate.weight").rate_group, RateGroup::Vectors);
    for (const ParamTable& table : {gpt2, llama, gated})
        for (const Param& p : table.params)
            EXPECT_EQ(p.optimizer == OptimizerType::Muon, p.rate_group == RateGroup::HiddenMatrices) << p.name;
    EXPECT_FALSE(parameter_table(config, 1).updates_matrices());
}

TEST(ParameterTable, FlopPerToken) {
    ModelConfig config;
    ASSERT_TRUE(preset("gpt2-124M", config));
    const double blocks = 12.0 * 12 * 768 * 768, head = 50257.0 * 768;
    EXPECT_DOUBLE_EQ(flop_per_token(Model(config, {}), 1024), 6 * (blocks + head) + 6.0 * 1024 * 12 * 768);
    config.tied = false;  // the embedding look-up counts nothing
    EXPECT_DOUBLE_EQ(flop_per_token(Model(config, {}), 1024), 6 * (blocks + head) + 6.0 * 1024 * 12 * 768);
}

// k vᵀ added to a state of each KV head, the state times q of each head; 2 FLOP per multiply-add, 3 passes.
TEST(ParameterTable, FlopPerTokenOfLinearLayers) {
    ModelConfig config;
    ASSERT_TRUE(preset("llama-tiny", config));  // 4 heads on 2, of 32
    const double softmax = flop_per_token(Model(config, {}), 512) - flop_per_token(Model(config, {}), 0);
    EXPECT_DOUBLE_EQ(softmax, 4 * 6.0 * 512 * 128);
    const double weights = flop_per_token(Model(config, {}), 0);
    // A window of 128 leaves of each head's 512·512/2 scores 512·128 − 128·128/2.
    for (LayerConfig& l : config.layer) l.window = 128;
    EXPECT_DOUBLE_EQ(flop_per_token(Model(config, {}), 512), weights + softmax * (512 * 128 - 128 * 64) / (512 * 256));
    EXPECT_DOUBLE_EQ(flop_per_token(Model(config, {}), 128), weights + softmax / 4);
    for (LayerConfig& l : config.layer) l.window = 0;
    config.set_attention("SLLL");
    EXPECT_DOUBLE_EQ(flop_per_token(Model(config, {}), 512), weights + softmax / 4 + 3 * 6.0 * (4 + 2) * 32 * 32);
    config.set_attention("SLLG");
    EXPECT_DOUBLE_EQ(
        flop_per_token(Model(config, {}), 512),
        weights + softmax / 4 + 3 * 6.0 * (4 + 2) * 32 * 32 + 6.0 * 2 * 128);  // and the decay gate's weights
}

// The initial decays range from 1 − 1/32 to 1 − 1/512; the weights of the heads' norm are 1.
TEST(Initialisation, DecayGatesStartNearOne) {
    ModelConfig config;
    ASSERT_TRUE(preset("gpt2-tiny", config));
    config.set_attention("SSSG");
    Driver driver(config, training_shape(1, 1));
    initialise_weights(driver.model.table, driver.model.arenas, 7, driver.ctx.stream);
    const std::vector<float> w = driver.params();
    const Param &bias = driver.model.table.by_name("layers.3.gate.bias"),
                &norm = driver.model.table.by_name("layers.3.headnorm.weight");
    ASSERT_EQ(bias.rows, 4);
    const auto decay = [&](int64_t head) { return 1 / (1 + std::exp(-double(w[size_t(bias.offset + head)]))); };
    EXPECT_NEAR(1 / (1 - decay(0)), 32, 1e-3);
    EXPECT_NEAR(1 / (1 - decay(3)), 512, 0.05);
    for (int64_t h = 0; h < 3; h++) EXPECT_LT(decay(h), decay(h + 1));
    for (int64_t i = 0; i < norm.rows; i++) EXPECT_EQ(w[size_t(norm.offset + i)], 1);
    EXPECT_TRUE(bias.fp32 && norm.fp32 && !bias.decay && !norm.decay);
    EXPECT_TRUE(driver.model.table.by_name("layers.3.gate.weight").decay);
    EXPECT_EQ(driver.model.table.find(DECAY_GATE_W, 0), nullptr);
}

TEST(Initialisation, MatchesGpt2) {
    ModelConfig config;
    ASSERT_TRUE(preset("gpt2-tiny", config));
    config.vocab_size = 300;
    Driver a(config, training_shape(1, 1)), b(config, training_shape(1, 1));
    initialise_weights(a.model.table, a.model.arenas, 7, a.ctx.stream);
    initialise_weights(b.model.table, b.model.arenas, 8, b.ctx.stream);
    const std::vector<float> w = a.params(), other = b.params();
    for (const Param& p : a.model.table.params) {
        const std::vector<double> values(w.begin() + p.offset, w.begin() + p.offset + p.numel());
        const bool residual = p.role == PROJ_W || p.role == FCPROJ_W,
                   norm_weight = p.role == NORM1_W || p.role == NORM2_W || p.role == NORMF_W;
        if (p.cols) {
            EXPECT_NEAR(rms(values), residual ? 0.02 / std::sqrt(8.0) : 0.02, 0.02 * 0.02) << p.name;
            EXPECT_NE(w[size_t(p.offset)], other[size_t(p.offset)]) << p.name << " does not depend on the seed";
        } else {
            EXPECT_EQ(values, std::vector<double>(values.size(), norm_weight ? 1.0 : 0.0)) << p.name;
        }
        for (int64_t i = p.numel(); i < p.padded_numel(); i++) ASSERT_EQ(w[size_t(p.offset + i)], 0.0f) << p.name;
    }
}

// Track 3 of modded-nanogpt: projections and head 0, the embedding normal(0, 1), matrices normal(0, √(0.33/inputs)).
TEST(Initialisation, FanInAndZeroProjections) {
    ModelConfig config;
    ASSERT_TRUE(preset("modern-124M", config));
    config.layers = 1;
    config.set_attention("S");
    config.vocab_size = 300;
    for (const bool tied : {false, true}) {
        config.tied = tied;
        Driver driver(config, training_shape(1, 1));
        initialise_weights(driver.model.table, driver.model.arenas, 7, driver.ctx.stream);
        const std::vector<float> w = driver.params();
        for (const Param& p : driver.model.table.params) {
            const std::vector<double> values(w.begin() + p.offset, w.begin() + p.offset + p.numel());
            const bool zero = p.role == PROJ_W || p.role == FCPROJ_W || p.role == HEAD_W,
                       weight = p.role == NORM1_W || p.role == NORM2_W || p.role == NORMF_W || p.role == EMBEDNORM_W;
            const double std = p.role == WTE && !tied ? 1 : std::sqrt(0.33 / 768);
            if (p.cols && !zero)
                EXPECT_NEAR(rms(values), std, 0.02 * std) << p.name;
            else
                EXPECT_EQ(values, std::vector<double>(values.size(), weight ? 1.0 : 0.0)) << p.name;
        }
    }
}

}  // namespace

// End-to-end tests of the driver: the model in train_gpt.cu as a whole, from tokens to gradients and updates.
// Single kernels are tested in dev/. Tests run in the project's root.
#define TRAIN_GPT_NO_MAIN
#include "train_gpt.cu"

#include <gtest/gtest.h>

#include <dlfcn.h>

#include "dev/fixtures.h"
#include "dev/preload.h"
#include "dev/reference_model.h"
#include "dev/temp_dir.h"

namespace {

// --------------------------------------------------------------------------------------------------------------------
// The driver, held by its parts.

template <typename U>
std::vector<U> fetch(const Tensor& t) {
    std::vector<U> host(static_cast<size_t>(t.numel()));
    copy_to_host(host.data(), t.as<U>(), host.size() * sizeof(U), {});
    return host;
}

Batch make_batch(const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets, int64_t B, int64_t T) {
    Batch batch;
    batch.tokens = tokens;
    batch.targets = targets;
    for (int64_t n = 0; n < B * T; n++) batch.positions.push_back(static_cast<int32_t>(n % T));
    for (int64_t b = 0; b <= B; b++) batch.cum_seqlens.push_back(static_cast<int32_t>(b * T));
    batch.max_seqlen = T;
    return batch;
}

// Random tokens, each followed by the next one.
Batch random_batch(const ModelConfig& config, int64_t B, int64_t T, uint64_t seed) {
    std::vector<int32_t> tokens, targets;
    auto token = [&](int64_t b, int64_t t) {
        return static_cast<int32_t>(philox(seed, uint64_t(t), uint64_t(b)).v[0] % uint64_t(config.vocab_size));
    };
    for (int64_t b = 0; b < B; b++) {
        for (int64_t t = 0; t < T; t++) tokens.push_back(token(b, t)), targets.push_back(token(b, t + 1));
    }
    return make_batch(tokens, targets, B, T);
}

// One batch for each of B sequences.
std::vector<Batch> split(const Batch& batch, int64_t B, int64_t T) {
    std::vector<Batch> parts;
    for (int64_t b = 0; b < B; b++) {
        auto part = [&](const std::vector<int32_t>& x) {
            return std::vector<int32_t>(x.begin() + b * T, x.begin() + (b + 1) * T);
        };
        parts.push_back(make_batch(part(batch.tokens), part(batch.targets), 1, T));
    }
    return parts;
}

// A model in training whose memory held NaN before the first step: reading what nobody wrote shows.
struct Driver {
    Context ctx;
    Model model;
    Activations acts;
    Optimizer optimizer;

    Driver(const ModelConfig& config, const RunShape& shape, bool master_weights = true)
        : model(config, 1, {shape.dtype, shape.dtype != DType::F32 && master_weights}), acts(config, shape) {
        model.allocate();
        acts.allocate(ctx);
        for (const ArenaPlan::Entry& e : acts.plan.entries()) {
            if (e.dtype != DType::I32 && e.name != "rope_table")
                device_fill(acts.at(e).data, 0xFF, size_t(acts.at(e).bytes()), {});
        }
        optimizer.allocate(ctx, model, AdamWOptions(), 0.1);
        for (const Param& p : model.table.params) {
            device_fill(param_tensor(p, optimizer.grads).data, 0xFF, size_t(p.padded_numel()) * sizeof(float), {});
        }
        write_scalars(ctx, acts, StepScalars{});
    }

    // Weights at which no part of the model is without effect: order-1 activations, random biases and norm weights.
    void randomise(uint64_t seed) {
        for (const Param& p : model.table.params) {
            std::vector<float> values(size_t(p.padded_numel()), 0.0f);
            const double std = p.cols ? 0.15 : 0.2;
            for (int64_t i = 0; i < p.numel(); i++)
                values[size_t(i)] = float(p.init_value + std * normal01(seed, name_hash(p.name), uint64_t(i)));
            model.arenas.store(p, values.data(), 0, p.padded_numel());
        }
    }

    // [n, V] without the padding.
    std::vector<double> logits(const Batch& batch) {
        const Input in = upload(ctx, acts, batch);
        forward(ctx, model, acts, in);
        std::vector<double> out;
        for (int64_t n = 0; n < in.n; n++) {
            const std::vector<float> row = fetch_floats(ctx, head_logits(ctx, model, acts, n, n + 1));
            out.insert(out.end(), row.begin(), row.begin() + model.config.vocab_size);
        }
        return out;
    }

    // Gradients of the mean loss over the batches' counted targets; returns that loss.
    double gradients(const std::vector<Batch>& batches) {
        int64_t counted = 0;
        for (const Batch& b : batches)
            counted += std::count_if(b.targets.begin(), b.targets.end(), [](int32_t t) { return t != IGNORE_TARGET; });
        for (size_t i = 0; i < batches.size(); i++) {
            const Input in = upload(ctx, acts, batches[i]);
            forward(ctx, model, acts, in);
            backward(ctx, model, optimizer.grads, acts, in, static_cast<float>(1.0 / double(counted)), i > 0);
        }
        mean_scale = 1.0 / double(counted);
        return fetch<double>(acts.loss_sum)[0] * mean_scale;
    }

    // One step on one batch; the loss before it.
    double step(const Batch& batch, double lr, double grad_clip = 1) {
        gradients({batch});
        StepScalars s = read_scalars(ctx, acts);
        s.lr = static_cast<float>(lr);
        s.grad_clip = static_cast<float>(grad_clip);
        write_scalars(ctx, acts, s);
        update(ctx, model, optimizer, acts, mean_scale);
        return read_scalars(ctx, acts).loss;
    }

    std::vector<float> grads() const { return fetch<float>(optimizer.grads); }
    // In the arenas' layout, the most exact there are.
    std::vector<float> params() const {
        std::vector<float> arena(size_t(model.table.total), 0.0f), buffer;
        for (const Param& p : model.table.params)
            std::copy_n(model.arenas.fetch(p, buffer), p.padded_numel(), arena.begin() + p.offset);
        return arena;
    }

  private:
    double mean_scale = 0;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

double rms(const std::vector<double>& x) {
    double sum = 0;
    for (const double v : x) sum += v * v;
    return std::sqrt(sum / double(x.size()));
}

std::vector<double> difference(const std::vector<double>& a, const std::vector<double>& b) {
    EXPECT_EQ(a.size(), b.size());
    std::vector<double> d(std::min(a.size(), b.size()));
    for (size_t i = 0; i < d.size(); i++) d[i] = a[i] - b[i];
    return d;
}

double max_abs(const std::vector<double>& x) {
    double m = 0;
    for (const double v : x) {
        if (!(std::fabs(v) <= m)) m = std::fabs(v);  // NaN stays
    }
    return m;
}

// --------------------------------------------------------------------------------------------------------------------
// Against PyTorch in float64.

// The dtypes that this backend computes in.
std::vector<DType> dtypes() {
    if (backend_device() == Device::CPU) return {DType::F32};
    return {DType::F32, DType::BF16};
}

RunShape training_shape(int64_t B, int64_t T, DType dtype) {
    RunShape shape{B, T, true};
    shape.dtype = dtype;
    return shape;
}

// Bounds of DESIGN section 7: of the logits' maximum, and of a gradient's RMS.
struct Bounds {
    double logits, gradients;
};
Bounds bounds(DType dtype) {
    return dtype == DType::F32 ? Bounds{1e-5, 1e-5} : Bounds{2e-2, 3e-2};
}

class Fixtures : public testing::TestWithParam<std::tuple<std::string, DType>> {
  protected:
    const Fixture f{std::get<0>(GetParam())};
    const DType dtype = std::get<1>(GetParam());
    Driver driver{f.config, training_shape(f.B, f.T, dtype)};
    const Batch batch = make_batch(f.tokens(), f.targets(), f.B, f.T);

    void SetUp() override { load_weights(f.directory, driver.model.table, driver.model.arenas); }
};

TEST_P(Fixtures, LogitsAndLoss) {
    const std::vector<double> ref = f.values<double>("logits");
    const double limit = bounds(dtype).logits * max_abs(ref);
    EXPECT_LE(max_abs(difference(driver.logits(batch), ref)), limit);
    // In 16 bits the loss, a difference of two logits on average, may be off by what they are.
    EXPECT_LE(std::fabs(driver.gradients({batch}) - f.loss()), dtype == DType::F32 ? 1e-5 * f.loss() : 2 * limit);
}

// Every tensor of the file within the bound on its relative RMS. Where a gradient is the residue of a cancellation
// (GPT-2's key bias: softmax doesn't see it, so its true gradient is 0), rounding errors are measured by the fused
// parameter that it is a part of.
TEST_P(Fixtures, Gradients) {
    driver.gradients({batch});
    const std::vector<float> grads = driver.grads();
    size_t compared = 0;
    for (const Param& p : driver.model.table.params) {
        std::vector<double> got(grads.begin() + p.offset, grads.begin() + p.offset + p.numel()), ref(got.size(), NAN);
        for (const Piece& piece : p.pieces) {
            const std::vector<float> file = f.values<float>("grad/" + piece.name);
            ASSERT_EQ(int64_t(file.size()), piece.rows * p.row_size()) << piece.name;
            for (int64_t r = 0; r < piece.rows; r++) {
                for (int64_t c = 0; c < p.row_size(); c++) {
                    ref[size_t((piece.row + r) * p.row_size() + c)] =
                        file[size_t(piece.transposed ? c * piece.rows + r : r * p.row_size() + c)];
                }
            }
            compared++;
        }
        // q, k and v are compared one by one, gate and up too, also where the file holds them in one piece.
        std::vector<std::pair<int64_t, int64_t>> parts = {{0, p.rows}};
        const int64_t Q = f.config.heads * f.config.head_size, K = f.config.kv_heads * f.config.head_size;
        if (p.slot == QKV_W || p.slot == QKV_B) parts = {{0, Q}, {Q, Q + K}, {Q + K, Q + 2 * K}};
        if (f.config.mlp == Mlp::SwiGLU && (p.slot == FC_W || p.slot == FC_B))
            parts = {{0, f.config.ffn}, {f.config.ffn, 2 * f.config.ffn}};
        for (const auto& [begin, end] : parts) {
            auto rows = [&, first = begin, last = end](const std::vector<double>& x) {
                return std::vector<double>(x.begin() + first * p.row_size(), x.begin() + last * p.row_size());
            };
            const double size = rms(rows(ref)), whole = rms(ref);
            const bool cancelled = size < 1e-6 * whole;
            EXPECT_LE(rms(difference(rows(got), rows(ref))), bounds(dtype).gradients * (cancelled ? whole : size))
                << p.name << " rows " << begin << " to " << end;
        }
    }
    size_t in_file = 0;
    for (const auto& entry : f.file.entries()) in_file += entry.first.rfind("grad/", 0) == 0;
    EXPECT_EQ(compared, in_file);
}

// Adam gives a gradient of 1e-8 the step of one of size 1, so rounding errors of tiny gradients grow: float64 itself
// moves by up to 2e-5 of the first loss (llama-bf16, step 8) when its weights are changed by 3e-8. Hence 1e-4.
TEST_P(Fixtures, AdamWSteps) {
    const std::vector<double> ref = f.values<double>("adamw_losses");
    const double limit = dtype == DType::F32 ? 1e-4 : 2e-2;
    for (size_t i = 0; i < ref.size(); i++)
        EXPECT_NEAR(driver.step(batch, 1e-2), ref[i], limit * ref[0]) << "step " << i;
    // Padding rows are still zero: they never trained.
    const std::vector<float> params = driver.params();
    for (const Param& p : driver.model.table.params) {
        for (int64_t i = p.numel(); i < p.padded_numel(); i++) ASSERT_EQ(params[size_t(p.offset + i)], 0.0f) << p.name;
    }
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
// Against the float64 reference model, with knobs in combinations that no other program has.

ModelConfig base_config() {
    ModelConfig c;
    c.layers = 2;
    c.channels = 24;
    c.heads = c.kv_heads = 4;
    c.head_size = 6;
    c.ffn = 40;
    c.vocab_size = 53;
    c.max_positions = 16;
    c.attention = "SS";
    return c;
}

struct Knobs {
    const char* name;
    void (*apply)(ModelConfig&);
};

void PrintTo(const Knobs& knobs, std::ostream* out) {
    *out << knobs.name;
}

const Knobs KNOBS[] = {
    {"gpt2", [](ModelConfig&) {}},
    {"llama",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm, c.positions = Positions::RoPE, c.mlp = Mlp::SwiGLU, c.kv_heads = 2;
         c.qkv_bias = c.proj_bias = c.mlp_bias = c.tied = false;
     }},
    {"rmsnorm_learned_relu2", [](ModelConfig& c) { c.norm = Norm::RMSNorm, c.mlp = Mlp::ReLU2, c.kv_heads = 1; }},
    {"layernorm_rope_swiglu_bias",
     [](ModelConfig& c) { c.positions = Positions::RoPE, c.mlp = Mlp::SwiGLU, c.head_size = 10, c.tied = false; }},
    {"gelu_without_biases_one_layer",
     [](ModelConfig& c) {
         c.qkv_bias = c.proj_bias = c.mlp_bias = false, c.layers = 1, c.attention = "S", c.heads = c.kv_heads = 1,
         c.head_size = 2;
     }},
    {"rmsnorm_rope_relu2_some_biases",
     [](ModelConfig& c) {
         c.norm = Norm::RMSNorm, c.positions = Positions::RoPE, c.mlp = Mlp::ReLU2, c.kv_heads = 2, c.proj_bias = false;
         c.rope_scaling.kind = RopeScaling::Kind::Linear, c.rope_scaling.factor = 2;
     }},
};

class MixedKnobs : public testing::TestWithParam<Knobs> {
  protected:
    static constexpr int64_t B = 2, T = 11;
    static ModelConfig config() {
        ModelConfig c = base_config();
        GetParam().apply(c);
        validate(c, GetParam().name);
        return c;
    }
    Driver driver{config(), {B, T, true}};
    const Batch batch = random_batch(config(), B, T, 5);

    void SetUp() override { driver.randomise(3); }

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

TEST_P(MixedKnobs, LogitsAndLoss) {
    const reference::Weights weights = reference::widen(driver.model.table, driver.params().data());
    const reference::ModelOutput ref =
        reference::model_forward(driver.model.config, weights, batch.tokens, batch.targets, B, T);
    EXPECT_LE(max_abs(difference(driver.logits(batch), ref.logits)), 1e-5 * max_abs(ref.logits));
    EXPECT_LE(std::fabs(driver.gradients({batch}) - ref.loss), 1e-5 * ref.loss);
}

// 20 random directions through all weights, and one through each tensor alone. Along a standard normal direction d the
// derivative g·d has standard deviation |g|: that is what 1e-5 is relative to.
TEST_P(MixedKnobs, DirectionalDerivatives) {
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

// The plan with every tensor in bytes of its own, and the one where tensors share them: the same bits. Likewise for
// what is computed again in the backward pass; two micro-steps, so that the second finds the memory used. The levels
// that compute GELU alone take it out of the forward product: they are compared where it is not in there.
TEST_P(MixedKnobs, MemoryPlansAgreeBitwise) {
    const std::vector<Batch> batches = {batch, random_batch(config(), B, T, 6)};
    for (const DType dtype : dtypes()) {
        for (const GeluEpilogue epilogue : {GeluEpilogue::Off, GeluEpilogue::Backward, GeluEpilogue::Both}) {
            auto run = [&](Recompute level, bool overlap, auto check) {
                Driver d(config(), {B, T, true, level, overlap, 1, dtype, epilogue});
                d.randomise(3);
                const double loss = d.gradients(batches);
                check(loss, d.grads(), d.acts.plan.bytes());
            };
            double expected_loss = 0;
            std::vector<float> expected;
            int64_t kept_bytes = 0;
            run(Recompute::None, true, [&](double loss, const std::vector<float>& grads, int64_t bytes) {
                expected_loss = loss, expected = grads, kept_bytes = bytes;
            });
            for (const float g : expected) ASSERT_TRUE(std::isfinite(g));
            for (const Recompute level : {Recompute::None, Recompute::Activation, Recompute::Norms, Recompute::Block}) {
                const bool alone = level == Recompute::Activation || level == Recompute::Norms;
                if (alone && epilogue == GeluEpilogue::Both) continue;
                for (const bool overlap : {true, false}) {
                    run(level, overlap, [&](double loss, const std::vector<float>& grads, int64_t bytes) {
                        EXPECT_EQ(loss, expected_loss);
                        EXPECT_TRUE(same_bits(grads, expected))
                            << "recompute level " << int(level) << ", overlap " << overlap << ", " << dtype_name(dtype)
                            << ", GELU in products " << int(epilogue);
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
TEST_P(MixedKnobs, GraphsReplayTheSameBits) {
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
                forward(recorded.ctx, recorded.model, recorded.acts, in);
                backward(recorded.ctx, recorded.model, recorded.optimizer.grads, recorded.acts, in,
                         static_cast<float>(1.0 / double(B * T)), false);
            });
            EXPECT_TRUE(same_bits(recorded.grads(), ordinary.grads())) << dtype_name(dtype) << ", run " << seed - 10;
        }
    }
}

// The plan without training keeps less and computes the same.
TEST_P(MixedKnobs, InferencePlanAgreesBitwise) {
    Driver inference(config(), {B, T, true});
    inference.randomise(3);
    const std::vector<double> expected = inference.logits(batch);
    Activations acts(config(), {B, T});
    acts.allocate(driver.ctx);
    EXPECT_LT(acts.plan.bytes(), driver.acts.plan.bytes());
    const Input in = upload(driver.ctx, acts, batch);
    forward(driver.ctx, driver.model, acts, in);
    for (int64_t n = 0; n < in.n; n++) {
        const std::vector<float> row = fetch_floats(driver.ctx, head_logits(driver.ctx, driver.model, acts, n, n + 1));
        for (int64_t v = 0; v < config().vocab_size; v++)
            ASSERT_EQ(row[size_t(v)], expected[size_t(n * config().vocab_size + v)]);
    }
}

// Gradients of micro-steps add up to those of the whole batch.
TEST_P(MixedKnobs, MicroStepsAddUp) {
    driver.gradients({batch});
    const std::vector<float> whole = driver.grads();
    driver.gradients(split(batch, B, T));
    const std::vector<float> sum = driver.grads();
    const std::vector<double> x(whole.begin(), whole.end()), y(sum.begin(), sum.end());
    EXPECT_LE(rms(difference(x, y)), 1e-6 * rms(x));
}

// The head works on chunks of tokens. With this vocabulary 70 tokens (on a GPU 1,040) take two chunks, and
// their halves one each.
TEST(Head, ChunksAddUp) {
    const int64_t B = 2, T = backend_device() == Device::CPU ? 35 : 520;
    ModelConfig config = base_config();
    config.layers = config.heads = config.kv_heads = 1;
    config.attention = "S";
    config.channels = config.head_size = config.ffn = 4;
    config.max_positions = T;
    config.vocab_size = (1 << 18) - 100;
    Driver whole(config, {B, T, true}), halves(config, {1, T, true});
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

// Documents of unequal length packed into one row see themselves only.
TEST_P(MixedKnobs, PackedDocuments) {
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

INSTANTIATE_TEST_SUITE_P(Reference, MixedKnobs, testing::ValuesIn(KNOBS),
                         [](const auto& test) { return std::string(test.param.name); });

// --------------------------------------------------------------------------------------------------------------------
// Learning.

class Overfit : public testing::TestWithParam<std::string> {};

TEST_P(Overfit, OneBatch) {
    ModelConfig config;
    ASSERT_TRUE(preset(GetParam(), config));
    config.vocab_size = 256;
    Driver driver(config, {2, 24, true});
    initialise_weights(driver.ctx, driver.model, 42);
    const Batch batch = random_batch(config, 2, 24, 1);
    const double first = driver.step(batch, 3e-3);
    EXPECT_NEAR(first, std::log(256.0), 0.2);  // an untrained model knows nothing
    double loss = first;
    for (int step = 1; step < 60 && loss >= 0.01; step++) loss = driver.step(batch, 3e-3);
    EXPECT_LT(loss, 0.01);
}

INSTANTIATE_TEST_SUITE_P(Presets, Overfit, testing::Values("gpt2-tiny", "llama-tiny"),
                         [](const auto& test) { return test.param.substr(0, test.param.find('-')); });

// A loss that is not finite leaves weights and moments as they are.
TEST(Update, SkipsWhatIsNotFinite) {
    Driver driver(base_config(), {2, 11, true});
    driver.randomise(3);
    const Batch batch = random_batch(base_config(), 2, 11, 5);
    driver.step(batch, 1e-2);
    const std::vector<float> params = driver.params(), m = fetch<float>(driver.optimizer.m),
                             v = fetch<float>(driver.optimizer.v);
    const Tensor bias = driver.model.weight(NORMF_B);
    const float saved = fetch<float>(bias)[0], poison = INFINITY;
    copy_to_device(bias.data, &poison, sizeof poison, {});
    driver.step(batch, 1e-2);
    copy_to_device(bias.data, &saved, sizeof saved, {});
    const StepScalars s = read_scalars(driver.ctx, driver.acts);
    EXPECT_EQ(s.skip, 1);
    EXPECT_EQ(s.t, 1);
    EXPECT_TRUE(same_bits(driver.params(), params));
    EXPECT_TRUE(same_bits(fetch<float>(driver.optimizer.m), m));
    EXPECT_TRUE(same_bits(fetch<float>(driver.optimizer.v), v));
    driver.step(batch, 1e-2);
    EXPECT_EQ(read_scalars(driver.ctx, driver.acts).t, 2);
    EXPECT_FALSE(same_bits(driver.params(), params));
}

// --------------------------------------------------------------------------------------------------------------------
// The trainer: steps as the command takes them.

// A run on random tokens in a folder of its own.
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

// What a run takes of the GPU is what its plan said. (The CPU's plan is compared with a whole process: bench_cpu.py.)
TEST(Training, PlanIsRight) {
    if (backend_device() == Device::CPU) GTEST_SKIP() << "a test's process holds more than a run does";
    for (const Recompute level : {Recompute::None, Recompute::Block}) {
        const int64_t before = device_memory_available();
        TrainingRun run({"--model", "gpt2-124M", "--dtype", "bf16", "--batch-size", "8", "--seq-len", "1024",
                         "--recompute", level == Recompute::None ? "none" : "block"});
        run.steps(3);
        const double used = double(before - device_memory_available());
        ModelConfig config;
        ASSERT_TRUE(preset("gpt2-124M", config));
        const Model model(config, 1, {DType::BF16, true});
        const Activations acts(config, {8, 1024, true, level, true, 1, DType::BF16, GeluEpilogue::Both});
        EXPECT_NEAR(double(memory_plan(model, acts).total) / used, 1, 0.02) << "used " << used / (1 << 20) << " MiB";
    }
}

// A step of fixed shape, from its batch to the copy of its scalars, asks for no memory, of the host or the device, in
// our code or in a library's. (What is logged of it is text, and allocates.) This binary runs itself with
// dev/alloc_shim.c preloaded, which counts.
TEST(Training, AllocatesNothingAfterTheFirstStep) {
    if (backend_device() == Device::CPU) GTEST_SKIP() << "oneDNN allocates its packing buffers in every product";
    if (why_no_preload()) GTEST_SKIP() << why_no_preload();
    using Counter = long (*)();
    const auto host = reinterpret_cast<Counter>(dlsym(RTLD_DEFAULT, "alloc_shim_host")),
               device = reinterpret_cast<Counter>(dlsym(RTLD_DEFAULT, "alloc_shim_device"));
    if (!host) {
        ASSERT_FALSE(std::getenv("ALLOC_SHIM_EXPECTED")) << "the library was not loaded";
        const TempDir dir;
        const int status =
            run_self({"--gtest_filter=Training.AllocatesNothingAfterTheFirstStep"},
                     {{"LD_PRELOAD", preload_path("alloc_shim")}, {"ALLOC_SHIM_EXPECTED", "1"}}, dir.file("output"));
        EXPECT_TRUE(exited(status, 0)) << read_file(dir.file("output"));
        return;
    }
    const Args small = {"--batch-size", "2", "--seq-len", "32", "--layers", "2", "--channels", "64", "--heads", "2"};
    for (const Args& args : {Args{"--model", "gpt2-tiny", "--dtype", "bf16", "--total-batch-tokens", "192"},
                             Args{"--model", "llama-tiny", "--kv-heads", "1", "--recompute", "block"},
                             Args{"--model", "gpt2-tiny", "--dtype", "bf16", "--master-weights", "off"}}) {
        Args all = args;
        all.insert(all.end(), small.begin(), small.end());
        TrainingRun run(all);
        run.steps(1);
        const long host_before = host(), device_before = device();
        EXPECT_GT(host_before, 0);
        EXPECT_GT(device_before, 0);
        run.steps(20);
        EXPECT_EQ(host(), host_before) << args[1];
        EXPECT_EQ(device(), device_before) << args[1];
    }
}

// --------------------------------------------------------------------------------------------------------------------
// The parameter table.

// Weights of the presets as their authors count them.
TEST(ParameterTable, PresetSizes) {
    const std::pair<const char*, int64_t> sizes[] = {
        {"gpt2-124M", 124439808}, {"gpt2-350M", 354823168}, {"gpt2-774M", 774030080}, {"gpt2-1558M", 1557611200},
        {"llama-1B", 1235814400}, {"llama-3B", 3212749824}, {"llama-8B", 8030261248}, {"llama2-7B", 6738415616}};
    for (const auto& [name, weights] : sizes) {
        ModelConfig config;
        ASSERT_TRUE(preset(name, config)) << name;
        EXPECT_EQ(parameter_table(config, 1).num_weights(), weights) << name;
    }
}

TEST(ParameterTable, FlopPerToken) {
    ModelConfig config;
    ASSERT_TRUE(preset("gpt2-124M", config));
    const double blocks = 12.0 * 12 * 768 * 768, head = 50257.0 * 768;
    EXPECT_DOUBLE_EQ(flop_per_token(Model(config, 1), 1024), 6 * (blocks + head) + 6.0 * 1024 * 12 * 768);
    config.tied = false;  // the look-up costs nothing
    EXPECT_DOUBLE_EQ(flop_per_token(Model(config, 1), 1024), 6 * (blocks + head) + 6.0 * 1024 * 12 * 768);
}

TEST(Initialisation, AsGpt2DoesIt) {
    ModelConfig config;
    ASSERT_TRUE(preset("gpt2-tiny", config));
    config.vocab_size = 300;
    Driver a(config, {1, 1, true}), b(config, {1, 1, true});
    initialise_weights(a.ctx, a.model, 7);
    initialise_weights(b.ctx, b.model, 8);
    const std::vector<float> w = a.params(), other = b.params();
    for (const Param& p : a.model.table.params) {
        const std::vector<double> values(w.begin() + p.offset, w.begin() + p.offset + p.numel());
        const bool residual = p.slot == PROJ_W || p.slot == FCPROJ_W,
                   norm_weight = p.slot == NORM1_W || p.slot == NORM2_W || p.slot == NORMF_W;
        if (p.cols) {
            EXPECT_NEAR(rms(values), residual ? 0.02 / std::sqrt(8.0) : 0.02, 0.02 * 0.02) << p.name;
            EXPECT_NE(w[size_t(p.offset)], other[size_t(p.offset)]) << p.name << " does not depend on the seed";
        } else {
            EXPECT_EQ(values, std::vector<double>(values.size(), norm_weight ? 1.0 : 0.0)) << p.name;
        }
        for (int64_t i = p.numel(); i < p.padded_numel(); i++) ASSERT_EQ(w[size_t(p.offset + i)], 0.0f) << p.name;
    }
}

}  // namespace

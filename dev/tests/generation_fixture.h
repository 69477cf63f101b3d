// Sequences that an engine generates from a model in memory, for the tests of infer/ with a model.
#pragma once

#include <memory>
#include <random>

#include "dev/tests/model_fixture.h"
#include "infer/engine.h"
#include "runtime/device/convert_dtype.h"

// Adapters of a model with random matrices. Every third part has none.
struct RandomAdapters {
    AdapterBank bank;

    RandomAdapters(const Model& model, int64_t count, int64_t rank)
        : bank(model.table, count, round_up_rank(rank), model.precision.dtype) {
        bank.allocate({});
        const auto fill = [&](const Tensor& t, double scale, uint64_t seed, int64_t rows, int64_t skipped) {
            std::vector<float> values(size_t(t.numel()));
            normal_numbers(values.data(), seed, 0, 0, t.numel());
            const int64_t row = t.shape[2];
            for (int64_t i = 0; i < t.numel(); i++)
                values[size_t(i)] = i / row % t.shape[1] / rows % 3 == skipped ? 0 : float(scale) * values[size_t(i)];
            std::vector<char> bytes(size_t(t.bytes()));
            convert_from_float(bytes.data(), t.dtype, values.data(), t.numel());
            copy_to_device(t.data, bytes.data(), bytes.size(), {});
        };
        uint64_t seed = 100;
        for (const BlockAdapters& b : bank.blocks())
            for (const AdapterWeights* w : {&b.qkv, &b.proj, &b.fc, &b.fcproj}) {
                fill(w->a, 0.2, seed++, bank.rank(), 1);
                fill(w->b, 0.2, seed++, 1, -1);
            }
        synchronize({});
    }
    // The model's weights with adapter i added, in fp32.
    void merge_into(Driver& to, const Driver& from, int64_t i) const {
        const int64_t R = bank.rank();
        for (const Param& p : from.model.table.params) {
            std::vector<float> values = fetch_param(from.model, p);
            const int linear = linear_layer_index(p.role);
            if (linear >= 0) {
                const BlockAdapters& block = bank.blocks()[size_t(p.layer)];
                const AdapterWeights& w =
                    *std::array{&block.qkv, &block.proj, &block.fc, &block.fcproj}[size_t(linear)];
                const std::vector<float> a = fetch_floats(from.ctx, w.a), b = fetch_floats(from.ctx, w.b);
                const int64_t count = w.a.shape[0];
                for (size_t part = 0; part < p.sources.size(); part++)
                    for (int64_t row = p.sources[part].row; row < p.sources[part].row + p.sources[part].rows; row++)
                        for (int64_t c = 0; c < p.cols; c++) {
                            double sum = 0;
                            for (int64_t r = 0; r < R; r++)
                                sum += double(b[size_t((row * count + i) * R + r)]) *
                                       double(a[size_t(
                                           ((i * int64_t(p.sources.size()) + int64_t(part)) * R + r) * p.cols + c)]);
                            values[size_t(row * p.cols + c)] += float(sum);
                        }
            }
            values.resize(size_t(p.padded_numel()), 0.0f);
            to.model.arenas.store(p, values.data(), 0, p.padded_numel());
        }
    }
};

// An engine with the weights of a model in memory.
struct Generation {
    Context ctx;
    Engine engine;

    Generation(const Model& model, EngineOptions options, const RandomAdapters* adapters = nullptr, int64_t count = 0)
        : engine(model.config, complete(options, model.precision.dtype, adapters, count), ctx.stream) {
        InferenceWeights weights = inference_weights(model);
        if (adapters) weights.adapters = adapters->bank.blocks();
        engine.allocate(weights);
    }
    static EngineOptions complete(EngineOptions o, DType dtype, const RandomAdapters* adapters, int64_t count) {
        o.dtype = dtype;
        o.adapters = count;
        if (adapters) o.adapter_rank = adapters->bank.rank();
        return o;
    }
    // The logits after each prompt.
    std::vector<std::vector<float>> prefill(const std::vector<Prompt>& prompts) {
        engine.prefill(prompts);
        sampled = engine.next().tokens;
        return logits(prompts.size());
    }
    std::vector<std::vector<float>> decode() {
        engine.decode();
        sampled = engine.next().tokens;
        return logits(sampled.size());
    }
    std::vector<std::vector<float>> logits(size_t n) const {
        std::vector<std::vector<float>> rows;
        for (size_t i = 0; i < n; i++) rows.push_back(engine.logits(int64_t(i)));
        return rows;
    }
    std::vector<int32_t> sampled;
};

inline EngineOptions engine_options(int64_t slots, int64_t context, float temperature = 0) {
    EngineOptions o;
    o.slots = slots;
    o.context = context;
    o.sampling.temperature = temperature;
    return o;
}

// The logits after the last token, by forward() over the whole sequence.
inline std::vector<double> logits_after(Driver& driver, const std::vector<int32_t>& sequence) {
    Activations acts(driver.model.config, inference_shape(1, int64_t(sequence.size()), driver.model.precision.dtype));
    acts.allocate(driver.ctx);
    const Input in = upload(driver.ctx, acts, single_sequence(sequence.data(), int64_t(sequence.size())));
    forward({driver.ctx, driver.model, acts, in});
    const std::vector<float> row =
        fetch_floats(driver.ctx, head_logits({driver.ctx, driver.model, acts, in}, in.n - 1, in.n));
    return {row.begin(), row.begin() + driver.model.config.vocab_size};
}

// In 16 bits both sides are within bounds() of the exact logits (test_model.cpp checks that of forward()), so they are
// within twice that of each other. Linear attention comes near it: forward() rounds its scores, decoding does not have
// any. In fp32 one bound has always been enough.
// rounded: what forward() makes of ref's model in `dtype`. After few tokens a gated linear head may be near 0 beside
// its terms, and its norm divides by it: rounding the weights alone then moves logits by up to 17%. So where forward()
// in `dtype` is further from ref than bounds() allows, what is compared may be, too, up to a fifth of the largest
// logit.
inline void expect_same_logits(const std::vector<float>& got, const std::vector<double>& ref, const std::string& where,
                               DType dtype = DType::F32, const std::vector<double>& rounded = {}) {
    double bound = bounds(dtype).logits * (dtype == DType::F32 ? 1 : 2) * max_abs(ref);
    if (!rounded.empty()) bound = std::max(bound, std::min(4 * max_abs(difference(rounded, ref)), max_abs(ref) / 5));
    EXPECT_LE(max_abs(difference({got.begin(), got.end()}, ref)), bound) << where;
}

// How far a model's logits move with its weights: copies of d in fp32, with its weights and with weights that differ
// from them by up to 2^-8, twice what rounding to bf16 may take off.
class MovedWeights {
  public:
    MovedWeights(const Driver& d, int64_t T) : exact(copy(d, T, nullptr)) {
        std::mt19937_64 generator(1);
        for (int i = 0; i < 3; i++) moved.push_back(copy(d, T, &generator));
    }
    // ref, moved as the logits after `sequence` move furthest: `rounded` of expect_same_logits().
    std::vector<double> apply(std::vector<double> ref, const std::vector<int32_t>& sequence) const {
        const std::vector<double> at = logits_after(*exact, sequence);
        std::vector<double> furthest(ref.size());
        for (const std::unique_ptr<Driver>& m : moved) {
            const std::vector<double> by = difference(logits_after(*m, sequence), at);
            if (max_abs(by) > max_abs(furthest)) furthest = by;
        }
        for (size_t i = 0; i < ref.size(); i++) ref[i] += furthest[i];
        return ref;
    }

  private:
    static std::unique_ptr<Driver> copy(const Driver& d, int64_t T, std::mt19937_64* generator) {
        auto to = std::make_unique<Driver>(d.model.config, training_shape(1, T));
        std::vector<float> buffer;
        for (const Param& p : d.model.table.params) {
            const float* const from = d.model.arenas.fetch(p, buffer);
            std::vector<float> values(from, from + p.padded_numel());
            std::uniform_real_distribution<float> factor(1 - 1 / 256.0f, 1 + 1 / 256.0f);
            if (generator)
                for (float& v : values) v *= factor(*generator);
            to->model.arenas.store(p, values.data(), 0, p.padded_numel());
        }
        return to;
    }

    std::unique_ptr<Driver> exact;
    std::vector<std::unique_ptr<Driver>> moved;
};

// attention: a letter for each layer; W is softmax attention with a window of 5.
inline ModelConfig long_config(const std::string& attention = "SS") {
    ModelConfig c = base_config();
    std::string letters = attention;
    std::replace(letters.begin(), letters.end(), 'W', 'S');
    c.set_attention(letters);
    for (size_t l = 0; l < letters.size(); l++) c.layer[l].window = attention[l] == 'W' ? 5 : 0;
    c.channels = 32;
    c.head_size = 8;  // whole 16 bytes in any dtype: some GPUs have a fused decode step for up to 8 sequences
    c.norm = Norm::RMSNorm;
    c.positions = Positions::RoPE;
    c.activation = Activation::SwiGLU;
    c.kv_heads = 2;
    c.max_positions = 64;
    return c;
}

// By attention type: a sequence keeps all keys and values, the last ones, or a state of one size.
class GenerationByType : public testing::TestWithParam<const char*> {
  protected:
    Driver driver{long_config(GetParam()), training_shape(1, 8)};
    void SetUp() override { driver.randomise(3); }
};
INSTANTIATE_TEST_SUITE_P(Types, GenerationByType, testing::Values("SS", "LG", "GS", "SW", "GW"),
                         [](const auto& test) { return std::string(test.param); });

// Sequences that an engine generates from a model in memory, for the tests of infer/ with a model.
#pragma once

#include "dev/tests/model_fixture.h"
#include "infer/engine.h"

// An engine with the weights of a model in memory.
struct Generation {
    Context ctx;
    Engine engine;

    Generation(const Model& model, EngineOptions options)
        : engine(model.config, with_dtype(options, model.precision.dtype), ctx.stream) {
        engine.allocate(inference_weights(model));
    }
    static EngineOptions with_dtype(EngineOptions o, DType dtype) {
        o.dtype = dtype;
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
inline void expect_same_logits(const std::vector<float>& got, const std::vector<double>& ref, const std::string& where,
                               DType dtype = DType::F32) {
    const double bound = bounds(dtype).logits * (dtype == DType::F32 ? 1 : 2);
    EXPECT_LE(max_abs(difference({got.begin(), got.end()}, ref)), bound * max_abs(ref)) << where;
}

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

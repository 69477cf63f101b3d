// Rollouts through training's forward pass (rl/exact_forward.h): recorded log-probabilities are training's, bit for
// bit, and tokens come as often as these say.
#ifndef USE_CUDA
#include <omp.h>
#endif

#include <cmath>
#include <cstring>
#include <map>

#include "dev/tests/adapters.h"
#include "dev/tests/generation_fixture.h"
#include "driver/inference.h"
#include "driver/sequence_loss.h"
#include "infer/generate.h"
#include "kernels/matmul.h"
#include "rl/completion_batches.h"
#include "rl/exact_forward.h"
#include "runtime/device/target.h"

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GenerationByType);  // of generation_fixture.h

namespace {

bool on_cpu() {
    return backend_device() == Device::CPU;
}
DType exact_dtype() {
    return on_cpu() ? DType::F32 : DType::BF16;
}
// Skips where choose_sampler() refuses the GPU.
class ExactRollouts : public testing::Test {
    void SetUp() override {
        if (!on_cpu() && !this_target().hopper) GTEST_SKIP() << "only a Hopper GPU has exact rollouts";
    }
};

constexpr int64_t CONTEXT = 270;  // keys in five blocks and three pages
constexpr int32_t END = 7;        // the token that ends a completion

RunShape policy_shape(int64_t B, int64_t T, double temperature = 1) {
    RunShape shape = training_shape(B, T, exact_dtype());
    shape.rollout.emplace();
    shape.rollout->temperature = temperature;
    if (!on_cpu()) shape.activation_epilogue = ActivationEpilogue::Both;  // as a run has it; rollouts do without
    return shape;
}

// An engine that samples through the forward pass of d's model.
struct ExactEngine {
    const Stream stream;
    Engine engine;
    ExactForward forward;
    TestArray memory;

    ExactEngine(const Driver& d, EngineOptions o)
        : stream(d.ctx.stream),
          engine(d.model.config, complete(o), stream),
          forward(d.ctx, d.model, d.acts, rollout_forward(run_options(), d.model, engine.pass_tokens())),
          memory(TestArray::scratch(forward.bytes())) {
        matmul_batch_invariant(true, stream);
        forward.allocate(memory);
        InferenceWeights weights = inference_weights(d.model);
        for (BlockWeights& b : weights.blocks)
            for (LinearWeights* layer : {&b.qkv, &b.proj, &b.fc, &b.fcproj}) layer->lora = {};
        engine.allocate(weights, {}, &forward);
    }
    ~ExactEngine() { matmul_batch_invariant(false, stream); }

    static EngineOptions complete(EngineOptions o) {
        o.outside_forward = o.logprobs = true;
        o.dtype = exact_dtype();
        return o;
    }
    static RunOptions run_options() {
        RunOptions o;
        o.model.dtype = on_cpu() ? "fp32" : "bf16";
        return o;
    }
};

// G completions of each prompt. Few sequences run at a time, in a cache that has no room for all of them: sequences
// begin, end and are suspended while others decode, prompts' pages are shared, and pages lie anywhere.
struct Rollout {
    std::vector<std::vector<int32_t>> prompts;
    std::vector<PolicyExample> examples;

    Rollout(const Driver& d, const std::vector<int64_t>& lengths, int64_t G, int64_t max_tokens) {
        // On a GPU a completion may end while the next step is in flight, which then has a retired row. The engine
        // waits instead where a sixteenth of the rows is retired, so the batch has more rows than that.
        EngineOptions o = engine_options(on_cpu() ? 11 : 40, CONTEXT, 1);
        o.cache_pages = on_cpu() ? 17 : 60;
        ExactEngine exact(d, o);
        CompletionOptions options;
        options.max_tokens = max_tokens;
        options.eos = {END};
        std::vector<Completion> completions(lengths.size() * size_t(G), Completion(nullptr, options));
        std::vector<Request> requests;
        for (const int64_t n : lengths) prompts.push_back(random_tokens(d.model.config, n, uint64_t(n)));
        for (size_t i = 0; i < completions.size(); i++)
            requests.push_back({prompts[i / size_t(G)], 0, int64_t(i), &completions[i], {}});
        ContextPolicy whole;
        whole.slide = false;
        generate(exact.engine, requests, whole);
        for (size_t i = 0; i < completions.size(); i++) {
            examples.push_back({&prompts[i / size_t(G)], completions[i].tokens(), completions[i].logprobs(), 1, 1});
            if (requests[i].end < 0) continue;
            examples.back().tokens.push_back(requests[i].end);
            examples.back().sampler_logps.push_back(requests[i].end_logprob);
        }
    }
    // Tokens whose recorded log-probability is not the one that training computes in batches of B·T; all tokens.
    struct Compared {
        int64_t differ = 0, tokens = 0;
    };
    Compared compare(const Driver& d, const Activations& acts, int64_t B, int64_t T) const {
        matmul_batch_invariant(true, d.ctx.stream);
        Compared result;
        for (const Batch& batch : completion_batches(examples, B, T, 0)) {
            const std::vector<float> logps = target_logps(d.ctx, d.model, acts, batch, true);
            for (size_t i = 0; i < logps.size(); i++) {
                if (batch.targets[i] == Batch::NO_TARGET) continue;
                result.tokens++;
                result.differ += std::memcmp(&logps[i], &batch.policy[i].sampler_logp, sizeof(float)) != 0;
            }
        }
        matmul_batch_invariant(false, d.ctx.stream);
        return result;
    }
};

// In micro-batches of two sizes. Returns the number of tokens.
int64_t expect_exact(Driver& d, double temperature) {
    d.randomise(3);
    const Rollout rollout(d, {1, 63, 64, 127, 130, 150}, on_cpu() ? 12 : 24, 120);
    const Rollout::Compared first = rollout.compare(d, d.acts, d.acts.shape.B, CONTEXT);
    RunShape shape = policy_shape(4, CONTEXT, temperature);  // rows that a GPU's matmuls share among two blocks
    set_adapters(shape, d.model);
    Activations larger(d.model.config, shape);
    larger.allocate(d.ctx);
    const Rollout::Compared second = rollout.compare(d, larger, 4, CONTEXT);
    EXPECT_EQ(first.differ, 0);
    EXPECT_EQ(second.differ, 0);
    EXPECT_EQ(first.tokens, second.tokens);
    EXPECT_GT(first.tokens, 1000);
    return first.tokens;
}

// Room for longer sequences, and windows that end within blocks of keys. A GPU takes sizes that are multiples of 8.
ModelConfig longer(ModelConfig c) {
    c.max_positions = CONTEXT + 10;
    if (!on_cpu()) c.head_size = (c.head_size + 7) / 8 * 8;
    for (LayerConfig& layer : c.layer)
        if (layer.window) layer.window = layer.window * 17 + 2;
    return c;
}

// Every variant of the model, and at least 100,000 tokens in all.
TEST_F(ExactRollouts, RecordTrainingsLogProbabilities) {
    int64_t tokens = 0;
#ifndef USE_CUDA
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1);  // the fastest for so small a model
#endif
    for (const ModelVariant& variant : MODEL_VARIANTS) {
        SCOPED_TRACE(variant.name);
        ModelConfig c = base_config();
        variant.apply(c);
        validate(c, variant.name);
        c = longer(c);
        RunOptions options = ExactEngine::run_options();
        options.rollout.prompts = 1;
        options.rollout.sampler = Sampler::Exact;
        options.seq_len = CONTEXT;
        RunOptions any = options;
        any.rollout.sampler = Sampler::Auto;
        EXPECT_NO_THROW(choose_sampler(any, c, this_target()));
        if (c.has_linear_attention() || (!on_cpu() && (c.head_bias || c.logit_softcap))) {
            EXPECT_THROW(choose_sampler(options, c, this_target()), Error);
            EXPECT_FALSE(any.rollout.exact);
            if (!c.has_linear_attention()) continue;
            EngineOptions o = engine_options(2, CONTEXT);
            o.outside_forward = true;
            o.dtype = exact_dtype();
            EXPECT_THROW(Engine(c, o, {}), Error);
            continue;
        }
        EXPECT_NO_THROW(choose_sampler(options, c, this_target()));
        EXPECT_TRUE(options.rollout.exact);
        EXPECT_EQ(any.rollout.exact, !on_cpu());
        Driver d(c, policy_shape(1, CONTEXT));
        tokens += expect_exact(d, 1);
    }
#ifndef USE_CUDA
    omp_set_num_threads(threads);
#endif
    EXPECT_GE(tokens, 100'000);
}

TEST_F(ExactRollouts, WithATemperatureAndAdapters) {
    ModelConfig c = longer(base_config());
    Driver plain(c, policy_shape(1, CONTEXT, 0.7));
    expect_exact(plain, 0.7);
    c.channels = on_cpu() ? 300 : 304;  // sums in more than one block of K
    c.layer[1].window = 77;
    LoraOptions lora = lora_options();
    if (!on_cpu()) lora.rank = 8;
    Driver adapted(c, policy_shape(1, CONTEXT, 1.3), true, Driver::default_options(), OptimizerType::AdamW, {}, {},
                   lora);
    expect_exact(adapted, 1.3);
}

// Each sequence has random numbers of its own, so that the first tokens after one prompt are independent draws. What is
// expected fewer than 8 times counts as one cell.
TEST_F(ExactRollouts, TokensComeAsOftenAsTheirRecordedProbabilitiesSay) {
    const int64_t SLOTS = 1000, ROUNDS = on_cpu() ? 100 : 1000;
    for (const bool capped : {false, true}) {
        if (capped && !on_cpu()) continue;
        ModelConfig c = longer(base_config());
        if (capped) c.logit_softcap = {Softcap::Function::Tanh, 2};
        Driver d(c, policy_shape(1, CONTEXT));
        d.randomise(3);
        EngineOptions o = engine_options(SLOTS, CONTEXT, 1);
        o.cache_pages = 2 * SLOTS;
        ExactEngine exact(d, o);
        Engine& engine = exact.engine;
        const std::vector<int32_t> prompt = random_tokens(c, 70, 5);
        std::map<int32_t, double> probability;
        std::map<int32_t, int64_t> count;
        for (int64_t round = 0; round < ROUNDS; round++) {
            std::vector<Prompt> prompts(SLOTS);
            for (int64_t s = 0; s < SLOTS; s++) {
                prompts[size_t(s)].slot = s;
                prompts[size_t(s)].sequence = round * SLOTS + s;
                prompts[size_t(s)].like = s ? 0 : -1;
            }
            prompts[0].tokens = prompt;
            engine.prefill(prompts);
            const Engine::Step& step = engine.next();
            for (size_t i = 0; i < step.tokens.size(); i++) {
                const double p = std::exp(double(step.logprobs[i]));
                EXPECT_EQ(probability.emplace(step.tokens[i], p).first->second, p);
                count[step.tokens[i]]++;
            }
            for (int64_t s = 0; s < SLOTS; s++) {
                engine.retire(s);
                engine.truncate(s);
            }
        }
        const double draws = double(SLOTS * ROUNDS);
        double chi_square = 0, rest = 1, rest_count = draws;
        int64_t cells = 1;
        const auto add = [&](double n, double p) { chi_square += (n - draws * p) * (n - draws * p) / (draws * p); };
        for (const auto& [token, p] : probability) {
            if (draws * p < 8) continue;
            add(double(count[token]), p);
            rest -= p;
            rest_count -= double(count[token]);
            cells++;
        }
        if (rest * draws >= 1) add(rest_count, rest);
        EXPECT_GT(cells, 20);
        // Mean and variance of χ² with n degrees of freedom: n and 2n. Five deviations.
        EXPECT_LT(chi_square, double(cells - 1) + 5 * std::sqrt(2.0 * double(cells - 1)));
    }
}

}  // namespace

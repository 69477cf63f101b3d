// Tests the engine: packed prefills and decode steps with a KV cache against forward() over the whole sequence.
#include "dev/tests/allocations.h"
#include "dev/tests/generation_fixture.h"
#include "dev/tests/test_util.h"

namespace {

class ModelVariants : public ModelVariantTest {};

// Prompts of unequal length in one packed pass, then steps at different positions.
TEST_P(ModelVariants, EngineMatchesForward) {
    constexpr int64_t CONTEXT = 14;
    for (const DType dtype : generation_dtypes(config())) {
        Driver d(config(), training_shape(1, T, dtype));
        d.randomise(3);
        Generation g(d.model, engine_options(4, CONTEXT));
        std::vector<std::vector<int32_t>> sequences;
        std::vector<Prompt> prompts;
        for (const int64_t n : {5, 1, 9, 2}) {
            sequences.push_back(random_tokens(config(), n, uint64_t(n)));
            prompts.push_back({3 - int64_t(prompts.size()), sequences.back(), 0, 0});  // slots in another order
        }
        std::vector<std::vector<float>> logits = g.prefill(prompts);
        for (int step = 0; step < 6; step++) {
            for (size_t i = 0; i < sequences.size(); i++) {
                const std::vector<double> ref = logits_after(d, sequences[i]);
                expect_same_logits(logits[i], ref, str(dtype_name(dtype), ", sequence ", i, " step ", step), dtype);
                EXPECT_EQ(g.sampled[i], std::max_element(logits[i].begin(), logits[i].end()) - logits[i].begin());
                sequences[i].push_back(g.sampled[i]);
            }
            if (step < 5) logits = g.decode();
        }
    }
}

// The same sequence in one prefill, in parts, and token by token.
TEST_P(ModelVariants, PrefillContinuesASequence) {
    const std::vector<int32_t> sequence = random_tokens(config(), 11, 3);
    for (const DType dtype : generation_dtypes(config())) {
        Driver d(config(), training_shape(1, T, dtype));
        d.randomise(3);
        const std::vector<double> ref = logits_after(d, sequence);
        for (const std::vector<size_t>& cuts :
             {std::vector<size_t>{11}, {4, 11}, {1, 2, 9, 11}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}}) {
            Generation g(d.model, engine_options(2, 12));
            std::vector<std::vector<float>> logits;
            size_t begin = 0;
            for (const size_t end : cuts) {
                if (begin) g.engine.retire(1);
                logits = g.prefill({{1, {sequence.begin() + long(begin), sequence.begin() + long(end)}, 0, 0}});
                begin = end;
            }
            expect_same_logits(logits[0], ref, str(dtype_name(dtype), ", ", cuts.size(), " parts"), dtype);
            EXPECT_EQ(g.engine.length(1), 11);
        }
    }
}

// In prefills and steps, each sequence of a batch of unequal lengths has the same bits as alone; on a GPU with
// batch_invariant.
TEST_P(ModelVariants, SequencesDoNotDependOnTheBatch) {
    EngineOptions o = engine_options(3, 16, 1);
    o.batch_invariant = true;
    o.sampling.repeat_penalty = 1.3f;
    Generation together(driver.model, o);
    std::vector<Prompt> prompts;
    for (const int64_t n : {7, 2, 4})
        prompts.push_back({int64_t(prompts.size()), random_tokens(config(), n, uint64_t(n)), 10 + n, 0});
    std::vector<std::vector<std::vector<float>>> steps{together.prefill(prompts)};
    std::vector<std::vector<int32_t>> sampled{together.sampled};
    for (int i = 0; i < 8; i++) {
        steps.push_back(together.decode());
        sampled.push_back(together.sampled);
    }
    for (size_t i = 0; i < prompts.size(); i++) {
        Generation alone(driver.model, o);
        Prompt p = prompts[i];
        p.slot = 0;
        for (size_t step = 0; step < steps.size(); step++) {
            const std::vector<std::vector<float>> logits = step ? alone.decode() : alone.prefill({p});
            ASSERT_TRUE(same_bits(logits[0], steps[step][i])) << "sequence " << i << " step " << step;
            ASSERT_EQ(alone.sampled[0], sampled[step][i]);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Reference, ModelVariants, testing::ValuesIn(MODEL_VARIANTS), variant_name);

// Contexts that are longer than a KV split of attention, and longer than a pass, so that the prompt is split.
TEST_P(GenerationByType, LongContexts) {
    std::vector<int64_t> lengths = {63, 64, 600, 1025, 4097};
    if (backend_device() != Device::CPU) lengths.insert(lengths.end(), {9000, 32768});
    ASSERT_GT(lengths.back(), Engine::prompt_chunk_tokens());
    for (const int64_t n : lengths) {
        Generation g(driver.model, engine_options(2, n + 4));
        std::vector<int32_t> sequence = random_tokens(driver.model.config, n, 4);
        std::vector<std::vector<float>> logits =
            g.prefill({{1, sequence, 0, 0}, {0, random_tokens(driver.model.config, 3, 5), 1, 0}});
        for (int step = 0; step < 3; step++) {
            expect_same_logits(logits[0], logits_after(driver, sequence), str(n, " tokens, step ", step));
            sequence.push_back(g.sampled[0]);
            logits = g.decode();
        }
    }
}

// More sequences than the fused decode step takes, and more than the small-batch GEMMs take. Does not test gated linear
// attention in 16 bits: some of so many first tokens have a q·k near 0, by which the norm of the heads divides.
TEST_P(GenerationByType, ManySequences) {
    const ModelConfig& c = driver.model.config;
    for (const int64_t slots : {12, 70})
        for (const DType dtype :
             c.layers_of(AttentionType::GatedLinear) ? std::vector<DType>{DType::F32} : generation_dtypes(c)) {
            Driver d(c, training_shape(1, 8, dtype));
            d.randomise(3);
            Generation g(d.model, engine_options(slots, 20));
            std::vector<std::vector<int32_t>> sequences;
            std::vector<Prompt> prompts;
            for (int64_t i = 0; i < slots; i++) {
                sequences.push_back(random_tokens(c, 1 + i % 13, uint64_t(i)));
                prompts.push_back({i, sequences.back(), i, 0});
            }
            std::vector<std::vector<float>> logits = g.prefill(prompts);
            for (int step = 0; step < 3; step++) {
                for (size_t i = 0; i < sequences.size(); i++) {
                    expect_same_logits(logits[i], logits_after(d, sequences[i]),
                                       str(dtype_name(dtype), ", sequence ", i, " of ", slots, ", step ", step), dtype);
                    sequences[i].push_back(g.sampled[i]);
                }
                logits = g.decode();
            }
        }
}

// Sequences that end leave the batch, new ones take their slots, and the others are not affected.
TEST_P(GenerationByType, SlotsAreReusedByNewSequences) {
    const ModelConfig& c = driver.model.config;
    EngineOptions o = engine_options(4, 40, 1);
    o.batch_invariant = true;
    Generation g(driver.model, o), alone(driver.model, engine_options(1, 40, 1));
    std::vector<Prompt> prompts;
    for (int64_t i = 0; i < 4; i++) prompts.push_back({i, random_tokens(c, 3 + 2 * i, uint64_t(i)), i, 0});
    g.prefill(prompts);
    std::vector<int32_t> third{g.sampled[2]}, last;
    for (int i = 0; i < 3; i++) {
        g.decode();
        third.push_back(g.sampled[2]);
    }
    g.engine.retire(0);
    g.engine.retire(3);
    EXPECT_EQ(g.engine.active(), 2);
    g.decode();
    EXPECT_EQ(g.sampled.size(), 2u);
    third.push_back(g.sampled[1]);
    g.engine.truncate(0);
    g.prefill({{0, random_tokens(c, 5, 9), 7, 0}});
    EXPECT_EQ(g.sampled.size(), 1u);
    last = g.sampled;
    for (int i = 0; i < 3; i++) {
        g.engine.decode();
        const Engine::Step& s = g.engine.next();
        ASSERT_EQ(s.slots.size(), 3u);
        for (size_t k = 0; k < 3; k++) {
            if (s.slots[k] == 2) third.push_back(s.tokens[k]);
            if (s.slots[k] == 0) last.push_back(s.tokens[k]);
        }
    }
    const auto expected = [&](const Prompt& p, size_t n) {
        alone.engine.retire(0);
        alone.engine.truncate(0);
        alone.prefill({{0, p.tokens, p.sequence, 0}});
        std::vector<int32_t> sampled{alone.sampled[0]};
        while (sampled.size() < n) {
            alone.decode();
            sampled.push_back(alone.sampled[0]);
        }
        return sampled;
    };
    EXPECT_EQ(third, expected(prompts[2], third.size()));
    EXPECT_EQ(last, expected({0, random_tokens(c, 5, 9), 7, 0}, last.size()));
}

// A decode step allocates no memory, except when it needs the graph of a longer context.
TEST(Engine, StepAllocatesNothing) {
    if (backend_device() == Device::CPU)
        GTEST_SKIP() << "libgomp allocates a thread team if the previous team had another size";
    if (why_no_preload()) GTEST_SKIP() << why_no_preload();
    const Allocations allocations("Engine.StepAllocatesNothing");
    if (!allocations.counting) return;
    for (const char* attention : {"SS", "LG", "SW"}) {
        Driver driver(long_config(attention), training_shape(1, 8));
        driver.randomise(3);
        Generation g(driver.model, engine_options(3, 64));
        g.prefill({{0, {1, 2, 3}, 0, 0}, {2, {4}, 1, 0}});
        const auto step = [&] {
            g.engine.decode();
            g.engine.next();
        };
        step();
        step();
        allocations.expect_none(attention, [&] {
            for (int i = 0; i < 20; i++) step();
        });
    }
}

// Dynamic NTK scaling rotates a prompt by the angles of its length, as forward() does, and each later token by those of
// the new length. Keys in the cache keep their angles. A decode step equals a prefill of one token.
TEST(Engine, DynamicRopeFollowsSequenceLength) {
    ModelConfig c = long_config();
    c.rope_scaling.kind = RopeScaling::Kind::Dynamic;
    c.rope_scaling.factor = 2;
    c.max_positions = c.rope_scaling.original_max_position = 16;
    Driver driver(c, training_shape(1, 8));
    driver.randomise(3);
    for (const int64_t n : {5, 16, 17, 30}) {
        Generation g(driver.model, engine_options(2, 40)), by_prompt(driver.model, engine_options(2, 40));
        const std::vector<int32_t> sequence = random_tokens(c, n, 6), other = random_tokens(c, 33, 7);
        const std::vector<std::vector<float>> logits = g.prefill({{0, sequence, 0, 0}, {1, other, 1, 0}});
        expect_same_logits(logits[0], logits_after(driver, sequence), str(n, " tokens"));
        expect_same_logits(logits[1], logits_after(driver, other), "33 tokens beside them");
        by_prompt.prefill({{0, sequence, 0, 0}});
        by_prompt.engine.retire(0);
        const std::vector<std::vector<float>> next = by_prompt.prefill({{0, {g.sampled[0]}, 0, 1}});
        expect_same_logits(g.decode()[0], {next[0].begin(), next[0].end()}, str("the step after ", n, " tokens"));
    }
}

// The log probability of a sampled token is the model's, before penalty, filters and temperature.
TEST(Engine, LogprobsMatchTheModel) {
    Driver driver(long_config(), training_shape(1, 8));
    driver.randomise(3);
    EngineOptions o = engine_options(2, 20, 0.7f);
    o.logprobs = true;
    o.sampling.top_k = 5;
    o.sampling.repeat_penalty = 2;
    Generation g(driver.model, o);
    g.engine.prefill(
        {{0, random_tokens(driver.model.config, 3, 1), 0, 0}, {1, random_tokens(driver.model.config, 5, 2), 1, 0}});
    for (int step = 0; step < 4; step++) {
        const Engine::Step& s = g.engine.next();
        for (size_t i = 0; i < 2; i++) {
            const std::vector<float> logits = g.engine.logits(int64_t(i));
            double sum = 0;
            for (const float l : logits) sum += std::exp(double(l));
            EXPECT_NEAR(s.logprobs[i], double(logits[size_t(s.tokens[i])]) - std::log(sum), 1e-5);
        }
        g.engine.decode();
    }
}

// Rows of the vocabulary beyond the tokenizer's ids are never sampled, whatever their logits: by temperature, by
// argmax, and with a penalty whose marks cover the tokenizer's ids alone. A prompt may contain them.
TEST(Engine, PaddingIdsAreNeverSampled) {
    Driver driver(base_config(), training_shape(1, 8));
    driver.randomise(3);
    constexpr int64_t USED = 33;  // of 53
    for (const float temperature : {0.0f, 5.0f}) {
        for (const float penalty : {1.0f, 1.5f}) {
            const auto sampled = [&](int64_t vocab) {
                EngineOptions o = engine_options(1, 16, temperature);
                o.sampled_vocab = vocab;
                o.sampling.repeat_penalty = penalty;
                Generation g(driver.model, o);
                g.prefill({{0, {50, 1, 40}, 0, 0}});
                std::vector<int32_t> tokens = g.sampled;
                for (int step = 0; step < 12; step++) {
                    g.decode();
                    tokens.push_back(g.sampled[0]);
                }
                return *std::max_element(tokens.begin(), tokens.end());
            };
            EXPECT_LT(sampled(USED), USED) << temperature << " " << penalty;
            EXPECT_GE(sampled(0), USED) << temperature << " " << penalty;  // they are likely enough
        }
    }
}

TEST(Engine, InvalidArgumentsAreErrors) {
    Driver driver(base_config(), training_shape(1, 8));
    const auto make = [&](int64_t slots, int64_t context) {
        Generation g(driver.model, engine_options(slots, context));
    };
    expect_error([&] { make(1, 17); },
                 "a context of 17 tokens exceeds the model's position table of 16 rows; use a shorter context");
    expect_error([&] { make(0, 8); }, "engine: a batch of 0 sequences of 8 tokens; both must be positive");
    Generation g(driver.model, engine_options(2, 8));
    expect_error([&] { g.prefill({{0, {1, 53}, 0, 0}}); }, "token 53 is beyond the model's vocabulary of 53 tokens");
    expect_error([&] { g.prefill({{0, {}, 0, 0}}); }, "the prompt has no tokens; give it at least one");
    expect_error([&] { g.prefill({{2, {1}, 0, 0}}); }, "engine: slot 2 does not exist; there are 2");
    expect_error([&] { g.prefill({{1, {1}, 0, 0}, {1, {2}, 0, 0}}); }, "engine: slot 1 is given twice");
    expect_error(
        [&] {
            g.prefill({{0, std::vector<int32_t>(9, 1), 0, 0}});
        },
        "a sequence of 9 tokens exceeds the context of 8; shorten the prompt or raise --context");
    EXPECT_FALSE(g.engine.ready());
    InferenceWeights adapted = inference_weights(driver.model);
    adapted.blocks[1].proj.lora.a = adapted.blocks[1].proj.weight;
    expect_error(
        [&] {
            Engine engine(driver.model.config, engine_options(2, 8), driver.ctx.stream);
            engine.allocate(adapted);
        },
        "engine: weights in NF4 or with adapters; merge the adapters first");
}

// Layers with a window equal recomputation, for prompts shorter and longer than it, in one pass with others and
// continued, and for sequences at different positions.
TEST(Engine, WindowsEqualRecomputation) {
    for (const char* attention : {"WW", "WS"}) {
        for (const DType dtype : generation_dtypes(long_config(attention))) {
            ModelConfig c = long_config(attention);
            if (c.window(1)) c.layer[1].window = 9;
            Driver d(c, training_shape(1, 8, dtype));
            d.randomise(3);
            Generation g(d.model, engine_options(4, 60));
            std::vector<std::vector<int32_t>> sequences;
            std::vector<Prompt> prompts;
            for (const int64_t n : {2, 5, 7, 23}) {
                sequences.push_back(random_tokens(c, n, uint64_t(n)));
                prompts.push_back({3 - int64_t(prompts.size()), sequences.back(), 0, 0});
            }
            std::vector<std::vector<float>> logits = g.prefill(prompts);
            for (int step = 0; step < 30; step++) {
                for (size_t i = 0; i < sequences.size(); i++) {
                    if (step < 8 || step % 5 == 0)
                        expect_same_logits(logits[i], logits_after(d, sequences[i]),
                                           str(attention, " ", dtype_name(dtype), ", sequence ", i, " step ", step),
                                           dtype);
                    sequences[i].push_back(g.sampled[i]);
                }
                if (step < 29) logits = g.decode();
            }
            // All continue with more tokens in one pass: the last sampled token is not in the cache yet.
            std::vector<Prompt> more;
            for (size_t i = 0; i < sequences.size(); i++) {
                g.engine.retire(3 - int64_t(i));
                std::vector<int32_t> tokens = random_tokens(c, 1 + 2 * int64_t(i), 40 + i);
                tokens.insert(tokens.begin(), sequences[i].back());
                sequences[i].insert(sequences[i].end(), tokens.begin() + 1, tokens.end());
                if (i < 3) more.push_back({3 - int64_t(i), tokens, 0, 0});
            }
            logits = g.prefill(more);
            for (size_t i = 0; i < more.size(); i++)
                expect_same_logits(logits[i], logits_after(d, sequences[i]), str("continued ", i), dtype);
        }
    }
}

// Below, at and above the window: no key too many and none too few.
TEST(Engine, WindowEdges) {
    for (const int64_t window : {1, 2, 8}) {
        ModelConfig c = long_config("WW");
        c.layer[0].window = c.layer[1].window = window;
        Driver d(c, training_shape(1, 8));
        d.randomise(3);
        for (const int64_t n : {window - 1, window, window + 1, 2 * window + 3}) {
            if (n == 0) continue;
            Generation g(d.model, engine_options(1, 40));
            std::vector<int32_t> sequence = random_tokens(c, n, 7);
            std::vector<std::vector<float>> logits = g.prefill({{0, sequence, 0, 0}});
            for (int step = 0; step < 4; step++) {
                expect_same_logits(logits[0], logits_after(d, sequence), str("window ", window, ", ", n, " + ", step));
                sequence.push_back(g.sampled[0]);
                logits = g.decode();
            }
        }
    }
}

// A sequence with windows can be cut back by the tokens that the host may be ahead, and further where no page before
// its windows was freed; else the sequence is read again.
TEST(Engine, SequencesWithWindowsAreCutBack) {
    ModelConfig c = long_config("WS");
    c.max_positions = 300;
    Driver d(c, training_shape(1, 8));
    d.randomise(3);
    for (const auto& [n, freed] : {std::pair<int64_t, int64_t>{20, 0}, {136, 128}, {270, 256}}) {  // freed tokens
        const std::vector<int32_t> sequence = random_tokens(c, n, 3);
        for (const int64_t kept : {n, n - 1, n - 2, freed + 4, freed + 3, int64_t(3)}) {
            Generation g(d.model, engine_options(1, 300));
            g.prefill({{0, sequence, 0, 0}});
            g.engine.retire(0);
            const int64_t held = g.engine.truncate(0, kept);
            EXPECT_EQ(held, kept >= freed + 4 || freed == 0 ? kept : 0) << kept << " of " << n;
            std::vector<int32_t> other(sequence.begin(), sequence.begin() + kept);
            for (const int32_t id : random_tokens(c, 2, 9)) other.push_back(id);
            expect_same_logits(g.prefill({{0, {other.begin() + held, other.end()}, 0, 0}})[0], logits_after(d, other),
                               str("cut back to ", kept));
        }
    }
}

// Sequences of unequal lengths share a cache that is too small for all of them at full length. A step waits until there
// is a page for each; cutting another sequence gives its pages back. The tokens are those of a cache with room.
TEST(Engine, SequencesShareTheCachesPages) {
    ModelConfig c = long_config("SW");
    c.max_positions = 600;
    Driver d(c, training_shape(1, 8));
    d.randomise(3);
    EngineOptions few = engine_options(3, 520);
    few.cache_pages = 6;  // of 15
    few.batch_invariant = true;
    EngineOptions enough = few;
    enough.cache_pages = 0;
    Generation small(d.model, few), large(d.model, enough);
    EXPECT_LT(small.engine.cache_bytes(), large.engine.cache_bytes());
    const std::vector<Prompt> prompts{
        {0, random_tokens(c, 250, 1), 0, 0}, {1, random_tokens(c, 254, 2), 1, 0}, {2, random_tokens(c, 250, 3), 2, 0}};
    EXPECT_TRUE(small.engine.has_room(prompts));
    EXPECT_EQ(small.prefill(prompts), large.prefill(prompts));
    for (int step = 0; step < 2; step++) EXPECT_EQ(small.decode(), large.decode());
    EXPECT_FALSE(small.engine.has_room());  // sequence 1 has 256 tokens
    EXPECT_FALSE(small.engine.ready());
    expect_error([&] { small.engine.decode(); }, "engine: decode() while not ready()");
    small.engine.retire(2);
    large.engine.retire(2);
    EXPECT_FALSE(small.engine.has_room());
    EXPECT_EQ(small.engine.truncate(2), 0);
    for (int step = 0; step < 6; step++) {
        ASSERT_TRUE(small.engine.ready());
        EXPECT_EQ(small.decode(), large.decode());
    }
    expect_error(
        [&] {
            small.prefill({{2, random_tokens(c, 129, 3), 3, 0}});
        },
        "engine: the KV cache has too few free pages for the prompts");
}

// A state keeps all tokens of its sequence or none. The layers determine the sizes of the cache and the states.
TEST(Engine, LinearLayersHaveStatesInsteadOfCaches) {
    const auto engine = [](const char* attention, int64_t context) {
        EngineOptions o = engine_options(3, context);
        return std::make_unique<Engine>(long_config(attention), o, Stream{});
    };
    const int64_t kv = engine("SS", 32)->cache_bytes();
    EXPECT_NEAR(double(engine("SL", 32)->cache_bytes()), double(kv) / 2, ArenaPlan::ALIGNMENT);
    EXPECT_EQ(engine("LG", 32)->cache_bytes(), 0);
    EXPECT_EQ(engine("SS", 32)->state_bytes(), 0);
    EXPECT_GE(engine("GG", 32)->state_bytes(), 2 * 3 * 2 * 8 * 8 * 4);
    EXPECT_GT(engine("LL", 32)->state_bytes(), engine("GG", 32)->state_bytes());  // with sums of keys
    EXPECT_EQ(engine("LL", 32)->state_bytes(), engine("LL", 4096)->state_bytes());

    Driver driver(long_config("GS"), training_shape(1, 8));
    driver.randomise(3);
    Generation g(driver.model, engine_options(1, 30));
    const std::vector<int32_t> sequence = random_tokens(driver.model.config, 9, 1);
    g.prefill({{0, sequence, 0, 0}});
    g.engine.retire(0);
    EXPECT_EQ(g.engine.truncate(0, 9), 9);
    EXPECT_EQ(g.engine.truncate(0, 8), 0);
    EXPECT_EQ(g.engine.length(0), 0);
    expect_same_logits(g.prefill({{0, sequence, 0, 0}})[0], logits_after(driver, sequence), "after truncate(0)");

    // One pass continues a sequence and starts another one in a reused slot.
    Generation two(driver.model, engine_options(2, 30));
    const std::vector<int32_t> other = random_tokens(driver.model.config, 7, 2);
    two.prefill(
        {{0, {sequence.begin(), sequence.begin() + 4}, 0, 0}, {1, random_tokens(driver.model.config, 5, 3), 1, 0}});
    two.engine.retire(0);
    two.engine.retire(1);
    two.engine.truncate(1);
    const std::vector<std::vector<float>> logits =
        two.prefill({{0, {sequence.begin() + 4, sequence.end()}, 0, 0}, {1, other, 1, 0}});
    expect_same_logits(logits[0], logits_after(driver, sequence), "continued");
    expect_same_logits(logits[1], logits_after(driver, other), "a new sequence");
}

}  // namespace

// Tests the engine: packed prefills and decode steps with a KV cache against forward() over the whole sequence.
#include <map>
#include <numeric>
#include <set>

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
        // A gated linear head may be near 0: after five tokens of the last sequence of qk_norm_linear weights that move
        // by 2^-8 move its logits by 5% in the mean and by up to 14%.
        std::unique_ptr<MovedWeights> moved;
        if (dtype != DType::F32 && config().layers_of(AttentionType::GatedLinear) > 0)
            moved = std::make_unique<MovedWeights>(d, CONTEXT);
        std::vector<std::vector<float>> logits = g.prefill(prompts);
        for (int step = 0; step < 6; step++) {
            for (size_t i = 0; i < sequences.size(); i++) {
                const std::vector<double> ref = logits_after(d, sequences[i]);
                const std::vector<double> rounded = moved ? moved->apply(ref, sequences[i]) : std::vector<double>{};
                expect_same_logits(logits[i], ref, str(dtype_name(dtype), ", sequence ", i, " step ", step), dtype,
                                   rounded);
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

// Steps whose passes compute prompts, too: in parts, several, with tokens that the host has not read yet, beside
// sequences that have ended.
TEST_P(ModelVariants, PromptsJoinSteps) {
    if (config().has_linear_attention()) GTEST_SKIP() << "steps with linear attention compute no prompts";
    for (const DType dtype : generation_dtypes(config())) {
        Driver d(config(), training_shape(1, T, dtype));
        d.randomise(3);
        EngineOptions o = engine_options(40, 16);
        o.joint_passes = true;
        Generation g(d.model, o);
        std::map<int64_t, std::vector<int32_t>> sequences;  // by slot
        const auto prompt = [&](int64_t slot, int64_t n, int64_t later = 0) {
            Prompt p{slot, random_tokens(config(), n, uint64_t(10 * slot + n)), slot, 0};
            p.later = later;
            sequences[slot].insert(sequences[slot].end(), p.tokens.begin(), p.tokens.end());
            return p;
        };
        // rows: those of slots in the step; without them their numbers.
        const auto check = [&](const std::vector<int64_t>& slots, const char* step, std::vector<int64_t> rows = {}) {
            const Engine::Step& s = g.engine.next();
            ASSERT_EQ(s.slots, slots) << step;
            for (size_t i = 0; i < slots.size(); i++) {
                expect_same_logits(g.engine.logits(rows.empty() ? int64_t(i) : rows[i]),
                                   logits_after(d, sequences[slots[i]]),
                                   str(dtype_name(dtype), ", ", step, ", slot ", slots[i]), dtype);
                sequences[slots[i]].push_back(s.tokens[i]);
            }
        };
        g.engine.prefill({prompt(2, 4), prompt(0, 1)});
        check({2, 0}, "prefill");
        g.engine.decode({prompt(3, 3, 2)});
        check({2, 0}, "a part");
        g.engine.decode({prompt(3, 2), prompt(1, 5)});
        EXPECT_TRUE(g.engine.pending());
        check({2, 0, 3, 1}, "two end");
        g.engine.retire(0);
        g.engine.truncate(0);
        sequences.erase(0);
        g.engine.decode({prompt(0, 2, 3)});
        check({2, 3, 1}, "after another has ended");
        g.engine.decode();
        check({2, 3, 1}, "decode");
        if (Engine::steps_ahead() > 1) {
            g.engine.decode();
            g.engine.retire(3);
            g.engine.decode({prompt(0, 1, 2)});  // queued behind a step
            const Engine::Step& s = g.engine.next();
            sequences[2].push_back(s.tokens[0]);
            sequences[1].push_back(s.tokens[2]);
            check({2, 1}, "behind a step", {0, 2});
        } else {
            g.engine.retire(3);
            g.engine.decode({prompt(0, 1, 2)});
            check({2, 1}, "another part");
        }
        g.engine.decode({prompt(0, 2)});
        check({2, 1, 0}, "the end of a part");
    }
}

// A step takes pages for its sequences and for its prompts: of two that are left a prompt of two pages gets none.
TEST(Engine, JoiningPromptsLeavePagesToTheSequences) {
    Driver d(long_config("SS"), training_shape(1, 8));
    d.randomise(3);
    EngineOptions o = engine_options(2, 3 * KV_PAGE);
    o.joint_passes = true;
    o.cache_pages = 3;
    Generation g(d.model, o);
    g.prefill({{0, random_tokens(d.model.config, KV_PAGE, 1), 0, 0}});
    Prompt two_pages{1, random_tokens(d.model.config, KV_PAGE + 1, 2), 1, 0};
    expect_error([&] { g.engine.decode({two_pages}); }, "engine: the KV cache has too few free pages for the prompts");
    two_pages.tokens.pop_back();
    g.engine.decode({two_pages});
    EXPECT_EQ(g.engine.next().slots, (std::vector<int64_t>{0, 1}));
    EXPECT_EQ(g.engine.pages_in_use(), 3);
}

// Passes that are graphs on a GPU (Engine::recorded_rows()): over prompts of unequal length, some with a past of more
// than a page, and with one adapter for all of them; as many chunks as a graph has, fewer and more. Then the same
// beside the sequences that generate, in one pass. Does not test gated linear attention in 16 bits, as ManySequences.
TEST_P(GenerationByType, RecordedPasses) {
    using Pass = std::vector<std::pair<int64_t, int64_t>>;  // slot, tokens
    const Pass passes[] = {{{2, 200}},
                           {{4, 140}},
                           {{2, 50}, {4, 190}},
                           {{0, 3}, {2, 60}, {1, 40}, {3, 20}},
                           {{0, 60}, {1, 1}, {2, 2}, {3, 7}, {5, 4}}};
    const ModelConfig& c = driver.model.config;
    const bool gated = c.layers_of(AttentionType::GatedLinear) > 0;
    for (const DType dtype : gated ? std::vector<DType>{DType::F32} : generation_dtypes(c))
        for (const bool adapted : {false, true}) {
            Driver d(c, training_shape(1, 8, dtype)), merged(c, training_shape(1, 8, DType::F32));
            d.randomise(3);
            const RandomAdapters adapters(d.model, 1, 8);
            if (adapted) adapters.merge_into(merged, d, 0);
            EngineOptions o = engine_options(6, 900);
            o.all_batch_sizes = true;
            if (!c.has_linear_attention()) o.joint_passes = true;
            Generation g(d.model, o, adapted ? &adapters : nullptr, adapted);
            std::vector<std::vector<int32_t>> sequences(6);
            std::map<int64_t, int32_t> sampled;  // by slot that generates
            for (const bool joint : {false, true}) {
                if (joint && !g.engine.joins_at_all()) continue;
                for (const Pass& pass : passes) {
                    std::vector<Prompt> prompts;
                    int64_t total = 0;
                    for (const auto& [slot, n] : pass) {
                        if (sampled.erase(slot)) g.engine.retire(slot);
                        prompts.push_back({slot, random_tokens(c, n, uint64_t(n)), slot, 0, adapted ? 0 : -1});
                        std::vector<int32_t>& sequence = sequences[size_t(slot)];
                        sequence.insert(sequence.end(), prompts.back().tokens.begin(), prompts.back().tokens.end());
                        total += n;
                    }
                    EXPECT_LE(total + joint * g.engine.joint_rows(), Engine::JOINT_PASS_ROWS);
                    for (const auto& [slot, token] : sampled)
                        if (joint) sequences[size_t(slot)].push_back(token);
                    if (joint)
                        g.engine.decode(prompts);
                    else
                        g.engine.prefill(prompts);
                    const Engine::Step& step = g.engine.next();
                    EXPECT_EQ(step.slots.size(), pass.size() + (joint ? sampled.size() : 0));
                    for (size_t i = 0; i < step.slots.size(); i++) {
                        const int64_t slot = step.slots[i];
                        expect_same_logits(g.engine.logits(int64_t(i)),
                                           logits_after(adapted ? merged : d, sequences[size_t(slot)]),
                                           str(dtype_name(dtype), ", slot ", slot, " of ", pass.size(),
                                               joint ? ", joint" : "", adapted ? ", adapted" : ""),
                                           dtype);
                        sampled[slot] = step.tokens[i];
                    }
                }
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

// Sequences with different adapters and without one in a batch: each has the logits of the model with its adapter
// merged, and the bits that it has alone.
TEST_P(ModelVariants, AdaptersOfRowsEqualMergedOnes) {
    for (const DType dtype : generation_dtypes(config())) {
        Driver d(config(), training_shape(1, T, dtype));
        d.randomise(3);
        const RandomAdapters adapters(d.model, 2, 5);
        const auto merge = [&](DType in, int64_t i) {
            auto to = std::make_unique<Driver>(config(), training_shape(1, T, in));
            adapters.merge_into(*to, d, i);
            return to;
        };
        // Of gated linear heads alone rounding is more than bounds() allows.
        const bool rounds = dtype != DType::F32 && config().layers_of(AttentionType::GatedLinear) > 0;
        std::vector<std::unique_ptr<Driver>> merged, rounded;
        for (int64_t i = 0; i < 2; i++) {
            merged.push_back(merge(DType::F32, i));
            if (rounds) rounded.push_back(merge(dtype, i));
        }
        EngineOptions o = engine_options(4, 14);
        o.batch_invariant = true;
        Generation g(d.model, o, &adapters, 2);
        std::vector<Prompt> prompts;
        // Not 2: a linear head is then so near 0 that fp32 moves the logits by 3e-5 on a GPU.
        for (const int64_t n : {5, 1, 9, 7}) {
            prompts.push_back({int64_t(prompts.size()), random_tokens(config(), n, uint64_t(n)), 0, 0});
            prompts.back().adapter = std::array{1, -1, 0, 1}[prompts.size() - 1];
        }
        std::vector<std::unique_ptr<Generation>> alone;
        std::vector<std::vector<int32_t>> sequences;
        for (Prompt p : prompts) {
            sequences.push_back(p.tokens);
            alone.push_back(std::make_unique<Generation>(d.model, o, &adapters, 2));
        }
        for (int step = 0; step < 5; step++) {
            const std::vector<std::vector<float>> logits = step ? g.decode() : g.prefill(prompts);
            for (size_t i = 0; i < prompts.size(); i++) {
                const std::string where = str(dtype_name(dtype), ", sequence ", i, " step ", step);
                Prompt p = prompts[i];
                p.slot = 0;
                const std::vector<std::vector<float>> own = step ? alone[i]->decode() : alone[i]->prefill({p});
                EXPECT_TRUE(same_bits(own[0], logits[i])) << where;
                Driver& reference = p.adapter < 0 ? d : *merged[size_t(p.adapter)];
                std::vector<double> of_dtype;
                if (rounds && p.adapter >= 0) of_dtype = logits_after(*rounded[size_t(p.adapter)], sequences[i]);
                expect_same_logits(logits[i], logits_after(reference, sequences[i]), where, dtype, of_dtype);
                sequences[i].push_back(g.sampled[i]);
            }
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Reference, ModelVariants, testing::ValuesIn(MODEL_VARIANTS), variant_name);

// More rows than the batch-invariant kernels take at once, of a model whose linear layers have adapters in their sums
// on Hopper GPUs (linear_with_adapters): both the prompts' pass and the steps.
TEST(Engine, AdaptersOfManyRowsEqualMergedOnes) {
    ModelConfig c = long_config();
    c.channels = 64;
    c.heads = 4;
    c.head_size = 16;
    for (const DType dtype : generation_dtypes(c)) {
        Driver d(c, training_shape(1, 16, dtype)), merged(c, training_shape(1, 16, DType::F32));
        d.randomise(3);
        const RandomAdapters adapters(d.model, 1, 8);
        adapters.merge_into(merged, d, 0);
        struct Row {
            int64_t slot;
            int32_t adapter;
            std::vector<int32_t> sequence;
        };
        for (const int64_t rows : {12, 70}) {
            Generation g(d.model, engine_options(rows, 30), &adapters, 1);
            std::vector<Row> batch;
            const auto check = [&](const std::vector<std::vector<float>>& logits, size_t first) {
                for (size_t i = first; i < batch.size(); i++) {
                    Row& r = batch[i];
                    expect_same_logits(
                        logits[i - first], logits_after(r.adapter < 0 ? d : merged, r.sequence),
                        str(dtype_name(dtype), ", slot ", r.slot, " of ", rows, ", ", r.sequence.size(), " tokens"),
                        dtype);
                    r.sequence.push_back(g.sampled[i - first]);
                }
            };
            std::vector<Prompt> prompts;
            for (int64_t i = 0; i < rows; i++) {
                batch.push_back({i, rows > 12 || i % 3 ? 0 : -1, random_tokens(c, 3 + i % 4, uint64_t(i))});
                prompts.push_back({i, batch.back().sequence, i, 0, batch.back().adapter});
            }
            check(g.prefill(prompts), 0);
            for (int step = 0; step < 2; step++) check(g.decode(), 0);
            // All rows have the adapter, then all but one, then all again, in graphs of one size.
            for (const int32_t adapter : {-1, 0}) {
                const int64_t slot = batch[5].slot;
                g.engine.retire(slot);
                g.engine.truncate(slot);
                batch.erase(batch.begin() + 5);
                batch.push_back({slot, adapter, random_tokens(c, 4, uint64_t(100 + adapter))});
                check(g.prefill({{slot, batch.back().sequence, 200 + adapter, 0, adapter}}), batch.size() - 1);
                for (int step = 0; step < 2; step++) check(g.decode(), 0);
            }
        }
    }
}

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
    EngineOptions of_one = o;
    of_one.slots = 1;
    Generation g(driver.model, o), alone(driver.model, of_one);
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

// A decode step allocates no memory, not on the host either, except when it needs the graph of a longer context.
// (Device memory in steps with all that requests ask for: test_scheduler.cpp.)
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
// QLoRA's adapters on their NF4 base: the logits of the dequantised weights with the adapter merged.
TEST(Engine, AdaptersOnNf4Bases) {
    ModelConfig c = long_config();
    c.channels = 64;
    c.heads = c.head_size = 8;
    c.ffn = 128;
    for (const DType dtype : generation_dtypes(c)) {
        Driver d(c, training_shape(1, 8, dtype));
        d.randomise(3);
        const Model model = inference_model(c, dtype, {}, true);
        const_cast<Model&>(model).allocate(d.ctx);
        for (const Param& p : model.table.params) {
            std::vector<float> values = fetch_param(d.model, p);
            if (!Nf4Base::quantises(p)) {
                values.resize(size_t(p.padded_numel()));
                model.arenas.store(p, values.data(), 0, p.padded_numel());
                continue;
            }
            model.nf4->store(p, values.data());
            const TestArray out = TestArray::poisoned({p.rows * p.cols});
            nf4_dequantise(out.tensor(), model.nf4->matrix(p), d.ctx.stream);
            const std::vector<float> exact = fetch_floats(d.ctx, out);
            d.model.arenas.store(p, exact.data(), 0, p.numel());
        }
        const RandomAdapters adapters(d.model, 1, 8);
        Driver merged(c, training_shape(1, 8, DType::F32));
        adapters.merge_into(merged, d, 0);
        EngineOptions o = engine_options(2, 12);
        o.nf4 = true;
        Generation g(model, o, &adapters, 1);
        std::vector<Prompt> prompts{{0, random_tokens(c, 5, 1), 0, 0}, {1, random_tokens(c, 3, 2), 0, 0}};
        prompts[1].adapter = 0;
        std::vector<std::vector<int32_t>> sequences{prompts[0].tokens, prompts[1].tokens};
        for (int step = 0; step < 4; step++) {
            const std::vector<std::vector<float>> logits = step ? g.decode() : g.prefill(prompts);
            for (size_t i = 0; i < 2; i++) {
                expect_same_logits(logits[i], logits_after(i ? merged : d, sequences[i]),
                                   str(dtype_name(dtype), ", sequence ", i, " step ", step), dtype);
                sequences[i].push_back(g.sampled[i]);
            }
        }
    }
}

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
    // Passes over a part of a prompt have its angles, too: the engine's own, and those of a caller that cuts it.
    for (const bool invariant : {false, true}) {
        EngineOptions o = engine_options(1, 700);
        o.batch_invariant = invariant;
        const std::vector<int32_t> sequence = random_tokens(c, 600, 6);
        const std::vector<double> ref = logits_after(driver, sequence);
        Generation whole(driver.model, o), cut(driver.model, o);
        expect_same_logits(whole.prefill({{0, sequence, 0, 0}})[0], ref, "600 tokens");
        Prompt first{0, {sequence.begin(), sequence.begin() + 128}, 0, 0};
        first.later = 600 - 128;
        cut.engine.prefill({first});
        expect_same_logits(cut.prefill({{0, {sequence.begin() + 128, sequence.end()}, 0, 0}})[0], ref,
                           "128 and the rest");
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
// An engine for prompts with any options.
EngineOptions any_options(int64_t slots, int64_t context) {
    EngineOptions o = engine_options(slots, context, 0.7f);
    o.batch_invariant = true;
    o.sampling_classes = sampling_class::ANY;
    o.top_logprobs = 4;
    o.prompt_logprobs = true;
    return o;
}

// Prompts with options of all kinds, each of another.
std::vector<Prompt> mixed_prompts(const ModelConfig& c) {
    std::vector<Prompt> prompts;
    for (int64_t i = 0; i < 9; i++) {
        Prompt p{8 - i, random_tokens(c, 2 + 3 * (i % 3), uint64_t(i)), 20 + i, 0};
        SamplingOptions o;
        o.seed = uint64_t(i);
        o.temperature = 2;
        if (i == 1) o.temperature = 0;
        if (i == 2 || i == 7) o.top_k = 10;
        if (i == 3 || i == 7) o.top_p = 0.8f;
        if (i == 4) o.min_p = 0.1f;
        if (i == 4 || i == 7) o.repeat_penalty = 1.6f;
        if (i == 5 || i == 7) o.presence_penalty = 0.9f;
        if (i == 5 || i == 6) o.frequency_penalty = -0.4f;
        if (i > 0) p.sampling = o;
        if (i >= 6) p.mask = {0x0F0F00F0, 0x155555};  // 53 tokens
        p.logprobs = i == 2;
        p.top_logprobs = i == 3 ? 2 : i == 7 ? 4 : 0;
        prompts.push_back(p);
    }
    return prompts;
}

// Requests with different options together: each gives the tokens and logprobs that it gives alone, while others end
// and a slot is used again.
TEST_P(GenerationByType, OptionsOfARowDoNotDependOnOthers) {
    const ModelConfig& c = driver.model.config;
    struct Result {
        std::vector<int32_t> tokens, top;
        std::vector<float> logprobs;
    };
    const auto read = [](const Engine::Step& s, size_t i, Result& r) {
        r.tokens.push_back(s.tokens[i]);
        for (const TokenLogprob& t : s.top_logprobs[i]) {
            r.top.push_back(t.token);
            r.logprobs.push_back(t.logprob);
        }
    };
    Generation g(driver.model, any_options(9, 40));
    std::vector<Prompt> prompts = mixed_prompts(c);
    std::vector<Result> results(prompts.size() + 1);
    std::vector<size_t> of_slot(prompts.size());
    for (size_t i = 0; i < prompts.size(); i++) of_slot[size_t(prompts[i].slot)] = i;
    const auto read_step = [&] {
        const Engine::Step& s = g.engine.next();
        for (size_t i = 0; i < s.slots.size(); i++) read(s, i, results[of_slot[size_t(s.slots[i])]]);
    };
    g.engine.prefill(prompts);
    read_step();
    for (int step = 0; step < 12; step++) {
        if (step == 3)
            for (const int64_t slot : {0, 3, 4, 6, 8}) g.engine.retire(slot);
        if (step == 5) {  // a slot that had a mask and penalties, with options of the engine
            Prompt p{1, random_tokens(c, 6, 50), 90, 0};
            g.engine.retire(1);
            g.engine.truncate(1);
            of_slot[1] = prompts.size();
            prompts.push_back(p);
            g.engine.prefill({p});
            read_step();
        }
        g.engine.decode();
        read_step();
    }
    Generation alone(driver.model, any_options(1, 40));
    for (size_t i = 0; i < prompts.size(); i++) {
        SCOPED_TRACE(i);
        Prompt p = prompts[i];
        p.slot = 0;
        Result expected;
        alone.engine.retire(0);
        alone.engine.truncate(0);
        alone.engine.prefill({p});
        for (;;) {
            read(alone.engine.next(), 0, expected);
            if (expected.tokens.size() == results[i].tokens.size()) break;
            alone.engine.decode();
        }
        EXPECT_GE(expected.tokens.size(), 4u);
        EXPECT_EQ(results[i].tokens, expected.tokens);
        EXPECT_EQ(results[i].top, expected.top);
        EXPECT_EQ(results[i].logprobs, expected.logprobs);
        if (p.mask.empty()) continue;
        for (const int32_t id : results[i].tokens)
            EXPECT_TRUE(uint32_t(p.mask[size_t(id / 32)]) >> (id % 32) & 1) << id;
    }
}

// Greedy decoding with penalties against the model's logits: the prompt's tokens count for the repetition penalty only,
// and a sequence that continues after a prefill of its beginning keeps its counts.
TEST(Engine, PenaltiesCountTheCompletion) {
    Driver driver(long_config(), training_shape(1, 8));
    driver.randomise(3);
    SamplingOptions o;
    o.temperature = 0;
    o.presence_penalty = 0.25f;
    o.frequency_penalty = 0.5f;
    Generation g(driver.model, any_options(2, 40));
    std::vector<int32_t> prompt;
    for (int32_t id = 0; id < int32_t(driver.model.config.vocab_size); id += 2) prompt.push_back(id);
    std::vector<int32_t> completion;
    const auto check = [&](const std::vector<float>& logits) {
        std::vector<float> l = logits;
        for (size_t v = 0; v < l.size(); v++) {
            const auto n = std::count(completion.begin(), completion.end(), int32_t(v));
            if (n > 0) l[v] -= 0.25f + 0.5f * float(n);
        }
        EXPECT_EQ(g.sampled[0], std::max_element(l.begin(), l.end()) - l.begin()) << completion.size();
        completion.push_back(g.sampled[0]);
    };
    const auto prefill = [&](const std::vector<int32_t>& tokens) {
        Prompt p{1, tokens, 0, int64_t(completion.size())};
        p.sampling = o;
        p.completion = completion;
        check(g.prefill({p})[0]);
    };
    prefill(prompt);
    for (int step = 0; step < 6; step++) check(g.decode()[0]);
    g.engine.retire(1);
    g.engine.truncate(1);
    std::vector<int32_t> all = prompt;
    all.insert(all.end(), completion.begin(), completion.end());
    prefill(all);
    check(g.decode()[0]);
    EXPECT_GT(completion.size(), std::set<int32_t>(completion.begin(), completion.end()).size()) << "no token twice";
}

// Top logprobs are those of the raw logits, sorted; prompt logprobs those of forward() at each position, whatever the
// passes and the other prompts are.
TEST(Engine, TopAndPromptLogprobsMatchTheModel) {
    Driver driver(long_config(), training_shape(1, 8));
    driver.randomise(3);
    const auto logprobs = [](const auto& logits) {
        double sum = 0;
        for (const auto l : logits) sum += std::exp(double(l));
        std::vector<double> p;
        for (const auto l : logits) p.push_back(double(l) - std::log(sum));
        return p;
    };
    const int64_t n = backend_device() == Device::CPU ? Engine::prompt_chunk_tokens() + 140 : 200;
    Generation g(driver.model, any_options(3, n + 4));
    const std::vector<int32_t> tokens = random_tokens(driver.model.config, n, 1);
    std::vector<Prompt> prompts{{2, {4, 5, 6}, 0, 0}, {0, tokens, 1, 0}, {1, {7}, 2, 0}};
    prompts[1].prompt_logprobs = prompts[2].prompt_logprobs = true;
    prompts[1].top_logprobs = 3;
    g.engine.prefill(prompts);
    Engine::Step s = g.engine.next();
    EXPECT_TRUE(s.prompt_logprobs[0].empty());
    EXPECT_TRUE(s.prompt_logprobs[2].empty());
    ASSERT_EQ(s.prompt_logprobs[1].size(), size_t(n - 1));
    ASSERT_EQ(s.prompt_top_logprobs[1].size(), 3 * size_t(n - 1));
    for (const int64_t i : {int64_t(1), int64_t(2), int64_t(130), n - 141, n - 140, n - 139, n - 1}) {
        const std::vector<double> p = logprobs(logits_after(driver, {tokens.begin(), tokens.begin() + i}));
        EXPECT_NEAR(double(s.prompt_logprobs[1][size_t(i - 1)]), p[size_t(tokens[size_t(i)])], 1e-3) << i;
        std::vector<double> sorted = p;
        std::sort(sorted.rbegin(), sorted.rend());
        for (size_t k = 0; k < 3; k++) {
            const TokenLogprob top = s.prompt_top_logprobs[1][size_t(i - 1) * 3 + k];
            EXPECT_NEAR(double(top.logprob), p[size_t(top.token)], 1e-3) << i << " " << k;
            EXPECT_NEAR(double(top.logprob), sorted[k], 1e-3) << i << " " << k;
        }
    }
    for (int step = 0; step < 3; step++) {
        const std::vector<double> p = logprobs(g.engine.logits(1));
        std::vector<int32_t> order(p.size());
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return p[size_t(a)] > p[size_t(b)]; });
        ASSERT_EQ(s.top_logprobs[1].size(), 3u);
        EXPECT_TRUE(s.top_logprobs[0].empty());
        for (size_t k = 0; k < 3; k++) {
            EXPECT_EQ(s.top_logprobs[1][k].token, order[k]);
            EXPECT_NEAR(double(s.top_logprobs[1][k].logprob), p[size_t(order[k])], 1e-5);
        }
        EXPECT_NEAR(double(s.logprobs[1]), p[size_t(s.tokens[1])], 1e-5);
        g.engine.decode();
        s = g.engine.next();
        EXPECT_TRUE(s.prompt_logprobs[1].empty());
        EXPECT_TRUE(s.prompt_top_logprobs[1].empty());
    }
}

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
    const auto refused = [&](auto change, const std::string& message) {
        Prompt p{0, {1}, 0, 0};
        change(p);
        expect_error([&] { g.prefill({p}); }, message);
    };
    const std::string name_it = "; name it in EngineOptions::sampling_classes";
    refused([](Prompt& p) { p.mask = {1, 0}; }, "engine: slot 0 asks for a mask" + name_it);
    refused([](Prompt& p) { p.sampling = SamplingOptions{1, 5}; }, "engine: slot 0 asks for other filters" + name_it);
    refused(
        [](Prompt& p) {
            p.sampling = SamplingOptions{};
            p.sampling->presence_penalty = 1;
        },
        "engine: slot 0 asks for a presence or frequency penalty" + name_it);
    refused([](Prompt& p) { p.sampling = SamplingOptions{-1}; },
            "sample_tokens: temperature is -1, expected 0 or more");
    refused([](Prompt& p) { p.top_logprobs = 2; },
            "engine: slot 0 asks for 2 top logprobs; EngineOptions::top_logprobs is 0");
    refused([](Prompt& p) { p.prompt_logprobs = true; },
            "engine: slot 0 asks for its prompt's logprobs; set EngineOptions::prompt_logprobs");
    EngineOptions with_masks = engine_options(2, 8);
    with_masks.sampling_classes = sampling_class::MASK;
    Generation masked(driver.model, with_masks);
    Prompt none{1, {1}, 0, 0};
    none.mask = {0, int32_t(1u << 21)};  // token 53
    expect_error([&] { masked.prefill({none}); }, "engine: the mask of slot 1 allows no token");
    none.mask = {1};
    expect_error([&] { masked.prefill({none}); }, "engine: the mask of slot 1 has 1 words, expected 2");
    EXPECT_FALSE(g.engine.ready());
    InferenceWeights adapted = inference_weights(driver.model);
    adapted.blocks[1].proj.lora.a = adapted.blocks[1].proj.weight;
    expect_error(
        [&] {
            Engine engine(driver.model.config, engine_options(2, 8), driver.ctx.stream);
            engine.allocate(adapted);
        },
        "engine: weights with training's adapters; give those of InferenceWeights");
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
    EXPECT_EQ(small.engine.pages_missing(), 1);  // sequence 1 has 256 tokens
    EXPECT_EQ(small.engine.pages_available(), 0);
    EXPECT_FALSE(small.engine.ready());
    expect_error([&] { small.engine.decode(); }, "engine: decode() while not ready()");
    small.engine.retire(2);
    large.engine.retire(2);
    EXPECT_FALSE(small.engine.ready());
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

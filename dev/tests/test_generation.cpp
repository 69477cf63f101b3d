// Tests generate() with a model: slots, ends of sequences, the context limit, and the cache of a conversation.
#include <set>

#include "dev/tests/generation_fixture.h"
#include "infer/generate.h"

namespace {

// Requests for generate() and the completions that it fills.
struct Job {
    std::vector<Completion> completions;
    std::vector<Request> requests;
    Job(const std::vector<std::vector<int32_t>>& prompts, const CompletionOptions& options) {
        completions.reserve(prompts.size());
        for (const std::vector<int32_t>& p : prompts) {
            completions.emplace_back(nullptr, options);
            requests.push_back({p, 0, int64_t(requests.size()), &completions.back(), {}});
        }
    }
};

TEST(Generation, FreedSlotsTakeWaitingRequests) {
    Driver driver(long_config(), training_shape(1, 8));
    driver.randomise(3);
    std::vector<std::vector<int32_t>> prompts;
    for (int64_t i = 0; i < 7; i++) prompts.push_back(random_tokens(driver.model.config, 1 + 3 * (i % 4), uint64_t(i)));
    CompletionOptions options;
    options.max_tokens = 12;
    options.eos = {5, 17, 40};  // some sequences end early
    std::vector<std::vector<int32_t>> first;
    bool ended_early = false;
    for (const int64_t slots : {7, 3, 1}) {
        EngineOptions o = engine_options(slots, 30, 1);
        o.batch_invariant = true;
        Generation g(driver.model, o);
        Job job(prompts, options);
        std::vector<int64_t> done;
        const GenerateStatistics s =
            generate(g.engine, job.requests, {}, {}, [&](const Request& r) { done.push_back(r.sequence); });
        std::vector<std::vector<int32_t>> tokens;
        int64_t in_completions = 0;
        for (const Completion& a : job.completions) {
            tokens.push_back(a.tokens());
            in_completions += int64_t(a.tokens().size());
            EXPECT_TRUE(a.finish() == std::string("eos") ||
                        (a.finish() == std::string("length") && a.tokens().size() == 12));
            ended_early |= a.finish() == std::string("eos");
        }
        if (first.empty()) first = tokens;
        EXPECT_EQ(tokens, first) << slots << " slots";
        EXPECT_EQ(done.size(), prompts.size());
        EXPECT_EQ(s.completion_tokens, in_completions) << slots << " slots";
        EXPECT_GT(s.steps, 0);
    }
    EXPECT_TRUE(ended_early) << "no sequence ended early; choose other end tokens";
}

// A context window that slides drops tokens that the frequency penalty still counts. With a large one no token comes
// twice, whatever the prompt is.
TEST(Generation, PenaltiesCountBeyondTheContext) {
    Driver driver(long_config(), training_shape(1, 8));
    driver.randomise(3);
    EngineOptions o = engine_options(2, 12);
    o.sampling.frequency_penalty = 1000;
    Generation g(driver.model, o);
    CompletionOptions options;
    options.max_tokens = 40;
    Job job({{1, 2, 3, 4}, {7}, {5, 5, 5}}, options);
    generate(g.engine, job.requests, {});
    for (const Completion& a : job.completions)
        EXPECT_EQ(std::set<int32_t>(a.tokens().begin(), a.tokens().end()).size(), 40u);
}

// The first sampled token may end the sequence; then no step follows.
TEST(Generation, EndOfTextOnTheFirstToken) {
    Driver driver(long_config(), training_shape(1, 8));
    driver.randomise(3);
    Generation g(driver.model, engine_options(1, 30));
    const std::vector<int32_t> prompt = random_tokens(driver.model.config, 4, 1);
    g.prefill({{0, prompt, 0, 0}});
    CompletionOptions options;
    options.eos = {g.sampled[0]};
    g.engine.retire(0);
    g.engine.truncate(0);
    Job job({prompt}, options);
    generate(g.engine, job.requests, {});
    EXPECT_STREQ(job.completions[0].finish(), "eos");
    EXPECT_TRUE(job.completions[0].tokens().empty());
    EXPECT_EQ(job.requests[0].context, prompt);
}

// At the context limit the sequence ends, or the context window slides: generation continues as a new sequence of the
// first tokens and the later half of the rest.
TEST_P(GenerationByType, FullContexts) {
    constexpr int64_t CONTEXT = 12, KEEP = 2;
    const std::vector<int32_t> prompt = random_tokens(driver.model.config, 7, 1);
    CompletionOptions options;
    options.max_tokens = 20;
    for (const bool slide : {false, true}) {
        Generation g(driver.model, engine_options(1, CONTEXT));
        Job job({prompt}, options);
        generate(g.engine, job.requests, {slide, KEEP});
        const std::vector<int32_t>& sampled = job.completions[0].tokens();
        EXPECT_STREQ(job.completions[0].finish(), slide ? "length" : "context");
        ASSERT_EQ(int64_t(sampled.size()), slide ? 20 : CONTEXT - 7 + 1);
        std::vector<int32_t> context = prompt;
        for (const int32_t token : sampled) {
            if (int64_t(context.size()) > CONTEXT) {
                std::vector<int32_t> cut(context.begin(), context.begin() + KEEP);
                cut.insert(cut.end(), context.end() - (CONTEXT - KEEP) / 2, context.end());
                context = cut;
            }
            const std::vector<double> ref = logits_after(driver, context);
            ASSERT_EQ(token, std::max_element(ref.begin(), ref.end()) - ref.begin());
            context.push_back(token);
        }
    }
    Generation g(driver.model, engine_options(1, CONTEXT));
    Job too_long({random_tokens(driver.model.config, 13, 1)}, options);
    EXPECT_THROW(generate(g.engine, too_long.requests, {false, 0}), Error);
}

TEST(Generation, InterruptEndsSequencesAndKeepsTheEngine) {
    Driver driver(long_config(), training_shape(1, 8));
    driver.randomise(3);
    Generation g(driver.model, engine_options(2, 40));
    CompletionOptions options;
    const std::vector<std::vector<int32_t>> prompts{
        random_tokens(driver.model.config, 4, 1), random_tokens(driver.model.config, 6, 2), {3}};
    int asked = 0;
    Job stopped(prompts, options);
    generate(g.engine, stopped.requests, {}, [&] { return ++asked > 5; });
    for (const Completion& a : stopped.completions) EXPECT_STREQ(a.finish(), "interrupted");
    EXPECT_GE(stopped.completions[0].tokens().size(), 5u);
    EXPECT_TRUE(stopped.completions[2].tokens().empty());  // it never had a slot
    options.max_tokens = 5;
    Job again(prompts, options);
    generate(g.engine, again.requests, {});
    for (size_t i = 0; i < 2; i++)
        EXPECT_TRUE(std::equal(again.completions[i].tokens().begin(), again.completions[i].tokens().end(),
                               stopped.completions[i].tokens().begin()));
}

TEST_P(GenerationByType, CacheOfEarlierRoundsIsReused) {
    Generation g(driver.model, engine_options(1, 60));
    CompletionOptions options;
    options.max_tokens = 6;
    std::vector<int32_t> conversation = random_tokens(driver.model.config, 9, 1), held;
    for (int round = 0; round < 3; round++) {
        Job job({conversation}, options), fresh({conversation}, options);
        job.requests[0].cached = int64_t(held.size());
        const GenerateStatistics s = generate(g.engine, job.requests, {});
        EXPECT_EQ(s.prompt_tokens, int64_t(conversation.size() - held.size()));
        Generation other(driver.model, engine_options(1, 60));
        generate(other.engine, fresh.requests, {});
        EXPECT_EQ(job.completions[0].tokens(), fresh.completions[0].tokens()) << "round " << round;
        held = conversation = job.requests[0].context;
        held.resize(size_t(std::min<int64_t>(g.engine.length(0), int64_t(held.size()))));
        for (const int32_t id : random_tokens(driver.model.config, 4, 20 + uint64_t(round))) conversation.push_back(id);
    }
}

// The cache may already hold the token that ends a sequence. Continuing it computes only the new tokens.
TEST_P(GenerationByType, CacheMayEndAtTheContextLimit) {
    const std::vector<int32_t> prompt = random_tokens(driver.model.config, 9, 1);
    Generation first(driver.model, engine_options(1, 40)), g(driver.model, engine_options(1, 40)),
        other(driver.model, engine_options(1, 40));
    CompletionOptions options;
    options.max_tokens = 5;
    Job all({prompt}, options);
    generate(first.engine, all.requests, {});
    const std::vector<int32_t> sampled = all.completions[0].tokens();
    EXPECT_EQ(all.requests[0].end, -1);
    options.eos = {sampled[3]};
    Job ended({prompt}, options);
    generate(g.engine, ended.requests, {});
    EXPECT_STREQ(ended.completions[0].finish(), "eos");
    EXPECT_EQ(ended.requests[0].end, sampled[3]);
    std::vector<int32_t> held = ended.requests[0].context;
    held.push_back(ended.requests[0].end);
    std::vector<int32_t> conversation = held;
    held.resize(size_t(std::min(g.engine.length(0), int64_t(held.size()))));
    EXPECT_EQ(int64_t(held.size()), g.engine.length(0));
    for (const int32_t id : random_tokens(driver.model.config, 3, 2)) conversation.push_back(id);
    options.eos.clear();
    Job goes_on({conversation}, options), fresh({conversation}, options);
    goes_on.requests[0].cached = int64_t(held.size());
    EXPECT_EQ(generate(g.engine, goes_on.requests, {}).prompt_tokens, int64_t(conversation.size() - held.size()));
    generate(other.engine, fresh.requests, {});
    EXPECT_EQ(goes_on.completions[0].tokens(), fresh.completions[0].tokens());
}

}  // namespace

// Requests that arrive, wait, are cancelled, suspended and resumed, with options of their own: each has the tokens that
// it has alone, and no page is lost.
#include "infer/scheduler.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <set>
#include <utility>

#include "dev/tests/allocations.h"
#include "dev/tests/fuzz_rounds.h"
#include "dev/tests/generation_fixture.h"
#include "dev/tests/packed_fixture.h"
#include "dev/tests/test_util.h"
#include "runtime/model/initialise.h"
#include "runtime/rng.h"

namespace {

int64_t random_below(uint64_t seed, uint64_t i, uint64_t j, int64_t n) {
    return int64_t(philox(seed, i, j).v[0] % uint64_t(n));
}

constexpr int64_t ADAPTERS = 2, TOP_LOGPROBS = 3;

// A request with its completion.
struct Job {
    CompletionOptions options;
    std::unique_ptr<Completion> completion;
    Request request;
    int64_t arrival = 0, cancelled = -1;  // steps of the scheduler

    Job(const std::vector<int32_t>& prompt, int64_t sequence, int64_t max_tokens) {
        options.max_tokens = max_tokens;
        completion = std::make_unique<Completion>(nullptr, options);
        request.tokens = prompt;
        request.sequence = sequence;
        request.completion = completion.get();
    }
    Job(const Job& other) : Job(other.request.tokens, other.request.sequence, other.options.max_tokens) {
        options.eos = other.options.eos;
        request.sampling = other.request.sampling;
        request.mask = other.request.mask;
        request.name_space = other.request.name_space;
        request.adapter = other.request.adapter;
        request.logprobs = other.request.logprobs;
        request.top_logprobs = other.request.top_logprobs;
        request.prompt_logprobs = other.request.prompt_logprobs;
    }
    bool has_logprobs() const { return request.logprobs || request.top_logprobs > 0; }
};

// Requests of one seed: prompts of up to `longest` tokens, some of them equal, with any sampling options.
std::vector<std::unique_ptr<Job>> random_jobs(const ModelConfig& c, uint64_t seed, int64_t count, int64_t longest) {
    std::vector<std::unique_ptr<Job>> jobs;
    int64_t arrival = 0;
    for (int64_t i = 0; i < count; i++) {
        const auto random = [&](uint64_t j, int64_t n) { return random_below(seed, uint64_t(i), j, n); };
        const bool repeats = i > 0 && random(0, 3) == 0;
        std::vector<int32_t> prompt =
            repeats ? jobs.back()->request.tokens
                    : random_tokens(c, 1 + (random(2, 3) ? 120 * random(19, 3) + random(1, 40) : random(1, longest)),
                                    seed * 1000 + uint64_t(i));
        const bool begins_alike = i > 0 && random(20, 3) == 0;
        const int64_t like = begins_alike ? random(21, i) : i - repeats;  // an earlier one, else itself
        if (begins_alike) {
            const std::vector<int32_t>& other = jobs[size_t(like)]->request.tokens;
            std::copy_n(other.begin(), std::min(prompt.size(), other.size()), prompt.begin());
        }
        jobs.push_back(std::make_unique<Job>(prompt, i, 1 + random(3, random(4, 2) ? 12 : 150)));
        Job& job = *jobs.back();
        job.arrival = repeats ? arrival : arrival += random(5, 3);
        if (random(6, 8) == 0) job.cancelled = job.arrival + random(7, 20);
        SamplingOptions o;
        o.temperature = random(8, 3) ? 0.5f + 0.5f * float(random(9, 3)) : 0;
        o.seed = uint64_t(random(10, 100));
        if (random(11, 3) == 0) o.top_k = 1 + random(12, 20);
        if (random(13, 3) == 0) o.top_p = 0.7f;
        if (random(14, 3) == 0) o.repeat_penalty = 1.3f;
        if (random(15, 3) == 0) o.frequency_penalty = 0.5f;
        if (random(16, 3) == 0) o.presence_penalty = 0.5f;
        if (random(25, 3) == 0) o.min_p = 0.1f;
        if (random(17, 2)) job.request.sampling = o;
        for (int64_t k = random(26, 5); k > 2; k--)
            job.options.eos.push_back(static_cast<int32_t>(random(25 + uint64_t(k), c.vocab_size)));
        job.request.logprobs = random(30, 3) == 0;
        if (random(31, 3) == 0) job.request.top_logprobs = 1 + random(32, TOP_LOGPROBS);
        job.request.name_space = random(33, 2);
        job.request.prompt_logprobs = random(24, 6) == 0;
        if (random(22, 3) == 0) job.request.adapter = static_cast<int32_t>(random(23, ADAPTERS));
        if (random(34, 4)) {  // may share the other's pages
            job.request.name_space = jobs[size_t(like)]->request.name_space;
            job.request.adapter = jobs[size_t(like)]->request.adapter;
        }
        if (random(18, 5) == 0) {
            job.request.mask.assign(size_t(c.vocab_size + 31) / 32, 0x55555555);
        }
    }
    return jobs;
}

EngineOptions options_of(int64_t slots, int64_t context, int64_t pages, bool joint = false) {
    EngineOptions o = engine_options(slots, context, 1);
    o.cache_pages = pages;
    o.batch_invariant = !joint;
    o.joint_passes = joint;
    o.sampling_classes = sampling_class::ANY;
    o.prompt_logprobs = true;
    o.top_logprobs = TOP_LOGPROBS;
    return o;
}

// The slot of each request that runs holds pages for the tokens that a layer may still see, and no others; that of a
// suspended sequence, and a free one, holds none. No other page is in use.
void expect_no_page_leaked(const Engine& engine, const Scheduler& scheduler) {
    const KvCache& cache = engine.kv_cache();
    std::vector<int64_t> window(size_t(cache.num_groups()), 0);
    for (int64_t l = 0; l < engine.config.layers; l++)
        if (cache.group(l) >= 0) window[size_t(cache.group(l))] = cache.window(l);
    std::set<std::pair<int64_t, int32_t>> held;  // groups and pages
    for (int64_t slot = 0; slot < cache.slots; slot++) {
        const int64_t length = scheduler.is_free(slot) ? 0 : engine.length(slot);
        for (int64_t g = 0; g < cache.num_groups(); g++) {
            const int64_t seen = window[size_t(g)] ? window[size_t(g)] - 1 + KvCache::STEPS_BACK : length;
            for (int64_t begin = 0; begin < cache.capacity; begin += KV_PAGE) {
                const int32_t row = cache.row(g, slot, begin);
                const bool needed = begin < length && begin + KV_PAGE > length - seen && !engine.is_suspended(slot);
                EXPECT_EQ(row >= 0, needed) << "slot " << slot << " of " << length << " tokens, page from " << begin;
                if (row >= 0) held.insert({g, row / int32_t(KV_PAGE)});
            }
        }
    }
    EXPECT_EQ(engine.pages_in_use(), int64_t(held.size()));
}

// Runs a schedule. Returns how many sequences were suspended.
int64_t run_schedule(Engine& engine, const std::vector<std::unique_ptr<Job>>& jobs, const ContextPolicy& policy,
                     int64_t chunk) {
    std::set<int64_t> ended;
    std::vector<int64_t> first_token(jobs.size(), -1);
    Scheduler scheduler(
        engine, policy, [&](const Request& r) { EXPECT_TRUE(ended.insert(r.sequence).second); }, chunk);
    size_t next = 0;
    int64_t suspensions = 0;
    bool more = true;
    for (int64_t step = 0; more || next < jobs.size(); step++) {
        for (; next < jobs.size() && jobs[next]->arrival <= step; next++) scheduler.add(jobs[next]->request);
        for (size_t i = 0; i < next; i++)
            if (jobs[i]->cancelled == step && !jobs[i]->completion->finish()) scheduler.cancel(jobs[i]->request);
        const int64_t allocations = device_allocations();
        more = scheduler.step();
        EXPECT_EQ(device_allocations(), allocations) << "a step allocates device memory";
        suspensions = scheduler.suspensions();
        if (const int64_t generating = scheduler.generating_alone(); generating > 0) {  // a GPU has a step in flight
            EXPECT_TRUE(engine.pending());
            EXPECT_EQ(generating, int64_t(next - ended.size())) << "a request that waits or is being computed";
        }
        EXPECT_LT(step, 100000) << "the schedule does not end";
        expect_no_page_leaked(engine, scheduler);
        if (testing::Test::HasFailure()) return suspensions;
        for (size_t i = 0; i < next; i++)
            if (first_token[i] < 0 && !jobs[i]->completion->tokens().empty()) first_token[i] = step;
    }
    EXPECT_EQ(ended.size(), jobs.size());
    EXPECT_EQ(engine.pages_in_use(), 0);
    // Requests start in the order of their arrival.
    int64_t latest = -1;
    for (size_t i = 0; i < jobs.size(); i++) {
        if (first_token[i] < 0 || jobs[i]->request.tokens.size() > 100) continue;
        EXPECT_GE(first_token[i] + 30, latest) << "request " << i << " started long before an earlier one";
        latest = std::max(latest, first_token[i]);
    }
    return suspensions;
}

// Of a sequence among others and of the same alone: the same bits, on a GPU nearly.
void expect_same_logprobs(const std::vector<float>& got, const std::vector<float>& alone) {
    ASSERT_EQ(got.size(), alone.size());
    for (size_t i = 0; i < got.size(); i++)
        ASSERT_NEAR(got[i], alone[i], backend_device() == Device::CPU ? 0 : 1e-3) << "token " << i;
}

void expect_same_top_logprobs(const std::vector<TokenLogprob>& got, const std::vector<TokenLogprob>& alone) {
    std::vector<float> logprobs[2];
    for (const TokenLogprob& t : got) logprobs[0].push_back(t.logprob);
    for (const TokenLogprob& t : alone) logprobs[1].push_back(t.logprob);
    expect_same_logprobs(logprobs[0], logprobs[1]);
    for (size_t i = 0; i < got.size() && backend_device() == Device::CPU; i++) ASSERT_EQ(got[i].token, alone[i].token);
}

// Of each token of the completion, which a cancelled request has fewer of.
void expect_same_logprobs_of_completion(const Completion& got, const Completion& alone, size_t top) {
    const size_t n = got.tokens().size();
    expect_same_logprobs(got.logprobs(), {alone.logprobs().begin(), alone.logprobs().begin() + std::ptrdiff_t(n)});
    for (size_t i = 0; i < n; i++) {
        ASSERT_EQ(got.top_logprobs()[i].size(), top);
        expect_same_top_logprobs(got.top_logprobs()[i], alone.top_logprobs()[i]);
    }
}

void check_alone(Engine& engine, const std::vector<std::unique_ptr<Job>>& jobs, const ContextPolicy& policy = {}) {
    for (size_t i = 0; i < jobs.size(); i++) {
        SCOPED_TRACE(str("request ", i));
        const Job& together = *jobs[i];
        Job alone(together);
        Scheduler scheduler(engine, policy);
        scheduler.add(alone.request);
        while (scheduler.step()) continue;
        const Request &r = together.request, &of_alone = alone.request;
        const std::vector<int32_t>&got = r.completion->tokens(), &expected = of_alone.completion->tokens();
        ASSERT_LE(got.size(), expected.size());
        ASSERT_TRUE(std::equal(got.begin(), got.end(), expected.begin()));
        if (together.has_logprobs())
            expect_same_logprobs_of_completion(*r.completion, *of_alone.completion, size_t(r.top_logprobs));
        if (r.completion->finish() == std::string("cancelled")) continue;
        ASSERT_EQ(got, expected);
        ASSERT_STREQ(r.completion->finish(), of_alone.completion->finish());
        ASSERT_EQ(r.end, of_alone.end);
        if (together.has_logprobs()) expect_same_logprobs({r.end_logprob}, {of_alone.end_logprob});
        expect_same_top_logprobs(r.end_top_logprobs, of_alone.end_top_logprobs);
        expect_same_logprobs(r.prompt_token_logprobs, of_alone.prompt_token_logprobs);
        expect_same_top_logprobs(r.prompt_token_top_logprobs, of_alone.prompt_token_top_logprobs);
        if (testing::Test::HasFailure()) return;
    }
}

// An engine and a scheduler of random requests.
struct ScheduleSetup {
    int64_t slots, pages, chunk, adapters;
    bool joint;
    int64_t context = 760;
    bool slide = true;
};
// Caches from too small to ample, chunks that cut prompts, contexts that sequences fill. Without adapters a GPU's
// chunks are queued behind steps in flight.
const ScheduleSetup SETUPS[] = {
    {6, 6, 128, ADAPTERS, false},      {3, 0, 0, ADAPTERS, false}, {8, 9, 256, ADAPTERS, false, 320},
    {5, 9, 128, 0, false, 320, false}, {6, 6, 0, ADAPTERS, true},  {8, 9, 128, 0, true},
};

// Each of `count` requests of a schedule has what it has alone. FUZZ_ROUNDS=n in the environment: n times as many.
// Returns how many sequences were suspended.
int64_t compare_schedules(const Model& model, const RandomAdapters& adapters, const ScheduleSetup& setup,
                          int64_t count) {
    const ModelConfig& c = model.config;
    const auto [slots, pages, chunk, adapted, joint, context, slide] = setup;
    if (joint && c.has_linear_attention()) return 0;
    SCOPED_TRACE(str(dtype_name(model.precision.dtype), ", ", slots, " slots, ", pages, " pages, ", adapted,
                     " adapters", joint ? ", joint passes" : "", ", context ", context));
    const auto options = [&](const EngineOptions& of_cache) {
        EngineOptions o = of_cache;
        o.packing = model.precision.packing;
        o.nf4 = model.nf4 != nullptr;
        return o;
    };
    const RandomAdapters* const used = adapted ? &adapters : nullptr;
    Generation together(model, options(options_of(slots, context, pages, joint)), used, adapted),
        alone(model, options(options_of(1, context, 0)), used, adapted);
    ContextPolicy policy;
    policy.slide = slide;
    int64_t suspensions = 0;
    for (int64_t round = 0; round < fuzz_rounds(); round++) {
        const uint64_t seed = uint64_t(slots + 100 * round);
        SCOPED_TRACE(str("seed ", seed));
        const std::vector<std::unique_ptr<Job>> jobs = random_jobs(c, seed, count, std::min<int64_t>(context, 600));
        for (size_t i = 0; i < jobs.size() && adapted == 0; i++) jobs[i]->request.adapter = -1;
        suspensions += run_schedule(together.engine, jobs, policy, chunk);
        if (testing::Test::HasFailure()) break;
        // Joint passes promise no bits, but on the CPU no token has differed in 10,000 requests.
        if (!joint || backend_device() == Device::CPU) check_alone(alone.engine, jobs, policy);
        if (testing::Test::HasFailure()) break;
    }
    return suspensions;
}

// On a GPU in all dtypes. FUZZ_ROUNDS=21 in the environment makes 10,000 requests of the 490 that this test and the
// next two have together.
TEST_P(GenerationByType, EachRequestOfAScheduleHasTheTokensThatItHasAlone) {
    const ModelConfig& c = driver.model.config;
    int64_t suspensions = 0;
    for (const DType dtype : generation_dtypes(c)) {
        Driver d(c, training_shape(1, 8, dtype));
        d.randomise(3);
        const RandomAdapters adapters(d.model, ADAPTERS, 8);
        for (const ScheduleSetup& setup : SETUPS) {
            suspensions += compare_schedules(d.model, adapters, setup, 10);
            if (HasFailure()) return;
        }
    }
    EXPECT_GT(suspensions, GetParam() == std::string("SS") ? 0 : -1) << "no cache was too small";
}

class ModelVariants : public testing::TestWithParam<ModelVariant> {};
INSTANTIATE_TEST_SUITE_P(Variants, ModelVariants, testing::ValuesIn(MODEL_VARIANTS), variant_name);

// Each family has one of the setups.
TEST_P(ModelVariants, EachRequestOfAScheduleHasTheTokensThatItHasAlone) {
    ModelConfig c = base_config();
    GetParam().apply(c);
    if (c.positions == Positions::Learned) c.max_positions = 760;
    const auto variant = std::find_if(std::begin(MODEL_VARIANTS), std::end(MODEL_VARIANTS),
                                      [](const ModelVariant& v) { return v.name == std::string(GetParam().name); });
    // Those with joint passes are the last.
    const size_t setups = std::size(SETUPS) - (c.has_linear_attention() ? 2 : 0);
    const ScheduleSetup& setup = SETUPS[size_t(variant - std::begin(MODEL_VARIANTS)) % setups];
    for (const DType dtype : generation_dtypes(c)) {
        Driver d(c, training_shape(1, 8, dtype));
        d.randomise(3);
        compare_schedules(d.model, RandomAdapters(d.model, ADAPTERS, 8), setup, 6);
        if (HasFailure()) return;
    }
}

// Weights that are packed, and bases in NF4.
TEST(Scheduler, EachRequestOfAScheduleHasTheTokensThatItHasAloneWithQuantisedWeights) {
    ModelConfig c = long_config("SW");
    c.channels = 64;
    c.heads = c.head_size = 8;
    c.ffn = 128;
    const Context ctx;
    std::vector<std::optional<Packings>> packings{std::nullopt};  // NF4
    for (const Packing packing : ALL_PACKINGS) packings.emplace_back(packing);
    if (backend_device() == Device::CPU) packings.emplace_back(Packing::Bf16);
    for (size_t i = 0; i < packings.size(); i++) {
        SCOPED_TRACE(packings[i] ? name_of(packings[i]->blocks) : "nf4");
        Model model = inference_model(c, DType::F32, packings[i], !packings[i]);
        model.allocate(ctx);
        if (packings[i]) {
            initialise_weights(model.table, model.arenas, 5, ctx.stream);
            model.packed->randomise(model.table, 5);
        } else {
            Driver::randomise(model, 5);
        }
        compare_schedules(model, RandomAdapters(model, ADAPTERS, 8), SETUPS[i % std::size(SETUPS)], 8);
        if (HasFailure()) return;
    }
}

// Nor do a GPU's libraries allocate in a step whose graphs are there: run_schedule() counts what the engine allocates.
TEST(Scheduler, StepsAllocateNoDeviceMemory) {
    if (backend_device() == Device::CPU) GTEST_SKIP() << "run_schedule() counts everything";
    if (why_no_preload()) GTEST_SKIP() << why_no_preload();
    const Allocations allocations("Scheduler.StepsAllocateNoDeviceMemory");
    if (!allocations.counting) return;
    for (const char* attention : {"SS", "SW", "LG"}) {
        const ModelConfig c = long_config(attention);
        Driver driver(c, training_shape(1, 8));
        driver.randomise(3);
        const RandomAdapters adapters(driver.model, ADAPTERS, 8);
        for (const bool joint : {false, true}) {
            if (joint && c.has_linear_attention()) continue;
            SCOPED_TRACE(str(attention, joint ? ", joint passes" : ""));
            Generation g(driver.model, options_of(6, 760, 6, joint), &adapters, ADAPTERS);
            long before = 0;
            for (int run = 0; run < 2; run++) {
                g.engine.restart();  // no page is found by its content: the runs are the same
                before = allocations.device();
                run_schedule(g.engine, random_jobs(c, 3, 20, 600), {}, KV_PAGE);
            }
            EXPECT_EQ(allocations.device(), before);
        }
    }
}

// Three sequences grow in a cache that holds two of them: the youngest is suspended, and goes on when another has
// ended.
TEST_P(GenerationByType, TheYoungestIsSuspended) {
    EngineOptions o = options_of(3, 380, 6);
    Generation together(driver.model, o), alone(driver.model, options_of(1, 380, 0));
    std::vector<std::unique_ptr<Job>> jobs;
    for (int64_t i = 0; i < 3; i++)
        jobs.push_back(std::make_unique<Job>(random_tokens(driver.model.config, 120, uint64_t(i)), i, 180));
    std::vector<int64_t> ended;
    Scheduler scheduler(together.engine, {}, [&](const Request& r) { ended.push_back(r.sequence); });
    for (const auto& job : jobs) scheduler.add(job->request);
    while (scheduler.step()) continue;
    EXPECT_EQ(ended, (std::vector<int64_t>{0, 1, 2}));
    EXPECT_EQ(scheduler.suspensions() > 0,
              driver.model.config.layers_of(AttentionType::Softmax) > 0 && GetParam() != std::string("GW"));
    EXPECT_EQ(together.engine.pages_in_use(), 0);
    check_alone(alone.engine, jobs);
}

// Sequences of one prompt: one is computed, the others share its pages, and each samples with its own random numbers.
TEST(Scheduler, EqualPromptsShareTheirPages) {
    const ModelConfig c = long_config("SW");
    Driver driver(c, training_shape(1, 8));
    driver.randomise(3);
    Generation together(driver.model, options_of(8, 500, 0)), alone(driver.model, options_of(1, 500, 0));
    const std::vector<int32_t> prompt = random_tokens(c, 300, 5);
    std::vector<std::unique_ptr<Job>> jobs;
    for (int64_t i = 0; i < 8; i++) jobs.push_back(std::make_unique<Job>(prompt, i, 20));
    Scheduler scheduler(together.engine, {}, {}, 128);
    for (const auto& job : jobs) scheduler.add(job->request);
    int64_t most = 0;
    while (scheduler.step()) most = std::max(most, together.engine.pages_in_use());
    EXPECT_EQ(scheduler.statistics.prompt_tokens, 300);
    // Without a window: 2 shared pages, and a page of each sequence. With the window of 5: at most 2 pages of each.
    EXPECT_LE(most, 2 + 8 + 2 * 8);
    EXPECT_EQ(together.engine.pages_in_use(), 0);
    check_alone(alone.engine, jobs);
    std::set<std::vector<int32_t>> different;
    for (const auto& job : jobs) different.insert(job->completion->tokens());
    EXPECT_GT(different.size(), 4u);
}

// With dynamic RoPE a prompt's angles are those of its whole length, wherever it is cut.
TEST(Scheduler, AChunkOfAPromptIsRotatedAsTheWholePrompt) {
    ModelConfig c = long_config("SS");
    c.rope_scaling.kind = RopeScaling::Kind::Dynamic;
    c.rope_scaling.factor = 2;
    c.max_positions = c.rope_scaling.original_max_position = 16;
    Driver driver(c, training_shape(1, 8));
    driver.randomise(3);
    Generation g(driver.model, options_of(1, 400, 0));
    std::vector<float> logprobs;
    for (const int64_t chunk : {0, 128}) {
        Job job(random_tokens(c, 300, 5), 0, 1);
        job.request.logprobs = true;
        Scheduler scheduler(g.engine, {}, {}, chunk);
        scheduler.add(job.request);
        while (scheduler.step()) continue;
        logprobs.push_back(job.completion->logprobs().at(0));
        g.engine.truncate(0);
    }
    EXPECT_NEAR(logprobs[0], logprobs[1], 1e-5);
}

// What a finished request's prompt began with is found by a later one, in its name space only, until the pages are
// needed.
TEST(Scheduler, BeginningsThatAreCachedAreNotComputedAgain) {
    Driver driver(long_config("SS"), training_shape(1, 8));
    driver.randomise(3);
    const ModelConfig& c = driver.model.config;
    Generation g(driver.model, options_of(2, 500, 4)), alone(driver.model, options_of(1, 500, 0));
    const std::vector<int32_t> prompt = random_tokens(c, 300, 5), other = random_tokens(c, 400, 6);
    const auto computed = [&](const std::vector<int32_t>& tokens, int64_t name_space) {
        std::vector<std::unique_ptr<Job>> jobs;
        jobs.push_back(std::make_unique<Job>(tokens, 3, 4));
        jobs[0]->request.name_space = name_space;
        Scheduler scheduler(g.engine, {});
        scheduler.add(jobs[0]->request);
        while (scheduler.step()) continue;
        EXPECT_EQ(g.engine.pages_in_use(), 0);
        check_alone(alone.engine, jobs);
        return scheduler.statistics.prompt_tokens;
    };
    const auto with_end = [&](int64_t shared, int64_t size) {
        std::vector<int32_t> tokens(prompt.begin(), prompt.begin() + shared);
        for (const int32_t id : random_tokens(c, size - shared, 8)) tokens.push_back(id);
        return tokens;
    };
    EXPECT_EQ(computed(prompt, 0), 300);
    EXPECT_EQ(computed(prompt, 0), 300 - 256);
    EXPECT_EQ(computed(with_end(300, 310), 0), 310 - 256);
    EXPECT_EQ(computed(with_end(200, 270), 0), 270 - 128);  // shares the first page
    EXPECT_EQ(computed(with_end(256, 256), 0), 128);        // the last token is always computed
    EXPECT_EQ(computed(prompt, 1), 300);
    EXPECT_EQ(computed(other, 0), 400);  // takes all 4 pages
    EXPECT_EQ(computed(prompt, 0), 300);
}

// A long prompt that arrives delays a running sequence by one chunk at a time.
TEST(Scheduler, RunningSequencesWaitForOneChunk) {
    const ModelConfig c = long_config("SS");
    Driver driver(c, training_shape(1, 8));
    driver.randomise(3);
    for (const bool joint : {false, true}) {
        EngineOptions o = options_of(2, 700, 0, joint);
        o.prompt_tokens = KV_PAGE;  // with the running sequence a step does not hold a whole chunk
        Generation g(driver.model, o);
        Job running(random_tokens(c, 3, 1), 0, 40), late(random_tokens(c, 600, 2), 1, 5);
        Scheduler scheduler(g.engine, {}, {}, 128);
        scheduler.add(running.request);
        for (int i = 0; i < 5; i++) scheduler.step();
        scheduler.add(late.request);
        int64_t steps = 0;
        while (late.completion->tokens().empty()) {
            const size_t before = running.completion->tokens().size();
            scheduler.step();
            EXPECT_GT(running.completion->tokens().size(), before);
            steps++;
        }
        // 4 chunks of 128 and the rest; the first step in flight behind another joins two.
        EXPECT_EQ(steps, joint && Engine::steps_ahead() > 1 ? 4 : 5);
    }
}

// After the oldest prompt the shortest has its share: it does not wait for long ones that came before it.
TEST(Scheduler, AShortPromptPassesLongOnes) {
    const ModelConfig c = long_config("SS");
    Driver driver(c, training_shape(1, 8));
    driver.randomise(3);
    Generation g(driver.model, options_of(5, 700, 0));
    std::vector<std::unique_ptr<Job>> jobs;
    for (const int64_t n : {3, 600, 600, 600, 40})
        jobs.push_back(std::make_unique<Job>(random_tokens(c, n, jobs.size()), int64_t(jobs.size()), 60));
    Scheduler scheduler(g.engine, {}, {}, 2 * KV_PAGE);
    scheduler.add(jobs[0]->request);
    for (int i = 0; i < 3; i++) scheduler.step();
    for (size_t i = 1; i < jobs.size(); i++) scheduler.add(jobs[i]->request);
    scheduler.step();
    EXPECT_FALSE(jobs[4]->completion->tokens().empty());
    scheduler.cancel_all("test");
}

// Steps of a scheduler with its own chunks until the first token of a prompt of 40 tokens that arrives behind one of
// 1,900, and then until that of the long one. With `running`, another sequence decodes meanwhile.
std::pair<int64_t, int64_t> steps_to_first_tokens(Engine& engine, bool running) {
    const uint64_t seed = running ? 10 : 20;  // no page of one call is there for the next
    Job decoding(random_tokens(engine.config, 3, seed), 0, 60),
        late(random_tokens(engine.config, 1900, seed + 1), 1, 5),
        brief(random_tokens(engine.config, 40, seed + 2), 2, 5);
    Scheduler scheduler(engine, {});
    if (running) scheduler.add(decoding.request);
    for (int i = 0; i < 3; i++) scheduler.step();
    scheduler.add(late.request);
    scheduler.add(brief.request);
    int64_t steps[2] = {};
    for (int i = 0; const Job* job : {&brief, &late}) {
        for (; job->completion->tokens().empty(); steps[i]++) scheduler.step();
        i++;
    }
    scheduler.cancel_all("test");
    return {steps[0], steps[0] + steps[1]};
}

// The oldest prompt has the first page of a chunk, a younger one the next, so that a short one is done first.
TEST(Scheduler, PromptsShareAChunk) {
    const ModelConfig c = long_config("SS");
    Driver driver(c, training_shape(1, 8));
    driver.randomise(3);
    Generation g(driver.model, options_of(3, 2000, 0));
    const bool gpu = backend_device() != Device::CPU;
    const auto [brief, late] = steps_to_first_tokens(g.engine, true);
    EXPECT_EQ(brief, 1);
    EXPECT_EQ(late, 7);  // 3 pages in a chunk of 512, beside the short prompt; then chunks of 256
    const auto [brief_alone, late_alone] = steps_to_first_tokens(g.engine, false);
    EXPECT_EQ(brief_alone, 1);
    EXPECT_EQ(late_alone, gpu ? 1 : 6);  // chunks of 512 before and after three while the short one decodes
}

// A prompt with logprobs is not cut: where it is longer than the chunk, the others wait for the next one.
TEST(Scheduler, OthersWaitForAWholePrompt) {
    const ModelConfig c = long_config("SS");
    Driver driver(c, training_shape(1, 8));
    driver.randomise(3);
    for (const bool joint : {false, true}) {
        EngineOptions o = options_of(3, 700, 0, joint);
        Generation g(driver.model, o);
        std::vector<std::unique_ptr<Job>> jobs;
        for (const int64_t n : {3, 300, 200})
            jobs.push_back(std::make_unique<Job>(random_tokens(c, n, jobs.size()), int64_t(jobs.size()), 40));
        jobs[1]->request.prompt_logprobs = true;
        Scheduler scheduler(g.engine, {}, {}, KV_PAGE);
        scheduler.add(jobs[0]->request);
        for (int i = 0; i < 3; i++) scheduler.step();
        for (size_t i : {1, 2}) scheduler.add(jobs[i]->request);
        while (scheduler.step()) continue;
        EXPECT_EQ(jobs[1]->request.prompt_token_logprobs.size(), 299);
        for (const auto& job : jobs) EXPECT_EQ(job->completion->tokens().size(), 40);
        EXPECT_EQ(g.engine.pages_in_use(), 0);
    }
}

// Logprobs of a prompt that is longer than a chunk, and whose beginning is cached.
TEST(Scheduler, PromptLogprobsAreWhole) {
    Driver driver(long_config("SS"), training_shape(1, 8));
    driver.randomise(3);
    EngineOptions o = options_of(2, 400, 0);
    o.prompt_logprobs = true;
    Generation g(driver.model, o);
    const std::vector<int32_t> prompt = random_tokens(driver.model.config, 300, 5);
    std::vector<float> first;
    for (int run = 0; run < 2; run++) {
        Job job(prompt, 0, 3);
        job.request.prompt_logprobs = true;
        Scheduler scheduler(g.engine, {}, {}, 128);
        scheduler.add(job.request);
        while (scheduler.step()) continue;
        ASSERT_EQ(job.request.prompt_token_logprobs.size(), 299u);
        if (run == 0) first = job.request.prompt_token_logprobs;
        EXPECT_EQ(job.request.prompt_token_logprobs, first);
    }
    for (const size_t n : {1u, 130u, 299u}) {
        const std::vector<double> logits = logits_after(driver, {prompt.begin(), prompt.begin() + long(n)});
        double sum = 0;
        for (const double l : logits) sum += std::exp(l);
        EXPECT_NEAR(first[n - 1], logits[size_t(prompt[n])] - std::log(sum), 1e-4) << n;
    }
}

TEST(Scheduler, InvalidArgumentsAreErrors) {
    Driver driver(long_config(), training_shape(1, 8));
    driver.randomise(3);
    Generation g(driver.model, options_of(2, 40, 0));
    expect_error([&] { Scheduler scheduler(g.engine, {}, {}, 100); },
                 "a chunk of 100 tokens of prompts; it must be a positive multiple of 128");
    Scheduler scheduler(g.engine, {});
    Job empty({}, 0, 3), longer(random_tokens(driver.model.config, 41, 1), 1, 3);
    expect_error([&] { scheduler.add(empty.request); }, "the prompt has no tokens; give it at least one");
    EXPECT_THROW(scheduler.add(longer.request), Error);
    EXPECT_FALSE(scheduler.step());
    expect_error([&] { g.engine.suspend(0); }, "engine: slot 0 is not generating");
    expect_error([&] { g.engine.resume(0); }, "engine: slot 0 is not suspended");
    Prompt like{1, {}, 0, 0};
    like.like = 0;
    expect_error([&] { g.engine.prefill({like}); }, "engine: slot 1 is like slot 0, whose prompt does not end here");
    expect_error([&] { Generation few(driver.model, options_of(2, 300, 2)); },
                 "engine: a KV cache of 2 pages cannot hold a sequence of 300 tokens");
}

}  // namespace

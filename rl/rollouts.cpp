#include "rl/rollouts.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "data/loader.h"
#include "driver/inference.h"
#include "driver/matmul_cache.h"
#include "driver/sequence_loss.h"
#include "infer/prompts.h"
#include "kernels/matmul.h"
#include "models/model_source.h"
#include "rl/advantages.h"
#include "runtime/device/convert_dtype.h"
#include "runtime/files/files.h"
#include "runtime/signals.h"
#include "runtime/timing.h"

namespace {

using Clock = std::chrono::steady_clock;

EngineOptions engine_options(const Trainer& t) {
    EngineOptions out = rollout_engine(t.options, t.ctx.world);
    out.sampled_vocab = sampled_vocab(t.model.config, t.tokenizer.get());
    out.sampling.seed = t.options.seed;
    out.tune_matmuls = t.options.gemm_tune && !t.options.rollout.exact;
    return out;
}

// Of all ranks, in their order.
template <typename T>
std::vector<T> gathered(const Context& ctx, const std::vector<T>& own) {
    std::vector<T> all(own.size() * size_t(ctx.world));
    ctx.comm->all_gather_host(all.data(), own.data(), own.size() * sizeof(T));
    return all;
}

}  // namespace

Rollouts::Rollouts(Trainer& t)
    : trainer(t),
      options(t.options.rollout),
      data(*t.setup.rollout),
      own_prompts(options.prompts / t.ctx.world),
      scorer(t.options.scorer),
      engine(t.model.config, engine_options(t), t.ctx.stream) {
    if (keeps_reference(t.acts.shape, t.model)) {
        reference.emplace(reference_model(t.model));
        reference->allocate(t.ctx);
        ::load_weights(t.setup.source, reference->table, reference->arenas);  // the trainer printed its notes
    }
    allocate_engine();
    if (options.completions_every && t.ctx.rank == 0)
        completions_log = std::make_unique<RunLog>(join_path(t.options.out, "completions.jsonl"), t.step);
}

void Rollouts::allocate_engine() {
    const Context& ctx = trainer.ctx;
    const Model& model = trainer.model;
    const Tensor memory = trainer.acts.rollout;
    const int64_t rest_at = ArenaPlan::aligned(engine.bytes());
    const auto rest = [&](int64_t bytes) { return memory.rows(rest_at, rest_at + bytes); };
    weights = inference_weights(model);
    for (BlockWeights& block : weights.blocks)
        for (LinearWeights* layer : {&block.qkv, &block.proj, &block.fc, &block.fcproj}) layer->lora = {};
    if (options.exact) {
        exact.emplace(ctx, model, trainer.acts, rollout_forward(trainer.options, model, engine.pass_tokens()));
        exact->allocate(rest(exact->bytes()));
    } else if (model.adapters) {
        bank.emplace(model.table, 1, engine.options.adapter_rank, engine.options.dtype);
        bank->allocate(ctx.stream, rest(bank->bytes()));
        weights.adapters = bank->blocks();
    }
    if (options.temperature != 1 && !exact) {  // then the logits are divided by it, as training's are
        Tensor* const tensors[] = {&weights.normf.weight, &weights.normf.bias};
        int64_t bytes = 0;
        for (const Tensor* t : tensors) bytes += *t ? ArenaPlan::aligned(t->bytes()) : 0;
        scaled_norm = Arena(bytes, "final norm of rollouts");
        int64_t at = 0;
        for (Tensor* t : tensors) {
            if (!*t) continue;
            *t = scaled_norm.at(at, t->dtype, {t->shape[0]});
            at += ArenaPlan::aligned(t->bytes());
        }
    }
    load_weights();
    const auto allocate = [&] { engine.allocate(weights, memory.rows(0, engine.bytes()), exact ? &*exact : nullptr); };
    // All ranks take rank 0's matmul algorithms, which its checkpoints name; another run of these sizes finds them too.
    std::string chosen;
    if (ctx.rank == 0) {
        allocate();
        if (engine.options.tune_matmuls) store_matmul_cache(ctx.stream);  // and takes what other runs have chosen
        chosen = matmul_choices(ctx.stream);
    }
    ctx.comm->broadcast_host(chosen, 0);
    if (ctx.rank == 0) return;
    matmul_use_choices(chosen, ctx.stream, true);
    allocate();
}

// What the engine has of its own beside the weights that the run trains.
void Rollouts::load_weights() {
    const Context& ctx = trainer.ctx;
    const Model& model = trainer.model;
    if (bank) {
        bank->clear(ctx.stream);
        bank->store(0, ctx, model);
    }
    if (!scaled_norm) return;
    const std::pair<Tensor, Tensor> scaled[] = {{weights.normf.weight, model.weight(NORMF_W)},
                                                {weights.normf.bias, model.weight(bias_of(NORMF_W))}};
    for (const auto& [to, from] : scaled) {
        if (!to) continue;
        std::vector<float> values = fetch_floats(ctx, from);
        for (float& value : values) value = float(double(value) / options.temperature);
        std::vector<char> bytes(size_t(to.bytes()));
        convert_from_float(bytes.data(), to.dtype, values.data(), int64_t(values.size()));
        copy_to_device(to.data, bytes.data(), bytes.size(), ctx.stream);
        synchronize(ctx.stream);  // `bytes` is a local variable
    }
}

std::string Rollouts::describe() const {
    return str(with_commas(int64_t(data.problems.size())), " prompts of up to ", data.prompts.longest, " tokens; ",
               options.prompts, " prompts x ", options.completions, " completions of up to ", options.max_tokens,
               " tokens a rollout", options.updates > 1 ? str(", ", options.updates, " updates each") : "",
               options.exact ? ", exact" : "");
}

// Each pass over the problems has another order.
size_t Rollouts::problem_of(int64_t prompt) const {
    const auto n = uint64_t(data.problems.size()), i = uint64_t(prompt);
    return size_t(permute(trainer.options.seed, i / n, i % n, n));
}

int64_t Rollouts::begin_step(int64_t step) {
    next_batch = 0;
    update = step % options.updates;
    if (update > 0) {
        for (Batch& batch : batches) batch.old_policy = true;
        std::erase_if(entries, [](const auto& entry) {  // of the first alone
            return entry.first.ends_with("_seconds") || entry.first == "verifier_errors";
        });
        return int64_t(batches.size());
    }
    const int64_t rollout = step / options.updates;
    entries.clear();
    if (!sample(rollout)) return 0;
    score();
    std::vector<Summary> own;
    for (const Sampled& s : sampled) own.push_back({s.reward, int64_t(s.tokens.size()), s.truncated});
    const std::vector<Summary> all = gathered(trainer.ctx, own);
    log_rewards(all);
    log_verifiers();
    learn_from(all);
    add_log_probabilities();
    if (options.completions_every && rollout % options.completions_every == 0) write_completions(step + 1);
    return idle_too_long(batches[0].loss_tokens > 0, step) ? 0 : int64_t(batches.size());
}

bool Rollouts::sample(int64_t rollout) {
    const Context& ctx = trainer.ctx;
    ctx.wait_for_stream("training");  // its time is not the rollout's
    const auto begin = Clock::now();
    for (int64_t slot = 0; slot < engine.options.slots; slot++) {
        engine.retire(slot);
        engine.truncate(slot);
    }
    load_weights();
    engine.restart();
    sampled.clear();
    std::vector<Request> requests;
    sampled.reserve(size_t(own_prompts * options.completions));
    for (int64_t p = ctx.rank * own_prompts; p < (ctx.rank + 1) * own_prompts; p++)
        for (int64_t g = 0; g < options.completions; g++) {
            const int64_t prompt = rollout * options.prompts + p;
            const size_t problem = problem_of(prompt);
            sampled.push_back({problem, Completion(trainer.tokenizer.get(), data.completion), {}, {}, {}});
            requests.push_back(
                {data.prompts.tokens[problem], 0, prompt * options.completions + g, &sampled.back().completion, {}});
            requests.back().adapter = bank ? 0 : -1;
        }
    ContextPolicy whole;  // a prompt and its completion fit
    whole.slide = false;
    const GenerateStatistics statistics = generate(engine, requests, whole, [&] {
        trainer.watchdog.state("sampling completions", trainer.step + 1);
        return stop_requested();
    });
    if (trainer.stopping()) return false;
    for (size_t i = 0; i < sampled.size(); i++) {
        Sampled& s = sampled[i];
        s.tokens = s.completion.tokens();
        s.logps = s.completion.logprobs();
        s.truncated = requests[i].end < 0;
        if (s.truncated) continue;
        s.tokens.push_back(requests[i].end);
        s.logps.push_back(requests[i].end_logprob);
    }
    const double seconds = seconds_since(begin);
    int64_t tokens = 0;
    for (const int64_t n : ctx.comm->all_gather_host(statistics.completion_tokens)) tokens += n;
    entries.emplace_back("rollout_seconds", seconds);
    entries.emplace_back("rollout_tokens_per_s", double(tokens) / seconds);
    return true;
}

void Rollouts::score() {
    trainer.watchdog.state("scoring completions", trainer.step + 1);
    const auto begin = Clock::now();
    const int64_t failures_before = scorer.failures();
    std::vector<Scorer::Attempt> attempts;
    for (const Sampled& s : sampled) attempts.push_back({&data.problems[s.problem], s.completion.text()});
    const std::vector<std::vector<double>> scores = scorer.score(attempts);
    for (size_t i = 0; i < sampled.size(); i++) {
        Sampled& s = sampled[i];
        s.scores = scores[i];
        s.reward = data.problems[s.problem].reward(s.scores);
        require(std::isfinite(s.reward),
                "the reward of a completion is not finite; lower the weights of its verifiers");
    }
    if (trainer.options.scorer.zero_on_error) log_verifier_errors(scorer.failures() - failures_before);
    entries.emplace_back("scoring_seconds", seconds_since(begin));
}

// Of this rollout, on all ranks. The first one since the start of the process is shown.
void Rollouts::log_verifier_errors(int64_t own) {
    const std::vector<int64_t> of_ranks = trainer.ctx.comm->all_gather_host(own);
    const int64_t all = std::accumulate(of_ranks.begin(), of_ranks.end(), int64_t(0));
    entries.emplace_back("verifier_errors", double(all));
    if (all == 0 || told_of_error) return;
    told_of_error = true;
    const auto rank = std::find_if(of_ranks.begin(), of_ranks.end(), [](int64_t n) { return n > 0; });
    std::string first = scorer.first_failure();
    trainer.ctx.comm->broadcast_host(first, rank - of_ranks.begin());
    note(str("step ", trainer.step + 1, ": reward 0 for ", all,
             " verifier errors, which log.jsonl counts; the first: ", first));
}

// Makes the batches of this rank. Every rank has as many, and divides by the same.
void Rollouts::learn_from(const std::vector<Summary>& all) {
    const Context& ctx = trainer.ctx;
    const TrainOptions& o = trainer.options;
    const int64_t G = options.completions, first = ctx.rank * own_prompts * G;
    std::vector<double> rewards;
    std::vector<int64_t> lengths;
    for (const Summary& s : all) {
        rewards.push_back(s.reward);
        lengths.push_back(options.keep_truncated || !s.truncated ? s.length : 0);
    }
    const std::vector<float> of_all = advantages(rewards, G, options.advantage);
    const auto leaves_out = [&](size_t begin) {  // without a difference of rewards only the KL has a gradient
        return options.policy.kl == 0 && !group_differs(rewards, begin, G);
    };
    int64_t left_out = 0;
    for (size_t begin = 0; begin < rewards.size(); begin += size_t(G)) left_out += leaves_out(begin);
    entries.emplace_back("groups_left_out", double(left_out));

    const auto learns_from = [&](size_t i) {
        return !leaves_out(i / size_t(G) * size_t(G)) && (options.keep_truncated || !all[i].truncated);
    };
    std::vector<PolicyExample> examples;
    for (size_t i = 0; i < sampled.size(); i++) {
        const size_t of_run = size_t(first) + i;
        if (!learns_from(of_run)) continue;
        const Sampled& s = sampled[i];
        examples.push_back({&data.prompts.tokens[s.problem], s.tokens, s.logps, of_all[of_run],
                            token_weight(options.loss_norm, int64_t(s.tokens.size()))});
    }
    const int64_t room = trainer.max_sequences();
    batches = completion_batches(examples, o.batch_size, o.seq_len, room);
    const std::vector<int64_t> counts = ctx.comm->all_gather_host(int64_t(batches.size()));
    const int64_t most = std::max<int64_t>(*std::max_element(counts.begin(), counts.end()), 1);
    while (int64_t(batches.size()) < most) batches.push_back(empty_batch(o.batch_size, o.seq_len, room));
    trained_tokens = 0;
    bool any = false;
    for (size_t i = 0; i < all.size(); i++) {
        if (!learns_from(i)) continue;
        any = true;
        const int64_t prompt = int64_t(trainer.step / options.updates * options.prompts) + int64_t(i) / G;
        trained_tokens += int64_t(data.prompts.tokens[problem_of(prompt)].size()) + all[i].length - 1;
    }
    if (any) batches[0].loss_tokens = loss_divisor(options.loss_norm, lengths, options.max_tokens);
}

// The reference is the model that the run started from: the one without its adapters, or the copy.
void Rollouts::add_log_probabilities() {
    const auto add = [&](const Model& model, bool adapters, float Batch::PolicyTerms::*field) {
        for (Batch& batch : batches) {
            const std::vector<float> logps = target_logps(trainer.ctx, model, trainer.acts, batch, adapters);
            for (size_t i = 0; i < logps.size(); i++) batch.policy[i].*field = logps[i];
        }
    };
    trainer.watchdog.state("computing log-probabilities", trainer.step + 1);
    const bool of_policy = options.updates > 1 && !exact;
    if (options.policy.kl == 0 && !of_policy) return;
    const auto begin = Clock::now();
    if (options.policy.kl > 0) add(reference ? *reference : trainer.model, false, &Batch::PolicyTerms::reference_logp);
    if (of_policy) add(trainer.model, true, &Batch::PolicyTerms::old_logp);
    entries.emplace_back("log_probability_seconds", seconds_since(begin));
}

void Rollouts::log_rewards(const std::vector<Summary>& all) {
    const auto n = double(all.size());
    double sum = 0, squares = 0, length = 0, truncated = 0;
    for (const Summary& s : all) {
        sum += s.reward;
        length += double(s.length);
        truncated += double(s.truncated);
    }
    for (const Summary& s : all) squares += (s.reward - sum / n) * (s.reward - sum / n);
    entries.emplace_back("reward", sum / n);
    entries.emplace_back("reward_std", std::sqrt(squares / n));
    entries.emplace_back("completion_length", length / n);
    entries.emplace_back("truncated", truncated / n);
}

// The mean score by each verifier, where the file names several.
void Rollouts::log_verifiers() {
    std::map<std::string, std::pair<double, double>> by_name;  // sum and number
    for (const Problem& p : data.problems)
        for (const WeightedVerifier& v : p.verifiers) by_name[v.name] = {0, 0};
    if (by_name.size() < 2) return;
    for (const Sampled& s : sampled)
        for (size_t v = 0; v < s.scores.size(); v++) {
            auto& [sum, number] = by_name[data.problems[s.problem].verifiers[v].name];
            sum += s.scores[v];
            number++;
        }
    std::vector<std::pair<double, double>> own;
    for (const auto& [name, score] : by_name) own.push_back(score);
    const std::vector<std::pair<double, double>> all = gathered(trainer.ctx, own);
    size_t i = 0;
    for (const auto& [name, score] : by_name) {
        double sum = 0, number = 0;
        for (size_t at = i; at < all.size(); at += own.size()) {
            sum += all[at].first;
            number += all[at].second;
        }
        if (number > 0) entries.emplace_back("reward_" + name, sum / number);
        i++;
    }
}

// Those of rank 0.
void Rollouts::write_completions(int64_t step) {
    if (!completions_log) return;
    for (const Sampled& s : sampled) {
        const Problem& p = data.problems[s.problem];
        nlohmann::ordered_json scores;
        for (size_t v = 0; v < s.scores.size(); v++) scores[p.verifiers[v].name] = s.scores[v];
        const nlohmann::ordered_json line = {{"step", step},
                                             {"prompt", p.prompt},
                                             {"answer", p.answer},
                                             {"completion", s.completion.text()},
                                             {"reward", s.reward},
                                             {"scores", scores},
                                             {"tokens", s.tokens.size()},
                                             {"finish", s.completion.finish()}};
        completions_log->write(line);
    }
}

// A run that goes on is told where one with the default would stop.
bool Rollouts::idle_too_long(bool differs, int64_t step) {
    const int64_t idle = differs ? 0 : trainer.idle_steps / options.updates + 1;
    const bool stops = options.max_idle_steps && idle >= options.max_idle_steps;
    if (stops || idle == RolloutFlags{}.max_idle_steps)
        note(str("step ", step + 1, ": in ", idle,
                 " rollouts in a row the completions of each prompt had equal rewards",
                 options.keep_truncated ? "" : ", or --max-tokens cut them", ", so there is nothing to learn; ",
                 stops ? "the run stops" : "the run goes on", " (--max-idle-steps ", options.max_idle_steps, ")"));
    return stops;
}

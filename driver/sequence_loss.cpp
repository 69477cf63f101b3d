#include "driver/sequence_loss.h"

#include <algorithm>

namespace {

constexpr int32_t NO_ROW = -1;

// Appends the loss tokens among [begin, end).
void append_loss_tokens(std::vector<int32_t>& rows, const Batch& batch, int32_t begin, int32_t end) {
    for (int32_t t = begin; t < end; t++)
        if (batch.targets[size_t(t)] != Batch::NO_TARGET) rows.push_back(t);
}

// False: a pair is longer than a chunk, or the rows are more than the tokens. chunk 0: pairs lie where they come.
bool lay_out(PairLayout& layout, const Batch& batch, size_t chunk) {
    std::vector<int32_t>& rows = layout.loss_rows;
    rows.clear();
    layout.pairs.clear();
    for (const Batch::Pair& pair : batch.pairs) {
        size_t begin = rows.size();
        append_loss_tokens(rows, batch, pair.chosen, pair.rejected);
        size_t middle = rows.size();
        append_loss_tokens(rows, batch, pair.rejected, pair.end);
        const size_t length = rows.size() - begin;
        if (chunk && length > chunk) return false;
        if (const size_t room = chunk ? chunk - begin % chunk : length; length > room) {
            rows.insert(rows.begin() + long(begin), room, NO_ROW);
            begin += room;
            middle += room;
        }
        layout.pairs.push_back({int32_t(begin), int32_t(middle), int32_t(rows.size())});
    }
    return rows.size() <= batch.tokens.size();
}

PreferenceLoss loss_of(const Pass& p) {
    const Activations& acts = p.acts;
    PreferenceLoss loss;
    loss.stats = acts.pair_stats;
    loss.losses = acts.losses.rows(0, p.in.head_tokens());
    loss.rows = acts.pair_rows;
    loss.options = *acts.shape.preference;
    if (has_reference(loss.options.method)) loss.reference = acts.pair_reference;
    loss.end = p.in.head_tokens();
    return loss;
}

}  // namespace

std::vector<int32_t> loss_rows(const Activations& acts, const Batch& batch) {
    const std::vector<int32_t>& targets = batch.targets;
    const size_t count = targets.size() - size_t(std::count(targets.begin(), targets.end(), Batch::NO_TARGET));
    const size_t unit = acts.logits.device == Device::CPU ? 1 : size_t(acts.logits.shape[0]);
    const size_t size = std::max<size_t>((count + unit - 1) / unit, 1) * unit;
    const bool policy = acts.shape.rollout.has_value();  // its head always gathers rows
    if (size >= targets.size() && !policy) return {};
    std::vector<int32_t> rows;
    rows.reserve(size);
    for (size_t n = 0; n < targets.size(); n++)
        if (targets[n] != Batch::NO_TARGET) rows.push_back(static_cast<int32_t>(n));
    rows.resize(std::min(size, targets.size()), NO_ROW);
    return rows;
}

PairLayout lay_out_pairs(const Batch& batch, int64_t most, int64_t chunk, int64_t unit) {
    PairLayout layout;
    layout.two_passes = !lay_out(layout, batch, size_t(chunk));
    if (layout.two_passes) lay_out(layout, batch, 0);
    const int64_t used = std::max<int64_t>(int64_t(layout.loss_rows.size()), 1),
                  size = std::min((used + unit - 1) / unit * unit, int64_t(batch.tokens.size()));
    layout.loss_rows.resize(size_t(size), NO_ROW);
    layout.pairs.resize(size_t(most), PairRows{0, 0, 0});
    return layout;
}

std::vector<int32_t> upload_pairs(const Context& ctx, const Activations& acts, const Batch& batch, Input& in) {
    const int64_t chunk = acts.logits.shape[0], unit = acts.logits.device == Device::CPU ? 1 : chunk;
    PairLayout layout = lay_out_pairs(batch, acts.pair_rows.shape[0], chunk, unit);
    acts.staging->put(acts.pair_rows.data, layout.pairs.data(), acts.pair_rows.bytes(), ctx.stream);
    in.two_passes = layout.two_passes;
    return std::move(layout.loss_rows);
}

void upload_policy(const Context& ctx, const Activations& acts, const Batch& batch, const std::vector<int32_t>& rows,
                   Input& in) {
    std::vector<float> values(size_t(NUM_POLICY_TERMS) * rows.size(), 0.0f);
    for (size_t i = 0; i < rows.size(); i++) {
        if (rows[i] < 0) continue;
        const Batch::PolicyTerms& t = batch.policy[size_t(rows[i])];
        const float terms[NUM_POLICY_TERMS] = {t.advantage, t.weight, t.sampler_logp, t.reference_logp, t.old_logp};
        for (size_t k = 0; k < NUM_POLICY_TERMS; k++) values[k * rows.size() + i] = terms[k];
    }
    acts.staging->put(acts.policy_terms.data, values.data(), int64_t(values.size() * sizeof(float)), ctx.stream);
    in.old_policy = batch.old_policy;
}

float logit_scale(const Activations& acts) {
    return acts.shape.rollout ? float(1 / acts.shape.rollout->temperature) : 1.0f;
}

void upload_reference(const Context& ctx, const Activations& acts, const std::vector<float>& logps) {
    acts.staging->put(acts.pair_reference.data, logps.data(), int64_t(logps.size() * sizeof(float)), ctx.stream);
}

void pair_head_forward_backward(const Pass& p, float dloss, const HeadRows& head) {
    const int64_t n = p.in.head_tokens(), chunk = p.acts.logits.shape[0];
    PreferenceLoss loss = loss_of(p);
    loss.dlosses = p.acts.dlosses.rows(0, n);
    loss.scale = dloss;
    const auto for_each_chunk = [&](const auto& compute) {
        for (int64_t begin = 0; begin < n; begin += chunk) {
            LinearCrossEntropy rows = head(begin, std::min(begin + chunk, n));
            rows.dlosses = loss.dlosses.rows(begin, std::min(begin + chunk, n));
            compute(rows, begin);
        }
    };
    if (p.in.two_passes) {
        for_each_chunk(
            [&](const LinearCrossEntropy& rows, int64_t) { linear_cross_entropy_forward(rows, p.stream()); });
        preference_loss(loss, p.stream());
        for_each_chunk([&](const LinearCrossEntropy& rows, int64_t) { linear_cross_entropy(rows, p.stream()); });
        return;
    }
    for_each_chunk([&](const LinearCrossEntropy& rows, int64_t begin) {
        linear_cross_entropy_losses(rows, p.stream());
        loss.begin = begin;
        loss.end = std::min(begin + chunk, n);
        preference_loss(loss, p.stream());
        linear_cross_entropy_gradient(rows, p.stream());
    });
}

void policy_head_forward_backward(const Pass& p, float dloss, bool accumulate, const HeadRows& head) {
    const Activations& acts = p.acts;
    const int64_t n = p.in.head_tokens(), chunk = acts.logits.shape[0];
    const auto term = [&](PolicyTerm which, int64_t begin, int64_t end) {
        float* const values = acts.policy_terms.as<float>() + which * n + begin;
        return make_tensor(values, DType::F32, acts.policy_terms.device, {end - begin});
    };
    PolicyLoss policy;
    policy.options = acts.shape.rollout->policy;
    policy.scale = dloss;
    policy.stats = make_tensor(acts.loss_sum.data, DType::F64, acts.loss_sum.device, {NUM_POLICY_STATS});
    for (int64_t begin = 0; begin < n; begin += chunk) {
        const int64_t end = std::min(begin + chunk, n);
        LinearCrossEntropy rows = head(begin, end);
        rows.dlosses = acts.dlosses.rows(begin, end);
        linear_cross_entropy_losses(rows, p.stream());
        policy.losses = rows.losses;
        policy.dlosses = rows.dlosses;
        policy.advantages = term(TERM_ADVANTAGE, begin, end);
        policy.weights = term(TERM_WEIGHT, begin, end);
        policy.sampler_logps = term(TERM_SAMPLER, begin, end);
        if (policy.options.kl > 0) policy.reference_logps = term(TERM_REFERENCE, begin, end);
        if (p.in.old_policy) policy.old_logps = term(TERM_OLD, begin, end);
        policy.accumulate = accumulate || begin > 0;
        policy_loss(policy, p.stream());
        linear_cross_entropy_gradient(rows, p.stream());
    }
}

std::vector<float> target_logps(const Context& ctx, const Model& model, const Activations& acts, const Batch& batch,
                                bool adapters) {
    const std::vector<int32_t> rows = loss_rows(acts, batch);
    const Input in = upload(ctx, acts, batch, true);
    Pass p{ctx, model, acts, in};
    p.adapters = adapters;
    forward(p);
    token_losses(p);
    ctx.wait_for_stream("log-probabilities");
    std::vector<float> losses(rows.size()), logps(batch.tokens.size(), 0.0f);
    copy_to_host(losses.data(), acts.losses.data, losses.size() * sizeof(float), ctx.stream);
    for (size_t i = 0; i < rows.size(); i++)
        if (rows[i] >= 0) logps[size_t(rows[i])] = -losses[i];
    return logps;
}

std::vector<std::pair<std::string, double>> policy_metrics(const std::vector<double>& sums) {
    std::array<double, NUM_POLICY_STATS> s{};
    for (size_t row = SUM_LOSS; row < sums.size(); row += NUM_STEP_SUMS)
        for (size_t i = 0; i < NUM_POLICY_STATS; i++)
            s[i] = i == POLICY_LARGEST_GAP ? std::max(s[i], sums[row + i]) : s[i] + sums[row + i];
    const double tokens = std::max(s[POLICY_TOKENS], 1.0);
    return {{"entropy", s[POLICY_ENTROPY] / tokens},        {"kl", s[POLICY_KL] / tokens},
            {"clip_fraction", s[POLICY_CLIPPED] / tokens},  {"sampler_gap", s[POLICY_SAMPLER_GAP] / tokens},
            {"sampler_gap_largest", s[POLICY_LARGEST_GAP]}, {"policy_tokens", s[POLICY_TOKENS]}};
}

void sum_pairs(const Pass& p, bool accumulate) {
    if (!p.grads) preference_loss(loss_of(p), p.stream());
    sum_pair_stats(p.acts.pair_sums(p.ctx.rank), p.acts.pair_stats, accumulate, p.stream());
}

void reference_pass(const Context& ctx, const Model& model, const Activations& acts, const Input& in) {
    Pass p{ctx, model, acts, in};
    p.adapters = false;
    forward(p);
    token_losses(p);
    pair_logps(acts.pair_reference, acts.losses.rows(0, in.head_tokens()), acts.pair_rows, p.stream());
}

// The margin of 1 is half of β, as the authors of SimPO recommend.
std::optional<PreferenceOptions> PreferenceFlags::options() const {
    if (!on()) return {};
    const bool simpo = method == PreferenceMethod::SimPO;
    return PreferenceOptions{*method, float(beta.value_or(simpo ? 2 : 0.1)), float(label_smoothing.value_or(0)),
                             float(margin.value_or(simpo ? 1 : 0))};
}

std::string PreferenceFlags::description() const {
    if (!on()) return "none";
    const PreferenceOptions o = *options();
    return str(PREFERENCE_NAMES[size_t(o.method)], ", beta ", o.beta, ", label smoothing ", o.label_smoothing,
               ", margin ", o.margin);
}

std::string RolloutFlags::description() const {
    if (!on()) return "none";
    return str(prompts, " prompts x ", completions, " completions of ", max_tokens, " tokens, temperature ",
               temperature, ", advantage ", ADVANTAGE_NAMES[size_t(advantage)], ", loss norm ",
               LOSS_NORM_NAMES[size_t(loss_norm)], ", ", updates, " updates, truncated ",
               keep_truncated ? "keep" : "mask", ", clip ", policy.clip_low, " ", policy.clip_high, ", kl ", policy.kl,
               ", importance cap ", policy.importance_cap, chat_template ? "" : ", no chat template",
               ignore_eos ? ", past end tokens" : "", exact ? ", exact" : "");
}

PairSums pair_sums_of(const StepScalars& step) {
    PairSums sums;
    std::copy(std::begin(step.pair_stats), std::end(step.pair_stats), sums.begin());
    return sums;
}

std::vector<std::pair<std::string, double>> pair_metrics(const PairSums& s, double pairs, PreferenceMethod method) {
    std::vector<std::pair<std::string, double>> metrics = {
        {"rewards_chosen", s[PAIR_CHOSEN_REWARD] / pairs},
        {"rewards_rejected", s[PAIR_REJECTED_REWARD] / pairs},
        {"rewards_margin", (s[PAIR_CHOSEN_REWARD] - s[PAIR_REJECTED_REWARD]) / pairs},
        {"rewards_accuracy", s[PAIR_ACCURATE] / pairs},
        {"logp_chosen", s[PAIR_CHOSEN_LOGP] / s[PAIR_CHOSEN_TOKENS]},
        {"logp_rejected", s[PAIR_REJECTED_LOGP] / s[PAIR_REJECTED_TOKENS]}};
    if (has_reference(method))
        metrics.emplace_back("kl", (s[PAIR_CHOSEN_LOGP] + s[PAIR_REJECTED_LOGP] - s[PAIR_REFERENCE_LOGP]) /
                                       (s[PAIR_CHOSEN_TOKENS] + s[PAIR_REJECTED_TOKENS]));
    return metrics;
}

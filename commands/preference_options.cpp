// The options of losses on preference pairs.
#include "commands/cli.h"
#include "commands/help.h"

std::vector<CLI::Option*> add_preference_options(CLI::App& app, PreferenceFlags& o) {
    const InGroup group(app, help_group::PREFERENCES);
    std::vector<const char*> names = {"cross-entropy"};
    names.insert(names.end(), PREFERENCE_NAMES.begin(), PREFERENCE_NAMES.end());
    CLI::Option* const loss =
        app.add_option("--loss", "cross-entropy, or a loss on preference pairs: dpo, ipo, simpo, orpo")
            ->type_name("TEXT")
            ->check(CLI::IsMember(names))
            ->default_str("cross-entropy")
            ->each([&o](const std::string& name) { o.method = find_enum<PreferenceMethod>(PREFERENCE_NAMES, name); });
    CLI::Option* const beta =
        app.add_option(
               "--beta", o.beta,
               "dpo, ipo: how much the model is held at its reference; simpo: factor of the rewards; orpo: weight of "
               "the odds ratio; default: 0.1, simpo 2")
            ->check(number_in(1e-6, 1e6));
    CLI::Option* const smoothing =
        app.add_option("--label-smoothing", o.label_smoothing,
                       "dpo, simpo: the share of pairs that are taken to be the wrong way round; default: 0")
            ->check(number_in(0.0, 0.499));
    CLI::Option* const margin = app.add_option("--simpo-margin", o.margin,
                                               "by how much a chosen response's reward is to be greater; default: 1")
                                    ->check(number_in(0.0, 1e6));
    CLI::Option* const reference =
        app.add_option_function<std::string>(
               "--reference", [&o](const std::string& name) { o.adapters_off = name == "adapters-off"; },
               "dpo, ipo: stored: the log-probabilities of the model that the run starts from are computed once and "
               "kept "
               "beside the data; adapters-off: they are computed in each step, by the model without its adapters")
            ->check(CLI::IsMember({"stored", "adapters-off"}))
            ->default_str("stored");
    return {loss, beta, smoothing, margin, reference};
}

void check_preference_options(const PreferenceFlags& o, const LoraOptions& lora, const Fp8Options& fp8) {
    const std::string loss = o.on() ? PREFERENCE_NAMES[size_t(*o.method)] : "cross-entropy";
    const auto only_for = [&](bool given, const char* option, bool fits, const char* losses) {
        if (given && !fits) throw UsageError(str(option, " is for --loss ", losses, ", not ", loss, "; leave it out"));
    };
    const bool logistic = o.method == PreferenceMethod::DPO || o.method == PreferenceMethod::SimPO;
    only_for(o.beta.has_value(), "--beta", o.on(), "dpo, ipo, simpo or orpo");
    only_for(o.label_smoothing.has_value(), "--label-smoothing", logistic, "dpo or simpo");
    only_for(o.margin.has_value(), "--simpo-margin", o.method == PreferenceMethod::SimPO, "simpo");
    only_for(o.adapters_off, "--reference adapters-off", o.has_reference(), "dpo or ipo");
    if (o.adapters_off && !lora.on())
        throw UsageError("--reference adapters-off: the run trains no adapters; add --lora-rank, or leave it out");
    if (o.has_reference() && fp8.on)
        throw UsageError(str("--loss ", loss,
                             ": the reference is not computed in fp8; leave out --matmul-dtype fp8, or use simpo or "
                             "orpo, which have none"));
}

#include "infer/declared_sampling.h"

#include "runtime/error.h"

using nlohmann::json;

namespace {

// The ranges are those of the options (commands/cli.cpp).
struct Declared {
    const char *key, *option;
    double low, high;
    void (*set)(SamplingOptions& options, double value);
};

constexpr Declared DECLARED[] = {
    {"repetition_penalty", "--repeat-penalty", 1e-3, 1e3, [](auto& o, double v) { o.repeat_penalty = float(v); }},
    {"temperature", "--temperature", 0, 1e6, [](auto& o, double v) { o.temperature = float(v); }},
    {"top_k", "--top-k", 0, 1e9, [](auto& o, double v) { o.top_k = int64_t(v); }},
    {"top_p", "--top-p", 1e-6, 1, [](auto& o, double v) { o.top_p = float(v); }},
    {"min_p", "--min-p", 0, 1, [](auto& o, double v) { o.min_p = float(v); }},
};

// Keys with which transformers would choose other tokens, and the number that turns each off, as null, false and an
// empty list do.
struct WithoutOption {
    const char* key;
    double off;
};

constexpr WithoutOption WITHOUT_OPTION[] = {
    {"typical_p", 1},
    {"top_h", 0},
    {"epsilon_cutoff", 0},
    {"eta_cutoff", 0},
    {"encoder_repetition_penalty", 1},
    {"exponential_decay_length_penalty", 0},
    {"no_repeat_ngram_size", 0},
    {"encoder_no_repeat_ngram_size", 0},
    {"bad_words_ids", 0},
    {"suppress_tokens", 0},
    {"begin_suppress_tokens", 0},
    {"sequence_bias", 0},
    {"forced_bos_token_id", -1},
    {"forced_eos_token_id", -1},
    {"min_length", 0},
    {"min_new_tokens", 0},
    {"num_beams", 1},
    {"num_beam_groups", 1},
    {"constraints", 0},
    {"force_words_ids", 0},
    {"penalty_alpha", 0},
    {"dola_layers", 0},
    {"guidance_scale", 1},
    {"token_healing", 0},
    {"watermarking_config", 0},
    {"stop_strings", 0},
};

bool is_off(const json& value, double off) {
    return value.empty() || value == false || value == off;
}

std::string short_form(double value) {
    return json(value == double(int64_t(value)) ? json(int64_t(value)) : json(value)).dump();
}

}  // namespace

std::string take_declared_sampling(const JsonKeys& file, const std::function<bool(const std::string&)>& is_given,
                                   SamplingOptions& options) {
    std::string set, ignored;
    const json& object = file.object;
    const bool greedy = object.value("do_sample", json()) == false;
    for (const Declared& d : DECLARED) {
        if (is_given(d.option)) continue;
        const bool zero = greedy && d.key == std::string("temperature");
        const json value = zero ? json(0) : object.value(d.key, json());
        if (value.is_null()) continue;
        const bool valid = value.is_number() && value >= d.low && value <= d.high;
        const bool whole = d.key != std::string("top_k") || (valid && value.get<double>() == value.get<int64_t>());
        require(valid && whole, file.path, ": key '", d.key, "' is ", shown(value), ", expected a ",
                whole ? "" : "whole ", "number from ", short_form(d.low), " to ", short_form(d.high),
                "; correct it, or give ", d.option);
        d.set(options, value.get<double>());
        set += str(" ", d.option, " ", value.dump());
    }
    for (const WithoutOption& w : WITHOUT_OPTION)
        if (!is_off(object.value(w.key, json()), w.off)) ignored += str(ignored.empty() ? "" : ", ", w.key);
    if (set.empty() && ignored.empty()) return "";
    if (!set.empty())
        set = str(" sets", set, greedy ? " (do_sample is false)" : "", "; options on the command line win");
    if (!ignored.empty()) ignored = str(set.empty() ? "" : ";", " not supported and ignored: ", ignored);
    return str(file.path, ":", set, ignored);
}

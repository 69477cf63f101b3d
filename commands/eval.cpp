// `eval`: the loss of a split of a data set, or the accuracy on multiple-choice questions or on prompts with answers.
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>

#include "commands/eval_answers.h"
#include "data/multiple_choice.h"
#include "data/token_files.h"
#include "data/tokenizer.h"
#include "driver/evaluation.h"
#include "driver/inference.h"
#include "driver/train_setup.h"
#include "infer/prompts.h"
#include "runtime/files/checkpoint_directory.h"
#include "runtime/files/files.h"

namespace {

struct EvalOptions {
    ModelOptions model;
    std::string data, multiple_choice, split = "val", too_long = "error";
    AnswerOptions answers;
    int64_t batch_size = 0;  // 0: 8, or with answers what GenerationFlags has
    int64_t seq_len = 0;     // 0: the length the checkpoint was trained with, else up to 1024
    bool json = false;
};

EvalOptions parse_eval(const Args& args) {
    EvalOptions o;
    CLI::App app(
        "Scores every token of a split once and prints tokens, bytes, val_loss (nats per token), perplexity and "
        "bits_per_byte; of conversations loss_tokens, val_loss and perplexity; of preference pairs their number, "
        "accuracy (the share whose chosen response has the greater log-probability), accuracy_per_token (the same of "
        "its mean over tokens), loss_chosen and loss_rejected (nats per token). With --multiple-choice, scores "
        "multiple-choice questions and prints accuracy, accuracy_norm "
        "(accuracy by log-probability per character) and count. If the questions have one ending each, it prints "
        "accuracy, perplexity and count. With --answers, completes prompts and prints accuracy (the share of "
        "completions "
        "with a reward of 1 or more), pass@G (the share of prompts with a correct one among --num-samples G), the mean "
        "reward, mean_tokens of a completion, truncated (the share that --max-tokens or the context ended) and count.",
        "train_gpt eval");
    const CLI::Validator positive = at_least(1);
    add_model_options(app, o.model);
    add_weights_option(app, o.model.weights);
    auto* data = app.add_option("--data", o.data, "directory with train_*.bin and val_*.bin, as 'make data' writes it");
    auto* questions =
        app.add_option(
               "--multiple-choice", o.multiple_choice,
               "file with one question per line: {\"ctx\": text, \"endings\": [text, ...], \"label\": index of the "
               "correct ending, from 0}; a single ending is predicted, not chosen")
            ->excludes(data);
    auto* split = app.add_option("--split", o.split, "split to score")
                      ->check(CLI::IsMember({"val", "train"}))
                      ->capture_default_str()
                      ->excludes(questions);
    app.add_option("--batch-size", o.batch_size,
                   "sequences per batch, 8 by default; with --answers those that generate at the same time, 64")
        ->check(positive);
    auto* seq_len =
        app.add_option("--seq-len", o.seq_len,
                       "tokens per sequence; default: the length that the checkpoint was trained with, else up to 1024")
            ->check(positive);
    auto* too_long = add_too_long_option(app, o.too_long)->excludes(questions);
    app.add_flag("--json", o.json, "print one JSON object");
    auto* answers = add_answer_options(app, o.answers);
    for (CLI::Option* option : {data, questions, split, seq_len, too_long}) option->excludes(answers);
    parse(app, args);
    if (o.data.empty() && o.multiple_choice.empty() && o.answers.file.empty())
        throw UsageError("--data, --multiple-choice or --answers is required");
    if (o.batch_size && !o.answers.file.empty()) o.answers.generation.batch_size = o.batch_size;
    if (!o.batch_size) o.batch_size = 8;
    return o;
}

constexpr const char* NOT_FINITE = "; the weights are damaged, or too large for --dtype";

void run_multiple_choice(const EvalOptions& o) {
    const Context ctx;
    const ModelSource source = o.model.resolve(0);
    const std::vector<Question> questions = read_questions(o.multiple_choice);
    const Tokenizer tokenizer(source.files);
    const std::vector<Choice> choices = make_choices(questions, tokenizer, source.config.vocab_size);
    std::string text;
    for (const Question& q : questions) {
        text += q.context;
        for (const std::string& ending : q.endings) text += " " + ending;
    }
    const std::string lost = lost_bytes_note(text, tokenizer);
    if (!lost.empty()) std::cerr << "train_gpt: eval: " << lost << "\n";
    int64_t T = o.seq_len;
    if (!T) {
        for (const Choice& c : choices) T = std::max(T, int64_t(c.tokens.size() + tokenizer.start_of_text().size()));
        if (source.config.positions == Positions::Learned) T = std::min(T, source.config.max_positions);
    }
    const std::string cut = cut_choices_note(choices, tokenizer.start_of_text().size(), T);
    if (!cut.empty()) std::cerr << "train_gpt: eval: " << cut << "\n";
    RunShape shape = inference_shape(o.batch_size, T, o.model.type());
    shape.packing = packing_of(source, o.model.weights);
    const LoadedModel m(ctx, source, shape);
    nlohmann::ordered_json result;
    for (const auto& [name, value] : answer_questions(ctx, m.model, m.acts, questions, choices, tokenizer)) {
        require(std::isfinite(value), source.name, ": the loss of an ending is not finite", NOT_FINITE);
        result[name] = value;
    }
    result["count"] = questions.size();
    print_result(result, o.json);
}

nlohmann::ordered_json pair_result(const PairScores& s, const ModelSource& source) {
    require(std::isfinite(s.chosen_nats + s.rejected_nats), source.name, ": the loss of a response is not finite",
            NOT_FINITE);
    const auto pairs = double(s.pairs);
    return {{"pairs", s.pairs},
            {"accuracy", s.accurate / pairs},
            {"accuracy_per_token", s.accurate_per_token / pairs},
            {"loss_chosen", s.chosen_nats / double(s.chosen_tokens)},
            {"loss_rejected", s.rejected_nats / double(s.rejected_tokens)}};
}

}  // namespace

void run_eval(const Args& args) {
    const EvalOptions o = parse_eval(args);
    if (!o.answers.file.empty()) return run_answers(o.answers, o.model, o.json, args);
    if (!o.multiple_choice.empty()) return run_multiple_choice(o);
    const Context ctx;
    const DataDirectory data = open_data(o.data);
    const bool train_split = o.split == "train";
    const TokenFiles files = open_split(data, train_split);
    const ModelSource source = o.model.resolve(0);
    check_same_tokenizer(data, source);
    int64_t T = o.seq_len;
    if (!T && !source.directory.empty())
        T = trained_seq_len(source.adapter.empty() ? source.directory : source.adapter);
    if (T <= 0) T = std::min<int64_t>(source.config.max_positions, 1024);
    std::unique_ptr<ExamplePacking> packing;
    if (files.has_examples()) packing = std::make_unique<ExamplePacking>(files, T, o.too_long == "skip");
    RunShape shape = inference_shape(o.batch_size, T, o.model.type());
    shape.packing = packing_of(source, o.model.weights);
    const LoadedModel m(ctx, source, shape);
    const EvalSplit split{files, packing.get(), data.end_of_text, 0, text_bytes(data, files, train_split)};
    if (packing && packing->num_too_long())
        std::cerr << "train_gpt: eval: " << packing->num_too_long() << (files.has_pairs() ? " pairs" : " examples")
                  << " longer than --seq-len " << T << " were left out\n";
    if (files.has_pairs()) return print_result(pair_result(score_pairs(ctx, m.model, m.acts, split), source), o.json);
    const Evaluation e = evaluate(ctx, m.model, m.acts, split);
    require(std::isfinite(e.loss()), source.name, ": the loss is ", e.loss(), NOT_FINITE);
    nlohmann::ordered_json result = {{files.masked() ? "loss_tokens" : "tokens", e.tokens}};
    if (e.bytes) result["bytes"] = e.bytes;
    result["val_loss"] = e.loss();
    result["perplexity"] = std::exp(e.loss());
    if (e.bytes) result["bits_per_byte"] = e.bits_per_byte();
    print_result(result, o.json);
}

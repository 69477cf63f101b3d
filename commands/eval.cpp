#include "commands/cli.h"

EvalOptions parse_eval(const Args& args) {
    EvalOptions o;
    CLI::App app(
        "Scores every token of a split once and prints tokens, bytes, val_loss (nats per token), perplexity and "
        "bits_per_byte. With --multiple-choice, scores multiple-choice questions and prints accuracy, accuracy_norm "
        "(accuracy by log-probability per character) and count. If the questions have one ending each, it prints "
        "accuracy, perplexity and count.",
        "train_gpt eval");
    const CLI::Validator positive = at_least(1);
    add_model_options(app, o.model);
    auto* data = app.add_option("--data", o.data, "directory with train_*.bin and val_*.bin, as 'make data' writes it");
    auto* questions =
        app.add_option(
               "--multiple-choice", o.multiple_choice,
               "file with one question per line: {\"ctx\": text, \"endings\": [text, ...], \"label\": index of the "
               "correct ending, from 0}; a single ending is predicted, not chosen")
            ->excludes(data);
    app.add_option("--split", o.split, "split to score")
        ->check(CLI::IsMember({"val", "train"}))
        ->capture_default_str()
        ->excludes(questions);
    app.add_option("--batch-size", o.batch_size, "sequences per batch")->check(positive)->capture_default_str();
    app.add_option("--seq-len", o.seq_len,
                   "tokens per sequence; default: the length that the checkpoint was trained with, else up to 1024")
        ->check(positive);
    add_too_long_option(app, o.too_long)->excludes(questions);
    app.add_flag("--json", o.json, "print one JSON object");
    parse(app, args);
    if (o.data.empty() && o.multiple_choice.empty()) throw UsageError("--data or --multiple-choice is required");
    return o;
}

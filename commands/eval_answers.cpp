#include "commands/eval_answers.h"

#include <filesystem>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "commands/help.h"
#include "driver/answer_prompts.h"
#include "driver/inference.h"
#include "infer/sample_output.h"
#include "kernels/generation/read_bandwidth.h"
#include "runtime/files/files.h"
#include "runtime/signals.h"

namespace {

struct Results {
    const std::vector<Problem>& problems;
    const std::vector<Completion>& completions;  // num_samples of each problem
    std::vector<std::vector<double>> scores;     // of each completion, by its verifiers

    const Problem& problem_of(size_t completion) const {
        return problems[completion / (completions.size() / problems.size())];
    }
    double reward(size_t completion) const { return problem_of(completion).reward(scores[completion]); }

    nlohmann::ordered_json summary() const {
        const size_t samples = completions.size() / problems.size();
        const auto count = double(completions.size());
        double rewards = 0, correct = 0, tokens = 0, truncated = 0, any_correct = 0;
        std::map<std::string, std::pair<double, double>> by_verifier;  // sum and number of scores
        for (size_t p = 0; p < problems.size(); p++) {
            int64_t right = 0;
            for (size_t i = p * samples; i < (p + 1) * samples; i++) {
                const std::string finish = completions[i].finish();
                rewards += reward(i);
                right += reward(i) >= CORRECT;
                tokens += double(completions[i].tokens().size());
                truncated += finish == "length" || finish == "context";
                for (size_t v = 0; v < scores[i].size(); v++) {
                    auto& [sum, number] = by_verifier[problems[p].verifiers[v].name];
                    sum += scores[i][v];
                    number++;
                }
            }
            correct += double(right);
            any_correct += pass_at_k(int64_t(samples), right, int64_t(samples));
        }
        nlohmann::ordered_json out = {{"accuracy", correct / count}};
        if (samples > 1) out[str("pass@", samples)] = any_correct / double(problems.size());
        out["reward"] = rewards / count;
        for (const auto& [name, score] : by_verifier)
            if (by_verifier.size() > 1) out[name] = score.first / score.second;
        out["mean_tokens"] = tokens / count;
        out["truncated"] = truncated / count;
        out["count"] = problems.size();
        return out;
    }

    // A JSON object a line for each completion.
    std::string lines() const {
        std::string text;
        for (size_t i = 0; i < completions.size(); i++) {
            const Problem& p = problem_of(i);
            nlohmann::ordered_json by_name;
            for (size_t v = 0; v < scores[i].size(); v++) by_name[p.verifiers[v].name] = scores[i][v];
            const nlohmann::ordered_json line = {{"prompt", p.prompt},
                                                 {"answer", p.answer},
                                                 {"completion", completions[i].text()},
                                                 {"reward", reward(i)},
                                                 {"scores", by_name},
                                                 {"tokens", completions[i].tokens().size()},
                                                 {"finish", completions[i].finish()}};
            text += line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
        }
        return text;
    }
};

}  // namespace

void add_scorer_options(CLI::App& app, Scorer::Options& scorer) {
    CLI::Option* const command =
        app.add_option(
               "--verifier", scorer.command.command,
               "program that rewards completions: it reads JSON lines with id, prompt, completion and answer and "
               "writes lines with id and reward, from 0 to 1; started without a shell, and no sandbox. For lines "
               "without verifier, and where it is 'command'")
            ->check([](const std::string& text) {
                command_words(text);
                return std::string();
            });
    app.add_option("--verifier-processes", scorer.command.processes, "how many run at the same time")
        ->check(at_least(1))
        ->default_val(int64_t(std::max(1u, std::thread::hardware_concurrency())))
        ->default_str("a process per core")
        ->needs(command);
    app.add_option("--verifier-timeout", scorer.command.timeout, "seconds that it has for one completion")
        ->check(number_in(1e-3, 1e6))
        ->capture_default_str()
        ->needs(command);
    app.add_option_function<std::string>(
           "--on-verifier-error", [&scorer](const std::string& what) { scorer.zero_on_error = what == "zero"; },
           "where a verifier fails: stop with an error, or a reward of zero; a line counts them")
        ->check(CLI::IsMember({"stop", "zero"}))
        ->default_str("stop");
}

CLI::Option* add_answer_options(CLI::App& app, AnswerOptions& o) {
    const InGroup group(app, help_group::ANSWERS);
    CLI::Option* const answers =
        app.add_option("--answers", o.file,
                       "file with one prompt per line: {\"prompt\": text, \"answer\": text, \"verifier\": name}; "
                       "prints the share of completions that are correct");
    add_generation_options(app, o.generation);
    app.get_option("--temperature")->default_str("0 with one sample, 1 with several");
    add_switch(app, "--chat-template", o.chat_template,
               "whether a prompt is a user turn of the model's chat template, where it has one, and not plain text");
    app.add_option("--output", o.output, "write each completion with its reward into this file, a JSON object a line");
    add_scorer_options(app, o.scorer);
    for (CLI::Option* option : app.get_options())
        if (option->get_group() == help_group::ANSWERS && option != answers) option->needs(answers);
    return answers;
}

void run_answers(const AnswerOptions& o, const ModelOptions& model, bool json, const Args& args) {
    catch_stop_signals();  // the verifier's processes end with this one
    const std::vector<Problem> problems = read_problems(o.file, !o.scorer.command.command.empty());
    const std::string directory = std::filesystem::path(o.output).parent_path();
    require(directory.empty() || is_directory(directory), "--output ", o.output, ": there is no directory ", directory);
    Scorer scorer(o.scorer);
    const Context ctx;
    const ModelSource source = model.resolve(0);
    const Tokenizer tokenizer(source.files);
    const AnswerPrompts prompts = answer_prompts(problems, o.file, o.chat_template, source, tokenizer);
    if (!prompts.note.empty()) std::cerr << "train_gpt: eval: " << prompts.note << "\n";
    const int64_t samples = o.generation.num_samples, count = completion_count(samples, int64_t(problems.size()));
    GenerationFlags generation = o.generation;
    Args typed = args;
    if (!is_typed("--temperature", args)) {
        generation.sampling.temperature = samples > 1 ? 1 : 0;
        typed.push_back("--temperature");  // the model's own does not count either
    }
    LoadedEngine m(ctx, source, generation_engine(generation, model, source, &tokenizer, count, prompts.longest, typed),
                   false);
    CompletionOptions ends = completion_options(generation, source, &tokenizer);
    if (!generation.ignore_eos) prompts.add_end_tokens(ends.eos, tokenizer);
    std::vector<Completion> completions;
    std::vector<Request> requests;
    completions.reserve(size_t(count));
    for (int64_t i = 0; i < count; i++) {
        completions.emplace_back(&tokenizer, ends);
        requests.push_back({prompts.tokens[size_t(i / samples)], 0, i, &completions.back(), {}});
    }
    const GenerateStatistics statistics = generate(m.engine, requests, generation.policy, stop_requested);
    require(!stop_requested(), "interrupted");
    std::vector<Scorer::Attempt> attempts;
    for (size_t i = 0; i < completions.size(); i++)
        attempts.push_back({&problems[i / size_t(samples)], completions[i].text()});
    const Results results{problems, completions, scorer.score(attempts)};
    if (!o.output.empty()) write_file(o.output, results.lines());
    nlohmann::ordered_json summary = results.summary();
    if (o.scorer.zero_on_error) summary["verifier_errors"] = scorer.failures();
    if (scorer.failures())
        std::cerr << "train_gpt: eval: reward 0 for " << scorer.failures() << " verifier errors; the "
                  << "first: " << scorer.first_failure() << "\n";
    if (!json)
        std::cerr << statistics_text(
            statistics, bandwidth_to_show(statistics, [&] { return measured_read_bandwidth(ctx.stream); }));
    print_result(summary, json);
}

// The output of `sample`.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer.h"
#include "infer/generate.h"

// Prints the completions of a batch in order, separated by lines of ---. The first completion that has not ended is
// printed as it grows; those after it are held back.
class SampleOutput {
  public:
    // prompts: one per completion, printed before it.
    SampleOutput(std::ostream& out, std::vector<std::string> prompts);

    // Appends text to a completion.
    void add(size_t completion, std::string_view text);
    // The completion has ended. after: lines that follow its text.
    void finish(size_t completion, const std::string& after = {});

  private:
    void start();

    std::ostream& out;
    std::vector<std::string> held_back;  // text of each completion that is not printed yet
    std::vector<bool> done;
    size_t current = 0;  // the completion that is printed as it grows
};

// A line for each token: the logarithm of its probability, its id and its text as a JSON string.
std::string logprob_lines(const Completion& completion, const Tokenizer* tokenizer);

// Tokens per second of prefill and decode, bytes per second of the decode steps and their fraction of read_bandwidth
// (0: not known).
std::string statistics_text(const GenerateStatistics& statistics, double read_bandwidth);
nlohmann::json statistics_json(const GenerateStatistics& statistics, double read_bandwidth);

struct SampleJob {
    std::vector<std::string> prompts;
    std::vector<std::vector<int32_t>> tokens;  // of each prompt
    std::vector<std::string> adapters;         // of the engine; each prompt is completed with each. Empty: with none
    int64_t num_samples = 1;                   // completions of each prompt and adapter
    CompletionOptions completion;
    ContextPolicy policy;
    bool json = false;  // print one object at the end instead of text as it grows
};

// Completes every prompt num_samples times with each adapter and prints to out. The statistics go to log, or with json
// into the object. read_bandwidth() measures the device's bandwidth for the statistics; it is called only if the run is
// long enough for the comparison to mean something. tokenizer may be null: then the ids of the tokens are printed.
void sample(Engine& engine, const SampleJob& job, const Tokenizer* tokenizer,
            const std::function<double()>& read_bandwidth, std::ostream& out, std::ostream& log);

// read_bandwidth(), or 0 if the run was too short to compare with it.
double bandwidth_to_show(const GenerateStatistics& statistics, const std::function<double()>& read_bandwidth);

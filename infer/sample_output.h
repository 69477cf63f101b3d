// Samples of prompts and what is shown of them.
//
// How the answers of a batch reach a terminal or a pipe: in order, separated by lines of ---, each as soon as all
// before it are done. The first that isn't done is shown as it grows; those behind it wait.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer.h"
#include "infer/generate.h"

class SampleOutput {
  public:
    // prompts: of each answer, printed in front of it.
    SampleOutput(std::ostream& out, std::vector<std::string> prompts);

    void text(size_t answer, std::string_view piece);
    // No more of it comes. after: lines that follow the text.
    void finish(size_t answer, const std::string& after = {});

  private:
    void start();

    std::ostream& out;
    std::vector<std::string> waiting;  // what each has said while it was not its turn
    std::vector<bool> done;
    size_t turn = 0;
};

// A line for each token: its logarithmic probability, its id and its text as a JSON string.
std::string logprob_lines(const Completion& answer, const Tokenizer* tokenizer);

// Tokens per second of both phases, bytes per second of decode steps and their fraction of read_bandwidth (0: not
// known).
std::string statistics_text(const GenerateStatistics& statistics, double read_bandwidth);
nlohmann::json statistics_json(const GenerateStatistics& statistics, double read_bandwidth);

struct SampleJob {
    std::vector<std::string> prompts;
    std::vector<std::vector<int32_t>> tokens;  // of each prompt
    int64_t num_samples = 1;                   // texts for each prompt
    CompletionOptions answer;
    ContextPolicy policy;
    bool json = false;  // one object at the end instead of text as it grows
};

// Answers every prompt num_samples times and prints to out; statistics go to log, or with json into the object.
// read_bandwidth measures the device's, for the statistics; it is asked only after a run that takes long enough to tell
// something. tokenizer may be null: then there are no texts, and tokens are printed by their ids.
void sample(Engine& engine, const SampleJob& job, const Tokenizer* tokenizer,
            const std::function<double()>& read_bandwidth, std::ostream& out, std::ostream& log);

// What the statistics of a run say of read_bandwidth(): 0 where the run was too short.
double bandwidth_to_show(const GenerateStatistics& statistics, const std::function<double()>& read_bandwidth);

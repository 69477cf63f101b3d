// How the answers of a batch reach a terminal or a pipe: in order, separated by lines of ---, each as soon as all
// before it are done. The first that isn't done is shown as it grows; those behind it wait.
#pragma once

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
std::string logprob_lines(const Answer& answer, const Tokenizer* tokenizer);

// The prompts of a file: what lies between lines that are ---. The newline before such a line belongs to it, and so
// does one at the end of the file if there are several prompts.
std::vector<std::string> split_prompts(const std::string& text);

// Tokens per second of both phases, bytes per second of decode steps and their fraction of read_bandwidth (0: not
// known).
std::string statistics_text(const GenerateStatistics& statistics, double read_bandwidth);
nlohmann::json statistics_json(const GenerateStatistics& statistics, double read_bandwidth);

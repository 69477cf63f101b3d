// A verifier that is another program: a pool of processes, each of which reads a JSON object a line from stdin and
// writes one to stdout.
//
//     {"id": 7, "prompt": text, "completion": text, "answer": text}  →  {"id": 7, "reward": number from 0 to 1}
//
// The processes are started without a shell and see the environment, the files and the network that this one sees: this
// is no sandbox. A process gets its next object after its line for the last one, so it must flush each line. What it
// writes to stderr is read and dropped, except the last line, which errors show.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

// Splits a command into words as a shell does, without its other rules: 'single' quotes keep everything, "double" ones
// all but \" and \\, and a backslash elsewhere keeps the next character. Throws UsageError where a quote is not closed.
std::vector<std::string> command_words(const std::string& command);

class VerifierCommand {
  public:
    struct Options {
        std::string command;
        int64_t processes = 1;
        double timeout = 30;  // seconds for one completion, the start of a process included
    };
    struct Item {
        std::string prompt, completion, answer;
    };

    // Starts a process. Throws Error if the command cannot be started.
    explicit VerifierCommand(const Options& options);
    // Ends all processes, with those that they started in their process group.
    ~VerifierCommand();
    VerifierCommand(const VerifierCommand&) = delete;
    VerifierCommand& operator=(const VerifierCommand&) = delete;

    // The reward of each. Where a process dies, takes too long or answers wrongly, on_failure() is told what happened,
    // in one line. If it returns, the reward is 0, and another process takes the next item. Throws Error where
    // stop_requested().
    std::vector<double> rewards(const std::vector<Item>& items,
                                const std::function<void(const std::string&)>& on_failure);

  private:
    class Process;

    const Options options;
    const std::vector<std::string> words;
    std::vector<std::unique_ptr<Process>> processes;
    int64_t next_id = 0;
};

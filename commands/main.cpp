// The program: its commands by name.
#include <iostream>

#include "commands/commands.h"
#include "runtime/communication/launcher.h"
#include "runtime/limits.h"
#include "runtime/signals.h"

extern const char BUILD_LINES[];  // of a source that make writes

namespace {

// Runs before the constructors of all libraries.
[[gnu::section(".preinit_array"), gnu::used]] void (*const before_libraries)(int, char**, char**) = note_hangup;

// Two processes would answer twice, or write the same file at once.
std::function<void(const Args&)> in_one_process(void (*run)(const Args&), bool computes = true) {
    return [run, computes](const Args& args) {
        require_one_process();
        if (computes) check_threads();
        run(args);
    };
}

}  // namespace

int main(int argc, char** argv) {
    restore_hangup();
    ignore_closed_pipes();
    ignore_file_size_limit();
    const std::vector<Command> commands = {
        {"train", "train a model", run_train},
        {"rl", "make rewarded completions more likely", run_rl},
        {"eval", "score a split of a data set", in_one_process(run_eval)},
        {"sample", "complete prompts", in_one_process(run_sample)},
        {"chat", "hold a conversation", in_one_process(run_chat)},
        {"serve", "answer requests over HTTP, as OpenAI's API", in_one_process(run_serve)},
        {"logits", "write the logits of given tokens", in_one_process(run_logits)},
        {"plan", "show the memory that a run needs", run_plan},
        {"convert", "turn a model into another format", in_one_process(run_convert, false)},
        {"info", "show what a file, a checkpoint or this program is", run_info}};
    try {
        take_signals_in_a_thread();
        return with_enough_stack([&] {
            bound_threads();
            return run_program(argc, argv, commands, BUILD_LINES);
        });
    } catch (const std::system_error& e) {
        std::cerr << "train_gpt: " << describe(e) << "\n";
        return 1;
    }
}

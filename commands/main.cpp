// The program: its commands by name.
#include "commands/run.h"
#include "model.h"
#include "runtime/limits.h"
#include "runtime/signals.h"

namespace {

void run_convert(const Args& args) {
    convert_model(parse_convert(args), [](const ModelConfig& config) { return parameter_table(config, 1); });
}

void run_info(const Args& args) {
    show_info(parse_info(args));
}

}  // namespace

int main(int argc, char** argv) {
    take_signals_in_a_thread();
    ignore_closed_pipes();
    ignore_file_size_limit();
    const std::vector<Command> commands = {{"train", "train a model", run_train},
                                           {"eval", "score a split of a data set", run_eval},
                                           {"sample", "complete prompts", run_sample},
                                           {"chat", "hold a conversation", run_chat},
                                           {"logits", "write the logits of given tokens", run_logits},
                                           {"plan", "show the memory that a run needs", run_plan},
                                           {"convert", "turn a model into another format", run_convert},
                                           {"info", "show what a file, a checkpoint or this program is", run_info}};
    return with_enough_stack([&] {
        bound_threads();
        return run_program(argc, argv, commands);
    });
}

// `logits`: the logits of given tokens, and all activations on request.
#include <algorithm>
#include <sstream>

#include "commands/cli.h"
#include "driver/inference.h"
#include "driver/pass.h"
#include "runtime/files/files.h"

namespace {

struct LogitsOptions {
    ModelOptions model;
    std::vector<int32_t> tokens;
    std::string output, dump;
};

LogitsOptions parse_logits(const Args& args) {
    LogitsOptions o;
    std::string tokens;
    CLI::App app("Writes the logits of a sequence of token ids as a float32 [T, V] array in NumPy's format.",
                 "train_gpt logits");
    add_model_options(app, o.model);
    add_weights_option(app, o.model.weights);
    app.add_option("--tokens", tokens, "token ids, separated by spaces")->required();
    app.add_option("--output", o.output, ".npy file to write")->required();
    app.add_option("--dump", o.dump, "directory to write every activation to, as <name>.npy");
    parse(app, args);

    std::istringstream words(tokens);
    for (std::string word; words >> word;) {
        size_t used = 0;
        long id = -1;
        try {
            id = std::stol(word, &used);
        } catch (const std::exception&) {
        }
        if (used != word.size() || id < 0 || id > INT32_MAX)
            throw UsageError("--tokens: '" + word + "' is not a token id; write whole numbers separated by spaces");
        o.tokens.push_back(static_cast<int32_t>(id));
    }
    if (o.tokens.empty()) throw UsageError("--tokens is empty; give at least one token id");
    return o;
}

}  // namespace

void run_logits(const Args& args) {
    const LogitsOptions o = parse_logits(args);
    const Context ctx;
    const ModelSource source = o.model.resolve(0);
    const int64_t T = static_cast<int64_t>(o.tokens.size()), V = source.config.vocab_size;
    for (const int32_t id : o.tokens) {
        require(id < V, "--tokens: ", id, " is beyond the model's vocabulary of ", V);
    }
    RunShape shape = inference_shape(1, T, o.model.type());
    shape.packing = packing_of(source, o.model.weights);
    shape.overlap = o.dump.empty();  // every activation survives until it is dumped
    const LoadedModel m(ctx, source, shape);
    if (!o.dump.empty()) make_directories(o.dump);  // an error here leaves no output
    const Input in = upload(ctx, m.acts, single_sequence(o.tokens.data(), T));
    forward({ctx, m.model, m.acts, in});

    std::vector<float> host(static_cast<size_t>(T * V));
    for (int64_t t = 0; t < T; t++) {
        const std::vector<float> row = fetch_floats(ctx, head_logits({ctx, m.model, m.acts, in}, t, t + 1));
        std::copy_n(row.begin(), V, host.begin() + t * V);
    }
    write_npy(o.output, host_tensor(host.data(), {T, V}));
    if (o.dump.empty()) return;
    for (const ArenaPlan::Entry& e : m.acts.plan.entries()) {
        const bool floats = e.dtype == DType::F32 || e.dtype == m.acts.shape.dtype;
        if (!floats || e.name == "logits" || e.name == "losses") continue;
        std::vector<float> values = fetch_floats(ctx, m.acts.at(e));
        write_npy(join_path(o.dump, e.name + ".npy"),
                  make_tensor(values.data(), DType::F32, Device::CPU, e.shape.data(), int(e.shape.size())));
    }
}

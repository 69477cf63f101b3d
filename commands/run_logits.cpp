// `logits`: the logits of given tokens, and all activations on request.
#include <algorithm>

#include "commands/inference.h"
#include "commands/run.h"
#include "runtime/files/files.h"

void run_logits(const Args& args) {
    const LogitsOptions o = parse_logits(args);
    const Context ctx;
    const ModelSource source = o.model.resolve(0);
    const int64_t T = static_cast<int64_t>(o.tokens.size()), V = source.config.vocab_size;
    for (const int32_t id : o.tokens) {
        require(id < V, "--tokens: ", id, " is beyond the model's vocabulary of ", V);
    }
    RunShape shape = inference_shape(1, T, o.model.type());
    shape.overlap = o.dump.empty();  // every activation survives until it is dumped
    const LoadedModel m(ctx, source, shape);
    if (!o.dump.empty()) make_directories(o.dump);  // an error here leaves no output
    const Input in = upload(ctx, m.acts, single_sequence(o.tokens.data(), T));
    forward(ctx, m.model, m.acts, in);

    std::vector<float> host(static_cast<size_t>(T * V));
    for (int64_t t = 0; t < T; t++) {
        const std::vector<float> row = fetch_floats(ctx, head_logits(ctx, m.model, m.acts, t, t + 1));
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
